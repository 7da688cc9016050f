"""Evaluation on one core beside the plain loop and lm-evaluation-harness: same requests, same answers, in turn."""

import importlib.util
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from data_pipeline.contamination.testsets import find_gpt2_vocabulary
from data_pipeline.tokens.tokenizer import Tokenizer
from engine.allocator import keep_large_buffers
from engine.config import ModelConfig
from evaluation.protocol import Request
from experiments.bench.eval_contenders import Answer, Score, export_model, harness, our_model, ours, plain_loop
from experiments.bench.eval_memory import peak_bytes
from experiments.bench.timing import median_ratio
from lineage.environment import available_cores, describe_environment
from lineage.errors import DataMissing
from lineage.extras import install_command
from lineage.progress import Progress, announce

TOLERANCE = 1e-5
STRIDE = 32
HARNESS_NEEDS = ("lm_eval", "accelerate", "transformers")
SIZES = {
    "2 layers, 128 wide": ModelConfig(
        num_layers=2, hidden_size=128, num_heads=2, seq_length=1024, vocab_size=50257, padded_vocab_size=50304,
        init_std=0.1,
    ),
    "GPT-2 124M": ModelConfig(
        num_layers=12, hidden_size=768, num_heads=12, seq_length=1024, vocab_size=50257, padded_vocab_size=50304,
    ),
}  # fmt: skip
SMALL, GPT2 = SIZES
NOTES = (
    "Seconds are processor seconds of one thread; every round measures both, ours first, and ratios are medians over "
    "rounds of the ratio within a round. Weights are initial ones, in fp32.",
    "The plain loop is Megatron-LM's: float logits and log-softmax at all positions, on this engine's network with "
    "fused attention. Of the batch sizes named it has the fastest.",
    "lm-evaluation-harness runs its Hugging Face backend on the same weights, exported; timed is what follows the "
    "tokens: batches, forward, softmax. Of the batch sizes named it has the fastest.",
    "Memory is the peak of resident memory above that of the loaded model, in a process of its own.",
)


@dataclass(frozen=True)
class Case:
    """One comparison."""

    name: str
    rival: str
    size: str
    goal: float
    requests: Sequence[Request]
    batch_sizes: tuple[int, ...]
    """The rival's; it is measured with the fastest."""


def sliding_requests(config: ModelConfig, count: int) -> list[Request]:
    """Full windows of stride 32 over random tokens of which few are frequent, as in text."""
    draws = np.random.default_rng(0).random(config.seq_length + 1 + STRIDE * count)
    tokens = (config.vocab_size**draws - 1).astype(np.int64)
    return [
        Request(tokens[start : start + config.seq_length + 1], STRIDE) for start in range(0, STRIDE * count, STRIDE)
    ]


def task_requests(name: str, tokenizer: Tokenizer, seq_length: int, limit: int) -> list[Request]:
    """Requests of a named protocol. Raises DataMissing without its file."""
    from evaluation.tasks import build_task

    def no_stand_in() -> Path:
        raise DataMissing("the benchmark scores the published files only")

    return build_task(name, tokenizer, seq_length, limit, no_stand_in).requests


def measure_eval(rounds: int) -> dict[str, Any]:
    """Every comparison `rounds` times in turn; the result as plain JSON values.

    Raises DataMissing without the published test files and GPT-2's vocabulary.
    """
    tokenizer = Tokenizer.from_gpt2_files(*find_gpt2_vocabulary())
    windows, examples = (
        task_requests(name, tokenizer, SIZES[SMALL].seq_length, limit)
        for name, limit in (("wikitext103-lm-eval", 24), ("lambada", 256))
    )
    announce(f"memory of {2 * len(SIZES)} evaluations, then 4 comparisons of {rounds} rounds on one core")
    memory = [measure_memory(name, config, batch) for name, config in SIZES.items() for batch in (1, 8)]
    keep_large_buffers()
    import torch

    torch.set_num_threads(1)
    models = {name: our_model(config) for name, config in SIZES.items()}
    stride = {name: sliding_requests(config, 16 if name == SMALL else 8) for name, config in SIZES.items()}
    cases = [
        Case("stride 32", "plain loop", SMALL, 10.0, stride[SMALL], (1, 8)),
        Case("stride 32", "plain loop", GPT2, 1.5, stride[GPT2], (1, 8)),
        Case("wikitext103-lm-eval", "lm-evaluation-harness", SMALL, 1.5, windows, (1, 4, 16)),
        Case("lambada", "lm-evaluation-harness", SMALL, 2.0, examples, (1, 8, 32)),
    ]
    load: list[float] = []
    results = []
    with tempfile.TemporaryDirectory() as folder, Progress("eval", len(cases), "comparisons") as progress:
        for case in cases:
            is_harness = case.rival != "plain loop"
            if is_harness and not has_harness():
                results.append(_describe(case) | {"status": "not installed"})
                continue
            rival = plain_loop(models[case.size])
            if is_harness:
                path = Path(folder) / case.name
                rival = harness(export_model(models[case.size], SIZES[case.size], tokenizer, path), 1024)
            results.append(compare(case, ours(models[case.size]), rival, rounds))
            load.append(round(os.getloadavg()[0], 2))
            progress.advance(1, case.name)
    return _result(results, memory, rounds, load)


def has_harness() -> bool:
    """Whether lm-evaluation-harness and what its Hugging Face backend needs are installed."""
    return all(importlib.util.find_spec(name) for name in HARNESS_NEEDS)


def compare(case: Case, our_score: Score, their_score: Score, rounds: int) -> dict[str, Any]:
    """Seconds of both, round by round, after one run of each that is not counted."""
    expected = our_score(case.requests, None)
    tried = {size: timed(their_score, case.requests, size) for size in case.batch_sizes}
    best = min(tried, key=lambda size: tried[size][0])
    measured: dict[str, list[float]] = {"ours": [], "theirs": []}
    for _ in range(rounds):
        for name, function, size in (("ours", our_score, None), ("theirs", their_score, best)):
            measured[name].append(timed(function, case.requests, size)[0])
    gaps = [relative_gap(answer, expected) for _, answer in tried.values()]
    verdicts = [int((answer.all_greedy != expected.all_greedy).sum()) for _, answer in tried.values()]
    ratio = median_ratio(measured["theirs"], measured["ours"])
    return _describe(case) | {
        "status": "measured",
        "batch_size": best,
        "seconds": {name: [round(value, 3) for value in values] for name, values in measured.items()},
        "median_seconds": {name: round(median(values), 3) for name, values in measured.items()},
        "times_faster": round(ratio, 2),
        "reached": ratio >= case.goal,
        "largest_relative_gap": max(gaps),
        "different_verdicts": max(verdicts),
    }


def timed(function: Score, requests: Sequence[Request], batch_size: int | None) -> tuple[float, Answer]:
    """Processor seconds of a run, and its answer."""
    start = time.process_time()
    answer = function(requests, batch_size)
    return time.process_time() - start, answer


def relative_gap(one: Answer, other: Answer) -> float:
    """Largest relative difference of the negative log-likelihoods."""
    return float(np.abs(one.nll / other.nll - 1).max())


def measure_memory(name: str, config: ModelConfig, batch: int) -> dict[str, Any]:
    """Peaks of scoring eight full windows at one size, the plain loop with `batch` rows at a time."""
    requests = sliding_requests(config, 8)
    contenders: dict[str, Callable[[], Callable[[], object]]] = {
        "ours": lambda: _ready(ours(our_model(config)), requests, None),
        "plain loop": lambda: _ready(plain_loop(our_model(config)), requests, batch),
    }
    found = {contender: peak_bytes(make) for contender, make in contenders.items()}
    share = found["ours"] / found["plain loop"]
    return {
        "size": name, "plain_batch_size": batch, "peak_bytes": found, "share": round(share, 4), "goal": 0.25,
        "reached": share <= 0.25,
    }  # fmt: skip


def _ready(function: Score, requests: Sequence[Request], batch_size: int | None) -> Callable[[], object]:
    return lambda: function(requests, batch_size)


def _describe(case: Case) -> dict[str, Any]:
    return {
        "name": case.name,
        "rival": case.rival,
        "size": case.size,
        "goal": case.goal,
        "requests": len(case.requests),
        "inputs": sum(len(request.tokens) - 1 for request in case.requests),
        "scored": sum(request.num_scored for request in case.requests),
        "batch_sizes_tried": list(case.batch_sizes),
    }


def _result(
    results: list[dict[str, Any]], memory: list[dict[str, Any]], rounds: int, load: Sequence[float]
) -> dict[str, Any]:  # fmt: skip
    environment = describe_environment()
    theirs = {name: version(name) for name in HARNESS_NEEDS if importlib.util.find_spec(name)}
    notes = list(NOTES)
    if not has_harness():
        notes.append(f"not installed, and so left out: lm-evaluation-harness ({install_command('eval')})")
    if load and max(load) > available_cores() + 1:
        notes.append(f"other work kept the machine busy: the load average was up to {max(load):.1f}")
    return {
        "benchmark": "eval",
        "rounds": rounds,
        "comparisons": results,
        "memory": memory,
        "disagreements": disagreements(results),
        "load_average": list(load),
        "notes": notes,
        "environment": environment | {"packages": environment["packages"] | theirs},
    }


def disagreements(results: Sequence[dict[str, Any]]) -> list[str]:
    """A sentence for each comparison whose answers are not equal up to rounding."""
    return [
        f"{result['name']} at {result['size']}: {result['rival']} computes something else: its losses differ by up to "
        f"{result['largest_relative_gap']:.2g} of them, its verdicts in {result['different_verdicts']} requests"
        for result in results
        if result["status"] == "measured"
        and not (result["largest_relative_gap"] <= TOLERANCE and result["different_verdicts"] == 0)
    ]
