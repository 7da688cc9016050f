"""A ladder of model sizes: its plan and trainings, and its outcome derived from those that it
keeps. Imports no torch.

Sizes rise by about 1.8 in parameters without embeddings. A model has a layer for every 43 units of
width, like the 355M and the 8.3B model, and at least two. Every size but the largest is tried at
the same learning rates for the same number of iterations; one rule for all sizes is fitted to the
trials. There is no dropout, and the rate is constant after its warm-up, so that one training gives
the loss after any number of tokens.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np

from mlm_repro.data_pipeline.files import DATASET, DataCard
from mlm_repro.engine.config import DataSection, ModelConfig, RunConfig, TrainConfig
from mlm_repro.engine.costs import parameter_count
from mlm_repro.engine.twin import initial_deviation, twin_seconds
from mlm_repro.experiments.files import (
    EVALUATIONS,
    FORECAST,
    PLAN,
    Forecast,
    LadderPlan,
    LadderResult,
    LadderRun,
    LadderScores,
    RateLaw,
    RungPlan,
)
from mlm_repro.experiments.forecast.law import FittedLaw
from mlm_repro.experiments.forecast.trainings import SEARCH_SEED, Kept, Trained, origin_of, seeds_of
from mlm_repro.experiments.scores import compared
from mlm_repro.lineage.errors import BadInput, IntegrityFailure
from mlm_repro.lineage.files import Manifest, read_document, read_lines
from mlm_repro.lineage.progress import format_duration
from mlm_repro.lineage.records import Record
from mlm_repro.lineage.run import MANIFEST

WIDTH_OF_A_LAYER = 1024 / 24
"""Width over layers of the 355M and 8.3B models."""
SHAPES = tuple(
    (max(2, round(width / WIDTH_OF_A_LAYER)), width, heads)
    for width, heads in (
        (36, 2),
        (48, 3),
        (64, 4),
        (84, 4),
        (104, 4),
        (120, 5),
        (144, 6),
        (168, 7),
        (208, 8),
        (256, 8),
        (304, 8),
    )
)
"""Layers, width and attention heads of each rung."""
SEQ_LENGTH, BATCH_SIZE = 128, 16
SEEDS = [1, 2, 3]
RATES = [0.002, 0.004, 0.008, 0.016]
SEARCH_SHARE = 0.2
"""Length of a trial over that of a training."""
TOKENS_PER_PARAMETER = 10
"""Number of tokens for each parameter of the largest rung, embeddings included."""
MOST_EPOCHS = 4.0
VALIDATIONS, VALIDATION_SAMPLES = 20, 512
LENGTH_EXPONENT = 0.32
"""Exponent by which the best rate falls with the length (Bjorck et al. 2024, arXiv 2409.19913)."""


def make_plan(rungs: int, cores: int, vocabulary: int, corpus_tokens: int) -> LadderPlan:
    """The ladder of the smallest shapes. Raises BadInput for a corpus that would be read more than
    four times."""
    models = [rung_model(*shape, vocabulary) for shape in SHAPES[:rungs]]
    counts = [parameter_count(model) for model in models]
    batch = BATCH_SIZE * SEQ_LENGTH
    iterations = VALIDATIONS * math.ceil(TOKENS_PER_PARAMETER * counts[-1] / batch / VALIDATIONS)
    if (epochs := iterations * batch / corpus_tokens) > MOST_EPOCHS:
        raise BadInput(
            f"{corpus_tokens:,} tokens of training text are too few: {rungs} rungs would read them"
            f" {epochs:.1f} times, more than {MOST_EPOCHS:g}; name a larger recipe with --data, or"
            " ask for fewer --rungs"
        )
    return LadderPlan(
        cores=cores,
        iterations=iterations,
        batch_size=BATCH_SIZE,
        seq_length=SEQ_LENGTH,
        epochs=epochs,
        seeds=SEEDS,
        rates=RATES,
        search_iterations=math.ceil(SEARCH_SHARE * iterations),
        rungs=[
            RungPlan(
                layers=layers,
                width=width,
                heads=heads,
                parameters=count,
                inner_parameters=count - (vocabulary + SEQ_LENGTH) * width,
            )
            for (layers, width, heads), count in zip(SHAPES, counts, strict=False)
        ],
    )


def describe_plan(plan: LadderPlan) -> str:
    """Sizes, tokens and time as text."""
    *smaller, largest = (rung.parameters for rung in plan.rungs)
    flops = (
        6
        * plan.tokens
        * (sum(smaller) * (len(plan.seeds) + SEARCH_SHARE * len(plan.rates)) + largest)
    )
    sizes = ", ".join(f"{size:,}" for size in (*smaller, largest))
    return (
        f"models of {sizes} parameters, each on {plan.tokens:,} tokens, {plan.epochs:.2f} passes"
        f" over the text\nexpected: about {format_duration(twin_seconds(flops, plan.cores))} on"
        f" {plan.cores} cores"
    )


def rung_config(
    plan: LadderPlan, rung: int, seed: int, rate: float, dataset: Path = Path()
) -> RunConfig:
    """One training of a rung at a constant learning rate; with `SEARCH_SEED` a shorter trial of the
    rate."""
    sizes, is_trial = plan.rungs[rung], seed == SEARCH_SEED
    count = plan.search_iterations if is_trial else plan.iterations
    return RunConfig(
        name=f"ladder-{sizes.layers}x{sizes.width}{'-trial' * is_trial}-rate-{rate:g}-seed-{seed}",
        model=rung_model(sizes.layers, sizes.width, sizes.heads),
        train=TrainConfig(
            iterations=count,
            global_batch_size=plan.batch_size,
            microbatch_size=plan.batch_size // 2,
            learning_rate=rate,
            min_learning_rate=rate,
            warmup_iterations=max(plan.iterations // 50, 1),
            precision="fp32",
            seed=seed,
            validation_interval=count if is_trial else max(count // VALIDATIONS, 1),
            validation_samples=VALIDATION_SAMPLES,
            checkpoint_interval=max(count // 4, 1),
            keep_checkpoints=1,
        ),
        data=DataSection(dataset=dataset),
    )


def trial_configs(plan: LadderPlan, dataset: Path = Path()) -> dict[int, list[RunConfig]]:
    """The trials of every rung but the largest."""
    smaller = range(len(plan.rungs) - 1)
    return {
        rung: [rung_config(plan, rung, SEARCH_SEED, rate, dataset) for rate in plan.rates]
        for rung in smaller
    }


def whole_configs(
    plan: LadderPlan, rates: RateLaw, rung: int, seeds: Iterable[int], dataset: Path = Path()
) -> list[RunConfig]:
    """The trainings of a rung at the rate that the law gives."""
    rate = rates.at(plan.rungs[rung].parameters, plan.tokens)
    return [rung_config(plan, rung, seed, rate, dataset) for seed in seeds]


def rung_model(layers: int, width: int, heads: int, vocabulary: int = 51200) -> ModelConfig:
    """The model of a rung; a dataset brings its own vocabulary."""
    return ModelConfig(
        num_layers=layers,
        hidden_size=width,
        num_heads=heads,
        seq_length=SEQ_LENGTH,
        vocab_size=vocabulary,
        padded_vocab_size=vocabulary,
        dropout=0.0,
        init_std=initial_deviation(width),
    )


class KeptRungs:
    """The trainings that a ladder keeps of its plan, by rung."""

    def __init__(self, ladder: Path) -> None:
        self.plan, self.kept = read_document(ladder / PLAN, LadderPlan), Kept(ladder)
        self.dataset = read_document(ladder / MANIFEST, Manifest).parents["dataset"]

    @cached_property
    def rates(self) -> RateLaw:
        """The learning rates of all rungs, from the trials."""
        trials = trial_configs(self.plan).items()
        return rate_law(
            self.plan, {rung: self.kept.of(configs, self.dataset) for rung, configs in trials}
        )

    def smaller(self) -> dict[int, list[Trained]]:
        """The trainings of every rung but the largest, for each seed of the plan."""
        return {rung: self._of(rung, self.plan.seeds) for rung in range(len(self.plan.rungs) - 1)}

    def all(self) -> dict[int, list[Trained]]:
        """The trainings of every rung; that of the largest has the forecast's seed."""
        largest = len(self.plan.rungs) - 1
        return self.smaller() | {
            largest: self._of(largest, seeds_of(self.kept.folder / FORECAST, 1))
        }

    def _of(self, rung: int, seeds: Sequence[int]) -> list[Trained]:
        return self.kept.of(whole_configs(self.plan, self.rates, rung, seeds), self.dataset)


def first_of_rungs(trained: Mapping[int, Iterable[Trained]]) -> list[Trained]:
    """The first finished training of each rung."""
    finished = ((each for each in seeds if each.is_finished) for seeds in trained.values())
    return [first for seeds in finished if (first := next(seeds, None))]


def read_scores(ladder: Path) -> dict[str, LadderScores]:
    """The scores of a ladder's models by training; empty before one is scored, and without the
    text."""
    path = ladder / EVALUATIONS
    return {each.name: each for each in read_lines(path, LadderScores)} if path.is_file() else {}


def rate_law(plan: LadderPlan, trials: Mapping[int, Iterable[Trained]]) -> RateLaw:
    """The learning rate for every size and length, from the trials of the smaller rungs.

    A line is fitted to the logarithms of best rate and size, so that no size is favoured, and the
    largest follows it without a trial of its own. Raises BadInput if fewer than two sizes have a
    rate at which they do not diverge.
    """
    ended = {
        rung: [each for each in of if each.is_finished and math.isfinite(each.end)]
        for rung, of in trials.items()
    }
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
    """The minimum of a parabola of loss over the rate's logarithm through the best trial and its
    neighbours."""
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
        if each.is_diverged:
            why = (
                "ended above that of the untrained model"
                if each.is_finished
                else "stopped being a number"
            )
            left_out[each.name] = f"its loss {why}"
        else:
            curves.setdefault(rung, []).append(each.losses)
            made_of[each.name] = each.digest
    fitted = FittedLaw(plan.rungs, curves)
    return Forecast(
        law=fitted.law,
        misfit=float(np.abs(fitted.misfits).max()),
        rung=plan.rungs[largest],
        curve=fitted.forecast(plan.rungs[largest].parameters),
        made_of=made_of,
        left_out=left_out,
    )


def derive(ladder: Path) -> tuple[LadderResult, list[Record]]:
    """The result and the records of a ladder from its files.

    Raises IntegrityFailure if the trainings are not those of the plan, the rates or the forecast do
    not follow from them, two are the same, or the forecast did not precede the largest.
    """
    rungs, forecast = KeptRungs(ladder), read_document(ladder / FORECAST, Forecast)
    plan, to_bits = (
        rungs.plan,
        read_document(ladder / DATASET, DataCard).splits["valid"].bits_per_nat,
    )
    finished = [each for each in rungs.kept.trained.values() if each.is_finished]
    curves = [each.losses for each in finished]
    if same := [each.name for each in finished if curves.count(each.losses) > 1]:
        raise IntegrityFailure(f"{' and '.join(same)} have the same losses")
    if not _agree(make_forecast(plan, rungs.smaller()), forecast):
        raise IntegrityFailure(f"{FORECAST} is not what the trainings of the smaller rungs give")
    trained = rungs.all()
    rungs.kept.check_no_more()
    runs = [
        LadderRun(
            name=each.name,
            rung=rung,
            seed=each.config.train.seed,
            learning_rate=each.config.train.learning_rate,
            curve=list(each.losses.items()),
            bits_per_byte=each.final * to_bits,
        )
        for rung, seeds in trained.items()
        for each in seeds
        if each.is_finished
    ]
    reached, foreseen = runs[-1].loss, forecast.curve[-1]
    verdict: Literal["HIT", "MISS"] = "HIT" if foreseen.low <= reached <= foreseen.high else "MISS"
    scored, first = read_scores(ladder), [each.name for each in first_of_rungs(trained)]
    scores = [scored[name].texts for name in first] if scored.keys() >= {*first} else []
    common = [
        text for text in (scores[0] if scores else ()) if all(text in each for each in scores)
    ]
    result = LadderResult(
        runs=runs,
        verdict=verdict,
        rates=rungs.rates,
        comparisons=[
            compared(text, larger - 2, larger, [[each[text]] for each in scores])
            for text in common
            for larger in range(2, len(scores))
        ],
        bits_per_byte={text: [each[text].bits_per_byte for each in scores] for text in common},
        sentence=(
            f"{verdict}: the largest rung was foreseen at {foreseen.loss:.4f} nats"
            f" ({foreseen.low:.4f} to {foreseen.high:.4f}) and reached {reached:.4f}"
        ),
    )
    return result, list(
        _records(plan, forecast, result, origin_of(read_document(ladder / MANIFEST, Manifest)))
    )


def _agree(ours: Forecast, other: Forecast) -> bool:
    """True if two forecasts differ by no more than the rounding of another machine or solver."""

    def numbers(forecast: Forecast) -> list[float]:
        ends = [(place.tokens, place.loss, place.low, place.high) for place in forecast.curve]
        return [forecast.misfit, *(number for end in ends for number in end)]

    fitted = {"curve", "law", "misfit"}
    return ours.model_dump(exclude=fitted) == other.model_dump(exclude=fitted) and np.allclose(
        numbers(ours), numbers(other), rtol=1e-3, atol=1e-4
    )


def _records(
    plan: LadderPlan, forecast: Forecast, result: LadderResult, origin: dict[str, Any]
) -> Iterable[Record]:
    def record(rung: int, quantity: str, value: float, kind: str = "scaled", **more: Any) -> Record:
        series = f"ladder, {plan.rungs[rung].parameters / 1e3:,.0f}k"
        fields = {
            "experiment": "2019/figure-6",
            "series": series,
            "quantity": quantity,
            "value": value,
            "kind": kind,
        }
        return Record(**fields, **origin, **more)  # type: ignore[arg-type]

    for run in result.runs:
        yield record(run.rung, "ladder_validation_loss", run.loss, seed=run.seed)
        yield record(run.rung, "ladder_bits_per_byte", run.bits_per_byte, seed=run.seed)
    for text, values in result.bits_per_byte.items():
        for rung, value in enumerate(values):
            yield record(rung, f"{text}_bits_per_byte", value)
    end = forecast.curve[-1]
    yield record(
        len(plan.rungs) - 1,
        "ladder_validation_loss",
        end.loss,
        "simulated",
        low=end.low,
        high=end.high,
        note="forecast before it was trained",
    )
