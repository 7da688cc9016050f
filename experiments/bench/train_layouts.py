"""Two processes of this engine against one of its own: tokens per second of wall clock."""

from statistics import median
from typing import Any

from engine.allocator import keep_large_buffers
from engine.config import ModelConfig
from engine.pipeline.stages import split_layers
from experiments.bench.contenders import Contender, contenders
from experiments.bench.parallel import SERIAL, TOLERANCE
from experiments.bench.sizes import BenchSize, read_size
from experiments.bench.timing import Timed, against_goals, on_ranks, ratios, time_contender
from lineage.progress import Progress

LAYOUT_GOALS = {"tp2": 1.85, "dp2": 1.75, "pp2": 0.90}
"""Ratio to one process; that of pp2 is a share of what the division of the operations over its stages allows."""


def measure_layouts(rounds: int) -> dict[str, Any]:
    """Rates of our layouts at size tiny in fp32, in turn, with ratios and goals; plain JSON values."""
    size = read_size("tiny")
    ours = [contender for contender in contenders() if contender.is_ours]
    timed: dict[str, list[Timed]] = {contender.name: [] for contender in ours}
    with Progress("layouts", rounds * len(ours), "measurements") as progress:
        for _ in range(rounds):
            for contender in ours:
                timed[contender.name].append(on_ranks(contender.name, contender.ranks, _timed, contender, size)[0])
                progress.advance(1, contender.name)
    return summarize_layouts(size, timed)


def summarize_layouts(size: BenchSize, timed: dict[str, list[Timed]]) -> dict[str, Any]:
    """The result from what was timed of each layout, in rounds."""
    rates = {name: [size.tokens / median(one.seconds) for one in many] for name, many in timed.items()}
    ideal = pipeline_ideal(size.model, 2)
    each_round = {name: ratios(rates[name], rates[SERIAL]) for name in LAYOUT_GOALS}
    each_round["pp2"] = [ratio / ideal for ratio in each_round["pp2"]]
    expected = timed[SERIAL][0].losses
    gaps = {
        name: max(abs(a - b) for one in many for a, b in zip(one.losses, expected, strict=True))
        for name, many in timed.items()
    }
    return against_goals("two processes, tiny fp32", each_round, LAYOUT_GOALS) | {
        "tokens_per_second": {name: [round(rate, 1) for rate in many] for name, many in rates.items()},
        "pp2_ideal": round(ideal, 4),
        "disagreements": [
            f"losses of {name} differ from those of {SERIAL} by up to {gap:.4g}"
            for name, gap in gaps.items()
            if not gap <= TOLERANCE
        ],
    }


def pipeline_ideal(model: ModelConfig, stages: int) -> float:
    """How many times faster than one process a pipeline can be: all operations by those of its largest stage."""
    layer = 12 * model.hidden_size**2 + model.seq_length * model.hidden_size
    head = model.vocab_size * model.hidden_size
    each = [
        len(stage.layers) * layer + (head if stage.is_last else 0)
        for stage in split_layers(model.num_layers, stages, 1)
    ]
    return sum(each) / max(each)


def _timed(contender: Contender, size: BenchSize) -> Timed:
    keep_large_buffers()
    return time_contender(contender, size, [0.0])[0]
