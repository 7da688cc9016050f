"""`mlm-bench gpu`: one GPU's kernels and training beside torch.compile, the peers' models and the GPU's own limits.

Each contender has a process of its own, started anew in every round, so that none finds memory that another kept.
"""

import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from statistics import median
from typing import Any

from engine.costs import flops_per_token
from experiments.bench.contenders import Contender, left_out
from experiments.bench.gpu_kernels import check_kernels, measure_kernels, measure_limits
from experiments.bench.ours import build_ours
from experiments.bench.peers import build_huggingface, build_nanogpt
from experiments.bench.sizes import BenchSize, published_size
from experiments.bench.timing import median_ratio, time_contender
from experiments.bench.train import MASKED
from lineage.environment import describe_environment, list_gpus
from lineage.errors import HardwareMissing, UserError
from lineage.progress import Progress, announce

OURS = "ours"
PEAK_TFLOPS = 989.0
"""Dense bf16 products of an H100 or H200 SXM, published by NVIDIA (H200 datasheet)."""
TO_PEERS = 1.15
FLOOR_SHARE = 0.85
DROPOUT = 0.1


@dataclass(frozen=True)
class Case:
    """A model trained at full size, and the share of the peak set as its goal."""

    name: str
    batch: int
    """Sequences of an iteration, one microbatch."""
    utilisation: float


CASES = (Case("355m", 32, 0.50), Case("2.5b", 8, 0.58))
LARGEST = ("8.3b", 8)
"""Forward and backward alone, all layers recomputed: its optimizer's state, 14 bytes a parameter, does not fit."""
ITERATIONS, WARM_UP = 9, 3


@dataclass(frozen=True)
class Measured:
    """One contender in one round."""

    seconds: list[float]
    """Of every timed iteration."""
    losses: list[float]
    peak_bytes: int


def contenders() -> list[Contender]:
    """In the order in which every round measures them."""
    return [
        Contender(OURS, 1, build_ours, is_ours=True),
        Contender("nanoGPT-style, torch.compile", 1, build_nanogpt, is_compiled=True),
        Contender("Hugging Face GPT-2, torch.compile", 1, build_huggingface, is_compiled=True, needs="transformers"),
    ]


def measure_gpu(rounds: int) -> dict[str, Any]:
    """Limits, exactness and speed of kernels, and training, as plain JSON values.

    Raises HardwareMissing where there is no GPU, or torch cannot use it.
    """
    _check_gpu()
    here = [each for each in contenders() if each.is_installed]
    rows, disagreements = [], []
    announce(f"exactness and speed of kernels, then {rounds} rounds of {len(CASES)} models by {len(here)} contenders")
    with Progress("gpu", 2 + rounds * len(CASES) * len(here) + 1, "measurements") as progress:
        limits = in_new_process("limits", measure_limits)
        exactness = in_new_process("exactness", check_kernels)
        progress.advance(1, "exactness")
        kernels = in_new_process("kernels", measure_kernels, limits)
        progress.advance(1, "kernels")
        for case in CASES:
            size = published_size(case.name, case.batch, ITERATIONS, WARM_UP)
            found: dict[str, list[Measured]] = {each.name: [] for each in here}
            failures: dict[str, str] = {}
            for _ in range(rounds):
                for each in here:
                    if each.name not in failures:
                        try:
                            found[each.name].append(in_new_process(each.name, measure_steps, each, size))
                        except UserError as error:
                            if each.is_ours:
                                raise
                            failures[each.name] = str(error)
                    progress.advance(1, f"{case.name}: {each.name}")
            rows.append(summarize(case, size, {name: many for name, many in found.items() if many}, failures))
        name, batch = LARGEST
        size = published_size(name, batch, ITERATIONS, WARM_UP)
        largest = summarize_largest(size, in_new_process(name, measure_forward_backward, size))
        progress.advance(1, name)
    disagreements += [sentence for row in rows for sentence in row["disagreements"]]
    disagreements += [
        f"{row['kernel']} has {row['error_ratio']:.1f} times the reference's error" for row in exactness
        if not row["is_exact"]
    ]  # fmt: skip
    return {
        "benchmark": "gpu",
        "rounds": rounds,
        "limits": limits,
        "exactness": exactness,
        "kernels": kernels,
        "training": rows,
        "forward_backward": largest,
        "ratios": {row["kernel"]: row["ratios"] for row in kernels} | {row["case"]: row["ratios"] for row in rows},
        "disagreements": disagreements,
        "environment": describe_environment(),
        "notes": [*NOTES, *left_out(contenders())],
    }


def _check_gpu() -> None:
    import torch

    if not list_gpus():
        raise HardwareMissing("there is no NVIDIA GPU here: nothing was measured")
    if torch.version.cuda is None:
        raise HardwareMissing(f"torch {torch.__version__} is built without CUDA: nothing was measured")


def in_new_process(name: str, function: Any, *arguments: Any) -> Any:
    """What a function returns in a process of its own. Raises UserError naming what was measured when it fails."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        try:
            return pool.submit(function, *arguments).result()
        except Exception as error:
            raise UserError(f"{name}: {type(error).__name__}: {str(error).partition(chr(10))[0]}") from error


def measure_steps(contender: Contender, size: BenchSize) -> Measured:
    """Training iterations on this process's device."""
    from engine.guard.memory import PeakMemory
    from engine.parallel.mesh import local_device

    memory = PeakMemory(local_device())
    timed = time_contender(contender, size, [DROPOUT])[0]
    return Measured(timed.seconds, timed.losses, memory.bytes())


def measure_forward_backward(size: BenchSize) -> Measured:
    """Forward and backward of our model with every layer recomputed, without an optimizer."""
    import time

    import torch

    from engine.config import ParallelConfig
    from engine.guard.memory import PeakMemory
    from engine.parallel.mesh import local_device, serial_mesh
    from engine.pipeline.microbatch import PipelineInput
    from engine.pipeline.partition import PartitionedModel
    from engine.precision import DTYPES
    from engine.rng import Dropout

    mesh, train = serial_mesh(local_device()), size.train
    memory = PeakMemory(mesh.device)
    parallel = ParallelConfig(recompute="full")
    chunk = PartitionedModel(size.model, parallel, mesh, DTYPES[train.precision], train.seed).chunks[0]
    seconds, losses = [], []
    for iteration in range(train.iterations):
        start = time.perf_counter()
        tokens = torch.from_numpy(size.batch(iteration)).to(mesh.device)
        masks = Dropout(DROPOUT, train.seed, iteration, tuple(range(len(tokens))))
        batch = PipelineInput(tokens[:, :-1], tokens[:, 1:], masks)
        loss = chunk.batch_loss(chunk.run_stage(batch.tokens, batch), batch)
        loss.backward()
        chunk.zero_grad()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - start)
    return Measured(seconds[size.warm_up :], losses, memory.bytes())


def summarize(
    case: Case, size: BenchSize, found: dict[str, list[Measured]], failures: dict[str, str]
) -> dict[str, Any]:  # fmt: skip
    """One row of the result from every contender's rounds."""
    rates = {name: [size.tokens / median(one.seconds) for one in many] for name, many in found.items()}
    ratios = {f"to_{name}": median_ratio(rates[OURS], rates[name]) for name in rates if name != OURS}
    goals = dict.fromkeys(ratios, TO_PEERS) | {"utilisation": case.utilisation}
    ratios["utilisation"] = _utilisation(size, rates[OURS])
    expected = found[OURS][0].losses
    gaps = {
        name: max(abs(a - b) for one in many for a, b in zip(one.losses, expected, strict=True))
        for name, many in found.items()
    }
    return {
        "case": case.name,
        "model": size.describe(),
        "tokens_per_second": {name: [round(rate, 1) for rate in many] for name, many in rates.items()},
        "utilisation": {name: round(_utilisation(size, many), 4) for name, many in rates.items()},
        "peak_bytes": {name: max(one.peak_bytes for one in many) for name, many in found.items()},
        "failures": failures,
        "ratios": {name: round(ratio, 4) for name, ratio in ratios.items()},
        "goals": goals,
        "reached": {name: ratios[name] >= goal for name, goal in goals.items()},
        "losses": {name: many[0].losses for name, many in found.items()},
        "disagreements": [
            f"{case.name}: losses of {name} differ from ours by up to {gap:.4g}"
            for name, gap in gaps.items()
            if not gap <= MASKED
        ],
    }


def summarize_largest(size: BenchSize, measured: Measured) -> dict[str, Any]:
    """The row of what is not trained, as plain JSON values."""
    rates = [size.tokens / median(measured.seconds)]
    return {
        "model": size.describe() | {"optimizer": "none: forward and backward alone, every layer recomputed"},
        "tokens_per_second": round(rates[0], 1),
        "utilisation": round(_utilisation(size, rates), 4),
        "peak_bytes": measured.peak_bytes,
        "losses": measured.losses,
    }


def _utilisation(size: BenchSize, rates: Sequence[float]) -> float:
    return median(rates) * flops_per_token(size.model, causal=True) / (PEAK_TFLOPS * 1e12)


NOTES = (
    "tokens/s are those of an iteration: forward, backward, clipping, AdamW, bf16, dropout 0.1; of each round the "
    "median of its timed iterations. Ratios are medians over rounds of the ratio within a round.",
    f"Utilisation is of {PEAK_TFLOPS:g} TFLOP/s (published), by the operations of a token's products, forward and "
    "backward, attention halved for causality; recomputed ones are not counted.",
    "A kernel's floor is the time in which this GPU, in this run, copies the bytes that it must read and write, or "
    "makes its products in bf16; forward and backward.",
    "The peers train under autocast to bf16 with torch.compile and fused AdamW; masks of dropout are their own.",
)
