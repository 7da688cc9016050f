"""The outcome of a ladder, derived from the trainings and evaluations that it keeps. Imports no torch."""

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np

from data_pipeline.files import DATASET, DataCard
from evaluation.schema import ClozeResult, PerplexityResult, Result
from experiments.files import (
    EVALUATIONS,
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
from experiments.forecast.ladder_plan import trial_configs, whole_configs
from experiments.forecast.law import METHOD, FittedLaw, size_exponent
from experiments.forecast.published import beside_published
from experiments.forecast.trainings import Kept, Trained, origin_of, seeds_of
from experiments.scores import compared, last_words, text_score
from lineage.errors import BadInput, IntegrityFailure
from lineage.files import Manifest, read_document
from lineage.records import Record
from lineage.run import MANIFEST

LENGTH_EXPONENT = 0.32
"""Exponent by which the best rate falls with the length (Bjorck et al. 2024, arXiv 2409.19913)."""


class KeptRungs:
    """The trainings that a ladder keeps of its plan, by rung."""

    def __init__(self, ladder: Path) -> None:
        self.plan, self.kept = read_document(ladder / PLAN, LadderPlan), Kept(ladder)
        self.dataset = read_document(ladder / MANIFEST, Manifest).parents["dataset"]

    @cached_property
    def rates(self) -> RateLaw:
        """The learning rates of all rungs, from the trials."""
        trials = trial_configs(self.plan).items()
        return rate_law(self.plan, {rung: self.kept.of(configs, self.dataset) for rung, configs in trials})

    def smaller(self) -> dict[int, list[Trained]]:
        """The trainings of every rung but the largest, for each seed of the plan."""
        return {rung: self._of(rung, self.plan.seeds) for rung in range(len(self.plan.rungs) - 1)}

    def all(self) -> dict[int, list[Trained]]:
        """The trainings of every rung; that of the largest has the forecast's seed."""
        largest = len(self.plan.rungs) - 1
        return self.smaller() | {largest: self._of(largest, seeds_of(self.kept.folder / FORECAST, 1))}

    def check_distinct(self) -> None:
        """Raises IntegrityFailure if two trainings are the same."""
        finished = [each for each in self.kept.trained.values() if each.is_finished]
        curves = [each.losses for each in finished]
        if same := [each.folder.name for each in finished if curves.count(each.losses) > 1]:
            raise IntegrityFailure(f"{' and '.join(same)} have the same losses")

    def _of(self, rung: int, seeds: Sequence[int]) -> list[Trained]:
        return self.kept.of(whole_configs(self.plan, self.rates, rung, seeds), self.dataset)


def first_of_rungs(trained: Mapping[int, Iterable[Trained]]) -> list[Trained]:
    """The first finished training of each rung."""
    finished = ((each for each in seeds if each.is_finished) for seeds in trained.values())
    return [first for seeds in finished if (first := next(seeds, None))]


def rate_law(plan: LadderPlan, trials: Mapping[int, Iterable[Trained]]) -> RateLaw:
    """The learning rate for every size and length, from the trials of the smaller rungs.

    A line is fitted to the logarithms of best rate and size, so that no size is favoured, and the largest follows it
    without a trial of its own. Raises BadInput if fewer than two sizes have a rate at which they do not diverge.
    """
    ended = {rung: [each for each in of if each.is_finished and math.isfinite(each.end)] for rung, of in trials.items()}
    rates = {plan.rungs[rung].parameters: best_rate(of) for rung, of in ended.items() if of}
    if len(rates) < 2:
        raise BadInput("at every learning rate that was tried, all models or all but one diverged")
    sizes = np.log([*rates])
    slope, middle = np.polyfit(sizes - sizes.mean(), [math.log(rate) for rate in rates.values()], 1)
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


def make_forecast(plan: LadderPlan, smaller: Mapping[int, Iterable[Trained]]) -> Forecast:
    """The largest rung's curve from the trainings of all others that did not diverge.

    Raises BadInput for fewer than three rungs.
    """
    largest = len(plan.rungs) - 1
    curves: dict[int, list[dict[int, float]]] = {}
    made_of, left_out = {}, {}
    for rung, each in ((rung, each) for rung, seeds in smaller.items() for each in seeds):
        if not each.is_finished:
            left_out[each.folder.name] = "its loss stopped being a number"
        elif each.is_diverged:
            left_out[each.folder.name] = "its loss ended above that of the untrained model"
        else:
            curves.setdefault(rung, []).append(each.losses)
            made_of[each.folder.name] = each.digest
    fitted = FittedLaw(plan.rungs, curves)
    curve, (low, high) = fitted.forecast(plan.rungs[largest].parameters)
    return Forecast(
        method=METHOD, law=fitted.law, exponent_low=low, exponent_high=high,
        misfit=float(np.abs(fitted.misfits).max()), rung=plan.rungs[largest], curve=curve, made_of=made_of,
        left_out=left_out,
    )  # fmt: skip


def derive(ladder: Path) -> tuple[LadderResult, list[Record]]:
    """The result and the records of a ladder from its files.

    Raises IntegrityFailure if the trainings are not those of the plan, the rates or the forecast do not follow from
    them, or the forecast did not precede the largest.
    """
    rungs, forecast = KeptRungs(ladder), read_document(ladder / FORECAST, Forecast)
    plan, card = rungs.plan, read_document(ladder / DATASET, DataCard)
    smaller = rungs.smaller()
    rungs.check_distinct()
    if not _agree(make_forecast(plan, smaller), forecast):
        raise IntegrityFailure(f"{FORECAST} is not what the trainings of the smaller rungs give")
    trained = rungs.all()
    rungs.kept.check_no_more()
    runs = [
        LadderRun(
            name=each.folder.name, rung=rung, seed=each.config.train.seed,
            learning_rate=each.config.train.learning_rate, curve=list(each.losses.items()),
            bits_per_byte=each.final * card.splits["valid"].bits_per_nat,
        )
        for rung, seeds in trained.items() for each in seeds if each.is_finished
    ]  # fmt: skip
    reached, foreseen = runs[-1].loss, forecast.curve[-1]
    verdict: Literal["HIT", "MISS"] = "HIT" if foreseen.low <= reached <= foreseen.high else "MISS"
    scores = _read_scores(ladder, first_of_rungs(trained))
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
        rates=rungs.rates,
        exponents=beside_published(*size_exponent([plan.rungs[rung].parameters for rung in ends], [*ends.values()])),
        sentence=f"{verdict}: the largest rung was foreseen at {foreseen.loss:.4f} nats ({foreseen.low:.4f} to "
        f"{foreseen.high:.4f}) and reached {reached:.4f}",
    )
    return result, list(_records(plan, forecast, result, origin_of(read_document(ladder / MANIFEST, Manifest))))


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
