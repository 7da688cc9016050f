"""Weight norms, update norms and trust ratios of LAMB over a training run, as `record.trust_ratio` counted them."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mlm_repro.engine.run.files import NORM_EDGES, Step, read_steps
from mlm_repro.lineage.errors import BadInput
from mlm_repro.lineage.files import Manifest, read_document
from mlm_repro.lineage.numbers import compact
from mlm_repro.lineage.run import MANIFEST
from mlm_repro.reports.exhibit import Exhibit, Table
from mlm_repro.reports.figures import DASHES, blank, plain_log_ticks
from mlm_repro.reports.style import LIGHT

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CLIP = 10.0
"""The clip of "Scaling Transformer-XL to 128 GPUs"."""
QUANTITIES = {"weight_norms": "weight norm", "update_norms": "update norm", "trust_ratios": "trust ratio"}
SHARES = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0)
"""Shares of the tensors that lie below the borders of the bands."""
SHOWN = 400
"""Most iterations that a figure shows."""


def trust_ratio_exhibit(run: Path) -> Exhibit:
    """The histograms of a training run. Raises BadInput if it has none."""
    steps = [step for step in read_steps(run) if step.trust_ratios]
    if not steps:
        raise BadInput(
            f"{run} is a training: `mlm-report run {run}` draws its curves. Its one figure here is trust-ratio, if a "
            "LAMB optimizer trained it with record.trust_ratio = true"
        )
    optimizer = read_document(run / MANIFEST, Manifest).config["train"]["optimizer"]
    shown = [*steps[:: -(-len(steps) // SHOWN)][:-1], steps[-1]]
    rows = [(str(step.iteration), name, *(f"{quantile(getattr(step, key), share):.3g}" for share in SHARES))
            for step in shown for key, name in QUANTITIES.items()]  # fmt: skip
    first, last = (f"{quantile(step.update_norms, 0.5):.3g}" for step in (steps[0], steps[-1]))
    reached = [sum(step.trust_ratios[NORM_EDGES.index(CLIP) + 1 :]) for step in steps]
    tensors = sum(steps[0].trust_ratios)
    begun = next((step.iteration for step, count in zip(steps, reached, strict=True) if count), None)
    caption = [
        f"{tensors} tensors in {len(steps)} updates by {optimizer}: all lie in the lightest band, 80 % and half in the "
        "darker ones, and the line is the median, each to an eighth of a decade.",
        f"Ratios of 10 or more: {sum(reached) / tensors / len(steps):.2%}, at the end {reached[-1]} of {tensors}"
        + (f", first in iteration {begun}." if begun else "."),
    ]
    notes = [
        "The dashed line is 10, the clip of “Scaling Transformer-XL to 128 GPUs”. `lamb-clamped` clamps the weight "
        "norm, not the ratio, which a small update takes above 10.",
        f"The median update norm is {first} in the first update and {last} in the last.",
    ]
    heads = ("iteration", "of each tensor", *(f"{share:.0%} below" for share in SHARES))
    return Exhibit(
        "trust-ratio", "LAMB’s trust ratio over training", caption, Table(heads, rows, words=2),
        f"mlm-report figure trust-ratio {run}", partial(draw, shown), " ".join(caption), notes=notes,
    )  # fmt: skip


def quantile(counts: list[int], share: float) -> float:
    """Middle of the bin below whose upper border lies a share of the tensors; the open bins count as their border."""
    total, reached = sum(counts), np.cumsum(counts)
    place = int(np.searchsorted(reached, np.clip(share * total, 0.5, total - 0.5)))
    borders = NORM_EDGES[max(place - 1, 0)], NORM_EDGES[min(place, len(NORM_EDGES) - 1)]
    return float(np.sqrt(borders[0] * borders[1]))


def draw(steps: list[Step]) -> "Figure":
    """Draw a panel for each quantity: bands of tensors over iterations, with the post's clip."""
    figure = blank(3.6)
    iterations = [step.iteration for step in steps]
    for axes, (key, name) in zip(figure.subplots(1, 3), QUANTITIES.items(), strict=True):
        borders = [[quantile(getattr(step, key), share) for step in steps] for share in SHARES]
        for low, high in ((0, 6), (1, 5), (2, 4)):
            axes.fill_between(iterations, borders[low], borders[high], color=LIGHT["model-0"], alpha=0.22, linewidth=0)
        axes.plot(iterations, borders[3], color=LIGHT["model-0"], linewidth=1.3)
        plain_log_ticks(axes)
        axes.set(xlabel="iteration", title=name, xlim=(0, iterations[-1]))
        axes.xaxis.set_major_formatter(lambda value, _: compact(value))
        if key != "update_norms":
            axes.axhline(CLIP, color=LIGHT["muted"], linestyle=DASHES, linewidth=1)
    return figure
