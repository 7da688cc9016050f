"""Training rate against width, depth, sequence length and ranks, beside the closed form."""

from statistics import median
from typing import TYPE_CHECKING

from reports.benchmark_results import Growth
from reports.numbers import compact
from reports.style import LIGHT

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw(result: Growth, narrow: bool = False) -> "Figure":
    """A panel for each axis, both scales logarithmic: the rounds' range with its median, and the prediction."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullLocator

    names = list(dict.fromkeys(one.axis for one in result.points))
    columns = 1 if narrow else len(names)
    rows = len(names) // columns
    figure = Figure(figsize=(4.5, 2.4 * rows) if narrow else (10.6, 2.9), layout="constrained")
    for panel, name in zip(figure.subplots(rows, columns, squeeze=False, sharey=True).flat, names, strict=True):
        points = sorted((one for one in result.points if one.axis == name), key=lambda one: one.value)
        values = [one.value for one in points]
        rates = [one.tokens_per_second for one in points]
        panel.plot(values, [one.predicted for one in points], color=LIGHT["muted"], linewidth=1.1,
                   linestyle=(0, (4, 2.2)), label="closed form")  # fmt: skip
        panel.vlines(values, [min(each) for each in rates], [max(each) for each in rates],
                     color=LIGHT["model-2"], linewidth=2.6, alpha=0.5)  # fmt: skip
        panel.plot(values, [median(each) for each in rates], "o", color=LIGHT["model-2"], markersize=4.5,
                   label="measured")  # fmt: skip
        panel.set_xscale("log")
        panel.set_yscale("log")
        panel.set_xticks(values, [compact(float(value)) for value in values])
        for line in (panel.xaxis, panel.yaxis):
            line.set_minor_locator(NullLocator())
        panel.set_title(name)
        if panel.get_subplotspec().is_first_col():
            panel.set_ylabel("tokens/s")
    ticks = _ticks([rate for one in result.points for rate in (*one.tokens_per_second, one.predicted)])
    panel.set_yticks(ticks, [compact(tick) for tick in ticks])
    panel.legend(loc="best")
    return figure


def _ticks(values: list[float]) -> list[float]:
    """Numbers of one digit from a sequence of 1, 2, 5 that lie among the values, or the nearest below."""
    steps = [digit * 10.0**power for power in range(9) for digit in (1, 2, 5)]
    inside = [step for step in steps if min(values) <= step <= max(values)]
    return inside or [max((step for step in steps if step <= min(values)), default=1.0)]
