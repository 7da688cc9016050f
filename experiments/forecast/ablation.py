"""The effects that an ablation found, derived from its forecast and the trainings that it keeps.
Imports no torch."""

import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from mlm_repro.engine.config import RunConfig
from mlm_repro.experiments.catalogue import ABLATION, Ablation, Arm, Effect
from mlm_repro.experiments.files import FORECAST, SWEEPS, EffectForecast, RateSweep, origin_of
from mlm_repro.experiments.forecast.trainings import SEARCH_SEED, Kept, Trained, seeds_of
from mlm_repro.experiments.scores import Finding, found
from mlm_repro.lineage.atomic import JSON
from mlm_repro.lineage.config import parse_config
from mlm_repro.lineage.errors import IntegrityFailure
from mlm_repro.lineage.files import Manifest, read_document
from mlm_repro.lineage.records import Record
from mlm_repro.lineage.run import MANIFEST


def ablation_config(
    experiment: str, ablation: Ablation, arm: Arm, seed: int, rate: float, dataset: Path = Path()
) -> RunConfig:
    """Return the RunConfig of an arm's training with the seed `seed` and the learning rate `rate`:
    the recipe of `ablation` with the arm's changes. With seed 0 (`SEARCH_SEED`) it is a trial of
    the rate, with `search_share` of the iterations, rounded up. `dataset` is a directory.

    The run's name, by which kept trainings are found, is made of the name `experiment`, the arm's
    name and the seed or, for a trial, the rate. After the recipe's warm-up the rate is constant
    unless the recipe states a final rate. Raises BadInput if the recipe is not valid.
    """
    values = {"min_learning_rate": rate, **ablation.train, **arm.train}
    is_trial = seed == SEARCH_SEED
    kind = f"trial-rate-{rate:g}" if is_trial else f"seed-{seed}"
    if is_trial:
        values["iterations"] = math.ceil(ablation.search_share * values["iterations"])
    run = {
        "name": slug(f"{experiment}-{arm.name}-{kind}"),
        "model": {**ablation.model, **arm.model},
        "train": {**values, "learning_rate": rate, "seed": seed},
        "data": {"dataset": str(dataset)},
    }
    return parse_config(run, RunConfig, f"ablation {experiment}")


def trials_of(
    experiment: str, ablation: Ablation, arm: Arm, dataset: Path = Path()
) -> list[RunConfig]:
    """Return a list with a RunConfig, of `experiment` on `dataset`, for the trial of each learning
    rate of `arm`, or of `ablation` if the arm states no rates of its own, in the order of the
    rates; empty if a finder or another arm gives the rate. Raises BadInput if the recipe is not
    valid."""
    rates = () if ablation.finder or arm.rate_of else arm.rates or ablation.rates
    return [
        ablation_config(experiment, ablation, arm, SEARCH_SEED, rate, dataset) for rate in rates
    ]


def sweep_config(experiment: str, ablation: Ablation, arm: Arm, dataset: Path) -> RunConfig:
    """Return the RunConfig of an arm's training on the directory `dataset`, as long as a trial,
    whose learning rate rises exponentially from the lower to the higher end of the ablation's
    finder (Smith 2017). The ablation must have a finder. The run's name is made of the name
    `experiment`, the arm's name and the higher end, and ends in `-sweep`. Raises BadInput if the
    recipe is not valid."""
    assert ablation.finder
    low, high = ablation.finder
    config = ablation_config(experiment, ablation, arm, SEARCH_SEED, high, dataset)
    rising = {
        "min_learning_rate": low,
        "warmup_iterations": 0,
        "decay": "exponential",
        "decay_iterations": None,
    }
    return config.model_copy(
        update={"name": f"{config.name}-sweep", "train": config.train.model_copy(update=rising)}
    )


def searched_rates(
    experiment: str, ablation: Ablation, trained: Kept, datasets: Sequence[str]
) -> tuple[dict[str, float], list[Trained]]:
    """Return a pair: a dict of the learning rate of each arm, by its name, and a list of the
    Trained of all trials of learning rates, arm by arm, from `trained`, the trainings that an
    ablation keeps. `experiment` is the name of the ablation's experiment, with which the names of
    the trials begin; `datasets` are the digests of its datasets, which an arm's `dataset` indexes.

    An arm's rate is the found rate times the arm's `of_rate`, to four digits. The found rate is
    that of the trial with the lowest final loss (the lowest rate if all diverged), that of the
    finder where its smoothed loss was lowest, or the one found for an earlier arm, `rate_of`.
    `trained` counts the trials as asked for. Raises IntegrityFailure if a trial is not kept or not
    as the ablation asks, or if a finder's losses are not kept or never fell.
    """
    rates = {}
    searched = []
    found_rates: dict[str, float] = {}
    for arm in ablation.arms:
        trials = trained.of(trials_of(experiment, ablation, arm), datasets[arm.dataset])
        rate: float | None
        if arm.rate_of:
            rate = found_rates[arm.rate_of]
        elif ablation.finder:
            rate = read_document(
                trained.folder / SWEEPS / f"{slug(arm.name)}.json", RateSweep
            ).lowest_rate
            if rate is None:
                raise IntegrityFailure(
                    f"no learning rate can be chosen for the arm {arm.name!r}: its loss never fell"
                    " in the training whose rate rises; lower the rates of the ablation's `finder`"
                )
        else:
            _, rate = min(
                (math.inf if trial.is_diverged else trial.final, trial.config.train.learning_rate)
                for trial in trials
            )
        found_rates[arm.name] = rate
        rates[arm.name] = float(f"{rate * arm.of_rate:.4g}")
        searched += trials
    return rates, searched


def derive_effects(folder: Path) -> tuple[list[Finding], list[Record]]:
    """Return a pair: a list of the Findings and a list of the Records of an ablation, derived from
    the forecast and the trainings in its directory, `folder`. The findings' own records come last.

    Raises IntegrityFailure if a file is missing or damaged, or if the forecast belongs to another
    experiment, has other rates than its search gives, or does not ask for exactly the kept
    trainings, trials aside, with their settings, seeds and data: then the forecast was changed, or
    written after the trainings. Raises BadInput if the forecast's ablation is not valid.
    """
    manifest = read_document(folder / MANIFEST, Manifest)
    forecast = read_document(folder / FORECAST, EffectForecast)
    name = forecast.experiment
    ablation = parse_config(forecast.ablation, Ablation, f"{folder.name}/{FORECAST}")
    if (name, forecast.ablation) != (
        manifest.config["experiment"]["name"],
        manifest.config[ABLATION],
    ):
        raise IntegrityFailure(
            f"{FORECAST} of {folder.name} has another experiment or ablation than its {MANIFEST}:"
            " one of the two was changed, so restore both"
        )
    trained = Kept(folder)
    seeds = seeds_of(folder / FORECAST, ablation.seeds)
    if searched_rates(name, ablation, trained, forecast.datasets)[0] != forecast.rates:
        raise IntegrityFailure(
            f"{FORECAST} of {folder.name} has other learning rates than the search that is kept"
            " beside it gives: one of the two was changed, so restore both"
        )
    arms = {}
    for arm in ablation.arms:
        configs = [
            ablation_config(name, ablation, arm, seed, forecast.rates[arm.name]) for seed in seeds
        ]
        arms[arm.name] = trained.of(configs, forecast.datasets[arm.dataset])
    trained.check_no_more()
    bits = {arm.name: forecast.bits_per_nat[arm.dataset] for arm in ablation.arms}
    about = {"experiment": name, **origin_of(manifest), "kind": "scaled"}
    findings = [
        find_effect(
            effect, ablation.level, arms, bits, about, doubts_of(effect, ablation, forecast, arms)
        )
        for effect in ablation.effects
    ]
    records = [Record(**about | line) for line in _lines(arms, forecast.rates)]
    return findings, records + [finding.record for finding in findings]


def doubts_of(
    effect: Effect, ablation: Ablation, forecast: EffectForecast, arms: dict[str, list[Trained]]
) -> list[str]:
    """Return a list of sentences on why the trainings leave an effect undecided, at most one for
    each of its two arms; empty if nothing does. `arms` has each arm's trainings by its name;
    `ablation` has the learning rates that were tried, `forecast` the chosen ones.

    The first reason that holds counts: a training of the arm diverged; its learning rate, found by
    trials and before its multiplier, is the lowest or the highest of its grid; the forecast kept no
    count of bigrams; or the arm is claimed to be better and does not end, on average, below the
    loss of bigrams counted in its own training text. An arm that is claimed to be worse may learn
    as little as it will.
    """
    doubts = []
    by_name = {arm.name: arm for arm in ablation.arms}
    for arm in (by_name[effect.of], by_name[effect.less]):
        trained = arms[arm.name]
        rate = forecast.rates[arm.name]
        grid = arm.rates or ablation.rates
        lost = sum(training.is_diverged for training in trained)
        loss = float(np.mean([training.final for training in trained]))
        bigrams = forecast.bigram_nats[arm.dataset] if forecast.bigram_nats else None
        if lost:
            doubts.append(f"{arm.name} diverged in {lost} of {len(trained)} trainings")
        # A better rate may lie beyond the edge of the rates that were tried.
        # A chosen rate is rounded to four digits.
        elif (
            grid
            and not ablation.finder
            and not (min(grid) * 1.001 < rate / arm.of_rate < max(grid) * 0.999)
        ):
            doubts.append(f"the rate of {arm.name}, {rate:g}, is at the edge of those tried")
        elif bigrams is None:
            doubts.append(f"no count of bigrams was kept to hold {arm.name} against")
        elif loss >= bigrams and arm.name in effect.better:
            doubts.append(
                f"{arm.name} learned no more than a count of bigrams ({loss:.3f}, {bigrams:.3f}"
                " nats)"
            )
    return doubts


def find_effect(
    effect: Effect,
    level: float,
    arms: dict[str, list[Trained]],
    bits: dict[str, float],
    about: JSON,
    doubts: Sequence[str] = (),
) -> Finding:
    """Return the Finding on an effect: over the seeds, the loss of its arm `of` minus the loss of
    its arm `less`, with its verdict on the claim; any sentence in `doubts` makes it undecided.
    `level` is the confidence of the interval, a fraction. `arms` has each arm's trainings in the
    order of the seeds, `bits` its bits per byte for each nat per token, both by the arm's name;
    `about` has the fields of the record that name its experiment, run and kind."""
    scale = bits if effect.quantity == "bits_per_byte" else dict.fromkeys(bits, 1.0)
    differences = [
        loss_after(first, effect.share) * scale[effect.of]
        - loss_after(second, effect.share) * scale[effect.less]
        for first, second in zip(arms[effect.of], arms[effect.less], strict=True)
    ]
    finding = found(effect, level, differences, about)
    is_number = not any(training.is_diverged for training in (*arms[effect.of], *arms[effect.less]))
    if doubts:
        sentence = "; ".join([finding.sentence if is_number else finding.record.series, *doubts])
        return finding._replace(outcome="undecided", sentence=sentence, is_number=is_number)
    return finding


def loss_after(trained: Trained, share: float) -> float:
    """Return the validation loss of the kept training `trained`, in nats per token, after the share
    `share`, 0 to 1, of its tokens.

    With `share` 1 it is measured on the whole validation text; before, it is interpolated between
    validations on a part of that text. A training that diverged has its first validation loss, that
    of the untrained model, at any share.
    """
    if trained.is_diverged:
        return trained.losses[0]
    if share == 1:
        return trained.final
    tokens = list(trained.losses)
    return float(np.interp(share * tokens[-1], tokens, list(trained.losses.values())))


def _lines(arms: dict[str, list[Trained]], rates: dict[str, float]) -> Iterator[JSON]:
    """Yield dicts with fields of records, without the fields that all records of an ablation share:
    for each arm its `learning_rate`; then for each of its trainings a `validation_loss` at each
    point of the curve, with the tokens as `x`, `diverged`, 1 or 0, and, unless the training
    diverged, `final_validation_loss`. `arms`, lists of Trained, and `rates` are by the arm's
    name."""
    for name, trainings in arms.items():
        yield {"series": name, "quantity": "learning_rate", "value": rates[name]}
        for training in trainings:
            same = {"series": name, "seed": training.config.train.seed}
            for tokens, loss in training.losses.items():
                yield same | {
                    "quantity": "validation_loss",
                    "value": loss,
                    "x": tokens,
                    "x_name": "tokens",
                }
            yield same | {"quantity": "diverged", "value": float(training.is_diverged)}
            if not training.is_diverged:
                yield same | {"quantity": "final_validation_loss", "value": training.final}


def slug(name: str) -> str:
    """Return a name as part of a file's name: each run of characters other than letters, digits,
    underscores and dots becomes a hyphen."""
    return re.sub(r"[^\w.]+", "-", name)
