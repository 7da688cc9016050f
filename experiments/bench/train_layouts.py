"""Two processes of this engine against one of its own: tokens per second of wall clock."""

from statistics import median
from typing import Any

from engine.allocator import keep_large_buffers
from engine.config import ModelConfig
from engine.pipeline.stages import split_layers
from experiments.bench.contenders import Contender, contenders
from experiments.bench.sizes import BenchSize, read_size
from experiments.bench.timing import Timed, median_ratio, on_ranks, time_contender

LAYOUT_GOALS = {"tp2": 1.85, "dp2": 1.75, "pp2": 0.90}
"""Ratio to one process; that of pp2 is a share of what the division of the operations over its stages allows."""
SERIAL = "serial"


def measure_layouts(rounds: int) -> dict[str, Any]:
    """Rates of our layouts at size tiny in fp32, in turn, with ratios and goals; plain JSON values."""
    size = read_size("tiny")
    ours = [contender for contender in contenders() if contender.is_ours]
    rates: dict[str, list[float]] = {contender.name: [] for contender in ours}
    for _ in range(rounds):
        for contender in ours:
            timed = on_ranks(contender.name, contender.ranks, _timed, contender, size)[0]
            rates[contender.name].append(size.tokens / median(timed.seconds))
    ratios = {name: median_ratio(rates[name], rates[SERIAL]) for name in LAYOUT_GOALS}
    ideal = pipeline_ideal(size.model, 2)
    ratios["pp2"] /= ideal
    return {
        "tokens_per_second": {name: [round(rate, 1) for rate in many] for name, many in rates.items()},
        "pp2_ideal": round(ideal, 4),
        "ratios": {name: round(ratio, 4) for name, ratio in ratios.items()},
        "goals": LAYOUT_GOALS,
        "reached": {name: ratios[name] >= goal for name, goal in LAYOUT_GOALS.items()},
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
