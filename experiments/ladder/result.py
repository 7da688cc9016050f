"""What came of a ladder, from the trainings and evaluations that it keeps. Imports no torch.

The largest rung's seed is the one that the forecast gives (`experiments.trainings.kept`).
"""

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np

from data_pipeline.files import DATASET, DataCard
from evaluation.schema import ClozeResult, PerplexityResult, Result
from experiments.ladder.law import METHOD, fit, size_exponent
from experiments.scaling_law import beside_published
from experiments.scores import compared, last_words, text_score
from experiments.trainings.kept import FORECAST, Trained, read_kept, seeds_of
from lineage.errors import BadInput, IntegrityFailure
from lineage.files import Manifest, read_document
from lineage.ladder import Forecast, LadderPlan, LadderResult, LadderRun, LadderScores, RateLaw
from lineage.records import Record
from lineage.run import MANIFEST

PLAN, LADDER, CARD, EVALUATIONS = "plan.json", "ladder.json", DATASET, "evaluations"
LENGTH_EXPONENT = 0.32


def rung_of(plan: LadderPlan, trained: Trained) -> int:
    """Which of the plan's rungs a training is of. Raises IntegrityFailure where it is of none."""
    model = trained.config.model
    sizes = [(rung.layers, rung.width, rung.heads) for rung in plan.rungs]
    try:
        return sizes.index((model.num_layers, model.hidden_size, model.num_heads))
    except ValueError:
        raise IntegrityFailure(f"{trained.folder.name} is of no rung of {PLAN}") from None


def first_of_rungs(plan: LadderPlan, trained: Iterable[Trained]) -> list[Trained]:
    """Of each rung that came to an end the training of the lowest seed."""
    ended = [each for each in trained if not each.is_trial and each.is_finished]
    first = {rung_of(plan, each): each for each in sorted(ended, key=lambda each: -each.config.train.seed)}
    return [each for _, each in sorted(first.items())]


def rate_law(plan: LadderPlan, trained: Iterable[Trained]) -> RateLaw:
    """The learning rate for every size and length, from the trials of the smaller rungs.

    The logarithm of the best rate of each size, at the trials' length, is fitted by a line in that of its parameters:
    a rule that favours no size, and that the largest follows without a trial of its own. The best rate falls with the
    length to the power of 0.32 (Bjorck et al. 2024, arXiv 2409.19913). Raises BadInput where fewer than two sizes have
    a rate at which they do not diverge.
    """
    trials: dict[int, list[Trained]] = {}
    for each in trained:
        if each.is_trial and each.is_finished and math.isfinite(each.end):
            trials.setdefault(rung_of(plan, each), []).append(each)
    if len(trials) < 2:
        raise BadInput("at every learning rate that was tried the loss of all models, or all but one, was no number")
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
    """The best learning rate for the trials' length.

    It is at the lowest point of a parabola of the loss in the logarithm of the rate, through the best trial and its
    neighbours.
    """
    ends = sorted((math.log(trial.config.train.learning_rate), trial.end) for trial in trials)
    best = min(range(len(ends)), key=lambda place: ends[place][1])
    lowest = ends[best][0]
    if 0 < best < len(ends) - 1:
        rates, losses = zip(*ends[best - 1 : best + 2], strict=True)
        curvature, slope, _ = np.polyfit(rates, losses, 2)
        lowest = -slope / (2 * curvature)
    return math.exp(lowest)


def make_forecast(plan: LadderPlan, trained: Iterable[Trained]) -> Forecast:
    """The largest rung's curve from the trainings of all others.

    A training that diverged is left out: its loss stopped being a number or ended above that of the untrained model.
    Raises BadInput for fewer than three rungs.
    """
    above = len(plan.rungs) - 1
    curves: dict[int, list[dict[int, float]]] = {}
    made_of, left_out = {}, {}
    smaller = [(rung_of(plan, each), each) for each in trained if not each.is_trial]
    for rung, each in sorted((place for place in smaller if place[0] < above), key=lambda place: place[0]):
        if not each.is_finished:
            left_out[each.folder.name] = "its loss stopped being a number"
        elif each.is_diverged:
            left_out[each.folder.name] = "its loss ended above that of the untrained model"
        else:
            curves.setdefault(rung, []).append(each.losses)
            made_of[each.folder.name] = each.digest
    fitted = fit(plan.rungs, curves)
    curve, exponents = fitted.forecast(plan.rungs[above].parameters)
    return Forecast(
        method=METHOD,
        law=fitted.law,
        exponent_low=exponents[0],
        exponent_high=exponents[1],
        misfit=float(np.abs(fitted.misfits).max()),
        rung=plan.rungs[above],
        curve=curve,
        made_of=made_of,
        left_out=left_out,
    )


def derive(ladder: Path) -> tuple[LadderResult, list[Record]]:
    """The result and the records of a ladder from what it keeps.

    Raises IntegrityFailure where trainings are of different data, a seed or a training is counted twice, a rate was not
    the best that was tried, or the forecast is not what the smaller rungs give or not that of the largest.
    """
    plan, forecast = read_document(ladder / PLAN, LadderPlan), read_document(ladder / FORECAST, Forecast)
    card, trained = read_document(ladder / CARD, DataCard), read_kept(ladder)
    _check(ladder, plan, forecast, trained)
    bits_per_nat = card.splits["valid"].bits_per_nat
    finished = [each for each in trained if not each.is_trial and each.is_finished]
    runs = sorted(
        (
            LadderRun(
                name=each.folder.name, rung=rung_of(plan, each), seed=each.config.train.seed,
                learning_rate=each.config.train.learning_rate, curve=list(each.losses.items()),
                bits_per_byte=each.final * bits_per_nat,
            )
            for each in finished
        ),
        key=lambda run: (run.rung, run.seed),
    )  # fmt: skip
    found, foreseen = runs[-1].loss, forecast.curve[-1]
    verdict: Literal["HIT", "MISS"] = "HIT" if foreseen.low <= found <= foreseen.high else "MISS"
    scores = _read_scores(ladder, first_of_rungs(plan, trained))
    common = [text for text in scores[0].texts if all(text in each.texts for each in scores)] if scores else []
    texts = {text: [each.texts[text] for each in scores] for text in common}
    comparisons = [
        compared(text, larger - 2, larger, [[each] for each in of])
        for text, of in texts.items()
        for larger in range(2, len(of))
    ]
    sentence = (
        f"{verdict}: the largest rung was foreseen at {foreseen.loss:.4f} nats ({foreseen.low:.4f} to "
        f"{foreseen.high:.4f}) and reached {found:.4f}"
    )
    by_rung = {rung: [run.loss for run in runs if run.rung == rung] for rung in sorted({run.rung for run in runs})}
    exponents = beside_published(*size_exponent([plan.rungs[rung].parameters for rung in by_rung], [*by_rung.values()]))
    result = LadderResult(
        runs=runs,
        verdict=verdict,
        found=found,
        bits_per_byte={text: [each.bits_per_byte for each in of] for text, of in texts.items()},
        comparisons=comparisons,
        last_words=[each.last_words for each in scores if each.last_words],
        rates=rate_law(plan, trained),
        exponents=exponents,
        sentence=sentence,
    )
    return result, list(_records(ladder, plan, forecast, result))


def _check(ladder: Path, plan: LadderPlan, forecast: Forecast, trained: list[Trained]) -> None:
    dataset = read_document(ladder / MANIFEST, Manifest).parents["dataset"]
    taken: set[object] = set()
    for each in trained:
        name, train = each.folder.name, each.config.train
        if each.dataset != dataset:
            raise IntegrityFailure(f"{name} was trained on other data than the ladder")
        mark = (rung_of(plan, each), train.seed, train.learning_rate if each.is_trial else None)
        same = {mark, tuple(each.losses.values())} & taken
        if same:
            raise IntegrityFailure(f"{name} is a seed that another training of its rung has already")
        taken |= {mark, tuple(each.losses.values())}
        if train.iterations != (plan.search_iterations if each.is_trial else plan.iterations):
            raise IntegrityFailure(f"{name} is of another length than {PLAN} says")
    again = make_forecast(plan, trained)
    if not _agree(again, forecast):
        raise IntegrityFailure(f"{FORECAST} is not what the trainings of the smaller rungs give")
    largest = [each for each in trained if not each.is_trial and rung_of(plan, each) == len(plan.rungs) - 1]
    if [each.config.train.seed for each in largest] != seeds_of(ladder / FORECAST, 1):
        raise IntegrityFailure(
            f"the largest rung was not trained with the seed that {FORECAST} gives: the forecast was changed or made "
            "after the training"
        )
    rates = rate_law(plan, trained)
    for each in trained:
        rung = rung_of(plan, each)
        by_law = rates.at(plan.rungs[rung].parameters, plan.tokens)
        if not each.is_trial and not math.isclose(each.config.train.learning_rate, by_law, rel_tol=0.01):
            raise IntegrityFailure(f"rung {rung + 1} was not trained at the rate that the trials give")


def _agree(one: Forecast, other: Forecast) -> bool:
    """Whether two forecasts are the same up to the rounding of another machine."""

    def numbers(forecast: Forecast) -> list[float]:
        ends = [(place.tokens, place.loss, place.low, place.high) for place in forecast.curve]
        return [forecast.exponent_low, forecast.exponent_high, forecast.misfit, *(n for end in ends for n in end)]

    exact = {"curve", "law", "exponent_low", "exponent_high", "misfit"}
    return one.model_dump(exclude=exact) == other.model_dump(exclude=exact) and np.allclose(
        numbers(one), numbers(other), rtol=1e-3, atol=1e-4
    )


def kept_scores(results: Mapping[str, Result]) -> LadderScores:
    """What a ladder keeps of a model's evaluations."""
    texts = {name: text_score(result) for name, result in results.items() if isinstance(result, PerplexityResult)}
    cloze = [result for result in results.values() if isinstance(result, ClozeResult)]
    return LadderScores(texts=texts, last_words=last_words(cloze[0]) if cloze else None)


def _read_scores(ladder: Path, scored: list[Trained]) -> list[LadderScores]:
    """What these trainings reached on the published texts; nothing if one is missing."""
    paths = [ladder / EVALUATIONS / f"{each.folder.name}.json" for each in scored]
    return [read_document(path, LadderScores) for path in paths] if all(path.is_file() for path in paths) else []


def _records(ladder: Path, plan: LadderPlan, forecast: Forecast, result: LadderResult) -> Iterable[Record]:
    manifest = read_document(ladder / MANIFEST, Manifest)
    same: dict[str, Any] = {"experiment": "2019/figure-6", "source": f"{manifest.name}-{manifest.identity[:8]}",
            "digest": manifest.config_digest}  # fmt: skip
    for run in result.runs:
        about = same | {"series": _series(plan, run.rung), "seed": run.seed, "kind": "scaled"}
        yield Record(**about, quantity="ladder_validation_loss", value=run.loss)
        yield Record(**about, quantity="ladder_bits_per_byte", value=run.bits_per_byte)
    for text, values in result.bits_per_byte.items():
        for rung, value in enumerate(values):
            about = same | {"series": _series(plan, rung), "kind": "scaled"}
            yield Record(**about, quantity=f"{text}_bits_per_byte", value=value)
    end = forecast.curve[-1]
    yield Record(
        **same, series=_series(plan, len(plan.rungs) - 1), quantity="ladder_validation_loss", value=end.loss,
        low=end.low, high=end.high, kind="simulated", note="forecast before it was trained",
    )  # fmt: skip


def _series(plan: LadderPlan, rung: int) -> str:
    return f"ladder, {plan.rungs[rung].parameters / 1e3:,.0f}k"


def format_ladder(ladder: Path) -> str:
    """A line for each rung, then what became of the forecast."""
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
