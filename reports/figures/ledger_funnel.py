"""What each stage of the data pipeline kept and dropped."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from lineage.data_files import Stage
from reports.figures.marks import blank
from reports.numbers import compact
from reports.style import LIGHT

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def draw(stages: Sequence[Stage], narrow: bool = False) -> "Figure":
    """A bar for each stage, kept and dropped, in documents and in tokens (bytes where tokens were not counted)."""
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    layout = ConstrainedLayoutEngine(wspace=0.06, hspace=0.06)
    rows, columns = (2, 1) if narrow else (1, 2)
    figure = blank(narrow, rows * (0.9 + 0.42 * len(stages)), layout)
    left, right = figure.subplots(rows, columns)
    _bars(left, stages, "documents", lambda stage: (stage.documents_in, stage.documents_out))
    if all(stage.tokens_in is not None and stage.tokens_out is not None for stage in stages):
        _bars(right, stages, "tokens", lambda stage: (stage.tokens_in or 0, stage.tokens_out or 0))
    else:
        _bars(right, stages, "bytes", lambda stage: (stage.bytes_in or 0, stage.bytes_out or 0))
    figure.legend(*left.get_legend_handles_labels(), loc="outside upper left", ncols=2)
    return figure


def _bars(axes: "Axes", stages: Sequence[Stage], what: str, counts: Callable[[Stage], tuple[int, int]]) -> None:
    from matplotlib.ticker import MaxNLocator

    largest = max(1, *(max(counts(stage)) for stage in stages))
    for row, stage in enumerate(stages):
        before, after = counts(stage)
        dropped = max(0, before - after)
        axes.barh(row, after, height=0.62, color=LIGHT["kept"], label="kept" if row == 0 else None)
        axes.barh(
            row,
            dropped,
            left=after,
            height=0.62,
            facecolor="none",
            edgecolor=LIGHT["muted"],
            hatch="/////",
            linewidth=0.6,
            label="dropped here" if row == 0 else None,
        )
        loss = f"  −{dropped:,}" if dropped else ""
        axes.text(max(before, after) + 0.02 * largest, row, f"{after:,}{loss}", va="center", fontsize=8.3)
    axes.set_yticks(range(len(stages)), [stage.name for stage in stages])
    axes.invert_yaxis()
    axes.set_xlim(0, largest * 1.45)
    axes.set_title(f"{what} kept after each stage")
    axes.grid(axis="y", visible=False)
    axes.tick_params(axis="y", length=0)
    ticks = [float(tick) for tick in MaxNLocator(4).tick_values(0, largest) if tick <= largest]
    axes.set_xticks(ticks, [compact(tick) for tick in ticks])
    axes.spines["bottom"].set_bounds(0, largest)
