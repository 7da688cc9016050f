"""Trainings that were forecast and are kept, and the seeds that a forecast gives. Imports no torch.

The seeds of the trainings are parts of the forecast's SHA-256. They cannot have been trained before
the forecast was written, and a forecast that is edited later no longer matches its trainings.
"""

import math
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from mlm_repro.engine.batch_schedule import BatchSchedule
from mlm_repro.engine.config import RunConfig
from mlm_repro.engine.run.files import METRICS, read_validations, validations_in
from mlm_repro.experiments.files import FORECAST, KeptRun, read_runs, write_runs
from mlm_repro.lineage.config import parse_config
from mlm_repro.lineage.digest import sha256_file
from mlm_repro.lineage.errors import IntegrityFailure
from mlm_repro.lineage.files import Manifest, parse_document
from mlm_repro.lineage.run import MANIFEST

SEARCH_SEED = 0
"""Seed of the trainings that try learning rates."""


class Trained(NamedTuple):
    """A training that a study keeps: the name of its directory, its RunConfig, the digests of its
    dataset and of itself, and its validation losses in nats per token, `losses` by the number of
    tokens trained on and `final` as the last. If the loss became NaN or infinite, `is_finished` is
    False and its own digest is empty."""

    name: str
    """Name of the training's directory."""
    config: RunConfig
    dataset: str
    """Digest of the dataset that it was trained on."""
    digest: str
    """Digest of the completed training; empty if it is not finished."""
    losses: dict[int, float]
    """Loss in nats per token on a fixed part of the validation text, by the tokens trained on, from
    0."""
    final: float
    """Last validation loss in nats per token: of a training that finished, on the whole validation
    text; NaN if nothing was validated."""
    is_finished: bool
    """False if the training's loss became NaN or infinite."""

    @property
    def is_trial(self) -> bool:
        """True for a trial of a learning rate, whose seed is `SEARCH_SEED` (0)."""
        return self.config.train.seed == SEARCH_SEED

    @property
    def is_diverged(self) -> bool:
        """True if the training's loss became NaN or infinite, or if the last of the validation
        losses in `losses` is above the first, the untrained model's."""
        losses = list(self.losses.values())
        return not self.is_finished or losses[-1] > losses[0]


def kept(training: Path) -> KeptRun:
    """Return the KeptRun, a line of runs.jsonl, that an ablation keeps of the training in the run
    directory `training`: its name, its manifest, completion marker and summary, as far as they
    exist, and of its metrics the validations alone. Raises IntegrityFailure if one of these files
    cannot be read or a validation does not fit the schema."""
    return KeptRun.of(training, metrics=[line.to_json() for line in read_validations(training)])


def keep(training: Path, study: Path) -> None:
    """Add a line for the training in the run directory `training`, under the name of that
    directory, to runs.jsonl in the folder `study`, in place of a line of the same name; without the
    file, create it. The line has the run's manifest, completion marker and summary, as far as they
    exist, and of its metrics the validations alone. Raises IntegrityFailure if a file of the run or
    runs.jsonl is damaged."""
    write_runs(study, (read_runs(study) | {training.name: kept(training)}).values())


class Kept:
    """Trainings that the folder of an ablation keeps: the attribute `trained` is a dict from the
    name of a configuration to its Trained. The method `of` returns the Trained of configurations
    that are asked for; after that the method `check_no_more` raises IntegrityFailure if a training,
    other than a trial of a learning rate, was never asked for."""

    def __init__(self, folder: Path) -> None:
        """Read all trainings that `folder`, an ablation's, keeps, into the attribute `trained`, a
        dict from a configuration's name to its Trained, empty if there are none. A training
        counts as asked for only after the method `of` was given its configuration. Raises
        IntegrityFailure if one is damaged or contradicts its seal, and BadInput if the
        configuration in its manifest is refused."""
        self.folder = folder
        trained = map(_read, read_runs(folder).values())
        self.trained = {each.config.name: each for each in trained}
        self._asked: set[str] = set()

    def of(self, configs: Iterable[RunConfig], dataset: str) -> list[Trained]:
        """Return a list of the kept trainings of these configurations, found by their names, as
        Trained, in the configurations' order. They count as asked for, for the method
        `check_no_more`. `dataset` is a digest.

        Raises IntegrityFailure if one is not kept, was trained on another dataset, or has other
        settings of `model` or `train`; the sizes of its vocabulary may differ.
        """
        trained = []
        for config in configs:
            self._asked.add(config.name)
            training = self.trained.get(config.name)
            if training is None:
                raise IntegrityFailure(
                    f"{self.folder.name} does not keep {config.name}, which {FORECAST} asks for:"
                    " the forecast was changed or made after its trainings; restore it, or run the"
                    " experiment again"
                )
            # A requested configuration has no dataset, so it lacks the vocabulary that the training
            # took from its own.
            model = training.config.model
            vocabulary = model.model_dump(include={"vocab_size", "padded_vocab_size"})
            asked = config.model.model_copy(update=vocabulary)
            if (model, training.config.train) != (asked, config.train):
                raise IntegrityFailure(
                    f"{training.name} was trained with other settings than {FORECAST} gives it:"
                    " the forecast was changed or made after its trainings; put back the"
                    " forecast that came before them, or train again"
                )
            if training.dataset != dataset:
                raise IntegrityFailure(
                    f"{training.name} was trained on another dataset than {FORECAST} states: the"
                    " forecast was changed or made after its trainings; put back the forecast that"
                    " came before them, or train again"
                )
            trained.append(training)
        return trained

    def check_no_more(self) -> None:
        """Raise IntegrityFailure if the folder keeps a training, other than a trial of a learning
        rate, whose configuration was never given to `of`. Call it after `of` was called with all
        configurations; what was not asked for until then counts as too much."""
        if unrequested := [
            name
            for name, training in self.trained.items()
            if not (training.is_trial or name in self._asked)
        ]:
            raise IntegrityFailure(
                f"{self.folder.name} keeps {', '.join(unrequested)} in runs.jsonl, which its"
                f" {FORECAST} does not ask for: one of the two was changed, or the forecast was"
                " made after its trainings; put back the original, or train again"
            )


def _read(run: KeptRun) -> Trained:
    manifest = parse_document(run.manifest, Manifest, f"{MANIFEST} of {run.name}")
    config = parse_config(manifest.config, RunConfig, f"{run.name}/{MANIFEST}")
    run.check_seal()
    batches = BatchSchedule(config.train)
    length = config.model.seq_length
    lines = validations_in(run.metrics)
    losses = {
        batches.samples_before(line.iteration) * length: line.loss
        for line in lines
        if line.kind == "validation"
    }
    if (
        run.seal
        and max(losses, default=0) != batches.samples_before(config.train.iterations) * length
    ):
        raise IntegrityFailure(
            f"{run.name}: its {METRICS} as kept in runs.jsonl does not end at the last iteration of"
            " the training: the line was changed, so restore the study's files"
        )
    final = lines[-1].loss if lines else math.nan
    digest = run.seal["digest"] if run.seal else ""
    return Trained(
        run.name, config, manifest.parents["dataset"], digest, losses, final, run.seal is not None
    )


def seeds_of(forecast: Path, count: int) -> list[int]:
    """Return a list of the seeds that the file `forecast` gives: the first `count` 32-bit words of
    its SHA-256. `count` is at most eight, since there are no more words."""
    digest = sha256_file(forecast)
    return [int(digest[8 * index : 8 * index + 8], 16) for index in range(count)]
