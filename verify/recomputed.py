"""Check a run against its inputs by making its numbers and its page again. Imports no torch.

A seal proves that nothing changed since it was made. If somebody edits files and seals them anew, the other
files of the run, and the runs it was made of that are on disk, contradict the edit.
"""

import math
import tempfile
from collections.abc import Callable, Iterable, Iterator
from itertools import zip_longest
from pathlib import Path

import numpy as np
from pydantic import BaseModel

from data_pipeline.files import DATASET, LEDGER, DataCard, Ledger, dataset_digest, named_datasets
from data_pipeline.passes.overlap import RESULT as OVERLAP
from engine.config import RunConfig
from engine.run.files import METRICS, SUMMARY, TIMELINE, read_metrics, read_steps, read_summary, read_validations
from engine.run.resolved import read_run_config
from evaluation.schema import ClozeResult, PerplexityResult
from experiments.benchmark import AGAINST
from experiments.catalogue import ABLATION
from experiments.files import EVALUATIONS, FORECAST, NOT_RUN, SCORES, LadderResult, LadderScores, ReproductionScores
from experiments.files import LADDER as LADDER_RESULT
from experiments.forecast.ladder import derive
from experiments.forecast.trainings import keep, read_kept
from experiments.reproduce.files import LADDER, ReproducedModel, ReproductionSummary
from experiments.reproduce.plan import twin_rule
from experiments.reproduce.reproduction import (
    RESULTS,
    derived_records,
    derived_scores,
    hardware_of,
    keep_training,
    reproduced_model,
    shape_of,
)
from experiments.reproduce.steps import TASKS, evaluation_file
from experiments.sealed import digest_of_numbers
from experiments.verdicts import load_results
from lineage.atomic import parse_json
from lineage.chain import broken_links
from lineage.config import parse_config
from lineage.digest import MARKER, check_seal, is_sealed, read_digest, sealed_files, sha256_file, sha256_json
from lineage.errors import DataMissing, UserError
from lineage.files import Manifest, one_line, read_document, read_object, read_values
from lineage.records import RECORDS, Record, read_records
from lineage.run import MANIFEST, RunDirectory
from lineage.shipped import model_file
from lineage.verified import check_seal_once
from reports.engines import read_engines
from verify import recounted
from verify.kinds import KINDS, hidden, misfits
from verify.recounted import SAME

KEPT, REPORT = "training", "report"
Check = Callable[[], Iterable[str]]


class RunCheck:
    """Differences between a run and its inputs, and between those of its inputs that are on disk and theirs."""

    def __init__(self, run: Path) -> None:
        self.run, self.manifest = run, read_document(run / MANIFEST, Manifest)
        self.broken: list[str] = []
        """A sentence for each difference."""
        self.absent: list[str] = []
        """Names of inputs that are not on disk."""
        self.compared: list[str] = []
        """Names of what was compared."""
        by_kind: dict[str, list[tuple[str, Check]]] = {
            "reproduction": [
                ("models", self._models), ("trainings", self._trainings), ("evaluations", self._evaluations),
                ("records", self._records), ("report", self._report),
            ],
            "experiment": [("records", self._numbers)],
            "training": [("datasets", self._datasets), ("metrics and summary", self._curve)],
            "data": [("data card, ledger, token files and documents", self._card)],
            "ladder": [("forecast, trainings, evaluations and records", self._ladder)],
            ABLATION: [("forecast, trainings and records", self._ablation)],
            "forecast": [("forecast", self._forecast)],
            "against": [("disagreements", self._against)],
        }  # fmt: skip
        checks: list[tuple[str, Check]] = [("files, keys, name and identity", self._described)]
        of_a_verb: list[tuple[str, Check]] = [("counts", self._counts)] * self.manifest.kind.startswith("data-")
        for name, check in (*checks, *by_kind.get(self.manifest.kind, of_a_verb)):
            try:
                self.broken += check()
                self.compared.append(name)
            except (UserError, OSError, LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
                said = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {one_line(error)}"
                self.broken.append(f"{run.name} cannot be checked: {said}")

    def _described(self) -> Iterator[str]:
        """Check that the run is of a known kind, with the files, keys and name of that kind, and belongs together."""
        if self.manifest.kind not in KINDS:
            yield f"{self.run.name} is of the kind {self.manifest.kind!r}, of which nothing is known"
            return
        yield from misfits(self.run, KINDS[self.manifest.kind], read_object(self.run / MANIFEST))
        yield from broken_links(self.run)
        self.absent += [f"{name} in {self.run.name}, which no seal covers" for name in hidden(self.run)]

    def _made_of(self, name: str, place: Path, digest: Callable[[Path], str]) -> Iterator[str]:
        """Check an input: its digest, if it is on disk, and then the input as a run."""
        if not is_sealed(place):
            self.absent.append(f"{name} ({place.name})")
            return
        if digest(place) != self.manifest.parents.get(name):
            yield f"{self.run.name} was not made of {place.name} as it is here: its digest differs"
        check_seal_once(place)
        other = RunCheck(place)
        self.absent += other.absent
        yield from other.broken

    # -- a dataset ------------------------------------------------------------------------------------------------

    def _card(self) -> Iterator[str]:
        """Compare the data card with the sealed files and with the ledger."""
        card, sealed = read_document(self.run / DATASET, DataCard), sealed_files(self.run)
        for name, file in card.files.items():
            if sealed.get(name) != file.to_json():
                yield f"{name} is not the file that {DATASET} describes"
        yield from self._counted(card)
        yield from recounted.of_dataset(self.run, card)

    def _counts(self) -> Iterator[str]:
        if (self.run / DATASET).is_file():
            yield from self._card()
        elif (self.run / LEDGER).is_file():
            yield from recounted.of_ledger(read_document(self.run / LEDGER, Ledger))
        else:
            yield from recounted.of_overlap(self.run / OVERLAP)

    def _counted(self, card: DataCard) -> Iterator[str]:
        ledger = read_document(self.run / LEDGER, Ledger)
        yield from recounted.of_ledger(ledger)
        amounts = {name: (split.documents, split.bytes, split.tokens) for name, split in card.splits.items()}
        counted = {name: (split.documents, split.bytes, split.tokens) for name, split in ledger.splits.items()}
        if (card.source, amounts) != (ledger.source, counted):
            yield f"{DATASET} and {LEDGER} differ in what was read and kept"
        for stage in ledger.stages:
            amount = card.stages.get(stage.name)
            if amount is None or (amount.documents, amount.tokens) != (stage.documents_out, stage.tokens_out):
                yield f"{DATASET} and {LEDGER} differ in what the stage {stage.name} kept"

    # -- a training -----------------------------------------------------------------------------------------------

    def _datasets(self) -> Iterator[str]:
        for dataset in named_datasets(self.run):
            yield from self._made_of(dataset.parent, dataset.place, dataset_digest)

    def _curve(self) -> Iterator[str]:
        """Check that the metrics have every iteration and end as the summary says."""
        if not is_sealed(self.run):
            return
        config = parse_config(self.manifest.config, RunConfig, f"{self.run.name}/{MANIFEST}")
        iterations = config.train.iterations
        yield from recounted.of_training(self.run, config)
        if [step.iteration for step in read_steps(self.run)] != list(range(1, iterations + 1)):
            yield f"{METRICS} of {self.run.name} does not have each of {iterations} iterations once and in order"
        yield from _ending(self.run)

    # -- a reproduction -------------------------------------------------------------------------------------------

    @property
    def _summary(self) -> ReproductionSummary:
        return read_document(self.run / "summary.json", ReproductionSummary)

    def _trainings(self) -> Iterator[str]:
        """Compare the summary and the kept curves with the training run of every model."""
        parents = {model.run.rpartition("-")[0]: model for model in self._summary.models}
        if self.manifest.parents.keys() != {"dataset", *parents}:
            yield f"{self.run.name} was made of {', '.join(self.manifest.parents)}, not of the models in summary.json"
        for name, model in parents.items():
            place, copy = self.run.parent / model.run, self.run / KEPT / model.name
            yield from self._made_of(name, place, read_digest)
            if copy.is_dir():
                yield from _ending(copy)
            if not is_sealed(place):
                continue
            training = RunDirectory(place)
            if reproduced_model(read_run_config(model_file(model.series)), training) != model:
                yield f"summary.json says of {model.name} what {model.run} does not"
            if self._summary.twin_rule != twin_rule(_recipe(place)):
                yield f"summary.json states another rule for twins than {model.run}"
            with tempfile.TemporaryDirectory() as folder:
                keep_training(training, Path(folder))
                yield from _differing(copy, Path(folder), (SUMMARY, TIMELINE), model.run)
                if read_metrics(copy) != read_metrics(Path(folder)):
                    yield f"{KEPT}/{model.name}/{METRICS} is not what {model.run} gives"
            if training.manifest["parents"]["dataset"] != self.manifest.parents["dataset"]:
                yield f"{model.run} was trained on another dataset than {MANIFEST} names"
            for dataset in named_datasets(place):
                if is_sealed(dataset.place):
                    yield from _differing(self.run, dataset.place, (DATASET, LEDGER), dataset.place.name)

    def _models(self) -> Iterator[str]:
        """Check that the summary describes the models that the manifest asks for."""
        summary, config = self._summary, self.manifest.config
        names = LADDER[: LADDER.index(config["target"]) + 1]
        if (summary.target, summary.mode) != (config["target"], config["mode"]):
            yield f"summary.json is of {summary.target}, {summary.mode}; {MANIFEST} asks for other work"
        if names != tuple(dict.fromkeys(model.series for model in summary.models)):
            yield f"summary.json does not have the models {', '.join(names)} in this order"
        for model in summary.models:
            published = shape_of(read_run_config(model_file(model.series)))
            if model.published != published:
                yield f"summary.json describes the published {model.name} as its recipe does not"
            same = model.trained.model_copy(update={
                "vocab_size": published.vocab_size, "parameters": published.parameters
            }) == published  # fmt: skip
            if summary.mode != "scaled" and not same:
                yield f"{model.name} is called {summary.mode} and is a smaller model: its numbers are scaled"
        said = (summary.hardware, summary.commit, summary.source)
        started = self.manifest.environment
        card = read_document(self.run / DATASET, DataCard)
        yield from self._counted(card)
        if said != (hardware_of(started), str(started.source.get("commit") or ""), card.source):
            yield f"summary.json names other hardware, code or data than {MANIFEST} and {DATASET}"
        if not all(summary.target in command for command in summary.commands.values()):
            yield "summary.json has a command that makes something else"

    def _evaluations(self) -> Iterator[str]:
        """Check the checkpoint, the kind and the derived numbers of every evaluation."""
        kind = "scaled" if self._summary.mode == "scaled" else "measured"
        files = {evaluation_file(self.run, model.name, task) for model in self._summary.models for task in TASKS}
        if files != set((self.run / "evaluations").iterdir()):
            yield f"evaluations/ does not have one file for each model and each of {', '.join(TASKS)}"
        tokenizer = read_document(self.run / DATASET, DataCard).tokenizer.digest
        for model in self._summary.models:
            for task, of in RESULTS.items():
                path = evaluation_file(self.run, model.name, task)
                result = read_document(path, of)
                where = f"evaluations/{path.name}"
                made = (result.kind, result.checkpoint.partition("/")[0], result.checkpoint_digest)
                if made != (kind, model.run, model.checkpoint_digest) or result.tokenizer_digest != tokenizer:
                    yield f"{where} is not a {kind} evaluation of the checkpoint and tokenizer of {model.name}"
                if result.partial != ("; only " in result.protocol):
                    yield f"{where} contradicts itself about being partial"
                yield from _unlike(result, recounted.follows(result), where, "its own sums give")
                yield from self._counted_again(result, model, where)

    def _counted_again(
        self, result: PerplexityResult | ClozeResult, model: ReproducedModel, where: str
    ) -> Iterator[str]:
        """Count what the text and the tokenizer give, and the answers that are kept."""
        training, config = self.run.parent / model.run, self.manifest.config
        limit = config["examples" if isinstance(result, ClozeResult) else "windows"]
        if is_sealed(training) and (places := [each.place for each in named_datasets(training) if each.is_here]):
            try:
                context = _recipe(training).model.seq_length
                yield from _unlike(result, recounted.counts(result, places[0], context, limit), where, "its text gives")
            except DataMissing as missing:
                self.absent.append(f"{missing} of {where}")
        else:
            self.absent.append(f"text and tokenizer of {where}")
        if isinstance(result, ClozeResult) and not result.examples:
            yield from self._answers_of_old(result, model, where)

    def _answers_of_old(self, result: ClozeResult, model: ReproducedModel, where: str) -> Iterator[str]:
        """Count the answers in the examples of a reproduction of an earlier version."""
        path = self.run / "examples.jsonl"
        about, *shown = [parse_json(line) for line in path.read_bytes().splitlines()] if path.is_file() else [{}]
        right = [example["correct"][about["models"].index(model.name)] for example in shown]
        if len(right) < result.num_examples:
            self.absent.append(f"answers of {where}")
        if right and not sum(right) <= result.num_correct <= result.num_examples - right.count(False):
            yield f"{where} says {result.num_correct} right answers; {path.name} has {sum(right)} in {len(right)}"

    def _records(self) -> Iterator[str]:
        """Compute scores and records again; claims may be worded differently by now."""
        scores = self.run / SCORES
        if scores.is_file() and not _alike(
            read_document(scores, ReproductionScores), derived_scores(RunDirectory(self.run), self._summary)
        ):
            yield f"{SCORES} is not what the evaluations give"
        actual = read_records(self.run / RECORDS)
        if not (self.run / KEPT).is_dir():
            self.absent.append(f"the metrics behind {RECORDS}")
            actual = [record for record in actual if record.x is None or record.kind == "published"]
        expected = derived_records(RunDirectory(self.run), self._summary)
        for says, gives in zip_longest(*map(_in_order, (actual, expected))):
            if not _alike(says, gives):
                yield f"{RECORDS} has {_shown(says)} where what it was made of gives {_shown(gives)}"

    # -- an experiment --------------------------------------------------------------------------------------------

    def _forecast(self) -> Iterator[str]:
        """Compare the forecast with the digest that it was sealed with."""
        if sha256_file(self.run / FORECAST) != self.manifest.config["sha256"]:
            yield f"{FORECAST} of {self.run.name} is not the one that was sealed"
        values = read_values(self.run / FORECAST)
        made_of = values.get("made_of") or {name: each for name, each in values["searched"].items() if each}
        if made_of != self.manifest.parents:
            yield f"{FORECAST} of {self.run.name} was made of other trainings than {MANIFEST} names"

    def _against(self) -> Iterator[str]:
        """Compare the curves of two engines with what is said of them."""
        result, config = read_engines(self.run), self.manifest.config
        if (result.title, result.setting, result.notes) != (config["title"], config["setting"], config["notes"]):
            yield f"{AGAINST} of {self.run.name} has another title, setting or notes than {MANIFEST}"
        yield from recounted.of_engines(self.run)

    def _numbers(self) -> Iterator[str]:
        """Compare the records with the digest that the run was begun with."""
        config, records = self.manifest.config, read_records(self.run / RECORDS)
        load_results([self.run])
        of = (f"{self.manifest.name}-{self.manifest.identity[:8]}", sha256_json(config), config["experiment"]["name"])
        if any((record.source, record.digest, record.experiment) != of for record in records):
            yield f"{RECORDS} of {self.run.name} has records of another run"
        if "records" not in config:  # a run of an earlier version
            self.absent.append(f"the digest of the records of {self.run.name}")
            return
        refused = read_values(self.run / NOT_RUN) if (self.run / NOT_RUN).is_file() else []
        if (digest_of_numbers(records), sha256_json(refused)) != (config["records"], config["refused"]):
            yield f"{RECORDS} of {self.run.name} does not have the numbers that the run was begun with"

    # -- a ladder -------------------------------------------------------------------------------------------------

    def _ladder(self) -> Iterator[str]:
        """Derive result and records again from the kept trainings, whose scores are of one text."""
        sizes: dict[str, list[float]] = {}
        for path in sorted((self.run / EVALUATIONS).glob("*.json")):
            for text, score in read_document(path, LadderScores).texts.items():
                sizes.setdefault(text, []).append(sum(score.nll) / score.bits_per_byte / sum(score.words))
        for text, bytes_of in sizes.items():
            if not np.allclose(bytes_of, bytes_of[0], rtol=1e-4):
                yield f"the bits per byte of {text} in {self.run.name} are not of the losses beside them"
        result, records = derive(self.run)
        if not _alike(result, read_document(self.run / LADDER_RESULT, LadderResult)):
            yield f"{LADDER_RESULT} of {self.run.name} is not what its trainings give"
        if not _alike(records, read_records(self.run / RECORDS)):
            yield f"{RECORDS} of {self.run.name} does not have the numbers of {LADDER_RESULT}"
        yield from self._kept_trainings()

    def _ablation(self) -> Iterator[str]:
        """Derive the records again from the kept trainings, whose seeds follow from the forecast."""
        load_results([self.run])
        yield from self._kept_trainings()

    def _kept_trainings(self) -> Iterator[str]:
        """Compare kept trainings with their runs, as far as those are on disk."""
        for trained in read_kept(self.run):
            place = self.run.parent / trained.folder.name
            if not place.is_dir():
                self.absent.append(trained.folder.name)
            elif trained.is_finished:
                check_seal_once(place)
                with tempfile.TemporaryDirectory() as folder:
                    keep(place, Path(folder))
                    made = Path(folder) / trained.folder.parent.name / place.name
                    yield from _differing(
                        trained.folder, made, sorted(_files(made) | _files(trained.folder)), place.name
                    )

    # -- a report -------------------------------------------------------------------------------------------------

    def _report(self) -> Iterator[str]:
        """Make the page and the files beside it again; they must be equal byte for byte."""
        if not (self.run / REPORT).is_dir():
            return
        from reports.page import write_report
        from reports.report import Inputs, assemble

        inputs = Inputs.of_built(self.run)
        for path in inputs.runs:
            if not is_sealed(path):
                yield f"{REPORT} was made of {path.name}, which is not there"
                return
            check_seal(path)
            yield from RunCheck(path).broken
        with tempfile.TemporaryDirectory() as folder:
            write_report(assemble(inputs), Path(folder))
            made, here = _files(Path(folder)), _files(self.run / REPORT)
            others = [name for name in sorted(made | here) if not _same(Path(folder) / name, self.run / REPORT / name)]
            if others:
                yield (
                    f"{REPORT}/{others[0]} is not what its inputs give ({len(others)} files are not): it was changed, "
                    f"or made by another version or elsewhere; `{inputs.command}` makes it again"
                )


def _unlike(result: BaseModel, values: dict[str, float], where: str, by: str) -> Iterator[str]:
    for name, value in values.items():
        said = getattr(result, name)
        if said is None or not math.isclose(value, said, rel_tol=SAME):
            yield f"{where} says {said!r} as {name}; {by} {value!r}"


def _in_order(records: Iterable[Record]) -> list[Record]:
    """Sort the published records and drop their words; the other records follow in their order."""
    published = [record for record in records if record.kind == "published"]
    bare = [record.model_copy(update={"source": "", "note": ""}) for record in published]
    return [*sorted(bare, key=Record.model_dump_json), *(record for record in records if record.kind != "published")]


def _ending(folder: Path) -> Iterator[str]:
    """Compare the last validation in the metrics with the summary."""
    done, validations = read_summary(folder), read_validations(folder)
    last = validations[-1] if validations else None
    said = (done.iterations, done.validation_loss, done.validation_perplexity)
    if last is None or said != (last.iteration, last.loss, last.perplexity):
        yield f"the summary of {folder.name} says another end of training than its {METRICS}"
    for validation in validations:
        if not math.isclose(validation.perplexity, math.exp(min(validation.loss, 20)), rel_tol=SAME):
            yield f"{METRICS} of {folder.name} has a perplexity at {validation.iteration} that is not of its loss"


def _recipe(training: Path) -> RunConfig:
    return parse_config(read_document(training / MANIFEST, Manifest).config, RunConfig, f"{training.name}/{MANIFEST}")


def _differing(folder: Path, made: Path, names: Iterable[str], by: str) -> Iterator[str]:
    for name in names:
        if (folder / name).exists() | (made / name).exists() and not _same(folder / name, made / name):
            yield f"{folder.name}/{name} is not what {by} gives"


def _files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir()} - {MARKER}


def _alike(value: object, other: object) -> bool:
    """True if two values, or files of them, are equal up to rounding."""
    if isinstance(value, BaseModel) and isinstance(other, BaseModel):
        return _alike(value.model_dump(), other.model_dump())
    if isinstance(value, dict) and isinstance(other, dict):
        return value.keys() == other.keys() and all(_alike(inner, other[key]) for key, inner in value.items())
    if isinstance(value, list | tuple) and isinstance(other, list | tuple):
        return len(value) == len(other) and all(map(_alike, value, other))
    if isinstance(value, float) and isinstance(other, float):
        return math.isclose(value, other, rel_tol=SAME)
    return value == other


def _same(path: Path, other: Path) -> bool:
    return path.is_file() and other.is_file() and sha256_file(path) == sha256_file(other)


def _shown(record: Record | None) -> str:
    if record is None:
        return "nothing"
    at = "" if record.x is None else f" at {record.x:g}"
    return f"{record.value!r} for {record.experiment} {record.series} {record.quantity}{at} ({record.kind})"
