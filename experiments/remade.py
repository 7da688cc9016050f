"""Kinds of runs that mlm-experiment makes, and how their files follow from one another and from
what they were made of. Imports no torch."""

import re
from collections.abc import Callable, Iterable, Sequence
from itertools import zip_longest
from pathlib import Path

from pydantic import BaseModel

from mlm_repro.data_pipeline.files import (
    DATASET,
    LEDGER,
    DataCard,
    Ledger,
    named_datasets,
)
from mlm_repro.data_pipeline.remade import counted
from mlm_repro.engine.config import RunConfig
from mlm_repro.engine.run.files import SUMMARY, TrainingSummary, validations_in
from mlm_repro.engine.run.remade import ending, recipe_of
from mlm_repro.engine.run.resolved import read_run_config
from mlm_repro.evaluation.recount import counts, follows
from mlm_repro.evaluation.schema import ClozeResult, PerplexityResult
from mlm_repro.experiments.catalogue import ABLATION, Ablation, Experiment, load_experiments
from mlm_repro.experiments.files import (
    EVALUATIONS,
    EXPERIMENTS,
    FORECAST,
    NOT_RUN,
    RUNS,
    SCORES,
    ReproductionScores,
    origin_of,
    read_evaluations,
    read_runs,
)
from mlm_repro.experiments.forecast.ablation import slug
from mlm_repro.experiments.forecast.trainings import kept
from mlm_repro.experiments.reproduce.files import LADDER, ReproducedModel, ReproductionSummary
from mlm_repro.experiments.reproduce.plan import training_place, twin_rule
from mlm_repro.experiments.reproduce.reproduction import (
    RESULTS,
    derived_records,
    derived_scores,
    facts_of,
    hardware_of,
    keep_training,
    reproduced_model,
    results_of,
    shape_of,
)
from mlm_repro.experiments.reproduce.steps import evaluation_name
from mlm_repro.experiments.sealed import SCHEMA, digest_of_numbers
from mlm_repro.experiments.verdicts import load_results, parts_of
from mlm_repro.experiments.worked_out import worked_out
from mlm_repro.lineage.atomic import JSON, parse_json
from mlm_repro.lineage.chain import broken_manifest
from mlm_repro.lineage.config import parse_config
from mlm_repro.lineage.digest import (
    MARKER,
    is_sealed,
    sealed_files,
    sha256_file,
    sha256_json,
)
from mlm_repro.lineage.errors import DataMissing
from mlm_repro.lineage.files import (
    Absent,
    Comparisons,
    Manifest,
    Parent,
    Remade,
    as_said,
    misread,
    parse_document,
    read_document,
    read_values,
)
from mlm_repro.lineage.kinds import NAME, Kind, differing
from mlm_repro.lineage.records import RECORDS, Record, read_records, records_bytes
from mlm_repro.lineage.run import MANIFEST, RunDirectory
from mlm_repro.lineage.shipped import model_file

OF_DATA = (
    f"{RUNS}: *.metrics; {DATASET}: name, seed, tokenizer.kind, vocab_size, padded_vocab_size,"
    " end_of_text, splits.*.prefix, files, settings, language, packages;"
    f" {LEDGER}: *.seconds, *.note, *.samples, *.changed, shards, blank_lines, malformed_lines"
)
OF_TEXT = "*evaluations*: *num_*, *data_*, *blocks, *perplexity_standard_error"
"""Keys of a reproduction's evaluations, as patterns in one text, that only the test's text and the
tokenizer could contradict; `OF_DATA` has those that only the training and its dataset could."""


def models(run: Path) -> Comparisons:
    """Yield comparisons for the reproduction in the directory `run`, each a Remade, a stated value
    beside the recomputed one: of its summary with the manifest, the data card and the published
    models that the target and the recipes give, and of the data card's own counts. Yield a sentence
    for a model that is called full and differs from the published one, and if a command does not
    name the target. Raises IntegrityFailure if a file there cannot be read, BadInput for a model
    that has no shipped recipe."""
    summary = _summary(run)
    manifest = _manifest(run)
    config = manifest.config
    started = manifest.environment
    card = read_document(run / DATASET, DataCard)
    yield from counted(run, card)
    due = {
        "target": config["target"],
        "mode": config["mode"],
        "hardware": hardware_of(started),
        "source": card.source,
        "commit": str(started.source.get("commit") or ""),
    }
    yield as_said(summary, due, SUMMARY)
    names = dict.fromkeys(model.series for model in summary.models)
    yield Remade(f"{SUMMARY}: models", list(names), [*LADDER[: LADDER.index(config["target"]) + 1]])
    for model in summary.models:
        published = shape_of(read_run_config(model_file(model.series)))
        yield Remade(
            f"{SUMMARY}: published {model.name}", model.published, published, "its recipe gives"
        )
        by_text = published.model_dump(include={"vocab_size", "parameters"})
        is_same = model.trained.model_copy(update=by_text) == published
        if summary.mode != "scaled" and not is_same:
            yield (
                f"{model.name} is called {summary.mode} and is a smaller model: its numbers are"
                " scaled"
            )
    if not all(summary.target in command for command in summary.commands.values()):
        yield f"{SUMMARY} has a command that does not name its target"


def evaluations(run: Path) -> Comparisons:
    """Yield comparisons, each a Remade (a stated value beside the recomputed one), of every
    evaluation of the reproduction in the directory `run`: its checkpoint, tokenizer, kind, derived
    numbers and, as far as its text is on this machine, its counts. An Absent is yielded if
    something is not on this machine, a sentence for a key that the schema lacks or reads as another
    value. Raises IntegrityFailure if a result is missing or does not fit its schema."""
    summary = _summary(run)
    kind = "scaled" if summary.mode == "scaled" else "measured"
    results = results_of(run, summary)
    lines = read_evaluations(run)
    yield Remade(EVALUATIONS, [*lines], sorted(results))
    tokenizer = read_document(run / DATASET, DataCard).tokenizer.digest
    for model in summary.models:
        for task, of in RESULTS.items():
            name = evaluation_name(model.name, task)
            result = results[name]
            where = f"{EVALUATIONS}: {name}"
            yield from misread(lines[name], of, where)
            facts = {
                "kind": kind,
                "checkpoint_digest": model.checkpoint_digest,
                "tokenizer_digest": tokenizer,
                "partial": "; only " in result.protocol,
            }
            yield as_said(result, facts, where)
            yield Remade(f"{where}: checkpoint", result.checkpoint.partition("/")[0], model.run)
            yield as_said(result, follows(result), where, "its own sums give")
            yield from _counted_again(run, result, model, where)


def _counted_again(
    run: Path, result: PerplexityResult | ClozeResult, model: ReproducedModel, where: str
) -> Comparisons:
    """Yield a Remade of the counts of `result`, an evaluation of `model`, beside the ones that its
    text and tokenizer give, or an Absent if these are not on this machine. For a last-word result
    of an earlier version, which has no losses of its examples, yield an Absent for them and for
    answers that examples.jsonl lacks, and a sentence if its number of right answers contradicts the
    answers there. `run` is the directory of the reproduction, and `where` names the evaluation in
    sentences."""
    training = training_place(model.run, run.parent)
    config = _manifest(run).config
    limit = config["examples" if isinstance(result, ClozeResult) else "windows"]
    if is_sealed(training) and (
        places := [each.place for each in named_datasets(training) if each.is_here]
    ):
        try:
            context = recipe_of(training).model.seq_length
            yield as_said(
                result, counts(result, places[0], context, limit), where, "its text gives"
            )
        except DataMissing as missing:
            yield Absent(f"{where}: {missing}")
    else:
        yield Absent(f"the text and the tokenizer of {where}, which alone give {OF_TEXT}")
    if not isinstance(result, ClozeResult) or result.examples:
        return
    yield Absent(f"the losses of {where}, which alone give *evaluations*: *perplexity", ever=False)
    path = run / "examples.jsonl"  # of a reproduction of an earlier version
    about, *shown = (
        [parse_json(line) for line in path.read_bytes().splitlines()] if path.is_file() else [{}]
    )
    right = [example["correct"][about["models"].index(model.name)] for example in shown]
    if len(right) < result.num_examples:
        yield Absent(f"the answers of {where}, which alone give *evaluations*: *num_correct")
    if right and not sum(right) <= result.num_correct <= result.num_examples - right.count(False):
        yield (
            f"{where} says {result.num_correct} right answers; {path.name} has {sum(right)} in"
            f" {len(right)}"
        )


def records(run: Path) -> Comparisons:
    """Yield comparisons of the scores and records of the reproduction in the directory `run` with
    those that are derived again from its files; a key of scores.json that the schema lacks or reads
    as another value is yielded as a sentence. Without scores.json no scores are compared. The
    published claims' source and note are not compared. If the run keeps no metrics, its own records
    along a curve are not compared, and an Absent says so. Raises BadInput if the file of records is
    missing or damaged, IntegrityFailure if another file is."""
    summary = _summary(run)
    if (run / SCORES).is_file():
        scores = read_document(run / SCORES, ReproductionScores)
        yield Remade(SCORES, scores, derived_scores(RunDirectory(run), summary))
        yield from misread(read_values(run / SCORES), ReproductionScores, SCORES)
    actual = read_records(run / RECORDS)
    if not read_runs(run):
        yield Absent(f"the metrics, which alone give {RECORDS}: *.value, *.x")
        actual = [record for record in actual if record.x is None or record.kind == "published"]
    for says, gives in zip_longest(
        *map(_in_order, (actual, derived_records(RunDirectory(run), summary)))
    ):
        at = says or gives
        yield Remade(f"{RECORDS}: {at.series} {at.quantity} ({at.kind})", says, gives)


def forecast(run: Path) -> Comparisons:
    """Yield two comparisons, each a Remade, for the forecast that is sealed in the run directory
    `run`: of its file's digest with the one that the manifest states, and of the trials that the
    file names, a dict name → digest, with the manifest's parents. Raises IntegrityFailure if the
    manifest is damaged or the file is not JSON."""
    yield Remade(
        f"{FORECAST}: digest", sha256_file(run / FORECAST), _manifest(run).config["sha256"]
    )
    values = read_values(run / FORECAST)
    made_of = values.get("made_of") or {
        name: each for name, each in values["searched"].items() if each
    }
    yield Remade(f"{FORECAST}: made_of", made_of, _manifest(run).parents, f"{MANIFEST} says")


def _in_order(records: Iterable[Record]) -> list[Record]:
    """Return a list: copies of the published records with an empty `source` and `note`, sorted by
    content, then the other records, unchanged and in their order."""
    bare = [
        record.model_copy(update={"source": "", "note": ""})
        for record in records
        if record.kind == "published"
    ]
    bare.sort(key=Record.model_dump_json)
    return bare + [record for record in records if record.kind != "published"]


def _manifest(run: Path) -> Manifest:
    return read_document(run / MANIFEST, Manifest)


def _summary(run: Path) -> ReproductionSummary:
    return read_document(run / SUMMARY, ReproductionSummary)


def trainings(run: Path) -> Comparisons:
    """Yield a Remade, a stated value beside the recomputed one, for each comparison of the
    reproduction in the directory `run`: of its summary and kept curves with the training run of
    every model, and of its data card and ledger with the training's dataset if that is on this
    machine. Also yield each training as a Parent, to be checked in turn. For one that is not on
    this machine an Absent is yielded too, and the summary is compared with the kept copy alone.
    Raises IntegrityFailure if a kept copy contradicts its seal."""
    summary = _summary(run)
    parents = _manifest(run).parents
    models = {model.run.rpartition("-")[0]: model for model in summary.models}
    runs = read_runs(run)
    yield Remade(f"{MANIFEST}: parents", sorted(parents), sorted({"dataset", *models}))
    for name, model in models.items():
        place = training_place(model.run, run.parent)
        copy = runs.get(model.name)
        yield Parent(place, name)
        if copy:
            copy.check_seal()
            done = parse_document(copy.summary, TrainingSummary, f"{SUMMARY} of {model.name}")
            yield from ending(done, validations_in(copy.metrics), model.name)
            if copy.manifest and copy.seal:  # which the first release did not keep
                config = parse_config(copy.manifest["config"], RunConfig, model.name)
                where = f"{SUMMARY}: {model.name}"
                yield as_said(model, facts_of(config, done), where, f"{RUNS} gives")
                yield Remade(f"{SUMMARY}: twin_rule", summary.twin_rule, twin_rule(config))
                yield Remade(f"{RUNS}: seal of {name}", copy.seal["digest"], parents[name])
        if not is_sealed(place):
            yield Absent(f"the training {model.run} and its data, which alone give {OF_DATA}")
            continue
        training = RunDirectory(place)
        again = keep_training(training)
        yield Remade(
            f"{SUMMARY}: {model.name}",
            model,
            reproduced_model(read_run_config(model_file(model.series)), training),
            f"{model.run} gives",
        )
        yield Remade(f"{SUMMARY}: twin_rule", summary.twin_rule, twin_rule(recipe_of(place)))
        if copy and copy.manifest is None:  # of the first release
            again = again.model_copy(update={"manifest": None, "seal": None})
        yield Remade(f"kept training {model.name}", copy, again, f"{model.run} gives")
        yield Remade(
            f"{MANIFEST}: dataset",
            parents["dataset"],
            training.manifest["parents"]["dataset"],
            f"{model.run} has",
        )
        for dataset in named_datasets(place):
            if is_sealed(dataset.place):
                mine, theirs = map(sealed_files, (run, dataset.place))
                for file in (DATASET, LEDGER):
                    yield Remade(
                        f"{run.name}/{file}", mine.get(file), theirs.get(file), "its dataset has"
                    )


def numbers(run: Path) -> Comparisons:
    """Yield comparisons of the run of an experiment in the directory `run`: a sentence if its
    records name another run, or do not have the digest that the run was begun with, and for
    simulated records a Remade with their values computed again. An Absent stands for measured
    values, for an experiment that the catalogue lacks and for a run that states no digest. Raises
    IntegrityFailure for a damaged run."""
    load_results([run])
    refused = read_values(run / NOT_RUN) if (run / NOT_RUN).is_file() else []
    yield from _begun_with(run, _manifest(run), read_records(run / RECORDS), refused)
    yield from _numbers_again(run)


def study(run: Path) -> Comparisons:
    """Yield comparisons of the directory `run`, which keeps the runs of several experiments: a
    Remade of the runs that its manifest names, and one of the order of the runs that it keeps. For
    each kept run yield a sentence if its manifest contradicts itself, it has no seal, or its
    records are not those that it was begun with, and an Absent if its manifest lacks their digest.
    Of simulated records yield a Remade with their values computed again, of measured ones an
    Absent. Raises IntegrityFailure if a file of the directory is damaged."""
    load_results([run])
    records = read_records(run / RECORDS)
    due = {}
    for name, kept_run in read_runs(run).items():
        manifest = parse_document(kept_run.manifest, Manifest, f"{MANIFEST} of {name}")
        due[name] = manifest.identity
        yield from broken_manifest(name, manifest.to_json())
        if kept_run.seal is None:
            yield f"{name} is kept in runs.jsonl without its seal"
        own = [record for record in records if record.source == name]
        kept_run.check_seal({RECORDS: records_bytes(own)})
        yield from _begun_with(run, manifest, own, kept_run.refused or [])
    yield Remade(f"{MANIFEST}: runs", _manifest(run).config["runs"], due, f"{RUNS} gives")
    yield Remade(f"{RUNS}: order", [*due], sorted(due))
    yield from _numbers_again(run)


def _begun_with(
    run: Path, manifest: Manifest, records: Sequence[Record], refused: object
) -> Comparisons:
    name = origin_of(manifest)["source"]
    config = manifest.config
    of = (name, sha256_json(config), config["experiment"]["name"])
    if any((record.source, record.digest, record.experiment) != of for record in records):
        yield f"{RECORDS} of {run.name} has a record that names another run or experiment"
    if "records" not in config:  # a run of an earlier version
        yield Absent(f"the digest of the records of {name}, which alone contradicts {RECORDS}: *")
    elif (digest_of_numbers(records), sha256_json(refused)) != (
        config["records"],
        config.get("refused", sha256_json([])),
    ):
        yield (
            f"{RECORDS} of {run.name} does not have the numbers whose digest the manifest of {name}"
            " has"
        )


def _numbers_again(run: Path) -> Comparisons:
    """Yield a Remade, a run's recorded values and the same values computed again, for the run in
    the directory `run` or, if that is a study, for each run that the study keeps. For a measured
    run, and for a run of an experiment that the catalogue lacks, an Absent is yielded instead."""
    for part in parts_of(run):
        config = part.manifest["config"]
        experiment = load_experiments().get(config["experiment"]["name"])
        made = made_again(experiment, str(config.get("mode"))) if experiment else None
        if made is None:
            yield Absent(f"{part.name}: its numbers, which were measured", ever=False)
        else:
            yield Remade(part.name, values_of(part.records), values_of(made), "made again it is")


def made_again(experiment: Experiment, mode: str) -> list[Record] | None:
    """Return a list of an experiment's Records, computed again, if `mode`, that of its run, is
    "simulate"; None for another mode, whose numbers this machine would have to measure."""
    return [each.record for each in worked_out(experiment).numbers] if mode == "simulate" else None


def values_of(records: Iterable[Record]) -> dict[str, float]:
    """Return a dict of the records' values by the text `SERIES QUANTITY (KIND) at X` of each."""
    return {f"{x.series} {x.quantity} ({x.kind}) at {x.x}": x.value for x in records}


def ablation(run: Path) -> Comparisons:
    """Check that the records of the ablation in the directory `run`, which must be sealed, follow
    from its kept trainings. For each kept training yield an Absent if its run is not on disk, or
    else a Remade, which compares the copy with the run, and a Parent, which names the run to check
    in turn; nothing if the copy has no seal. Raises IntegrityFailure if a file was changed, or if
    records or forecast disagree with the trainings."""
    load_results([run])
    for name, kept_run in read_runs(run).items():
        place = run.parent / name
        if not place.is_dir():
            yield Absent(f"the training {name}")
        elif kept_run.seal:
            yield Remade(f"kept training {name}", kept_run, kept(place), f"{name} gives")
            yield Parent(place)


def _experiment(config: JSON) -> str:
    return f"experiment-{re.escape(slug(config['experiment']['name']))}"


def _settings(section: str, model: type[BaseModel]) -> Callable[[JSON], JSON]:
    return lambda config: config | {section: differing(model, config[section])}


INNER_RUNS = rf"experiments?-{NAME}/(manifest\.json|(runs|records)\.jsonl|not_run\.json|{MARKER})"
"""Pattern of the files of the runs of experiments inside a reproduction."""
FORMER_PARTS = (
    rf"examples\.jsonl|evaluations/{NAME}\.json"
    rf"|training/{NAME}/(metrics\.jsonl|(summary|timeline)\.json)"
)
"""Pattern of the files that only a reproduction of the first release has."""
KINDS = {
    "experiment": Kind(
        {RECORDS: None},
        r"not_run\.json",
        lambda config: f"{_experiment(config)}(-measured)?",
        settings=_settings("experiment", Experiment),
        schema=SCHEMA,
        made=(numbers,),
    ),
    EXPERIMENTS: Kind(
        dict.fromkeys((RUNS, RECORDS)), name=lambda config: EXPERIMENTS, made=(study,)
    ),
    "forecast": Kind(
        {FORECAST: None},
        name=lambda config: f"{min(config.keys() - {'sha256'})}-forecast",
        made=(forecast,),
    ),
    ABLATION: Kind(
        dict.fromkeys((FORECAST, RUNS, RECORDS)),
        rf"sweeps/{NAME}\.json",
        lambda config: f"{_experiment(config)}-effects",
        settings=_settings(ABLATION, Ablation),
        free=(f"{RUNS} *.metrics",),
        made=(ablation,),
    ),
    "reproduction": Kind(
        {DATASET: DataCard, LEDGER: Ledger, RECORDS: None, SUMMARY: ReproductionSummary},
        rf"scores\.json|(runs|evaluations)\.jsonl|report/.+|{INNER_RUNS}|{FORMER_PARTS}",
        lambda config: rf"reproduce-{re.escape(config['target'])}(-\w+)?",
        free=(
            "*evaluations* *environment",
            "*evaluations* *checkpoint",
            "*evaluations* *dtype",
            "*evaluations* *seconds",
            "*evaluations* *warnings",
            "*evaluations* *backend",
            "*evaluations* *checked",
            "*evaluations* *window",
            "*evaluations* *megatron",
            "*evaluations* *protocol",
            "*evaluations* *stride",
            "*evaluations* *note",
            "the order of an evaluation's examples",
            "*examples.jsonl",
            "*timeline",
            "summary.json reason",
            "summary.json commands",
            "summary.json *.matrix_gflops",
            "records.jsonl *.note",
            "records.jsonl *.source",
        ),
        made=(models, trainings, evaluations, records),
    ),
}
