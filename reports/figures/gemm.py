"""Rates of matrix products around multiples of 8."""

from typing import TYPE_CHECKING

from reports.benchmark_results import Gemm
from reports.numbers import compact
from reports.style import look
from reports.sweeps import gemm_rates

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw(result: Gemm, narrow: bool = False) -> "Figure":
    """A colour for each precision: solid and filled at multiples of 8, dashed and open one above."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, NullLocator

    figure = Figure(figsize=(4.5, 3.6) if narrow else (10.6, 3.6), layout="constrained")
    axes, rates = figure.subplots(), gemm_rates(result)
    sizes = sorted({size for _, size, _ in rates})
    for rank, precision in enumerate(result.ratios):
        color, marker = look(rank)
        for offset, style in ((0, "-"), (1, (0, (4, 2.2)))):
            reached = [
                (size + offset, rates[precision, size, offset]) for size in sizes if (precision, size, offset) in rates
            ]
            if reached:
                xs, ys = zip(*reached, strict=True)
                label = f"{precision}, {'multiple of 8' if offset == 0 else 'one more'}"
                axes.plot(xs, ys, color=color, marker=marker, markersize=4.5, linewidth=1.3, linestyle=style,
                          markerfacecolor=color if offset == 0 else "none", label=label)  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(sizes, [compact(float(size)) for size in sizes])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: compact(value)))
    axes.set_xlabel("n")
    axes.set_ylabel("GFLOP/s")
    axes.legend(loc="best", ncols=2)
    return figure
