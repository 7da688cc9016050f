"""How the cost of training grows: tokens per second against width, depth, sequence length and ranks, beside the closed
form of a token's operations.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median

from engine.config import ModelConfig, ParallelConfig
from engine.costs import flops_per_token
from experiments.bench.contender import BenchSize, Contender, bench_size
from experiments.bench.timing import NOTES, Rounds, Timed, in_turn, measure_contender, rates, ratio, series
from lineage.benchmark import Benchmark, Case
from lineage.environment import available_cores
from lineage.progress import announce

TOKENS = 1024
"""Of an iteration, at every point."""
BASE = {"num_layers": 4, "hidden_size": 256, "num_heads": 4, "seq_length": 256}
VOCABULARY = 4096
SEPARATE = "separate processes"
"""The axis on which every process trains a model of its own: no layout can gain more than that on this machine."""
WIDTHS, DEPTHS, LENGTHS = (64, 128, 256, 512), (1, 2, 4, 8), (64, 128, 256, 512, 1024)


@dataclass(frozen=True)
class Point:
    """One configuration on an axis along which the cost grows."""

    axis: str
    value: int
    size: BenchSize
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    ranks: int = 1

    @property
    def name(self) -> str:
        """As it is printed."""
        return f"{self.axis} {self.value}"


def points(cores: int) -> list[Point]:
    """All that are measured on a machine of so many cores; of each axis the point that is the base comes too."""
    every = [Point("width", width, _size(hidden_size=width, num_heads=width // 64)) for width in WIDTHS]
    every += [Point("depth", depth, _size(num_layers=depth)) for depth in DEPTHS]
    every += [Point("sequence length", length, _size(seq_length=length)) for length in LENGTHS]
    every_ranks = [count for count in (1, 2, 4) if count <= cores]
    every += [Point(SEPARATE, count, _size(), ranks=count) for count in every_ranks]
    every += [Point("data-parallel ranks", ranks, _size(), ranks=ranks) for ranks in every_ranks]
    every += [Point("tensor-parallel ranks", ranks, _size(), ParallelConfig(tp=ranks), ranks) for ranks in every_ranks]
    return every


def _size(**changes: int) -> BenchSize:
    shape = BASE | {"vocab_size": VOCABULARY, "padded_vocab_size": VOCABULARY}
    model = ModelConfig.model_validate(shape | changes)
    return bench_size("growth", model, TOKENS // model.seq_length, iterations=4, warm_up=1)


def measure(rounds: Rounds = 3) -> Benchmark:
    """Training tokens/s against width, depth, sequence length and ranks, beside what the closed form predicts."""
    every = points(available_cores())
    announce(f"{rounds} rounds of {len(every)} models, on up to {max(point.ranks for point in every)} processes")
    taken, load = in_turn("growth", rounds, {point.name: partial(_timed, point) for point in every})
    return Benchmark(
        benchmark="growth",
        title="Growth of the cost of training",
        cases=summarize(every, [*rates(every[0].size, taken).values()]),
        notes=NOTES["growth"],
        setting={"rounds": rounds, "base": BASE | {"vocab_size": VOCABULARY, "tokens": TOKENS, "precision": "fp32"}},
        load_average=load,
    )


def summarize(every: Sequence[Point], rates: Sequence[Sequence[float]]) -> list[Case]:
    """A case for each point: what was measured in each round, predicted, and the ratio of both."""
    base = {point.axis: (point, timed) for point, timed in zip(every, rates, strict=True) if _is_base(point)}
    cases = []
    for point, timed in zip(every, rates, strict=True):
        origin, origin_rates = base[point.axis]
        origin_flops, flops = (flops_per_token(timing.size.model, causal=True) for timing in (origin, point))
        growth = origin_flops / flops * point.ranks
        predicted = [rate * growth for rate in origin_rates]
        cases.append(
            Case(
                name=point.name,
                axis=point.axis,
                at=point.value,
                series=[
                    series("measured", "rate", "tokens/s", *timed),
                    series("closed form", "rate", "tokens/s", median(predicted), kind="computed"),
                ],
                ratios=[ratio("measured ÷ predicted", timed, predicted)],
                setting={"flops_per_token": round(flops)},
            )
        )
    return cases


def _is_base(point: Point) -> bool:
    return point.ranks == 1 and all(getattr(point.size.model, name) == value for name, value in BASE.items())


def _timed(point: Point) -> Timed:
    from experiments.bench.contenders.ours import build_ours, build_separate

    is_separate = point.axis == SEPARATE
    build, trained = (build_separate, point.ranks) if is_separate else (build_ours, 1)
    contender = Contender(point.name, point.ranks, build, is_ours=True, parallel=point.parallel)
    clock = time.perf_counter if "ranks" in point.axis or is_separate else time.process_time
    timed = measure_contender(contender, point.size, 0.0, clock)
    return replace(timed, seconds=[spent / trained for spent in timed.seconds])
