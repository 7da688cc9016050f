"""Makes an ablation: the same training but for one thing, over seeds that a sealed forecast gives.

Each tests a paper's claim at a size that a laptop trains in minutes; its experiment.toml defines it. For each seed all
arms start from the same initial values and see the same tokens in the same order, each at the best of its rates.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from data_pipeline.files import DATASET, DataCard, dataset_digest
from engine.config import RunConfig
from engine.launch.forked import run_forked
from engine.lr_finder import find_learning_rate, write_curve
from engine.run.resolved import resolve
from experiments.catalogue import ABLATION, Ablation, Experiment, load_experiments
from experiments.files import SWEEPS, EffectForecast
from experiments.forecast.ablation import ablation_config, derive_effects, searched_rates, slug, trials_of
from experiments.forecast.study import train_all, try_forecast
from experiments.forecast.trainings import SEARCH_SEED, Kept
from lineage.environment import available_cores
from lineage.errors import BadInput
from lineage.files import read_document
from lineage.lock import locked
from lineage.progress import announce
from lineage.run import RunDirectory


def ablation_of(experiment: Experiment) -> Ablation:
    """The experiment's ablation. Raises BadInput if it has none."""
    if experiment.ablation is None:
        names = ", ".join(other.name for other in load_experiments().values() if other.ablation)
        raise BadInput(f"{experiment.name} has no ablation; there are {names}")
    return experiment.ablation


def run_ablation(experiment: Experiment, datasets: Sequence[Path], runs: Path) -> RunDirectory:
    """Search each arm's rate, seal the forecast, train every arm with every seed that it gives, and seal the outcome.

    Everything lies below `runs`; finished parts are reused. Raises BadInput for an experiment without an ablation, and
    for too few, too many or unequal datasets, StepFailed if a training fails, Interrupted after SIGTERM or Ctrl-C.
    """
    ablation, name = ablation_of(experiment), experiment.name
    needed = 1 + max(arm.dataset for arm in ablation.arms)
    if len(datasets) != needed:
        raise BadInput(f"{name} takes --dataset {needed} times; it was given {len(datasets)}")
    bits_per_nat, digests = _bits_per_nat(datasets), [dataset_digest(path) for path in datasets]
    about = {"experiment": {"name": name}, "mode": "scaled", ABLATION: ablation.model_dump(mode="json")}
    parents = {f"dataset-{place}": digest for place, digest in enumerate(digests)}
    run = RunDirectory.begin(runs, f"experiment-{slug(name)}-effects", ABLATION, about, parents)
    if run.is_complete:
        run.link()
        return run
    trials = [each for arm in ablation.arms for each in trials_of(name, ablation, arm, datasets[arm.dataset])]
    trainings = len(ablation.arms) * ablation.seeds
    announce(f"{len(trials)} trials of rates and {trainings} trainings, {available_cores()} at a time")

    def search() -> EffectForecast:
        train_all(trials, run.path, runs)
        _sweep(name, ablation, datasets, run.path)
        rates, searched = searched_rates(name, ablation, Kept(run.path), digests)
        return EffectForecast(
            experiment=name,
            ablation=ablation.model_dump(mode="json"),
            datasets=digests,
            bits_per_nat=bits_per_nat,
            rates=rates,
            searched={each.folder.name: each.digest for each in searched},
        )

    def arms(forecast: EffectForecast, seeds: list[int]) -> list[RunConfig]:
        return [
            ablation_config(name, ablation, arm, seed, forecast.rates[arm.name], datasets[arm.dataset])
            for seed in seeds
            for arm in ablation.arms
        ]

    with locked(run.path):
        try_forecast(run, runs, EffectForecast, search, ablation.seeds, arms, lambda: derive_effects(run.path)[1])
    return run


def _sweep(name: str, ablation: Ablation, datasets: Sequence[Path], folder: Path) -> None:
    """Run the learning-rate finder for every arm if the ablation asks for it, and keep the curves."""
    if ablation.finder is None:
        return
    low, high = ablation.finder
    for arm in ablation.arms:
        config = ablation_config(name, ablation, arm, SEARCH_SEED, high, datasets[arm.dataset])
        sweep = resolve(config, 1)
        (curve,) = run_forked(find_learning_rate, 1, sweep, low, high, config.train.iterations)
        write_curve(folder / SWEEPS, replace(sweep, config=config.model_copy(update={"name": slug(arm.name)})), curve)


def _bits_per_nat(datasets: Sequence[Path]) -> list[float]:
    """Bits per byte for each nat per token, for each dataset's validation text; 0 if its card does not say.

    Raises BadInput unless all datasets have the same text.
    """
    cards = [read_document(path / DATASET, DataCard) for path in datasets]
    texts = {tuple((name, split.documents, split.bytes) for name, split in card.splits.items()) for card in cards}
    if len(texts) > 1:
        raise BadInput(f"{' and '.join(map(str, datasets))} are not of the same text")
    return [card.splits["valid"].bits_per_nat if "valid" in card.splits else 0.0 for card in cards]
