"""Check a run against its inputs by making its numbers, sums and page again. Imports no torch.

If somebody edits files and seals them anew, the other files of the run, and the runs it was made of, contradict it.
"""

import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from functools import wraps
from pathlib import Path

import numpy as np

from mlm_repro.data_pipeline.files import DATASET, LEDGER, DataCard, Ledger, dataset_digest, named_datasets
from mlm_repro.data_pipeline.remade import card, stages
from mlm_repro.engine.run.files import (
    SUMMARY,
    TrainingSummary,
    validations_in,
)
from mlm_repro.engine.run.remade import checkpoints, ending, metrics, recipe_of
from mlm_repro.engine.run.resolved import read_run_config
from mlm_repro.experiments.benchmark import AGAINST
from mlm_repro.experiments.catalogue import ABLATION, TAKES_LONG, Experiment, load_experiments
from mlm_repro.experiments.files import (
    EXPERIMENTS,
    NOT_RUN,
    RUNS,
    LadderResult,
    read_runs,
)
from mlm_repro.experiments.files import LADDER as LADDER_RESULT
from mlm_repro.experiments.forecast.ladder import derive, read_scores
from mlm_repro.experiments.forecast.trainings import kept
from mlm_repro.experiments.remade import evaluations, forecast, models, records
from mlm_repro.experiments.reproduce.files import ReproductionSummary
from mlm_repro.experiments.reproduce.plan import training_place, twin_rule
from mlm_repro.experiments.reproduce.reproduction import (
    keep_training,
    reproduced_model,
)
from mlm_repro.experiments.runner import measure, run_experiment
from mlm_repro.experiments.sealed import Line, digest_of_numbers
from mlm_repro.experiments.verdicts import load_results, parts_of
from mlm_repro.lineage.chain import broken_links, broken_manifest
from mlm_repro.lineage.digest import MARKER, is_sealed, read_digest, sealed_files, sha256_file, sha256_json
from mlm_repro.lineage.errors import DataMissing, UserError
from mlm_repro.lineage.files import (
    Absent,
    Comparisons,
    Manifest,
    Remade,
    as_said,
    misread,
    one_line,
    parse_document,
    read_document,
    read_object,
    read_values,
    unlike,
)
from mlm_repro.lineage.records import RECORDS, Record, read_records, records_bytes
from mlm_repro.lineage.run import MANIFEST, RunDirectory
from mlm_repro.lineage.shipped import model_file
from mlm_repro.lineage.verified import check_seal_once
from mlm_repro.reports.engines import read_engines
from mlm_repro.verify.kinds import KINDS, hidden, kind_of, misfits, parts_within

REPORT = "report"
ROUNDING = {"largest_logit_difference": 3}
"""Digits after the point of quantities that another processor rounds otherwise."""


class Findings:
    """Differences that a check finds, and all that it did not compare."""

    def __init__(self, seen: set[Path] | None = None, at_length: bool = False) -> None:
        """Runs that were `seen` on the way here are not looked at again; `at_length`, seconds are measured again."""
        self.seen, self.at_length = seen if seen is not None else set(), at_length
        self.broken: list[str] = []
        """A sentence for each difference."""
        self.absent: list[str] = []
        """Names of inputs that are not on disk."""
        self.left: list[str] = []
        """Sentences on what was not made again, with what it needs."""
        self.compared: list[str] = []
        """Names of what was compared."""
        self.counted: Counter[str] = Counter()
        """How many records, verdicts and figures were made again."""

    def check(self, place: Path, strictly: bool = True) -> None:
        """Check a run to its leaves, once; what it lacks is lacking here too, if `strictly`."""
        if place.resolve() in self.seen:
            return
        for directory in (place, *parts_within(place)):
            if is_sealed(directory):
                check_seal_once(directory)
        other = RunCheck(place, self.seen, self.at_length)
        self.left += other.left
        (self.absent if strictly else self.left).extend(other.absent)
        self.counted += other.counted
        self.broken += other.broken


class RunCheck(Findings):
    """Differences between a run and its inputs, and between those of its inputs that are on disk and theirs."""

    def __init__(self, run: Path, seen: set[Path] | None = None, at_length: bool = False) -> None:
        """Compare all that MADE names of the run's kind."""
        super().__init__(seen, at_length)
        self.run, self.manifest = run, read_document(run / MANIFEST, Manifest)
        self.seen.add(run.resolve())
        for part in (RunCheck.identity, *MADE.get(self.manifest.kind, ())):
            try:
                for each in part(self):
                    if isinstance(each, Absent):
                        (self.absent if each.ever else self.left).append(each.name)
                    else:
                        self.broken += unlike(*each) if isinstance(each, Remade) else [each]
                self.compared.append("files, keys, name and identity" if part == RunCheck.identity else part.__name__)
            except (UserError, OSError, LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
                said = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {one_line(error)}"
                said = f"{error} is missing" if isinstance(error, KeyError) else said
                self.broken.append(f"{run.name} cannot be checked: {said}")

    def identity(self) -> Comparisons:
        """Check that the run is of a known kind, with the files, keys and name of that kind, and belongs together."""
        if self.manifest.kind not in KINDS:
            yield f"{self.run.name} is of the kind {self.manifest.kind!r}, of which nothing is known"
            return
        yield from misfits(self.run, KINDS[self.manifest.kind], read_object(self.run / MANIFEST))
        for inner in parts_within(self.run):
            if (inner / MANIFEST).is_file():
                self.check(inner)
            elif (kind := kind_of(inner)) in KINDS:
                yield from misfits(inner, KINDS[kind])
            else:
                yield f"{inner.name} in {self.run.name} is of no kind that is known"
        summary = ReproductionSummary if self.manifest.kind == "reproduction" else TrainingSummary
        schemas = {MANIFEST: Manifest, DATASET: DataCard, LEDGER: Ledger, SUMMARY: summary}
        for name, schema in schemas.items():
            if (path := self.run / name).is_file():
                yield from misread(read_object(path), schema, f"{name} of {self.run.name}")
        if (path := self.run / RECORDS).is_file() and records_bytes(read_records(path)) != path.read_bytes():
            yield f"{RECORDS} of {self.run.name} is not written as records are"
        yield from broken_links(self.run)
        if not datetime.fromisoformat(self.manifest.created) <= datetime.now(UTC) + timedelta(days=1):
            yield f"{self.run.name} was created {self.manifest.created}, which is still to come"
        self.absent += [f"{name} in {self.run.name}, which no seal covers" for name in hidden(self.run)]

    def _made_of(self, name: str, place: Path, digest: Callable[[Path], str]) -> Comparisons:
        """Check an input: its digest, if it is on disk, every byte of it, and then the input as a run."""
        if not is_sealed(place):
            self.absent.append(f"{name} ({place.name})")
            return
        if digest(place) != self.manifest.parents.get(name):
            yield f"{self.run.name} was not made of {place.name} as it is here: its digest differs"
        elif digest is read_digest and read_object(place / MANIFEST)["created"] > self.manifest.created:
            yield f"{self.run.name} was created before {place.name}, of which it was made"
        self.check(place)

    def datasets(self) -> Comparisons:
        """Check the datasets that a training names, by their digests."""
        for dataset in named_datasets(self.run):
            yield from self._made_of(dataset.parent, dataset.place, dataset_digest)

    @property
    def _summary(self) -> ReproductionSummary:
        return read_document(self.run / SUMMARY, ReproductionSummary)

    def trainings(self) -> Comparisons:
        """Compare the summary and the kept curves with the training run of every model."""
        parents = {model.run.rpartition("-")[0]: model for model in self._summary.models}
        runs = read_runs(self.run)
        yield Remade(f"{MANIFEST}: parents", sorted(self.manifest.parents), sorted({"dataset", *parents}))
        for name, model in parents.items():
            place, copy = training_place(model.run, self.run.parent), runs.get(model.name)
            yield from self._made_of(name, place, read_digest)
            if copy:
                copy.check_seal()
                done = parse_document(copy.summary, TrainingSummary, f"{SUMMARY} of {model.name}")
                yield from ending(done, validations_in(copy.metrics), model.name)
            if not is_sealed(place):
                continue
            training = RunDirectory(place)
            made = reproduced_model(read_run_config(model_file(model.series)), training)
            yield Remade(f"{SUMMARY}: {model.name}", model, made, f"{model.run} gives")
            yield Remade(f"{SUMMARY}: twin_rule", self._summary.twin_rule, twin_rule(recipe_of(place)))
            again = keep_training(training)
            if copy and copy.manifest is None:  # of the first release
                again = again.model_copy(update={"manifest": None, "seal": None})
            yield Remade(f"kept training {model.name}", copy, again, f"{model.run} gives")
            trained_on = training.manifest["parents"]["dataset"]
            yield Remade(f"{MANIFEST}: dataset", self.manifest.parents["dataset"], trained_on, f"{model.run} has")
            for dataset in named_datasets(place):
                if is_sealed(dataset.place):
                    mine, theirs = map(sealed_files, (self.run, dataset.place))
                    for name in (DATASET, LEDGER):
                        yield Remade(f"{self.run.name}/{name}", mine.get(name), theirs.get(name), "its dataset has")

    def against(self) -> Comparisons:
        """Compare the curves of two engines with what is said of them."""
        result, config = read_engines(self.run), self.manifest.config
        due = {name: config[name] for name in ("title", "setting", "notes")}
        yield as_said(result, due, AGAINST, f"{MANIFEST} says")
        for case in (case for case in result.cases if case.series):
            mine, theirs, apart, allowed = (np.array(series.samples) for series in case.series)
            where = f"{AGAINST}: differences of the {case.name}"
            yield Remade(where, [*apart], [*np.abs(mine - theirs)])
            share = np.divide(apart, allowed, out=np.where(apart > 0, np.inf, 0.0), where=allowed > 0).max()
            value = case.ratios[0].value
            yield Remade(f"{AGAINST}: share of the tolerance in the {case.name}", min(value, share), float(share))
        beyond = [ratio.name for case in result.cases for ratio in case.ratios if not ratio.is_reached]
        yield Remade(f"{AGAINST}: number of disagreements", len(result.disagreements), len(beyond))

    def numbers(self) -> Comparisons:
        """Compare the records with the digest that the run was begun with."""
        load_results([self.run])
        refused = read_values(self.run / NOT_RUN) if (self.run / NOT_RUN).is_file() else []
        yield from self._begun_with(self.manifest, read_records(self.run / RECORDS), refused)
        yield from self._numbers_again()

    def _numbers_again(self) -> Comparisons:
        """Make the records again: simulated ones, and with `at_length` those that take no training and no hours."""
        for part in parts_of(self.run):
            config = part.manifest["config"]
            experiment = load_experiments().get(config["experiment"]["name"])
            if experiment is None or (config.get("mode") != "simulate" and not self.at_length):
                self.left.append(f"{part.name}: its numbers, which were measured")
                continue
            try:
                made = _measured_again(experiment, str(config.get("mode")))
            except DataMissing as missing:
                self.left.append(f"{part.name}: {missing}")
                continue
            self.counted["records"] += len(part.records)
            says, gives = (
                {
                    f"{x.series} {x.quantity} ({x.kind}) at {x.x}": round(x.value, ROUNDING.get(x.quantity, 99))
                    for x in records
                }
                for records in (part.records, made)
            )
            yield Remade(part.name, says, gives, "made again it is")

    def study(self) -> Comparisons:
        """Compare the records of each run that a study of experiments keeps with what that run was sealed with."""
        load_results([self.run])
        records, due = read_records(self.run / RECORDS), {}
        for name, run in read_runs(self.run).items():
            due[name] = run.manifest and run.manifest["identity"]
            manifest = parse_document(run.manifest, Manifest, f"{MANIFEST} of {name}")
            yield from broken_manifest(name, manifest.model_dump(mode="json", exclude_unset=True))
            own = [record for record in records if record.source == name]
            run.check_seal({RECORDS: records_bytes(own)})
            yield from self._begun_with(manifest, own, run.refused or [])
        yield Remade(f"{MANIFEST}: runs", self.manifest.config["runs"], due, f"{RUNS} gives")
        yield from self._numbers_again()

    def _begun_with(self, manifest: Manifest, records: Sequence[Record], refused: object) -> Comparisons:
        name, config = f"{manifest.name}-{manifest.identity[:8]}", manifest.config
        of = (name, sha256_json(config), config["experiment"]["name"])
        if any((record.source, record.digest, record.experiment) != of for record in records):
            yield f"{RECORDS} of {self.run.name} has records of another run"
        if "records" not in config:  # a run of an earlier version
            self.absent.append(f"the digest of the records of {name}")
        elif (digest_of_numbers(records), sha256_json(refused)) != (config["records"], config["refused"]):
            yield f"{RECORDS} of {self.run.name} does not have the numbers that {name} was begun with"

    def ladder(self) -> Comparisons:
        """Derive result and records again from the kept trainings, whose scores are of one text."""
        sizes: dict[str, list[float]] = {}
        for scores in read_scores(self.run).values():
            for text, score in scores.texts.items():
                sizes.setdefault(text, []).append(sum(score.nll) / score.bits_per_byte / sum(score.words))
        for text, bytes_of in sizes.items():
            if not np.allclose(bytes_of, bytes_of[0], rtol=1e-4):
                yield f"the bits per byte of {text} in {self.run.name} are not of the losses beside them"
        result, records = derive(self.run)
        yield Remade(LADDER_RESULT, read_document(self.run / LADDER_RESULT, LadderResult), result)
        yield Remade(RECORDS, read_records(self.run / RECORDS), records)
        yield from self._kept_trainings()

    def ablation(self) -> Comparisons:
        """Derive the records again from the kept trainings, whose seeds follow from the forecast."""
        load_results([self.run])
        yield from self._kept_trainings()

    def _kept_trainings(self) -> Comparisons:
        """Compare kept trainings with their runs, as far as those are on disk."""
        for name, run in read_runs(self.run).items():
            place = self.run.parent / name
            if not place.is_dir():
                self.absent.append(name)
                self.left.append(f"{self.run.name}: its trainings, which need their processors and hours")
            elif run.seal:
                yield Remade(f"kept training {name}", run, kept(place), f"{name} gives")
                self.check(place)

    def report(self) -> Comparisons:
        """Make the page and the files beside it again; they must be equal byte for byte."""
        if not (self.run / REPORT).is_dir():
            return
        from mlm_repro.reports.page import write_report
        from mlm_repro.reports.report import Inputs, assemble

        inputs = Inputs.of_built(self.run)
        for path in inputs.runs:
            if not is_sealed(path):
                yield f"{REPORT} was made of {path.name}, which is not there"
                return
            if path.resolve() == self.run.resolve():
                yield f"{REPORT} was made of the run that it is of"
                return
            self.check(path, strictly=False)
        with tempfile.TemporaryDirectory() as folder:
            write_report(assemble(inputs), Path(folder))
            made, here = _files(Path(folder)), _files(self.run / REPORT)
            if others := sorted(name for name in made | here if made.get(name) != here.get(name)):
                yield (
                    f"{REPORT}/{others[0]} is not what its inputs give ({len(others)} files are not): it was changed, "
                    f"or made by another version or elsewhere; `{inputs.command}` makes it again"
                )


def _alone(made: Callable[[Path], Comparisons]) -> Callable[[RunCheck], Comparisons]:
    """Wrap what a room declares of its kind of run, which needs its files alone."""
    return wraps(made)(lambda check: made(check.run))


MADE: dict[str, tuple[Callable[[RunCheck], Comparisons], ...]] = {
    **{kind: (_alone(stages),) for kind in KINDS if kind.startswith("data-")},
    "data": (_alone(card),),
    "training": (RunCheck.datasets, _alone(metrics), _alone(checkpoints)),
    "experiment": (RunCheck.numbers,),
    EXPERIMENTS: (RunCheck.study,),
    "forecast": (_alone(forecast),),
    ABLATION: (RunCheck.ablation,),
    "ladder": (RunCheck.ladder,),
    "against": (RunCheck.against,),
    "reproduction": (
        _alone(models), RunCheck.trainings, _alone(evaluations), _alone(records), RunCheck.report,
    ),
}  # fmt: skip
"""All that is made again of each kind of run, beside files, keys, name and identity."""


def _measured_again(experiment: Experiment, mode: str) -> list[Record]:
    """The records of an experiment. Raises DataMissing for one that takes long or is no longer measured."""
    if mode == "simulate":
        with tempfile.TemporaryDirectory() as folder:
            return read_records(run_experiment(experiment, Path(folder))[0].path / RECORDS)
    if not experiment.measures:
        raise DataMissing("an earlier version measured it")
    if experiment.measures in TAKES_LONG:
        raise DataMissing(f"it {TAKES_LONG[experiment.measures]}")
    about: Line = {"experiment": experiment.name, "source": ""}
    return [Record(**about | line) for line in measure(experiment)]


def _files(folder: Path) -> dict[str, str]:
    """Digest of each file below a folder but its seal."""
    paths = (path for path in folder.rglob("*") if not path.is_dir() and path.name != MARKER)
    return {str(path.relative_to(folder)): sha256_file(path) for path in paths}
