"""Evaluation on one core beside the plain loop, transformers and lm-evaluation-harness: same requests, same answers."""

import ctypes
import importlib.util
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from engine.config import ModelConfig, Precision
from engine.launch.allocator import keep_large_buffers
from experiments.bench.timing import NOTES, cpu_seconds, in_turn, on_ranks, ratio, series
from lineage.benchmark import Benchmark, Case
from lineage.errors import DataMissing
from lineage.extras import install_command
from lineage.progress import Progress, announce

if TYPE_CHECKING:
    from evaluation.protocol import Request
    from evaluation.scoring import ScoringModel
    from experiments.bench.contenders.scorers import Score

    Generate = Callable[[Sequence[Sequence[int]], int], list[list[int]]]

TOLERANCES = {"fp32": 1e-5, "bf16": 1e-2}
STRIDE = 32
HARNESS_NEEDS = ("lm_eval", "accelerate", "transformers")
SMALL, GPT2 = "2 layers, 128 wide", "GPT-2 124M"
OURS, PLAIN_LOOP, HARNESS, TRANSFORMERS = "ours", "plain loop", "lm-evaluation-harness", "transformers"
PROMPT, NEW = 32, 64
"""Tokens of a prompt, and generated after it."""


@dataclass(frozen=True)
class Comparison:
    """One comparison."""

    name: str
    rival: str
    size: str
    goal: float
    requests: "Sequence[Request]"
    batch_sizes: tuple[int, ...]
    """The rival's; it is measured with the fastest."""
    precision: Precision = "fp32"

    @property
    def case(self) -> str:
        """Its name in the result."""
        return f"{self.name}, {self.size}{' bf16' * (self.precision == 'bf16')}, beside {self.rival}"

    def describe(self) -> dict[str, Any]:
        """What is scored, as plain JSON values."""
        return {
            "requests": len(self.requests),
            "inputs": sum(len(request.tokens) - 1 for request in self.requests),
            "scored": sum(request.num_scored for request in self.requests),
            "batch_sizes_tried": list(self.batch_sizes),
        }


@cache
def sizes() -> dict[str, ModelConfig]:
    """The models that score."""
    of_gpt2 = partial(ModelConfig, seq_length=1024, vocab_size=50257, padded_vocab_size=50304)
    return {
        SMALL: of_gpt2(num_layers=2, hidden_size=128, num_heads=2, init_std=0.1),
        GPT2: of_gpt2(num_layers=12, hidden_size=768, num_heads=12),
    }


def sliding_requests(config: ModelConfig, count: int) -> "list[Request]":
    """Full windows of stride 32 over random tokens of which few are frequent, as in text."""
    import numpy as np

    from evaluation.protocol import Request

    draws = np.random.default_rng(0).random(config.seq_length + 1 + STRIDE * count)
    tokens = (config.vocab_size**draws - 1).astype(np.int64)
    return [
        Request(tokens[start : start + config.seq_length + 1], STRIDE) for start in range(0, STRIDE * count, STRIDE)
    ]


def measure(
    rounds: Annotated[int, typer.Option(min=1, help="How often both of each comparison are measured, in turn.")] = 9,
) -> Benchmark:
    """Scoring and generating beside the plain loop, transformers and lm-evaluation-harness: processor time and memory.

    Needs the published test files and GPT-2's vocabulary. Ends with code 3 if the answers differ by more than rounding.
    """
    from data_pipeline.contamination.testsets import find_gpt2_vocabulary
    from data_pipeline.tokens.tokenizer import Tokenizer
    from engine.optim.precision import DTYPES
    from evaluation.builders import build_task
    from experiments.bench.contenders import scorers
    from experiments.bench.contenders.scorers import initial_network, our_model, ours

    tokenizer = Tokenizer.from_gpt2_files(*find_gpt2_vocabulary())

    def no_stand_in() -> Path:
        raise DataMissing("the benchmark scores the published files only")

    windows, examples = (
        build_task(name, tokenizer, sizes()[SMALL].seq_length, no_stand_in).limited(limit).requests
        for name, limit in (("wikitext103-lm-eval", 8), ("lambada", 256))
    )
    announce(f"memory of {2 * len(sizes())} evaluations, then 8 comparisons of {rounds} rounds on one core")
    memory = [measure_memory(name, config, batch) for name, config in sizes().items() for batch in (1, 8)]
    keep_large_buffers()
    import torch

    torch.set_num_threads(1)
    stride = {name: sliding_requests(config, 16 if name == SMALL else 2) for name, config in sizes().items()}
    comparisons = [
        Comparison("stride 32", PLAIN_LOOP, SMALL, 10.0, stride[SMALL], (1, 8)),
        Comparison("stride 32", PLAIN_LOOP, GPT2, 1.5, stride[GPT2], (1, 2)),
        Comparison("stride 32", PLAIN_LOOP, GPT2, 1.5, stride[GPT2], (1, 2), "bf16"),
        Comparison("stride 32", TRANSFORMERS, GPT2, 1.5, stride[GPT2], (1,)),
        Comparison("wikitext103-lm-eval", HARNESS, SMALL, 1.5, windows, (1, 4, 8)),
        Comparison("lambada", HARNESS, SMALL, 2.0, examples, (1, 8, 32)),
    ]
    cases, disagreements = [], []
    with tempfile.TemporaryDirectory() as folder, Progress("eval", len(comparisons) + 2, "comparisons") as progress:

        @cache
        def model_of(size: str, precision: Precision) -> "ScoringModel":
            return our_model(sizes()[size], DTYPES[precision])

        @cache
        def network_of(size: str, precision: Precision) -> Any:
            return initial_network(sizes()[size], DTYPES[precision])

        @cache
        def exported(size: str) -> Path:
            return scorers.export_model(network_of(size, "fp32"), tokenizer, Path(folder) / size)

        for each in comparisons:
            if each.rival != PLAIN_LOOP and not has_harness():
                why = f"not installed: {install_command('eval')}"
                cases.append(Case(name=each.case, missing={each.rival: why}, setting=each.describe()))
                continue
            model = model_of(each.size, each.precision)
            if each.rival == PLAIN_LOOP:
                rival = scorers.plain_loop(network_of(each.size, each.precision))
            elif each.rival == HARNESS:
                rival = scorers.harness(exported(each.size), sizes()[each.size].seq_length)
            else:
                rival = scorers.transformers_loop(scorers.transformers_model(exported(each.size)))
            case, differing = compare(each, ours(model), rival, rounds)
            cases.append(case)
            disagreements += differing
            progress.advance(1, each.name)
        if has_harness():
            theirs = scorers.transformers_model(exported(GPT2))
            for batch, model in ((1, scorers.scoring_model(network_of(GPT2, "fp32"))), (16, model_of(GPT2, "fp32"))):
                case, differing = compare_generation(
                    partial(scorers.our_tokens, model),
                    partial(scorers.their_tokens, theirs),
                    batch,
                    rounds,
                )
                cases.append(case)
                disagreements += differing
                progress.advance(1, case.name)
    return Benchmark(
        benchmark="eval",
        title="Evaluation beside the plain loop, transformers and lm-evaluation-harness",
        cases=[*cases, *memory],
        disagreements=disagreements,
        notes=NOTES["eval"],
        setting={"rounds": rounds},
    )


def has_harness() -> bool:
    """Whether lm-evaluation-harness and what its Hugging Face backend needs are installed."""
    return all(importlib.util.find_spec(name) for name in HARNESS_NEEDS)


def compare(comparison: Comparison, our_score: "Score", their_score: "Score", rounds: int) -> tuple[Case, list[str]]:
    """Seconds of both, round by round, after one run of each that is not counted; a sentence if answers differ."""
    import numpy as np

    expected = our_score(comparison.requests, None)
    tried = {size: cpu_seconds(their_score, comparison.requests, size) for size in comparison.batch_sizes}
    best = min(tried, key=lambda size: tried[size][0])
    rivals = {OURS: (our_score, None), comparison.rival: (their_score, best)}
    taken, _ = in_turn(
        comparison.name,
        rounds,
        {name: partial(cpu_seconds, score, comparison.requests, size) for name, (score, size) in rivals.items()},
    )
    measured = {name: [seconds for seconds, _ in many] for name, many in taken.items()}
    gap = float(np.max([np.abs(answer.nll / expected.nll - 1) for _, answer in tried.values()]))
    verdicts = max(int((answer.all_greedy != expected.all_greedy).sum()) for _, answer in tried.values())
    case = Case(
        name=comparison.case,
        series=[series(name, "time", "processor s", *many) for name, many in measured.items()],
        ratios=[ratio("times faster", measured[comparison.rival], measured[OURS], comparison.goal)],
        setting=comparison.describe() | {"batch_size": best, "different_verdicts": verdicts}
        | {"largest_relative_gap": gap if np.isfinite(gap) else None},
    )  # fmt: skip
    if gap <= TOLERANCES[comparison.precision] and verdicts == 0:
        return case, []
    return case, [
        f"{case.name}: {comparison.rival} computes something else: its losses differ by up to {gap:.2g} of them, its "
        f"verdicts in {verdicts} requests"
    ]


def compare_generation(ours: "Generate", theirs: "Generate", batch: int, rounds: int) -> tuple[Case, list[str]]:
    """Seconds in which both continue as many prompts of random tokens; a sentence if they say something else."""
    import numpy as np

    prompts = np.random.default_rng(0).integers(0, 50257, (batch, PROMPT)).tolist()
    contenders = {OURS: ours, TRANSFORMERS: theirs}
    said = {name: say(prompts, NEW) for name, say in contenders.items()}
    taken, _ = in_turn(
        f"generate {batch}",
        rounds,
        {name: partial(cpu_seconds, say, prompts, NEW) for name, say in contenders.items()},
    )
    measured = {name: [seconds for seconds, _ in many] for name, many in taken.items()}
    case = Case(
        name=f"generate, {GPT2}, batch {batch}, beside {TRANSFORMERS}",
        series=[series(name, "time", "processor s", *many) for name, many in measured.items()],
        ratios=[ratio("times faster", measured[TRANSFORMERS], measured[OURS], 1.0)],
        setting={"prompt": PROMPT, "new": NEW},
    )
    differing = sum(a != b for a, b in zip(said[OURS], said[TRANSFORMERS], strict=True))
    return case, [f"{case.name}: {differing} of {batch} continuations differ"] if differing else []


def measure_memory(name: str, config: ModelConfig, batch: int) -> Case:
    """Peaks of scoring eight full windows at one size, the plain loop with `batch` rows at a time."""
    from experiments.bench.contenders.scorers import initial_network, our_model, ours, plain_loop

    requests = sliding_requests(config, 8)
    peaks = {
        OURS: peak_bytes(lambda: partial(ours(our_model(config)), requests, None)),
        PLAIN_LOOP: peak_bytes(lambda: partial(plain_loop(initial_network(config)), requests, batch)),
    }
    return Case(
        name=f"{name}, plain loop's batch {batch}",
        series=[series(name, "peak memory", "bytes", peak) for name, peak in peaks.items()],
        ratios=[ratio("of the plain loop's memory", [peaks[OURS]], [peaks[PLAIN_LOOP]], 0.25, less_is_better=True)],
        setting={"size": name, "plain_batch_size": batch},
    )


def peak_bytes(make: Callable[[], Callable[[], object]]) -> int:
    """Bytes that `work = make(); work()` needs at most during `work()` above what `make()` left in use."""
    return int(on_ranks("memory", 1, _measure, make)[0])


def _measure(make: Callable[[], Callable[[], object]]) -> int:
    import torch

    from engine.guard.memory import PeakMemory

    work = make()
    ctypes.CDLL(None).malloc_trim(0)  # what building it left free would hide what the work takes
    memory = PeakMemory(torch.device("cpu"))
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    work()
    return memory.bytes()
