"""A ladder on the page: losses over compute with the forecast of the largest rung, and the fitted law."""

from functools import partial
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

import numpy as np

from mlm_repro.experiments.files import FORECAST, LADDER, PLAN, Forecast, LadderPlan, LadderResult
from mlm_repro.lineage.errors import IntegrityFailure
from mlm_repro.lineage.files import read_document
from mlm_repro.lineage.numbers import compact, show
from mlm_repro.reports.exhibit import Exhibit, Table
from mlm_repro.reports.figures import DASHES, blank, plain_log_ticks
from mlm_repro.reports.style import LIGHT, look

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def ladder_exhibit(run: Path) -> Exhibit:
    """Curves, law and forecast of a ladder. Raises IntegrityFailure for a damaged file."""
    plan, forecast = read_document(run / PLAN, LadderPlan), read_document(run / FORECAST, Forecast)
    result = read_document(run / LADDER, LadderResult)
    places = {tuple(tokens for tokens, _ in each.curve) for each in result.runs}
    if len(places) != 1 or not {each.rung for each in result.runs} <= set(range(len(plan.rungs))):
        raise IntegrityFailure(f"{LADDER} of {run.name} does not fit the rungs and lengths of {PLAN}")
    heads = ("parameters, N", "without embeddings", "seed", "learning rate", "loss", "bits per byte", "kind")
    rows = [
        (str(plan.rungs[each.rung].parameters), str(plan.rungs[each.rung].inner_parameters), str(each.seed),
         f"{each.learning_rate:g}", f"{each.loss:.4f}", f"{each.bits_per_byte:.4f}", "scaled")
        for each in result.runs
    ]  # fmt: skip
    names = [f"rung {number}" for number in range(1, len(plan.rungs) + 1)]
    scored = [each.sentence(names) for each in result.comparisons]
    caption = [
        f"A forecast sealed before the training {'held' if result.verdict == 'HIT' else 'failed'}: "
        f"{result.sentence.partition(': ')[2]}.".replace("rung", "model"),
        f"They were trained on the same {plan.tokens:,} tokens ({plan.epochs:.2f} passes), all but the largest with "
        f"{len(plan.seeds)} seeds.",
        "The largest model's seed is the beginning of its forecast's digest: it cannot have been trained before.",
        f"The law misses no mean at the end by more than {forecast.misfit:.2%}.",
        *(f"{sentence}." for sentence in scored),
    ]
    return Exhibit(
        "ladder", "Figure 6 as a law: a ladder of small models", caption, Table(heads, rows, words=0),
        f"mlm-experiment ladder --rungs {len(plan.rungs)}", partial(draw, plan, forecast, result),
        f"Validation loss of {len(plan.rungs)} models over tokens and over parameters. {result.sentence}",
    )  # fmt: skip


def draw(plan: LadderPlan, forecast: Forecast, result: LadderResult) -> "Figure":
    """Draw losses over compute with the forecast as a band, and final losses over parameters beside the law."""
    figure = blank(4.6)
    panels = figure.subplot_mosaic([["curves", "ends"], ["curves", "misses"]], height_ratios=[3, 1.2])
    curves, ends, misses = panels["curves"], panels["ends"], panels["misses"]
    every = []
    for rung, sizes in enumerate(plan.rungs):
        runs = [each for each in result.runs if each.rung == rung]
        if not runs:
            continue
        color, marker = look(rung)
        reached = [each.loss for each in runs]
        points = zip(*(each.curve for each in runs), strict=True)  # each place with its loss for every seed
        shown = [(6 * sizes.parameters * at[0][0], fmean(loss for _, loss in at)) for at in points if at[0][0]]
        name = compact(float(f"{sizes.parameters:.3g}"))
        curves.plot(*zip(*shown, strict=True), color=color, marker=marker, markersize=3, linewidth=1.2, label=name)
        across, by_law = [sizes.parameters] * len(reached), forecast.law.loss(sizes.parameters, plan.tokens)
        ends.plot(across, reached, marker, color=color, markersize=5)
        misses.plot(across, [100 * (loss / by_law - 1) for loss in reached], marker, color=color)
        every += reached
    places = [6 * forecast.rung.parameters * place.tokens for place in forecast.curve]
    low, high = [place.low for place in forecast.curve], [place.high for place in forecast.curve]
    curves.fill_between(places, low, high, color=LIGHT["muted"], alpha=0.35, linewidth=0, label="forecast, 90 %")
    along = np.geomspace(plan.rungs[0].parameters, plan.rungs[-1].parameters, 60)
    ends.plot(along, [forecast.law.loss(size, plan.tokens) for size in along], color=LIGHT["muted"], linestyle=DASHES)
    end = forecast.curve[-1]
    size = forecast.rung.parameters
    ends.plot([size, size], [end.low, end.high], "_-", color=LIGHT["muted"], markersize=10, linewidth=1.5)
    misses.axhline(0, color=LIGHT["muted"], linestyle=DASHES, linewidth=1)
    for axes, name in ((curves, "training compute (FLOPs, 6 × parameters × tokens)"),
                       (ends, ""), (misses, "parameters")):  # fmt: skip
        plain_log_ticks(axes, "x")
        axes.set_xlabel(name)
        axes.yaxis.set_major_formatter(lambda value, _: show(value))
    for axes in (curves, ends):
        axes.set_ylabel("validation loss (nats per token)")
    misses.set_ylabel("% off")
    curves.set_ylim(lowest := min(*low, *every), 2 * max(every) - lowest)
    curves.legend(fontsize=7.5, frameon=False)
    return figure
