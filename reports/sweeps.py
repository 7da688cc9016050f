"""Sweeps of one number: matrix products against their size, loss against the learning rate."""

from statistics import median

from reports.benchmark_results import Gemm, LearningRate
from reports.exhibit import Table
from reports.numbers import MISSING, exact, printable


def gemm_rates(result: Gemm) -> dict[tuple[str, int, int], float]:
    """Median GFLOP/s by precision, multiple of 8, and distance from it."""
    return {(one.precision, one.size, one.offset): median(one.gflops) for one in result.points}


def gemm_table(result: Gemm) -> Table:
    """A line for each precision: how much faster a multiple of 8 is than its neighbours."""
    names = list(dict.fromkeys(name for ratios in result.ratios.values() for name in ratios))
    rows = [
        (precision, *(f"{ratios[name]:.2f}" if name in ratios else MISSING for name in names))
        for precision, ratios in result.ratios.items()
    ]
    return Table(("precision", *names), rows, 1, f"times as fast, {result.device}")


def gemm_data(result: Gemm) -> Table:
    """A line for each round of each product."""
    rows = [
        (one.precision, str(one.size + one.offset), str(one.offset), str(number), exact(rate))
        for one in result.points
        for number, rate in enumerate(one.gflops, 1)
    ]
    return Table(("precision", "n", "from a multiple of 8", "round", "GFLOP/s"), rows, 1)


def gemm_caption(result: Gemm) -> list[str]:
    """How far each precision gets at multiples of 8 and one above."""
    rates = gemm_rates(result)
    largest = max(size for _, size, _ in rates)
    ends = [
        f"{precision} {rates[precision, largest, 0]:,.0f} at {largest:,} and {rates[precision, largest, 1]:,.0f} at "
        f"{largest + 1:,}"
        for precision in result.ratios
        if (precision, largest, 1) in rates
    ]
    return [f"GFLOP/s of n × n products on {result.device}: {'; '.join(ends)}."]


def gemm_alt(result: Gemm) -> str:
    """In words what the picture has."""
    return (
        f"Rates of matrix products over their size, at multiples of 8 and one above. {' '.join(gemm_caption(result))}"
    )


def rate_curve_table(result: LearningRate) -> Table:
    """What the curve says of the learning rate."""
    row = (printable(result.name), result.optimizer, str(result.global_batch_size), _rate(result.steepest_rate),
           _rate(result.lowest_rate), _rate(result.suggestion))  # fmt: skip
    return Table(("run", "optimizer", "batch", "falls fastest at", "lowest at", "suggested"), [row], 2)


def rate_curve_data(result: LearningRate) -> Table:
    """A line for each iteration."""
    rows = [tuple(map(exact, line)) for line in zip(result.rates, result.losses, result.smoothed, strict=True)]
    return Table(("learning_rate", "loss", "smoothed_loss"), rows, 0)


def rate_curve_caption(result: LearningRate) -> list[str]:
    """What is suggested, and why."""
    if result.suggestion is None:
        return ["The loss never fell below that of the first learning rate: nothing is suggested."]
    return [
        f"With {result.optimizer} the smoothed loss is lowest at {_rate(result.lowest_rate)}; a tenth of "
        f"that, {_rate(result.suggestion)}, is suggested.",
        f"The sweep reached {_rate(result.rates[-1])} in {len(result.rates)} iterations of batch "
        f"{result.global_batch_size}, seed {result.seed}.",
    ]


def rate_curve_alt(result: LearningRate) -> str:
    """In words what the picture has."""
    return f"Loss over a rising learning rate, as it was and smoothed. {' '.join(rate_curve_caption(result))}"


def _rate(value: float | None) -> str:
    return MISSING if value is None else f"{value:.3g}"
