"""How the files of a reproduction and of a forecast follow from one another. Imports no torch."""

from collections.abc import Iterable
from itertools import zip_longest
from pathlib import Path

from mlm_repro.data_pipeline.files import DATASET, DataCard, named_datasets
from mlm_repro.data_pipeline.remade import counted
from mlm_repro.engine.run.files import SUMMARY
from mlm_repro.engine.run.remade import recipe_of
from mlm_repro.engine.run.resolved import read_run_config
from mlm_repro.evaluation.recount import counts, follows
from mlm_repro.evaluation.schema import ClozeResult, PerplexityResult
from mlm_repro.experiments.files import EVALUATIONS, FORECAST, SCORES, ReproductionScores, read_evaluations, read_runs
from mlm_repro.experiments.reproduce.files import LADDER, ReproducedModel, ReproductionSummary
from mlm_repro.experiments.reproduce.plan import training_place
from mlm_repro.experiments.reproduce.reproduction import (
    RESULTS,
    derived_records,
    derived_scores,
    hardware_of,
    results_of,
    shape_of,
)
from mlm_repro.experiments.reproduce.steps import evaluation_name
from mlm_repro.lineage.atomic import parse_json
from mlm_repro.lineage.digest import is_sealed, sha256_file
from mlm_repro.lineage.errors import DataMissing
from mlm_repro.lineage.files import (
    Absent,
    Comparisons,
    Manifest,
    Remade,
    as_said,
    misread,
    read_document,
    read_values,
)
from mlm_repro.lineage.records import RECORDS, Record, read_records
from mlm_repro.lineage.run import MANIFEST, RunDirectory
from mlm_repro.lineage.shipped import model_file


def models(run: Path) -> Comparisons:
    """Check that the summary describes the models that the manifest asks for."""
    summary, config, started = _summary(run), _manifest(run).config, _manifest(run).environment
    card = read_document(run / DATASET, DataCard)
    yield from counted(run, card)
    due = {
        "target": config["target"], "mode": config["mode"], "hardware": hardware_of(started), "source": card.source,
        "commit": str(started.source.get("commit") or ""),
    }  # fmt: skip
    yield as_said(summary, due, SUMMARY)
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


def evaluations(run: Path) -> Comparisons:
    """Check the checkpoint, the kind and the derived numbers of every evaluation."""
    kind = "scaled" if _summary(run).mode == "scaled" else "measured"
    results, lines = results_of(run, _summary(run)), read_evaluations(run)
    yield Remade(EVALUATIONS, sorted(lines), sorted(results))
    tokenizer = read_document(run / DATASET, DataCard).tokenizer.digest
    for model in _summary(run).models:
        for task, of in RESULTS.items():
            name = evaluation_name(model.name, task)
            result, where = results[name], f"{EVALUATIONS}: {name}"
            yield from misread(lines[name], of, where)
            facts = {"kind": kind, "checkpoint_digest": model.checkpoint_digest, "tokenizer_digest": tokenizer,
                   "partial": "; only " in result.protocol}  # fmt: skip
            yield as_said(result, facts, where)
            yield Remade(f"{where}: checkpoint", result.checkpoint.partition("/")[0], model.run)
            yield as_said(result, follows(result), where, "its own sums give")
            yield from _counted_again(run, result, model, where)


def _counted_again(
    run: Path, result: PerplexityResult | ClozeResult, model: ReproducedModel, where: str
) -> Comparisons:
    """Count what the text and the tokenizer give, and the answers that are kept."""
    training, config = training_place(model.run, run.parent), _manifest(run).config
    limit = config["examples" if isinstance(result, ClozeResult) else "windows"]
    if is_sealed(training) and (places := [each.place for each in named_datasets(training) if each.is_here]):
        try:
            context = recipe_of(training).model.seq_length
            yield as_said(result, counts(result, places[0], context, limit), where, "its text gives")
        except DataMissing as missing:
            yield Absent(f"{missing} of {where}")
    else:
        yield Absent(f"text and tokenizer of {where}")
    if not isinstance(result, ClozeResult) or result.examples:
        return
    path = run / "examples.jsonl"  # of a reproduction of an earlier version
    about, *shown = [parse_json(line) for line in path.read_bytes().splitlines()] if path.is_file() else [{}]
    right = [example["correct"][about["models"].index(model.name)] for example in shown]
    if len(right) < result.num_examples:
        yield Absent(f"answers of {where}")
    if right and not sum(right) <= result.num_correct <= result.num_examples - right.count(False):
        yield f"{where} says {result.num_correct} right answers; {path.name} has {sum(right)} in {len(right)}"


def records(run: Path) -> Comparisons:
    """Compute scores and records again; claims may be worded differently by now."""
    summary = _summary(run)
    if (run / SCORES).is_file():
        scores = read_document(run / SCORES, ReproductionScores)
        yield Remade(SCORES, scores, derived_scores(RunDirectory(run), summary))
    actual = read_records(run / RECORDS)
    if not read_runs(run):
        yield Absent(f"the metrics behind {RECORDS}")
        actual = [record for record in actual if record.x is None or record.kind == "published"]
    for says, gives in zip_longest(*map(_in_order, (actual, derived_records(RunDirectory(run), summary)))):
        at = says or gives
        yield Remade(f"{RECORDS}: {at.series} {at.quantity} ({at.kind})", says, gives)


def forecast(run: Path) -> Comparisons:
    """Compare the forecast with the digest that it was sealed with."""
    yield Remade(f"{FORECAST}: digest", sha256_file(run / FORECAST), _manifest(run).config["sha256"])
    values = read_values(run / FORECAST)
    made_of = values.get("made_of") or {name: each for name, each in values["searched"].items() if each}
    yield Remade(f"{FORECAST}: made_of", made_of, _manifest(run).parents, f"{MANIFEST} says")


def _in_order(records: Iterable[Record]) -> list[Record]:
    """Sort the published records and drop their words; the other records follow in their order."""
    published = [record for record in records if record.kind == "published"]
    bare = [record.model_copy(update={"source": "", "note": ""}) for record in published]
    return [*sorted(bare, key=Record.model_dump_json), *(record for record in records if record.kind != "published")]


def _manifest(run: Path) -> Manifest:
    return read_document(run / MANIFEST, Manifest)


def _summary(run: Path) -> ReproductionSummary:
    return read_document(run / SUMMARY, ReproductionSummary)
