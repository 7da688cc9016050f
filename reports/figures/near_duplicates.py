"""What a banding should find, over what it was given to compare."""

from typing import TYPE_CHECKING

from lineage.data_files import NearDuplicates
from reports.data_card import recalls
from reports.figures.marks import blank
from reports.numbers import compact
from reports.style import LIGHT

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw(banding: NearDuplicates, narrow: bool = False) -> "Figure":
    """Expected recall against Jaccard similarity, and the compared pairs in bins of the same axis."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

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
    width = 1 / len(banding.compared_pairs_by_similarity)
    lefts = [index * width for index in range(len(banding.compared_pairs_by_similarity))]
    bars.bar(
        lefts, banding.compared_pairs_by_similarity, width=0.92 * width, align="edge", color=LIGHT["kept"], zorder=3
    )
    bars.set_ylim(0, max(1, *banding.compared_pairs_by_similarity) * 1.1)
    bars.set_ylabel("pairs")
    bars.set_title("pairs that were compared")
    bars.yaxis.set_major_locator(MaxNLocator(4, integer=True))
    bars.yaxis.set_major_formatter(FuncFormatter(lambda value, _: compact(value)))
    for axes in (curve, bars):
        axes.axvline(banding.threshold, color=LIGHT["alert"], linestyle=(0, (4, 2.2)), linewidth=1.1, zorder=2)
    curve.text(
        banding.threshold - 0.01,
        0.05,
        f"threshold {banding.threshold:g}",
        color=LIGHT["alert"],
        ha="right",
        fontsize=8.5,
    )
    bars.set_xlim(0, 1)
    bars.set_xlabel("Jaccard similarity")
    return figure
