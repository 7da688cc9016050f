"""The outcome of a ladder, derived from the trainings and evaluations that it keeps. Imports no torch."""

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np

from data_pipeline.files import DATASET, DataCard
from evaluation.schema import ClozeResult, PerplexityResult, Result
from experiments.files import (
    FORECAST,
    LADDER,
    PLAN,
    Forecast,
    LadderPlan,
    LadderResult,
    LadderRun,
    LadderScores,
    RateLaw,
)
from experiments.forecast.law import METHOD, fit_law, size_exponent
from experiments.forecast.published import beside_published
from experiments.forecast.trainings import Trained, origin_of, read_kept, seeds_of
from experiments.reproduce.files import EVALUATIONS
from experiments.scores import compared, last_words, text_score
from lineage.errors import BadInput, IntegrityFailure
from lineage.files import Manifest, read_document
from lineage.records import Record
from lineage.run import MANIFEST

LENGTH_EXPONENT = 0.32
"""Exponent by which the best rate falls with the length (Bjorck et al. 2024, arXiv 2409.19913)."""


def rung_of(plan: LadderPlan, trained: Trained) -> int:
    """Index of a training's rung. Raises IntegrityFailure if the plan has no such rung."""
    model = trained.config.model
    sizes = [(rung.layers, rung.width, rung.heads) for rung in plan.rungs]
    try:
        return sizes.index((model.num_layers, model.hidden_size, model.num_heads))
    except ValueError:
        raise IntegrityFailure(f"{trained.folder.name} is of no rung of {PLAN}") from None


def first_of_rungs(plan: LadderPlan, trained: Iterable[Trained]) -> list[Trained]:
    """The finished training with the lowest seed of each rung."""
    ended = [each for each in trained if not each.is_trial and each.is_finished]
    first = {rung_of(plan, each): each for each in sorted(ended, key=lambda each: -each.config.train.seed)}
    return [each for _, each in sorted(first.items())]


def rate_law(plan: LadderPlan, trained: Iterable[Trained]) -> RateLaw:
    """The learning rate for every size and length, from the trials of the smaller rungs.

    A line is fitted to the logarithms of best rate and size, so that no size is favoured, and the largest follows it
    without a trial of its own. Raises BadInput if fewer than two sizes have a rate at which they do not diverge.
    """
    trials: dict[int, list[Trained]] = {}
    for each in trained:
        if each.is_trial and each.is_finished and math.isfinite(each.end):
            trials.setdefault(rung_of(plan, each), []).append(each)
    if len(trials) < 2:
        raise BadInput("at every learning rate that was tried, all models or all but one diverged")
    sizes = np.log([plan.rungs[rung].parameters for rung in trials])
    slope, middle = np.polyfit(sizes - sizes.mean(), [math.log(best_rate(of)) for of in trials.values()], 1)
    return RateLaw(
        rate=math.exp(middle),
        parameters=math.exp(sizes.mean()),
        size_exponent=-slope,
        tokens=plan.search_iterations * plan.batch_size * plan.seq_length,
        length_exponent=LENGTH_EXPONENT,
    )


def best_rate(trials: Iterable[Trained]) -> float:
    """The minimum of a parabola of loss over the rate's logarithm through the best trial and its neighbours."""
    ends = sorted((math.log(trial.config.train.learning_rate), trial.end) for trial in trials)
    best = min(range(len(ends)), key=lambda place: ends[place][1])
    lowest = ends[best][0]
    if 0 < best < len(ends) - 1:
        rates, losses = zip(*ends[best - 1 : best + 2], strict=True)
        curvature, slope, _ = np.polyfit(rates, losses, 2)
        lowest = -slope / (2 * curvature)
    return math.exp(lowest)


def make_forecast(plan: LadderPlan, trained: Iterable[Trained]) -> Forecast:
    """The largest rung's curve from the trainings of all others that did not diverge.

    Raises BadInput for fewer than three rungs.
    """
    largest = len(plan.rungs) - 1
    curves: dict[int, list[dict[int, float]]] = {}
    made_of, left_out = {}, {}
    smaller = [(rung_of(plan, each), each) for each in trained if not each.is_trial]
    for rung, each in sorted((place for place in smaller if place[0] < largest), key=lambda place: place[0]):
        if not each.is_finished:
            left_out[each.folder.name] = "its loss stopped being a number"
        elif each.is_diverged:
            left_out[each.folder.name] = "its loss ended above that of the untrained model"
        else:
            curves.setdefault(rung, []).append(each.losses)
            made_of[each.folder.name] = each.digest
    fitted = fit_law(plan.rungs, curves)
    curve, (low, high) = fitted.forecast(plan.rungs[largest].parameters)
    return Forecast(
        method=METHOD, law=fitted.law, exponent_low=low, exponent_high=high,
        misfit=float(np.abs(fitted.misfits).max()), rung=plan.rungs[largest], curve=curve, made_of=made_of,
        left_out=left_out,
    )  # fmt: skip


def derive(ladder: Path) -> tuple[LadderResult, list[Record]]:
    """The result and the records of a ladder from its files.

    Raises IntegrityFailure if trainings used different data, a seed or a training occurs twice, a rate is not the one
    that the trials give, or the forecast does not follow from the smaller rungs or did not precede the largest.
    """
    plan, forecast = read_document(ladder / PLAN, LadderPlan), read_document(ladder / FORECAST, Forecast)
    card, trained = read_document(ladder / DATASET, DataCard), read_kept(ladder)
    manifest = read_document(ladder / MANIFEST, Manifest)
    rates = rate_law(plan, trained)
    _check(ladder / FORECAST, plan, forecast, trained, rates, manifest.parents["dataset"])
    bits_per_nat = card.splits["valid"].bits_per_nat
    runs = sorted(
        (
            LadderRun(
                name=each.folder.name, rung=rung_of(plan, each), seed=each.config.train.seed,
                learning_rate=each.config.train.learning_rate, curve=list(each.losses.items()),
                bits_per_byte=each.final * bits_per_nat,
            )
            for each in trained if not each.is_trial and each.is_finished
        ),
        key=lambda run: (run.rung, run.seed),
    )  # fmt: skip
    reached, foreseen = runs[-1].loss, forecast.curve[-1]
    verdict: Literal["HIT", "MISS"] = "HIT" if foreseen.low <= reached <= foreseen.high else "MISS"
    scores = _read_scores(ladder, first_of_rungs(plan, trained))
    common = [text for text in scores[0].texts if all(text in each.texts for each in scores)] if scores else []
    texts = {text: [each.texts[text] for each in scores] for text in common}
    ends: dict[int, list[float]] = {}
    for run in runs:
        ends.setdefault(run.rung, []).append(run.loss)
    result = LadderResult(
        runs=runs,
        verdict=verdict,
        bits_per_byte={text: [each.bits_per_byte for each in models] for text, models in texts.items()},
        comparisons=[
            compared(text, larger - 2, larger, [[each] for each in models])
            for text, models in texts.items()
            for larger in range(2, len(models))
        ],
        last_words=[each.last_words for each in scores if each.last_words],
        rates=rates,
        exponents=beside_published(*size_exponent([plan.rungs[rung].parameters for rung in ends], [*ends.values()])),
        sentence=f"{verdict}: the largest rung was foreseen at {foreseen.loss:.4f} nats ({foreseen.low:.4f} to "
        f"{foreseen.high:.4f}) and reached {reached:.4f}",
    )
    return result, list(_records(plan, forecast, result, origin_of(manifest)))


def _check(
    path: Path, plan: LadderPlan, forecast: Forecast, trained: list[Trained], rates: RateLaw, dataset: str
) -> None:
    """Raises IntegrityFailure unless the trainings are those of the plan and of the forecast at `path`."""
    taken: set[object] = set()
    largest = []
    for each in trained:
        name, train, rung = each.folder.name, each.config.train, rung_of(plan, each)
        each.check_data(dataset, "the ladder")
        marks = {(rung, train.seed, train.learning_rate if each.is_trial else None), tuple(each.losses.values())}
        if marks & taken:
            raise IntegrityFailure(f"{name} is a seed that another training of its rung has already")
        taken |= marks
        if train.iterations != (plan.search_iterations if each.is_trial else plan.iterations):
            raise IntegrityFailure(f"{name} is of another length than {PLAN} says")
        by_law = rates.at(plan.rungs[rung].parameters, plan.tokens)
        if not each.is_trial and not math.isclose(train.learning_rate, by_law, rel_tol=0.01):
            raise IntegrityFailure(f"rung {rung + 1} was not trained at the rate that the trials give")
        if not each.is_trial and rung == len(plan.rungs) - 1:
            largest.append(train.seed)
    if not _agree(make_forecast(plan, trained), forecast):
        raise IntegrityFailure(f"{FORECAST} is not what the trainings of the smaller rungs give")
    if largest != seeds_of(path, 1):
        raise IntegrityFailure(
            f"the largest rung was not trained with the seed that {FORECAST} gives: the forecast was changed or made "
            "after the training"
        )


def _agree(ours: Forecast, other: Forecast) -> bool:
    """True if two forecasts differ by no more than the rounding of another machine or solver."""

    def numbers(forecast: Forecast) -> list[float]:
        ends = [(place.tokens, place.loss, place.low, place.high) for place in forecast.curve]
        return [forecast.exponent_low, forecast.exponent_high, forecast.misfit, *(n for end in ends for n in end)]

    fitted = {"curve", "law", "exponent_low", "exponent_high", "misfit"}
    return ours.model_dump(exclude=fitted) == other.model_dump(exclude=fitted) and np.allclose(
        numbers(ours), numbers(other), rtol=1e-3, atol=1e-4
    )


def kept_scores(results: Mapping[str, Result]) -> LadderScores:
    """The scores that a ladder keeps of a model's evaluations."""
    texts = {name: text_score(result) for name, result in results.items() if isinstance(result, PerplexityResult)}
    cloze = [result for result in results.values() if isinstance(result, ClozeResult)]
    return LadderScores(texts=texts, last_words=last_words(cloze[0]) if cloze else None)


def _read_scores(ladder: Path, scored: list[Trained]) -> list[LadderScores]:
    """Scores of these trainings; empty if any is missing."""
    paths = [ladder / EVALUATIONS / f"{each.folder.name}.json" for each in scored]
    return [read_document(path, LadderScores) for path in paths] if all(path.is_file() for path in paths) else []


def _records(plan: LadderPlan, forecast: Forecast, result: LadderResult, origin: dict[str, Any]) -> Iterable[Record]:
    def record(rung: int, quantity: str, value: float, kind: str = "scaled", **more: Any) -> Record:
        series = f"ladder, {plan.rungs[rung].parameters / 1e3:,.0f}k"
        fields = {"experiment": "2019/figure-6", "series": series, "quantity": quantity, "value": value, "kind": kind}
        return Record(**fields, **origin, **more)  # type: ignore[arg-type]

    for run in result.runs:
        yield record(run.rung, "ladder_validation_loss", run.loss, seed=run.seed)
        yield record(run.rung, "ladder_bits_per_byte", run.bits_per_byte, seed=run.seed)
    for text, values in result.bits_per_byte.items():
        for rung, value in enumerate(values):
            yield record(rung, f"{text}_bits_per_byte", value)
    end = forecast.curve[-1]
    yield record(len(plan.rungs) - 1, "ladder_validation_loss", end.loss, "simulated", low=end.low, high=end.high,
                 note="forecast before it was trained")  # fmt: skip


def format_ladder(ladder: Path) -> str:
    """A line for each rung, then the outcome of the forecast."""
    plan, forecast = read_document(ladder / PLAN, LadderPlan), read_document(ladder / FORECAST, Forecast)
    result = read_document(ladder / LADDER, LadderResult)
    lines = [f"{'N':>10}{'rate':>8}{'loss':>9}  {'by seed':<26}{'law':>9}{'bits/byte':>11}"
             + "".join(f"{text:>19}" for text in result.bits_per_byte)]  # fmt: skip
    for rung, sizes in enumerate(plan.rungs):
        runs = [run for run in result.runs if run.rung == rung]
        if not runs:
            lines.append(f"{sizes.parameters:>10,}  diverged")
            continue
        loss, bits = (float(np.mean([getattr(run, name) for run in runs])) for name in ("loss", "bits_per_byte"))
        by_law = forecast.law.loss(sizes.parameters, plan.tokens)
        lines.append(
            f"{sizes.parameters:>10,}{runs[0].learning_rate:>8g}{loss:>9.4f}  "
            f"{', '.join(f'{run.loss:.4f}' for run in runs):<26}{by_law:>9.4f}"
            f"{bits:>11.4f}" + "".join(f"{values[rung]:>19.4f}" for values in result.bits_per_byte.values())
        )
    names = [f"rung {number}" for number in range(1, len(plan.rungs) + 1)]
    lines += [each.sentence(names) for each in result.comparisons]
    lines += [words.sentence(name) for name, words in zip(names, result.last_words, strict=False)]
    lines += [f"left out of the law: {name}: {reason}" for name, reason in forecast.left_out.items()]
    lines += [str(result.rates), result.exponents]
    return "\n".join([*lines, f"the law misses no rung by more than {forecast.misfit:.2%}", result.sentence])
