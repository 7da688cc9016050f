"""Simulated numbers beside the published ones: those that a fit has seen, and those that none has."""

from collections.abc import Mapping, Sequence
from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING

from mlm_repro.experiments.verdicts import Verdict, interval, skills
from mlm_repro.reports.claims import Claims
from mlm_repro.reports.exhibit import Exhibit, Table
from mlm_repro.reports.figures import DASHES, HEIGHT, blank
from mlm_repro.reports.style import LIGHT, look

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FRAME = 80
"""Percent that the figure shows on either side."""


def calibration_exhibit(claims: Claims) -> Exhibit:
    """Every simulated number with its interval, one for each fact and place, in two panels."""
    simulated = {(each.fact, each.claim.x): each for each in reversed(claims)
                 if each.scale == "simulated" and each.claim.value}  # fmt: skip
    ordered = sorted(simulated.values(), key=_error)
    panels = {
        "seen by a fit": [each for each in ordered if each.outcome == "fitted"],
        "seen by no fit": [each for each in ordered if each.outcome != "fitted"],
    }
    rows = [
        (verdict.claim.id, name, f"{verdict.claim.value:f}", *(f"{end:.4g}" for end in _ends(verdict)))
        for name, verdicts in panels.items() for verdict in verdicts
    ]  # fmt: skip
    fitted = panels["seen by a fit"]
    caption = ["Each bar is a 90 % interval, of the published number, in the order of the errors."]
    if fitted:
        inside = sum(low <= float(each.claim.value) <= high for each in fitted for _, low, high in [_ends(each)])
        error = fmean(abs(_error(each)) for each in fitted)
        caption.append(
            f"Of {len(fitted)} numbers that a fit has seen, {inside} lie in the interval; mean error {error:.1f} %. "
            "They say how well the constants fit, and decide nothing."
        )
    if outside := [verdict.claim.id for verdict in ordered if abs(_error(verdict)) > FRAME]:
        caption.append(f"Beyond the frame: {', '.join(outside)}.")
    caption += [each.sentence for each in skills(ordered)]
    return Exhibit(
        "calibration", "Simulated beside published", caption,
        Table(("claim", "fit", "published", "simulated", "low", "high"), rows, words=2),
        "mlm-experiment compare --all --rows", partial(draw, panels), " ".join(caption),
    )  # fmt: skip


def draw(panels: Mapping[str, Sequence[Verdict]]) -> "Figure":
    """Draw the error of each number with its interval, in percent of the published one."""
    figure = blank(HEIGHT)
    axes = figure.subplots(1, len(panels), sharey=True)
    for place, (panel, (name, verdicts)) in enumerate(zip(axes, panels.items(), strict=True)):
        color, marker = look(place)
        for rank, verdict in enumerate(verdicts):
            value, low, high = (100 * (end / float(verdict.claim.value) - 1) for end in _ends(verdict))
            panel.plot([rank, rank], [low, high], color=LIGHT["muted"], linewidth=1)
            panel.plot(rank, value, marker, color=color, markersize=3)
        panel.axhline(0, color=LIGHT["muted"], linestyle=DASHES, linewidth=1)
        panel.set_xlabel(f"{len(verdicts)} numbers {name}")
        panel.set_xticks([])
    axes[0].set_ylim(-FRAME, FRAME)
    axes[0].set_ylabel("simulated over published, % off")
    return figure


def _ends(verdict: Verdict) -> tuple[float, float, float]:
    ends = interval(verdict.record)
    return ends.value, ends.low, ends.high


def _error(verdict: Verdict) -> float:
    return 100 * (_ends(verdict)[0] / float(verdict.claim.value) - 1)
