"""Ratios of the training benchmark as shares of their goals."""

from typing import TYPE_CHECKING

from reports.benchmark_results import Train
from reports.style import LIGHT

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw(result: Train, narrow: bool = False) -> "Figure":
    """A row for each goal: the median's share of it with the rounds' range, at 1 the goal; more is better."""
    from matplotlib.figure import Figure

    goals = result.goals
    figure = Figure(figsize=(4.5 if narrow else 10.6, 0.8 + 0.3 * len(goals)), layout="constrained")
    axes = figure.subplots()
    names = []
    for place, (case, name) in enumerate(goals):
        goal, is_reached = case.goals[name], case.reached[name]
        power = -1 if name in result.less_is_better else 1
        shares = [(value / goal) ** power for value in case.each_round[name]]
        middle = (case.ratios[name] / goal) ** power
        color = LIGHT["good" if is_reached else "alert"]
        axes.plot([min(shares), max(shares)], [place, place], color=color, linewidth=2.6, alpha=0.5)
        axes.plot(middle, place, "o" if is_reached else "s", color=color, markersize=5, zorder=3)
        names.append(f"{case.case}: {result.measures.get(name, name)}")
    axes.axvline(1.0, color=LIGHT["ink"], linewidth=0.9)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    axes.set_xlabel("share of the goal (1: reached)")
    return figure
