"""Figures of the data pipeline: attrition by stage, and near-duplicates by similarity."""

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator

from data_pipeline.files import NearDuplicates, StageAttrition
from reports.data_card import recalls
from reports.figures.marks import DASHES, blank
from reports.numbers import compact
from reports.style import LIGHT


def draw_funnel(stages: Sequence[StageAttrition], narrow: bool = False) -> Figure:
    """Draw kept and dropped amounts of each stage in documents and in tokens, or in bytes without tokens."""
    rows, columns = (2, 1) if narrow else (1, 2)
    layout = ConstrainedLayoutEngine(wspace=0.06, hspace=0.06)
    figure = blank(narrow, rows * (0.9 + 0.42 * len(stages)), layout)
    left, right = figure.subplots(rows, columns)
    _bars(left, stages, "documents")
    has_tokens = all(stage.tokens_in is not None and stage.tokens_out is not None for stage in stages)
    _bars(right, stages, "tokens" if has_tokens else "bytes")
    figure.legend(*left.get_legend_handles_labels(), loc="outside upper left", ncols=2)
    return figure


def _bars(axes: Axes, stages: Sequence[StageAttrition], what: str) -> None:
    counts = [(getattr(stage, f"{what}_in") or 0, getattr(stage, f"{what}_out") or 0) for stage in stages]
    largest = max(1, *map(max, counts))
    hatched: Any = {"facecolor": "none", "edgecolor": LIGHT["muted"], "hatch": "/////", "linewidth": 0.6}
    for row, (before, after) in enumerate(counts):
        dropped = max(0, before - after)
        labels = ("_", "_") if row else ("kept", "dropped here")
        axes.barh(row, after, height=0.62, color=LIGHT["kept"], label=labels[0])
        axes.barh(row, dropped, left=after, height=0.62, label=labels[1], **hatched)
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


def draw_banding(banding: NearDuplicates, narrow: bool = False) -> Figure:
    """Draw expected recall against Jaccard similarity, and compared pairs in bins of the same axis."""
    figure = blank(narrow, 5.2 if narrow else 4.9)
    curve, bars = figure.subplots(2, 1, sharex=True, height_ratios=[1.5, 1])
    xs, ys = zip(*banding.s_curve, strict=True)
    curve.plot(xs, ys, color=LIGHT["model-2"], clip_on=False, zorder=3)
    marked = [(float(similarity), value) for similarity, value in banding.expected_recall.items()]
    curve.plot(*zip(*marked, strict=True) if marked else ((), ()), "o", color=LIGHT["model-2"], clip_on=False, zorder=4)
    curve.text(0.03, 0.95, "\n".join(recalls(banding)), va="top", linespacing=1.5, fontsize=8.5)
    curve.set_ylim(0, 1.02)
    curve.set_ylabel("expected recall")
    curve.set_title("probability that a pair is compared")
    pairs = banding.compared_pairs_by_similarity
    lefts = [index / len(pairs) for index in range(len(pairs))]
    bars.bar(lefts, pairs, width=0.92 / len(pairs), align="edge", color=LIGHT["kept"], zorder=3)
    bars.set_ylim(0, max(1, *pairs) * 1.1)
    bars.set_ylabel("pairs")
    bars.set_title("pairs that were compared")
    bars.yaxis.set_major_locator(MaxNLocator(4, integer=True))
    bars.yaxis.set_major_formatter(lambda value, _: compact(value))
    alert, threshold = LIGHT["alert"], banding.threshold
    for axes in (curve, bars):
        axes.axvline(threshold, color=alert, linestyle=DASHES, linewidth=1.1, zorder=2)
    curve.text(threshold - 0.01, 0.05, f"threshold {threshold:g}", color=alert, ha="right", fontsize=8.5)
    bars.set_xlim(0, 1)
    bars.set_xlabel("Jaccard similarity")
    return figure
