"""Small controlled comparisons: the same training but for one thing, over seeds that a sealed forecast gives.

Each is a paper's claim at a size a laptop trains in minutes, defined in its experiment.toml. Every arm of a seed starts
from the same initial values and sees the same tokens in the same order, at the best of as many learning rates.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from data_pipeline.files import DATASET, DataCard, dataset_digest
from engine.launch.forked import run_forked
from engine.lr_finder import find_learning_rate, write_curve
from engine.run.resolved import resolve
from experiments.catalogue import ABLATION, Ablation, Experiment, load_experiments
from experiments.effects import (
    SWEEPS,
    EffectForecast,
    Finding,
    ablation_config,
    derive_effects,
    searched_rates,
    slug,
    trials_of,
)
from experiments.trainings.kept import FORECAST, SEARCH_SEED, read_kept, seal_forecast, seeds_of
from experiments.trainings.together import train_all
from lineage.environment import available_cores
from lineage.errors import BadInput
from lineage.files import read_document, write_document
from lineage.lock import locked
from lineage.progress import announce
from lineage.records import RECORDS, Record, write_records
from lineage.run import RunDirectory

CARD = DATASET


def run_ablation(experiment: Experiment, datasets: Sequence[Path], runs: Path) -> RunDirectory:
    """Search each arm's rate, seal the forecast, train every arm with every seed that it gives, and seal what came of
    it, all below `runs`; what is finished is reused.

    Raises BadInput for an experiment without an ablation, and where datasets are too few, too many or of other text,
    StepFailed where a training fails, Interrupted after SIGTERM or Ctrl-C.
    """
    ablation = ablation_of(experiment)
    needed = 1 + max(arm.dataset for arm in ablation.arms)
    if len(datasets) != needed:
        raise BadInput(f"{experiment.name} takes --dataset {needed} times; it was given {len(datasets)}")
    bits_per_nat, digests = _bits_per_nat(datasets), [dataset_digest(path) for path in datasets]
    about = {"experiment": {"name": experiment.name}, "mode": "scaled", ABLATION: ablation.model_dump(mode="json")}
    parents = {f"dataset-{place}": digest for place, digest in enumerate(digests)}
    run = RunDirectory.begin(runs, f"experiment-{slug(experiment.name)}-effects", ABLATION, about, parents)
    if run.is_complete:
        run.link()
        return run
    trials = [one for arm in ablation.arms for one in trials_of(experiment.name, ablation, arm, datasets[arm.dataset])]
    trainings = len(ablation.arms) * ablation.seeds
    announce(f"{len(trials)} trials of rates and {trainings} trainings, {available_cores()} at a time")
    with locked(run.path):
        if not (run.path / FORECAST).is_file():
            train_all(trials, run.path, runs)
            _sweep(experiment, datasets, run.path)
            kept = read_kept(run.path)
            forecast = EffectForecast(
                experiment=experiment.name,
                ablation=ablation.model_dump(mode="json"),
                datasets=digests,
                bits_per_nat=bits_per_nat,
                rates=searched_rates(experiment.name, ablation, run.path, {each.config.name: each for each in kept}),
                searched={each.folder.name: each.digest for each in kept if each.is_trial},
            )
            write_document(run.path / FORECAST, forecast)
        forecast = read_document(run.path / FORECAST, EffectForecast)
        sealed = seal_forecast(
            run.path / FORECAST, ABLATION, {name: of for name, of in forecast.searched.items() if of}
        )
        print(f"sealed in {sealed}: the forecast, with the rates {forecast.rates}", flush=True)
        configs = [
            ablation_config(experiment.name, ablation, arm, seed, forecast.rates[arm.name], datasets[arm.dataset])
            for seed in seeds_of(run.path / FORECAST, ablation.seeds)
            for arm in ablation.arms
        ]
        train_all(configs, run.path, runs)
        write_records(run.path / RECORDS, derive_effects(run.path)[1])
        run.complete()
    return run


def _sweep(experiment: Experiment, datasets: Sequence[Path], folder: Path) -> None:
    """Let the finder raise the rate of every arm, where the ablation asks for it, and keep the curves."""
    ablation = ablation_of(experiment)
    if ablation.finder is None:
        return
    low, high = ablation.finder
    for arm in ablation.arms:
        config = ablation_config(experiment.name, ablation, arm, SEARCH_SEED, high, datasets[arm.dataset])
        sweep = resolve(config, 1)
        (curve,) = run_forked(find_learning_rate, 1, sweep, low, high, config.train.iterations)
        named = config.model_copy(update={"name": slug(arm.name)})
        write_curve(folder / SWEEPS, replace(sweep, config=named), curve)


def ablation_of(experiment: Experiment) -> Ablation:
    """Its ablation. Raises BadInput where there is none."""
    if experiment.ablation is None:
        names = ", ".join(other.name for other in load_experiments().values() if other.ablation)
        raise BadInput(f"{experiment.name} has no ablation; there are {names}")
    return experiment.ablation


def _bits_per_nat(datasets: Sequence[Path]) -> list[float]:
    """Bits a byte of each dataset's validation text for each nat a token; 0 where its card does not say.

    Raises BadInput unless all are of the same text.
    """
    cards = [read_document(path / CARD, DataCard) for path in datasets]
    texts = {tuple((name, split.documents, split.bytes) for name, split in card.splits.items()) for card in cards}
    if len(texts) > 1:
        raise BadInput(f"{' and '.join(map(str, datasets))} are not of the same text")
    return [card.splits["valid"].bits_per_nat if "valid" in card.splits else 0.0 for card in cards]


def format_ablation(experiment: Experiment, findings: Sequence[Finding], records: Sequence[Record]) -> str:
    """What came of each arm at the end, by seed, then of each effect, as text."""
    lines = [ablation_of(experiment).question]
    for arm in ablation_of(experiment).arms:
        mine = [record for record in records if record.series == arm.name]
        (rate,) = (record.value for record in mine if record.quantity == "learning_rate")
        ends = ", ".join(f"{record.value:.4f}" for record in mine if record.quantity == "final_validation_loss")
        lost = sum(record.value for record in mine if record.quantity == "diverged")
        lines.append(f"{arm.name:<32} rate {rate:<9g} {ends}" + (f" {lost:g} diverged" if lost else ""))
    return "\n".join(
        [*lines, *(f"{each.outcome}: {each.sentence}, claimed {each.effect.claimed}" for each in findings)]
    )
