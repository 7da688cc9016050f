"""What an ablation found of the effects that were forecast of it, from the trainings that it keeps. Imports no torch.

The seeds of the trainings are those that the forecast gives (`experiments.trainings.kept`).
"""

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from scipy.special import stdtrit  # type: ignore[import-untyped]

from engine.config import RunConfig
from engine.run.files import LearningRateSweep
from experiments.catalogue import ABLATION, Ablation, Arm, Effect
from experiments.trainings.kept import FORECAST, SEARCH_SEED, Trained, read_kept, seeds_of
from lineage.config import parse_config
from lineage.errors import IntegrityFailure
from lineage.files import FileSchema, Finite, Manifest, Positive, read_document
from lineage.records import Record
from lineage.run import MANIFEST

SWEEPS = "sweeps"
Supported = Literal["SUPPORTED", "CONTRADICTED", "INCONCLUSIVE"]
UNITS = {"validation_loss": "nats", "bits_per_byte": "bits/byte"}


class EffectForecast(FileSchema):
    """forecast.json of an ablation: all that decides its verdict, written before the trainings whose seeds it gives."""

    experiment: str
    ablation: dict[str, Any]
    """As experiment.toml had it: arms, effects, length, number of seeds, analysis."""
    datasets: list[str]
    """Digests."""
    bits_per_nat: list[Finite]
    """Of each dataset's validation text: bits a byte for each nat a token; 0 where its card does not say."""
    rates: dict[str, Positive]
    """That each arm is trained at."""
    searched: dict[str, str]
    """Digests of the trainings that tried the rates, by name; empty for one that diverged."""


class Finding(NamedTuple):
    """What came of an effect."""

    effect: Effect
    record: Record
    """The mean difference with its paired interval."""
    outcome: Supported
    sentence: str


def ablation_config(
    experiment: str, ablation: Ablation, arm: Arm, seed: int, rate: float, dataset: Path = Path()
) -> RunConfig:
    """One arm's training with a seed, at a constant rate unless it ends at another; with `SEARCH_SEED` a trial of the
    rate, which is as much shorter.
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


def trials_of(experiment: str, ablation: Ablation, arm: Arm, dataset: Path = Path()) -> list[RunConfig]:
    """The trainings that try an arm's rates; none where a finder gives it."""
    rates = () if ablation.finder else arm.rates or ablation.rates
    return [ablation_config(experiment, ablation, arm, SEARCH_SEED, rate, dataset) for rate in rates]


def searched_rates(
    experiment: str, ablation: Ablation, folder: Path, trained: Mapping[str, Trained]
) -> dict[str, float]:
    """Of each arm the rate that its search gives: that of the trial which ended lowest, the lowest rate where all
    diverged, or where the finder's smoothed loss was lowest.

    Raises IntegrityFailure where an arm was not searched, or the finder's loss never fell.
    """
    rates = {}
    for arm in ablation.arms:
        if ablation.finder:
            found = read_document(folder / SWEEPS / f"{slug(arm.name)}.json", LearningRateSweep).lowest_rate
            if found is None:
                raise IntegrityFailure(f"the loss of {arm.name!r} never fell while its rate rose: nothing is suggested")
        else:
            ends = []
            for trial in trials_of(experiment, ablation, arm):
                each = _trained(folder, trained, trial)
                ends.append((math.inf if each.is_diverged else each.final, trial.train.learning_rate))
            found = min(ends)[1]
        rates[arm.name] = float(f"{found * arm.of_rate:.4g}")
    return rates


def derive_effects(folder: Path) -> tuple[list[Finding], list[Record]]:
    """What an ablation's run found and its records, from the forecast and the trainings that it keeps.

    Raises IntegrityFailure where the forecast is of other work, a training was not made as the forecast says, or its
    seed is not one that the forecast gives: then the forecast was changed or made after the trainings.
    """
    manifest, forecast = read_document(folder / MANIFEST, Manifest), read_document(folder / FORECAST, EffectForecast)
    if (forecast.experiment, forecast.ablation) != (manifest.config["experiment"]["name"], manifest.config[ABLATION]):
        raise IntegrityFailure(f"{FORECAST} of {folder.name} is of other work than its {MANIFEST}")
    ablation = parse_config(forecast.ablation, Ablation, f"{folder.name}/{FORECAST}")
    trained = {each.config.name: each for each in read_kept(folder)}
    if searched_rates(forecast.experiment, ablation, folder, trained) != forecast.rates:
        raise IntegrityFailure(f"{FORECAST} of {folder.name} has other rates than its search gives")
    seeds = seeds_of(folder / FORECAST, ablation.seeds)
    arms: dict[str, list[Trained]] = {}
    for arm in ablation.arms:
        for config in trials_of(forecast.experiment, ablation, arm):
            _check_data(_trained(folder, trained, config), forecast.datasets[arm.dataset])
        rate = forecast.rates[arm.name]
        configs = [ablation_config(forecast.experiment, ablation, arm, seed, rate) for seed in seeds]
        arms[arm.name] = [_trained(folder, trained, config) for config in configs]
        for each in arms[arm.name]:
            _check_data(each, forecast.datasets[arm.dataset])
    if more := sum(not each.is_trial for each in trained.values()) - len(ablation.arms) * len(seeds):
        raise IntegrityFailure(f"{folder.name} keeps {more} trainings that its {FORECAST} does not ask for")
    bits = {arm.name: forecast.bits_per_nat[arm.dataset] for arm in ablation.arms}
    about = {"experiment": forecast.experiment, "source": f"{manifest.name}-{manifest.identity[:8]}",
             "digest": manifest.config_digest, "kind": "scaled"}  # fmt: skip
    findings = [find_effect(effect, ablation.level, arms, bits, about) for effect in ablation.effects]
    records = [Record(**about | line) for line in _lines(arms, forecast.rates)]
    return findings, records + [finding.record for finding in findings]


def _trained(folder: Path, trained: Mapping[str, Trained], config: RunConfig) -> Trained:
    """The kept training of a configuration, which may have any vocabulary."""
    found = trained.get(config.name)
    if found is None:
        raise IntegrityFailure(
            f"{folder.name} does not keep {config.name}, which {FORECAST} asks for: the forecast was changed or made "
            "after its trainings"
        )
    vocabulary = {name: getattr(found.config.model, name) for name in ("vocab_size", "padded_vocab_size")}
    if (found.config.model, found.config.train) != (config.model.model_copy(update=vocabulary), config.train):
        raise IntegrityFailure(f"{found.folder.name} was not trained as {FORECAST} says")
    return found


def _check_data(trained: Trained, dataset: str) -> None:
    if trained.dataset != dataset:
        raise IntegrityFailure(f"{trained.folder.name} was trained on other data than {FORECAST} says")


def find_effect(
    effect: Effect, level: float, arms: dict[str, list[Trained]], bits: dict[str, float], about: dict[str, Any]
) -> Finding:
    """The paired t interval of the differences over seeds, and on which side of what is claimed it lies."""
    scale = bits if effect.quantity == "bits_per_byte" else dict.fromkeys(bits, 1.0)
    differences = [
        loss_after(one, effect.share) * scale[effect.of] - loss_after(other, effect.share) * scale[effect.less]
        for one, other in zip(arms[effect.of], arms[effect.less], strict=True)
    ]
    count, mean = len(differences), float(np.mean(differences))
    reach = float(stdtrit(count - 1, (1 + level) / 2) * np.std(differences, ddof=1) / math.sqrt(count))
    mean, low, high = (float(f"{number:.6g}") for number in (mean, mean - reach, mean + reach))
    above = -math.inf if effect.above is None else effect.above
    below = math.inf if effect.below is None else effect.below
    outcome: Supported = "INCONCLUSIVE"
    if above < low and high < below:
        outcome = "SUPPORTED"
    elif high <= above or below <= low:
        outcome = "CONTRADICTED"
    when = "" if effect.share == 1 else f" after {effect.share:.0%} of the tokens"
    series, unit = f"{effect.of} less {effect.less}{when}", UNITS[effect.quantity]
    sentence = f"{series}: {mean:+.4g} {unit} ({low:+.4g} to {high:+.4g}, {level:.0%}, {count} seeds)"
    if outcome == "INCONCLUSIVE":
        sentence += f"; an effect of {reach:.2g} would have shown"
    record = Record(
        **about, series=series, quantity=f"{effect.quantity}_difference", value=mean, low=low, high=high, unit=unit,
        note=outcome,
    )  # fmt: skip
    return Finding(effect, record, outcome, sentence)


def loss_after(trained: Trained, share: float) -> float:
    """Validation loss after a share of the training's tokens, in nats a token: at the end of the whole validation text,
    before between two validations of a part of it. One that diverged counts as the untrained model.
    """
    if trained.is_diverged:
        return trained.losses[0]
    if share == 1:
        return trained.final
    tokens = list(trained.losses)
    return float(np.interp(share * tokens[-1], tokens, list(trained.losses.values())))


def _lines(arms: dict[str, list[Trained]], rates: dict[str, float]) -> Iterator[dict[str, Any]]:
    """Of each arm its rate, its curves and their ends."""
    for name, trainings in arms.items():
        yield {"series": name, "quantity": "learning_rate", "value": rates[name]}
        for each in trainings:
            of = {"series": name, "seed": each.config.train.seed}
            for tokens, loss in each.losses.items():
                yield of | {"quantity": "validation_loss", "value": loss, "x": tokens, "x_name": "tokens"}
            yield of | {"quantity": "diverged", "value": float(each.is_diverged)}
            if not each.is_diverged:
                yield of | {"quantity": "final_validation_loss", "value": each.final}


def slug(name: str) -> str:
    """A name as a part of a file's name."""
    return re.sub(r"[^\w.]+", "-", name)
