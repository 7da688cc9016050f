"""Training on one processor core beside nanoGPT's model, stock and tuned, and beside what the core can do."""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from engine.allocator import keep_large_buffers
from engine.config import Precision
from engine.costs import flops_per_token
from experiments.bench.contenders import Contender
from experiments.bench.ours import build_ours
from experiments.bench.parallel import SERIAL
from experiments.bench.peers import build_nanogpt
from experiments.bench.sizes import BenchSize, read_size
from experiments.bench.timing import LESS_IS_BETTER, against_goals, on_ranks, ratios, time_contender
from experiments.bench.train_layouts import measure_layouts
from lineage.environment import describe_environment
from lineage.progress import Progress, announce

OURS, STOCK, TUNED = SERIAL, "stock nanoGPT", "tuned nanoGPT"
TOLERANCES: dict[Precision, float] = {"fp32": 1e-3, "bf16": 3e-2}
"""Most by which losses without dropout may differ; with dropout, where masks are each contender's own, MASKED."""
MASKED = 0.1
MEASURES = {
    "to_stock": "× stock nanoGPT",
    "to_tuned": "× tuned nanoGPT",
    "to_limit": "of the limit",
    "memory_to_stock": "of stock nanoGPT's memory",
    "tp2": "tp2, × one process",
    "dp2": "dp2, × one process",
    "pp2": "pp2, of the ideal",
}
"""What a ratio says, by its name in the result."""
GEMM_WIDTH, GEMM_REPEATS, COPIED_BYTES = 1024, 4, 1 << 28


@dataclass(frozen=True)
class Case:
    """One row: a size, a number format, a dropout probability, and the goals set for it."""

    size: str
    precision: Precision
    dropout: float
    to_stock: float | None = None
    to_tuned: float | None = None
    to_limit: float | None = None
    memory_to_stock: float | None = None

    @property
    def name(self) -> str:
        """As it is printed."""
        return f"{self.size} {self.precision} dropout {self.dropout:g}"


CASES = (
    Case("small", "bf16", 0.1, 2.0, 1.5, 0.60, 0.5),
    Case("small", "fp32", 0.1, 1.7, 1.2, 0.75),
    Case("small", "bf16", 0.0, to_limit=0.70),
    Case("small", "fp32", 0.0, to_limit=0.83),
    Case("tiny", "fp32", 0.0, to_limit=0.85),
    Case("tiny", "bf16", 0.0, to_limit=0.75),
    Case("twin", "fp32", 0.1, to_stock=1.5),
)


@dataclass(frozen=True)
class Measured:
    """One contender in one round."""

    cpu_seconds: list[float]
    """Of every timed iteration."""
    losses: list[float]
    peak_bytes: int


def contenders() -> list[Contender]:
    """In the order in which every round measures them."""
    return [
        Contender(OURS, 1, build_ours, is_ours=True),
        Contender(STOCK, 1, build_nanogpt, is_tuned=False),
        Contender(TUNED, 1, build_nanogpt),
    ]


def measure_train(rounds: int, cases: Sequence[Case] = CASES) -> dict[str, Any]:
    """Measure every case `rounds` times, contenders in turn; the result as plain JSON values.

    Raises UserError naming the contender whose process failed.
    """
    import torch._dynamo  # noqa: F401  (imported here once, so that forked processes do not each import it)

    rows, load = [], []
    many = len(cases) * len(contenders())
    announce(f"{rounds} rounds of {many} contenders in processes of their own, then {rounds} rounds of our layouts")
    with Progress("train", len(cases) * rounds * len(contenders()), "measurements") as progress:
        for case in cases:
            size = read_size(case.size).in_precision(case.precision)
            found: dict[str, list[Measured]] = {contender.name: [] for contender in contenders()}
            gflops = []
            for _ in range(rounds):
                gflops.append(on_ranks("matrix products", 1, gemm_gflops, case.precision)[0])
                for contender in contenders():
                    measured = on_ranks(contender.name, 1, measure_steps, contender, size, case.dropout)[0]
                    found[contender.name].append(measured)
                    progress.advance(1, f"{case.name}: {contender.name}")
                load.append(round(os.getloadavg()[0], 2))
            rows.append(summarize(case, size, found, gflops))
    layouts = measure_layouts(rounds)
    largest = read_size(cases[0].size).in_precision(cases[0].precision)
    return {
        "benchmark": "train",
        "rounds": rounds,
        "measures": MEASURES,
        "less_is_better": sorted(LESS_IS_BETTER),
        "cases": rows,
        "layouts": layouts,
        "ratios": {row["case"]: row["ratios"] for row in [*rows, layouts]},
        "disagreements": [sentence for row in [*rows, layouts] for sentence in row["disagreements"]],
        "where_time_went": {"case": cases[0].name, "shares": on_ranks(OURS, 1, profile, largest, cases[0].dropout)[0]},
        "copy_gigabytes_per_second": round(on_ranks("copy", 1, copy_rate)[0], 1),
        "environment": describe_environment(),
        "notes": [*NOTES, *([f"load average up to {max(load)}"] if max(load) > 1.5 else [])],
    }


def summarize(
    case: Case, size: BenchSize, found: dict[str, list[Measured]], gflops: Sequence[float]
) -> dict[str, Any]:  # fmt: skip
    """One row of the result, from every contender's rounds and what matrix products reached in each."""
    rates = {name: [size.tokens / median(one.cpu_seconds) for one in many] for name, many in found.items()}
    flops = flops_per_token(size.model, causal=True)
    peaks = {name: [one.peak_bytes for one in many] for name, many in found.items()}
    each_round = {
        "to_stock": ratios(rates[OURS], rates[STOCK]),
        "to_tuned": ratios(rates[OURS], rates[TUNED]),
        "to_limit": ratios(rates[OURS], [rate * 1e9 / flops for rate in gflops]),
        "memory_to_stock": ratios(peaks[OURS], peaks[STOCK]),
    }
    return against_goals(case.name, each_round, {name: getattr(case, name) for name in each_round}) | {
        "model": size.describe(),
        "cpu_tokens_per_second": {name: [round(rate, 1) for rate in many] for name, many in rates.items()},
        "peak_bytes": peaks,
        "gemm_gflops": [round(rate, 1) for rate in gflops],
        "limit_tokens_per_second": round(median(gflops) * 1e9 / flops, 1),
        "losses": {name: many[0].losses for name, many in found.items()},
        "disagreements": disagreements(case, found),
    }


def disagreements(case: Case, found: dict[str, list[Measured]]) -> list[str]:
    """A sentence for each contender whose losses on the same data are not ours."""
    allowed = MASKED if case.dropout else TOLERANCES[case.precision]
    expected = found[OURS][0].losses
    sentences = []
    for name, rounds in found.items():
        gaps = [abs(a - b) for one in rounds for a, b in zip(one.losses, expected, strict=True)]
        if not all(gap <= allowed for gap in gaps):
            sentences.append(f"{case.name}: losses of {name} differ from ours by up to {max(gaps):.4g}")
    return sentences


def measure_steps(contender: Contender, size: BenchSize, dropout: float) -> Measured:
    """On a process of its own: iterations and their processor seconds."""
    if contender.is_tuned:
        keep_large_buffers()
    import torch

    from engine.guard.memory import PeakMemory

    memory = PeakMemory(torch.device("cpu"))
    timed = time_contender(contender, size, [dropout], clock=time.process_time)[0]
    return Measured(timed.seconds, timed.losses, memory.bytes())


def gemm_gflops(precision: Precision) -> float:
    """Billions of operations per processor second in square products, the best of several tries."""
    import torch

    from engine.precision import DTYPES

    a, b, out = (torch.ones(GEMM_WIDTH, GEMM_WIDTH, dtype=DTYPES[precision]) for _ in range(3))
    tries = []
    for _ in range(8):
        start = time.process_time()
        for _ in range(GEMM_REPEATS):
            torch.mm(a, b, out=out)
        tries.append(time.process_time() - start)
    return 2 * GEMM_WIDTH**3 * GEMM_REPEATS / min(tries) / 1e9


def copy_rate() -> float:
    """Gigabytes read and written per processor second in copying memory, the best of several tries."""
    import torch

    source, target = (torch.zeros(COPIED_BYTES, dtype=torch.uint8) for _ in range(2))
    tries = []
    for _ in range(5):
        start = time.process_time()
        target.copy_(source)
        tries.append(time.process_time() - start)
    return 2 * COPIED_BYTES / min(tries) / 1e9


def profile(size: BenchSize, dropout: float) -> dict[str, float]:
    """Share of an iteration of ours that each operation took, those of at least one percent."""
    keep_large_buffers()
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    step = build_ours(contenders()[0], size)
    step(0, dropout)
    with record(activities=[ProfilerActivity.CPU]) as recorded:
        step(1, dropout)
    times = {event.key: event.self_cpu_time_total for event in recorded.key_averages()}
    total = sum(times.values())
    largest = sorted(times.items(), key=lambda item: -item[1])
    return {name: round(spent / total, 4) for name, spent in largest if spent >= total / 100}


NOTES = (
    "tokens per processor second of one thread: forward, backward, clipping, AdamW; of each round the median of its "
    "timed iterations. Ratios are medians over rounds of the ratio within a round.",
    "stock nanoGPT: nanoGPT's model as published, glibc's own allocator settings, torch.optim.AdamW as nanoGPT makes "
    "it on CPU. tuned: this engine's allocator setting and the fused AdamW. In bf16 both run under autocast.",
    "The limit is what square matrix products of width 1024 reach in the same number format, by the operations of a "
    "token's products (attention halved for causality).",
)
