"""A ladder on the page: losses over compute with the forecast of the largest rung, and the fitted
law."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from mlm_repro.experiments.files import FORECAST, LADDER, PLAN, Forecast, LadderPlan, LadderResult
from mlm_repro.lineage.errors import IntegrityFailure
from mlm_repro.lineage.files import read_document
from mlm_repro.lineage.numbers import compact
from mlm_repro.reports.exhibit import Exhibit, Table
from mlm_repro.reports.figures import Layer, Panel, Point

FORESEEN = "forecast, 90 %"


def ladder_exhibit(run: Path) -> Exhibit:
    """Curves, law and forecast of a ladder. Raises IntegrityFailure for a damaged file."""
    plan = read_document(run / PLAN, LadderPlan)
    forecast = read_document(run / FORECAST, Forecast)
    result = read_document(run / LADDER, LadderResult)
    places = {tuple(tokens for tokens, _ in each.curve) for each in result.runs}
    if len(places) != 1 or not {each.rung for each in result.runs} <= set(range(len(plan.rungs))):
        raise IntegrityFailure(
            f"{LADDER} of {run.name} does not fit the rungs and lengths of {PLAN}"
        )
    heads = (
        "parameters, N",
        "without embeddings",
        "seed",
        "learning rate",
        "loss",
        "bits per byte",
        "kind",
    )
    rows = [
        (
            str(plan.rungs[each.rung].parameters),
            str(plan.rungs[each.rung].inner_parameters),
            str(each.seed),
            f"{each.learning_rate:g}",
            f"{each.loss:.4f}",
            f"{each.bits_per_byte:.4f}",
            "scaled",
        )
        for each in result.runs
    ]
    names = [f"rung {number}" for number in range(1, len(plan.rungs) + 1)]
    scored = [each.sentence(names) for each in result.comparisons]
    caption = [
        f"A forecast sealed before the training {'held' if result.verdict == 'HIT' else 'failed'}: "
        f"{result.sentence.partition(': ')[2]}.".replace("rung", "model"),
        (
            f"They were trained on the same {plan.tokens:,} tokens ({plan.epochs:.2f} passes), all"
            f" but the largest with {len(plan.seeds)} seeds."
        ),
        (
            "The largest model's seed is the beginning of its forecast's digest: it cannot have"
            " been trained before."
        ),
        f"The law misses no mean at the end by more than {forecast.misfit:.2%}.",
        *(f"{sentence}." for sentence in scored),
    ]
    return Exhibit(
        "ladder",
        "Figure 6 as a law: a ladder of small models",
        caption,
        Table(heads, rows, words=0),
        f"mlm-experiment ladder --rungs {len(plan.rungs)}",
        panels_of(plan, forecast, result),
        f"Validation loss of {len(plan.rungs)} models over tokens and over parameters."
        f" {result.sentence}",
    )


def panels_of(plan: LadderPlan, forecast: Forecast, result: LadderResult) -> list[Panel]:
    """Losses over compute with the forecast, and final losses over parameters beside the law."""
    curves = list[Layer]()
    ends = list[Layer]()
    misses = list[Layer]()
    for rung, size in enumerate(rung.parameters for rung in plan.rungs):
        runs = [each for each in result.runs if each.rung == rung]
        if not runs:
            continue
        name = compact(float(f"{size:.3g}"))
        losses = [each.loss for each in runs]
        # Each place with its loss for every seed.
        places = zip(*(each.curve for each in runs), strict=True)
        points = [
            Point.mean(6 * size * at[0][0], [loss for _, loss in at]) for at in places if at[0][0]
        ]
        misfits = [100 * (loss / forecast.law.loss(size, plan.tokens) - 1) for loss in losses]
        curves.append(Layer(name, rung, "scaled", tuple(points)))
        ends.append(Layer(name, rung, "scaled", (Point.mean(size, losses),)))
        misses.append(Layer(name, rung, "scaled", (Point.mean(size, misfits),)))
    size = forecast.rung.parameters
    last = len(plan.rungs) - 1
    foreseen = [
        Point(6 * size * each.tokens, each.loss, each.low, each.high) for each in forecast.curve
    ]
    along = np.geomspace(plan.rungs[0].parameters, size, 60).tolist()
    by_law = [Point(n, forecast.law.loss(n, plan.tokens)) for n in along]
    end = replace(foreseen[-1], x=size)
    curves.append(Layer(FORESEEN, last + 1, "simulated", tuple(foreseen)))
    ends += [
        Layer("the law", last + 2, "law", tuple(by_law)),
        Layer(FORESEEN, last + 1, "simulated", (end,)),
    ]
    loss = "validation loss (nats per token)"
    return [
        Panel(curves, "training compute (FLOPs, 6 × parameters × tokens)", loss, logarithmic="x"),
        Panel(ends, "parameters", loss, logarithmic="x"),
        Panel(misses, "parameters", "% off the law", logarithmic="x"),
    ]
