"""Predicted against measured, drawn. Imports no torch."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from experiments.simulator.workload import Floats
from lineage.atomic import write_text


class Panel(NamedTuple):
    """One set of values."""

    title: str
    measured: Floats
    predicted: Floats
    unit: str


def draw(path: Path, panels: Sequence[Panel]) -> None:
    """An SVG with a panel per set: a point per row, the line of equality, and 10 % to either side."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = path.name
    from matplotlib import pyplot
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    figure, places = pyplot.subplots(1, len(panels), figsize=(4.2 * len(panels), 4.0), layout="constrained")
    for place, panel in zip(places, panels, strict=True):
        low = float(min(panel.measured.min(), panel.predicted.min())) / 1.2
        high = float(max(panel.measured.max(), panel.predicted.max())) * 1.2
        for factor, style in ((1.0, "-"), (1.1, ":"), (1 / 1.1, ":")):
            place.plot([low, high], [low * factor, high * factor], style, color="0.5", linewidth=0.8)
        place.plot(panel.measured, panel.predicted, "o", markersize=3, alpha=0.6)
        place.set(xscale="log", yscale="log", xlim=(low, high), ylim=(low, high), title=panel.title,
                  xlabel=f"measured ({panel.unit})", ylabel=f"simulated ({panel.unit})")  # fmt: skip
        for axis in (place.xaxis, place.yaxis):
            axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.set_major_formatter(StrMethodFormatter("{x:g}"))
            axis.set_minor_formatter(NullFormatter())
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    pyplot.close(figure)
    write_text(path, buffer.getvalue())
