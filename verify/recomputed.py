"""Check a run against its inputs by making its numbers, sums and page again. Imports no torch.

If somebody edits files and seals them anew, the other files of the run, and the runs it was made of, contradict it.
"""

import math
import random
import secrets
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from itertools import pairwise, zip_longest
from pathlib import Path
from typing import NamedTuple

import numpy as np
from pydantic import BaseModel

from mlm_repro.data_pipeline.files import DATASET, LEDGER, DataCard, Ledger, dataset_digest, named_datasets
from mlm_repro.data_pipeline.passes.overlap import RESULT as OVERLAP
from mlm_repro.data_pipeline.tokens.token_file import TokenFile
from mlm_repro.data_pipeline.tokens.tokenizer import Tokenizer
from mlm_repro.engine.batch_schedule import BatchSchedule
from mlm_repro.engine.config import RunConfig
from mlm_repro.engine.costs import parameter_count, tokens_trained
from mlm_repro.engine.optim.schedule import clock, learning_rate
from mlm_repro.engine.run.files import (
    METRICS,
    SUMMARY,
    TrainingSummary,
    Validation,
    read_metrics,
    read_steps,
    read_summary,
    read_validations,
    validations_in,
)
from mlm_repro.engine.run.resolved import read_run_config
from mlm_repro.evaluation.recount import counts, follows
from mlm_repro.evaluation.schema import ClozeResult, PerplexityResult
from mlm_repro.experiments.benchmark import AGAINST
from mlm_repro.experiments.catalogue import ABLATION, TAKES_LONG, Experiment, load_experiments
from mlm_repro.experiments.files import (
    EVALUATIONS,
    EXPERIMENTS,
    FORECAST,
    NOT_RUN,
    RUNS,
    SCORES,
    LadderResult,
    ReproductionScores,
    read_evaluations,
    read_runs,
)
from mlm_repro.experiments.files import LADDER as LADDER_RESULT
from mlm_repro.experiments.forecast.ladder import derive, read_scores
from mlm_repro.experiments.forecast.trainings import kept
from mlm_repro.experiments.reproduce.files import LADDER, ReproducedModel, ReproductionSummary
from mlm_repro.experiments.reproduce.plan import twin_rule
from mlm_repro.experiments.reproduce.reproduction import (
    RESULTS,
    derived_records,
    derived_scores,
    hardware_of,
    keep_training,
    reproduced_model,
    results_of,
    shape_of,
)
from mlm_repro.experiments.reproduce.steps import evaluation_name
from mlm_repro.experiments.runner import measure, run_experiment
from mlm_repro.experiments.sealed import Line, digest_of_numbers
from mlm_repro.experiments.verdicts import load_results, parts_of
from mlm_repro.lineage.atomic import parse_json
from mlm_repro.lineage.chain import STATE, broken_links, broken_manifest, complete_checkpoints, iteration_of
from mlm_repro.lineage.config import parse_config
from mlm_repro.lineage.digest import MARKER, is_sealed, read_digest, sealed_files, sha256_file, sha256_json
from mlm_repro.lineage.errors import DataMissing, UserError
from mlm_repro.lineage.files import (
    GIVES,
    Manifest,
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
from mlm_repro.verify.kinds import KINDS, hidden, kind_of, misfits, parts_within, unread
from mlm_repro.verify.weights import wrong_tensors

REPORT = "report"
SAMPLED_DOCUMENTS = 64
ROUNDING = {"largest_logit_difference": 3}
"""Digits after the point of quantities that another processor rounds otherwise."""
WINDOW = 128
"""Iterations whose loss and gradient norm a checkpoint keeps."""


class Remade(NamedTuple):
    """A value that files state, beside what is made again of what they were made of."""

    where: str
    said: object
    gives: object
    by: str = GIVES


Comparisons = Iterator[str | Remade]


class RunCheck:
    """Differences between a run and its inputs, and between those of its inputs that are on disk and theirs."""

    def __init__(self, run: Path, seen: set[Path] | None = None, at_length: bool = False) -> None:
        """Compare all that MADE names of the run's kind; `at_length` measurements of seconds are repeated too.

        Runs that were `seen` on the way here are not looked at again.
        """
        self.run, self.manifest = run, read_document(run / MANIFEST, Manifest)
        self.seen, self.at_length = seen if seen is not None else set[Path](), at_length
        self.seen.add(run.resolve())
        self.broken: list[str] = []
        """A sentence for each difference."""
        self.absent: list[str] = []
        """Names of inputs that are not on disk."""
        self.left: list[str] = []
        """Sentences on what was not made again, with what it needs."""
        self.compared: list[str] = []
        """Names of what was compared."""
        self.counted: Counter[str] = Counter()
        """How many records were made again."""
        for part in (RunCheck.identity, *MADE.get(self.manifest.kind, ())):
            try:
                for each in part(self):
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
                yield from self._other(inner)
            elif (kind := kind_of(inner)) in KINDS:
                yield from misfits(inner, KINDS[kind])
            else:
                yield f"{inner.name} in {self.run.name} is of no kind that is known"
        schemas: dict[str, type[BaseModel]] = {MANIFEST: Manifest, DATASET: DataCard, LEDGER: Ledger}
        if self.manifest.kind == "reproduction":
            schemas[SUMMARY] = ReproductionSummary
        for pattern, schema in schemas.items():
            for path in self.run.glob(pattern):
                yield from unread(read_object(path), schema, f"{path.name} of {self.run.name}")
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
        yield from self._other(place)

    def _other(self, place: Path) -> Comparisons:
        """Check another run to its leaves, once."""
        if place.resolve() in self.seen:
            return
        for directory in (place, *parts_within(place)):
            if is_sealed(directory):
                check_seal_once(directory)
        other = RunCheck(place, self.seen, self.at_length)
        self.absent += other.absent
        self.left += other.left
        self.counted += other.counted
        yield from other.broken

    def checkpoints(self) -> Comparisons:
        """Compare each checkpoint with the metrics, its tensors with their statistics, its tokenizer with the data."""
        if not is_sealed(self.run):
            return
        steps = [step for step in read_steps(self.run) if step.gradient_norm is not None]
        places, count = complete_checkpoints(self.run), _recipe(self.run).train.iterations
        newest = max(map(iteration_of, places), default=0)
        yield Remade(f"newest checkpoint of {self.run.name}", newest, count, "its configuration gives")
        data = [each.place for each in named_datasets(self.run) if each.is_here]
        tokenizer = sealed_files(data[0]) if data else {}
        for path in places:
            seen = [[step.loss, step.gradient_norm] for step in steps if step.iteration <= iteration_of(path)][-WINDOW:]
            recent = read_object(path / STATE).get("recent", [])
            began = max(0, len(recent) - len(seen)) if "continues" in self.manifest.parents else 0
            yield Remade(f"{path.name}: recent losses and norms", recent[began:], seen, f"{METRICS} gives")
            files = {name: it for name, it in sealed_files(path).items() if name.startswith("tokenizer/")}
            if data:
                yield Remade(f"{path.name}", files, {name: tokenizer.get(name) for name in files}, "its dataset has")
            yield from wrong_tensors(path)

    def card(self) -> Comparisons:
        """Compare the data card with the sealed files, the ledger, token files, documents and tokenizer."""
        run, card, sealed = self.run, read_document(self.run / DATASET, DataCard), sealed_files(self.run)
        files = {name: file.to_json() for name, file in card.files.items()}
        yield Remade(f"{DATASET}: files", files, {name: sealed.get(name) for name in files})
        yield from self._counted(card)
        tokenizer = Tokenizer.load(run / "tokenizer")
        said = (card.tokenizer.digest, card.vocab_size)
        yield Remade(f"{DATASET}: tokenizer", said, (tokenizer.digest, tokenizer.vocab_size))
        for name, split in card.splits.items():
            tokens, documents = TokenFile(run / split.prefix), run / "documents" / f"{name}.jsonl"
            where, counted = f"{DATASET}: {split.prefix}", (len(tokens.document_index) - 1, len(tokens.tokens))
            yield Remade(f"{where}: documents and tokens", (split.documents, split.tokens), counted)
            if not documents.is_file():
                continue
            with documents.open("rb") as file:
                texts = [parse_json(line)["text"] for line in file]
            size = sum(len(text.encode("utf-8", "surrogatepass")) for text in texts)
            yield Remade(f"{where}: documents and bytes", (split.documents, split.bytes), (len(texts), size))
            # nobody knows before the seal which documents these are
            draw, amount = random.Random(f"{read_digest(run)} {secrets.token_hex()}"), min(counted[0], len(texts))
            for place in sorted(draw.sample(range(amount), min(amount, SAMPLED_DOCUMENTS))):
                first, end = tokens.document_index[place : place + 2]
                has = np.concatenate([tokens[each] for each in range(first, end)]).tolist()
                due = [*tokenizer.encode(texts[place]), tokenizer.end_of_text]
                yield Remade(f"{split.prefix}: tokens of document {place}", has, due)

    def counts(self) -> Comparisons:
        """Check what a verb of mlm-data states."""
        if (self.run / DATASET).is_file():
            yield from self.card()
        elif (self.run / LEDGER).is_file():
            yield from self._attrition(read_document(self.run / LEDGER, Ledger))
        else:
            for name, measured in read_object(self.run / OVERLAP)["test_sets"].items():
                ngrams, present = (sum(column) for column in zip(*measured["documents"], strict=True))
                due = {"ngrams": ngrams, "found": present, "percent": 100 * present / ngrams if ngrams else 0.0}
                said = {**measured["occurrences"], "percent": measured["percent"]}
                yield Remade(f"{OVERLAP}: {name}", said, due)

    def _attrition(self, ledger: Ledger) -> Comparisons:
        """Compare what stages took in, kept and dropped, and what the splits have."""
        for stage in ledger.stages:
            amount = stage.documents_out + sum(dropped.documents for dropped in stage.dropped.values())
            yield Remade(f"{LEDGER}: documents into {stage.name}", stage.documents_in, amount)
        for before, after in pairwise(ledger.stages):
            yield Remade(f"{LEDGER}: documents into {after.name}", after.documents_in, before.documents_out)
        if splits := ledger.splits.values():
            said = sum(split.documents for split in splits), sum(split.bytes or 0 for split in splits)
            due = ledger.stages[-1].documents_out, ledger.stages[-1].bytes_out
            yield Remade(f"{LEDGER}: documents and bytes of its splits", said, due)

    def _counted(self, card: DataCard) -> Comparisons:
        """Compare a data card with its ledger."""
        ledger = read_document(self.run / LEDGER, Ledger)
        yield from self._attrition(ledger)
        stages = {stage.name: (stage.documents_out, stage.tokens_out) for stage in ledger.stages}
        of_card = {name: (x.documents, x.tokens) for name, x in card.stages.items() if name in stages}
        said, due = ({"source": each.source, "splits": {
            name: (split.documents, split.bytes, split.tokens) for name, split in each.splits.items()
        }} for each in (card, ledger))  # fmt: skip
        yield Remade(DATASET, said | {"stages": of_card}, due | {"stages": stages}, f"{LEDGER} says")

    def datasets(self) -> Comparisons:
        for dataset in named_datasets(self.run):
            yield from self._made_of(dataset.parent, dataset.place, dataset_digest)

    def metrics(self) -> Comparisons:
        """Check that the metrics have every iteration, and that they and the configuration give the summary."""
        if not is_sealed(self.run):
            return
        config, done = _recipe(self.run), read_summary(self.run)
        count, schedule, where = config.train.iterations, BatchSchedule(config.train), f"{SUMMARY} of {self.run.name}"
        yield _as_said(done, {
            "iterations": count, "tokens": tokens_trained(config.model, config.train),
            "parameters": parameter_count(config.model), "seed": done.seed and config.train.seed,
        }, where, "its configuration gives")  # fmt: skip
        seconds = done.tokens / done.tokens_per_second
        if abs(seconds - done.train_seconds) > 0.01 + 0.001 * done.train_seconds:
            yield Remade(f"{where}: train_seconds", done.train_seconds, seconds, "its tokens and rate give")
        if [step.iteration for step in read_steps(self.run)] != list(range(1, count + 1)):
            yield f"{METRICS} of {self.run.name} does not have each of {count} iterations once and in order"
        updates = updated_samples = 0
        for line in (line for line in read_metrics(self.run) if line["kind"] == "train" and "samples" in line):
            due: dict[str, float] = {"samples": schedule.samples_before(line["iteration"])}
            if set(self.manifest.parents) == {"dataset"}:  # its updates are counted from 1
                due["learning_rate"] = learning_rate(config.train, clock(config.train, updates, updated_samples))
            if not line.get("skipped"):
                updates, updated_samples = updates + 1, updated_samples + schedule.batch_size(line["iteration"] - 1)
            for name, value in due.items():
                yield Remade(f"{METRICS}: {name} at {line['iteration']}", line[name], value, "its schedule gives")
        yield from _ending(done, read_validations(self.run), self.run.name)

    @property
    def _summary(self) -> ReproductionSummary:
        return read_document(self.run / SUMMARY, ReproductionSummary)

    def trainings(self) -> Comparisons:
        """Compare the summary and the kept curves with the training run of every model."""
        parents = {model.run.rpartition("-")[0]: model for model in self._summary.models}
        runs = read_runs(self.run)
        yield Remade(f"{MANIFEST}: parents", sorted(self.manifest.parents), sorted({"dataset", *parents}))
        for name, model in parents.items():
            place, copy = self.run.parent / model.run, runs.get(model.name)
            yield from self._made_of(name, place, read_digest)
            if copy:
                copy.check_seal()
                done = parse_document(copy.summary, TrainingSummary, f"{SUMMARY} of {model.name}")
                yield from _ending(done, validations_in(copy.metrics), model.name)
            if not is_sealed(place):
                continue
            training = RunDirectory(place)
            made = reproduced_model(read_run_config(model_file(model.series)), training)
            yield Remade(f"{SUMMARY}: {model.name}", model, made, f"{model.run} gives")
            yield Remade(f"{SUMMARY}: twin_rule", self._summary.twin_rule, twin_rule(_recipe(place)))
            again = keep_training(training)
            if copy and copy.manifest is None:  # of the first release
                again = again.model_copy(update={"manifest": None, "seal": None})
            yield Remade(f"kept training {model.name}", copy, again, f"{model.run} gives")
            data = [run.manifest["parents"]["dataset"] for run in (training, RunDirectory(self.run))]
            yield Remade(f"{MANIFEST}: dataset", data[1], data[0], f"{model.run} was trained on")
            for dataset in named_datasets(place):
                if is_sealed(dataset.place):
                    yield from _differing(self.run, dataset.place, (DATASET, LEDGER), dataset.place.name)

    def models(self) -> Comparisons:
        """Check that the summary describes the models that the manifest asks for."""
        summary, config, started = self._summary, self.manifest.config, self.manifest.environment
        card = read_document(self.run / DATASET, DataCard)
        yield from self._counted(card)
        due = {
            "target": config["target"], "mode": config["mode"], "hardware": hardware_of(started), "source": card.source,
            "commit": str(started.source.get("commit") or ""),
        }  # fmt: skip
        yield _as_said(summary, due, SUMMARY)
        names = dict.fromkeys(model.series for model in summary.models)
        yield Remade(f"{SUMMARY}: models", list(names), [*LADDER[: LADDER.index(config["target"]) + 1]])
        for model in summary.models:
            published = shape_of(read_run_config(model_file(model.series)))
            yield Remade(f"{SUMMARY}: published {model.name}", model.published, published, "its recipe gives")
            same = model.trained.model_copy(update={
                "vocab_size": published.vocab_size, "parameters": published.parameters
            }) == published  # fmt: skip
            if summary.mode != "scaled" and not same:
                yield f"{model.name} is called {summary.mode} and is a smaller model: its numbers are scaled"
        if not all(summary.target in command for command in summary.commands.values()):
            yield f"{SUMMARY} has a command that makes something else"

    def evaluations(self) -> Comparisons:
        """Check the checkpoint, the kind and the derived numbers of every evaluation."""
        kind = "scaled" if self._summary.mode == "scaled" else "measured"
        results, lines = results_of(self.run, self._summary), read_evaluations(self.run)
        yield Remade(EVALUATIONS, sorted(lines), sorted(results))
        tokenizer = read_document(self.run / DATASET, DataCard).tokenizer.digest
        for model in self._summary.models:
            for task, of in RESULTS.items():
                name = evaluation_name(model.name, task)
                result, where = results[name], f"{EVALUATIONS}: {name}"
                yield from unread(lines[name], of, where)
                facts = {"kind": kind, "checkpoint_digest": model.checkpoint_digest, "tokenizer_digest": tokenizer,
                       "partial": "; only " in result.protocol}  # fmt: skip
                yield _as_said(result, facts, where)
                yield Remade(f"{where}: checkpoint", result.checkpoint.partition("/")[0], model.run)
                yield _as_said(result, follows(result), where, "its own sums give")
                yield from self._counted_again(result, model, where)

    def _counted_again(self, result: PerplexityResult | ClozeResult, model: ReproducedModel, where: str) -> Comparisons:
        """Count what the text and the tokenizer give, and the answers that are kept."""
        training, config = self.run.parent / model.run, self.manifest.config
        limit = config["examples" if isinstance(result, ClozeResult) else "windows"]
        if is_sealed(training) and (places := [each.place for each in named_datasets(training) if each.is_here]):
            try:
                context = _recipe(training).model.seq_length
                yield _as_said(result, counts(result, places[0], context, limit), where, "its text gives")
            except DataMissing as missing:
                self.absent.append(f"{missing} of {where}")
        else:
            self.absent.append(f"text and tokenizer of {where}")
        if not isinstance(result, ClozeResult) or result.examples:
            return
        path = self.run / "examples.jsonl"  # of a reproduction of an earlier version
        about, *shown = [parse_json(line) for line in path.read_bytes().splitlines()] if path.is_file() else [{}]
        right = [example["correct"][about["models"].index(model.name)] for example in shown]
        if len(right) < result.num_examples:
            self.absent.append(f"answers of {where}")
        if right and not sum(right) <= result.num_correct <= result.num_examples - right.count(False):
            yield f"{where} says {result.num_correct} right answers; {path.name} has {sum(right)} in {len(right)}"

    def records(self) -> Comparisons:
        """Compute scores and records again; claims may be worded differently by now."""
        run, summary = RunDirectory(self.run), self._summary
        if (self.run / SCORES).is_file():
            scores = read_document(self.run / SCORES, ReproductionScores)
            yield Remade(SCORES, scores, derived_scores(run, summary))
        actual = read_records(self.run / RECORDS)
        if not read_runs(self.run):
            self.absent.append(f"the metrics behind {RECORDS}")
            actual = [record for record in actual if record.x is None or record.kind == "published"]
        for says, gives in zip_longest(*map(_in_order, (actual, derived_records(run, summary)))):
            at = says or gives
            yield Remade(f"{RECORDS}: {at.series} {at.quantity} ({at.kind})", says, gives)

    def forecast(self) -> Comparisons:
        """Compare the forecast with the digest that it was sealed with."""
        yield Remade(f"{FORECAST}: digest", sha256_file(self.run / FORECAST), self.manifest.config["sha256"])
        values = read_values(self.run / FORECAST)
        made_of = values.get("made_of") or {name: each for name, each in values["searched"].items() if each}
        yield Remade(f"{FORECAST}: made_of", made_of, self.manifest.parents, f"{MANIFEST} says")

    def against(self) -> Comparisons:
        """Compare the curves of two engines with what is said of them."""
        result, config = read_engines(self.run), self.manifest.config
        due = {name: config[name] for name in ("title", "setting", "notes")}
        yield _as_said(result, due, AGAINST, f"{MANIFEST} says")
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
                yield from self._other(place)

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
            yield from self._other(path)
        with tempfile.TemporaryDirectory() as folder:
            write_report(assemble(inputs), Path(folder))
            made, here = _files(Path(folder)), _files(self.run / REPORT)
            others = [name for name in sorted(made | here) if not _same(Path(folder) / name, self.run / REPORT / name)]
            if others:
                yield (
                    f"{REPORT}/{others[0]} is not what its inputs give ({len(others)} files are not): it was changed, "
                    f"or made by another version or elsewhere; `{inputs.command}` makes it again"
                )


MADE: dict[str, tuple[Callable[[RunCheck], Comparisons], ...]] = {
    **{kind: (RunCheck.counts,) for kind in KINDS if kind.startswith("data-")},
    "data": (RunCheck.card,),
    "training": (RunCheck.datasets, RunCheck.metrics, RunCheck.checkpoints),
    "experiment": (RunCheck.numbers,),
    EXPERIMENTS: (RunCheck.study,),
    "forecast": (RunCheck.forecast,),
    ABLATION: (RunCheck.ablation,),
    "ladder": (RunCheck.ladder,),
    "against": (RunCheck.against,),
    "reproduction": (
        RunCheck.models, RunCheck.trainings, RunCheck.evaluations, RunCheck.records, RunCheck.report,
    ),
}  # fmt: skip
"""All that is made again of each kind of run, beside files, keys, name and identity."""


def _as_said(result: BaseModel, values: Mapping[str, object], where: str, by: str = GIVES) -> Remade:
    return Remade(where, {name: getattr(result, name) for name in values}, {**values}, by)


def _measured_again(experiment: Experiment, mode: str) -> list[Record]:
    """The records of an experiment. Raises DataMissing for one that takes long."""
    if mode == "simulate":
        with tempfile.TemporaryDirectory() as folder:
            return read_records(run_experiment(experiment, Path(folder))[0].path / RECORDS)
    if experiment.measures in TAKES_LONG:
        raise DataMissing(f"it {TAKES_LONG[experiment.measures]}")
    about: Line = {"experiment": experiment.name, "source": ""}
    return [Record(**about | line) for line in measure(experiment)]


def _in_order(records: Iterable[Record]) -> list[Record]:
    """Sort the published records and drop their words; the other records follow in their order."""
    published = [record for record in records if record.kind == "published"]
    bare = [record.model_copy(update={"source": "", "note": ""}) for record in published]
    return [*sorted(bare, key=Record.model_dump_json), *(record for record in records if record.kind != "published")]


def _ending(done: TrainingSummary, validations: Sequence[Validation], name: str) -> Comparisons:
    """Compare the last validation in the metrics with the summary."""
    where, by = f"{SUMMARY} of {name}", f"its {METRICS} gives"
    said = {"iteration": done.iterations, "loss": done.validation_loss, "perplexity": done.validation_perplexity}
    yield Remade(where, said, {name: getattr(validations[-1], name) for name in said} if validations else None, by)
    for each in validations:
        perplexity = math.exp(min(each.loss, 20))
        yield Remade(f"{METRICS}: perplexity at {each.iteration}", each.perplexity, perplexity, "its loss gives")


def _recipe(training: Path) -> RunConfig:
    return parse_config(read_document(training / MANIFEST, Manifest).config, RunConfig, f"{training.name}/{MANIFEST}")


def _differing(folder: Path, made: Path, names: Iterable[str], by: str) -> Comparisons:
    for name in names:
        if (folder / name).exists() | (made / name).exists() and not _same(folder / name, made / name):
            yield f"{folder.name}/{name} is not what {by} gives"


def _files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir()} - {MARKER}


def _same(path: Path, other: Path) -> bool:
    return path.is_file() and other.is_file() and sha256_file(path) == sha256_file(other)
