"""Kinds of directories that the engine writes, and how a training's files follow from its
configuration and one another. Imports no torch."""

import math
import re
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlm_repro.data_pipeline.files import dataset_digest, named_datasets
from mlm_repro.data_pipeline.tokens.tokenizer import FILE_NAME
from mlm_repro.engine.batch_schedule import BatchSchedule
from mlm_repro.engine.config import RunConfig
from mlm_repro.engine.costs import parameter_count, tokens_trained
from mlm_repro.engine.optim.schedule import clock, learning_rate
from mlm_repro.engine.run.files import (
    METRICS,
    STATISTICS,
    SUMMARY,
    Step,
    TrainingSummary,
    Validation,
    read_metrics,
    read_steps,
    read_summary,
    read_validations,
)
from mlm_repro.engine.run.resolved import PLACES, SCHEMA
from mlm_repro.lineage.atomic import parse_json
from mlm_repro.lineage.chain import (
    CONFIG,
    INDEX,
    LINEAGE,
    STATE,
    checkpoint_path,
    complete_checkpoints,
    iteration_of,
)
from mlm_repro.lineage.config import parse_config
from mlm_repro.lineage.digest import MARKER, sealed_files
from mlm_repro.lineage.files import (
    RETIRED_KEYS,
    Absent,
    Comparisons,
    Manifest,
    Parent,
    Remade,
    as_said,
    read_document,
    read_object,
)
from mlm_repro.lineage.kinds import NAME, PIECES, Kind, differing
from mlm_repro.lineage.run import MANIFEST

# The guards' SPIKE_WINDOW, which cannot be imported without torch.
WINDOW = 128
"""Number of last iterations whose losses and gradient norms a checkpoint keeps."""
BITS = {"F64": "<i8", "F32": "<i4", "F16": "<i2", "BF16": "<i2"}
FLOATS = {"F64": "<f8", "F32": "<f4", "F16": "<f2"}
Bits = NDArray[np.signedinteger[Any]]


def metrics(run: Path) -> Comparisons:
    """Yield comparisons, each a Remade, of the directory `run` of a complete training. The lines
    that the training wrote for each iteration and validation are compared with the iterations,
    samples, batch sizes, learning rates and loss scales that its configuration gives, and its
    summary with those lines and the configuration. A fault that is no comparison is yielded as a
    sentence, a text. Raises IntegrityFailure if a file cannot be read, BadInput if this program
    refuses the configuration."""
    config = recipe_of(run)
    done = read_summary(run)
    manifest = read_document(run / MANIFEST, Manifest)
    count = config.train.iterations
    schedule = BatchSchedule(config.train)
    where = f"{SUMMARY} of {run.name}"
    yield as_said(
        done,
        {
            "iterations": count,
            "tokens": tokens_trained(config.model, config.train),
            "parameters": parameter_count(config.model),
            "seed": config.train.seed,
            "checkpoint": checkpoint_path(run, count).name,
        },
        where,
        "its configuration gives",
    )
    rate = {"tokens_per_second": round(done.tokens_per_second, 1)}
    yield as_said(done, rate, where, "a training writes, to a tenth")
    seconds = done.tokens / done.tokens_per_second
    if not math.isclose(seconds, done.train_seconds, rel_tol=0.001, abs_tol=0.01):
        yield Remade(
            f"{where}: train_seconds", done.train_seconds, seconds, "its tokens and rate give"
        )
    if [step.iteration for step in read_steps(run)] != list(range(1, count + 1)):
        yield f"{METRICS} of {run.name} does not have each of {count} iterations once and in order"
    last = updates = updated_samples = 0
    is_begun_here = manifest.parents.keys() == {"dataset"}
    most = {"validation": config.train.validation_samples}
    validations = read_validations(run)
    if len({(line.kind, line.iteration) for line in validations}) < len(validations):
        yield f"{METRICS} of {run.name} has a validation twice"
    for line in read_metrics(run):
        number = line["iteration"]
        if line["kind"] != "train":
            yield Remade(
                f"{METRICS}: iteration of a validation", number, last, "the line before it gives"
            )
            if is_begun_here and (whole := done.validation_samples):
                yield Remade(
                    f"{METRICS}: samples of a validation",
                    line["samples"],
                    min(most.get(line["kind"], whole), whole),
                )
            continue
        last = number
        if not line.keys() <= Step.model_fields.keys() | RETIRED_KEYS:
            yield f"{METRICS}: the line of iteration {number} has a key that no training measures"
        if "samples" not in line:
            continue
        size = schedule.batch_size(number - 1)
        due: dict[str, float] = {"samples": schedule.samples_before(number), "batch_size": size}
        if is_begun_here:  # its updates are counted from 1
            due["learning_rate"] = learning_rate(
                config.train, clock(config.train, updates, updated_samples)
            )
        if config.train.precision != "fp16":
            due["loss_scale"] = 1.0
        if not line.get("skipped"):
            updates = updates + 1
            updated_samples = updated_samples + size
        for name, value in due.items():
            yield Remade(f"{METRICS}: {name} at {number}", line[name], value, "its schedule gives")
    yield from ending(done, validations, run.name)


def checkpoints(run: Path) -> Comparisons:
    """Yield comparisons, each a Remade, for the directory `run` of a complete training: of the
    newest checkpoint's iteration with the configuration's number of iterations and, for each
    checkpoint, of its state with the training's metrics, its tensors with their statistics, and its
    tokenizer with the dataset's, if the dataset is on this machine. Yields an Absent for iterations
    that no checkpoint remembers, and for a tensor of an earlier version that has no checksum.
    Raises IntegrityFailure if a file cannot be read, BadInput if this program refuses the
    configuration, DataMissing if the manifest does not name the dataset."""
    manifest = read_document(run / MANIFEST, Manifest)
    every = read_steps(run)
    steps = [step for step in every if step.gradient_norm is not None]
    directories = complete_checkpoints(run)
    count = recipe_of(run).train.iterations
    # An earlier version, which chained no attempts, made the checkpoints before the first chained
    # attempt.
    chained = next((attempt.iteration for attempt in manifest.attempts if attempt.before), count)
    yield Remade(
        f"newest checkpoint of {run.name}",
        iteration_of(directories[-1]),
        count,
        "its configuration gives",
    )
    data = [dataset.place for dataset in named_datasets(run) if dataset.is_here]
    tokenizer = sealed_files(data[0]) if data else {}
    remembered = set[int]()
    for path in directories:
        last = iteration_of(path)
        remembered.update(range(last - WINDOW + 1, last + 1))
    if unchecked := sum(step.iteration not in remembered for step in steps):
        yield Absent(
            f"{run.name}: validations and {unchecked:,} iterations, more than {WINDOW} before a"
            f" checkpoint, {METRICS}: *.loss, *.gradient_norm, *.perplexity; `mlm-verify replay`"
            " trains segments again",
            ever=False,
        )
    for path in directories:
        seen = [
            [step.loss, step.gradient_norm]
            for step in steps
            if step.iteration <= iteration_of(path)
        ][-WINDOW:]
        state = read_object(path / STATE)
        reached = [step for step in every if step.iteration <= iteration_of(path)]
        updates = [step for step in reached if not step.skipped]
        due = {
            "iteration": iteration_of(path),
            "optimizer_steps": len(updates),
            "recent": seen,
            "updated_samples": sum(step.batch_size or 0 for step in updates),
            **{name: state.get(name) for name in ("loss_scaler", "seconds")},
        }
        is_old = iteration_of(path) <= chained
        if is_old and "updated_samples" not in state:
            del due["updated_samples"]
        yield Remade(f"{path.name}: {STATE}", state, due, f"{METRICS} gives")
        files = {
            name: it for name, it in sealed_files(path).items() if name.startswith("tokenizer/")
        }
        if data:
            yield Remade(
                path.name,
                files,
                {name: tokenizer.get(name) for name in files},
                "its dataset has",
            )
        yield from _tensors_of(path, is_old)


def datasets(run: Path) -> Comparisons:
    """Yield a Parent for each dataset that the manifest in a training's directory names, in the
    order of the configuration, to be checked in turn: the directory where the dataset is now,
    found by its digest if it was moved, its name in the manifest, and the function that gives the
    digest to compare with the manifest's. A dataset that is not found is yielded too, with a
    likely directory. Raises BadInput if there is no run, IntegrityFailure if its manifest is
    damaged, DataMissing if it does not name its datasets."""
    for dataset in named_datasets(run):
        yield Parent(dataset.place, dataset.parent, dataset_digest)


def ending(done: TrainingSummary, validations: Sequence[Validation], name: str) -> Comparisons:
    """Yield comparisons, each a Remade, of the final validation in a training's summary with the
    last of `validations`, the training's validations in the metrics, in order, or with None if
    there are none, and then of each validation's perplexity with its loss. `name` is the run's, for
    the texts."""
    where = f"{SUMMARY} of {name}"
    by = f"its {METRICS} gives"
    stated = {
        "iteration": done.iterations,
        "samples": done.validation_samples,
        "loss": done.validation_loss,
        "perplexity": done.validation_perplexity,
    }
    yield Remade(
        where,
        stated,
        {name: getattr(validations[-1], name) for name in stated} if validations else None,
        by,
    )
    for validation in validations:
        perplexity = math.exp(min(validation.loss, 20))
        yield Remade(
            f"{METRICS}: perplexity at {validation.iteration}",
            validation.perplexity,
            perplexity,
            "its loss gives",
        )


def recipe_of(training: Path) -> RunConfig:
    """Return the RunConfig in the manifest of a training's directory. Raises IntegrityFailure if
    the manifest cannot be read, BadInput if this program refuses the configuration."""
    return parse_config(
        read_document(training / MANIFEST, Manifest).config,
        RunConfig,
        f"{training.name}/{MANIFEST}",
    )


def _tensors_of(checkpoint: Path, is_old: bool) -> Comparisons:
    """Yield comparisons, each a Remade. The first compares the tensors' names in the statistics
    with the ones in the index. The others compare, for each tensor in both, its entry in the index,
    and its statistics, taken before it was written, with the tensor in the files of the directory
    `checkpoint`.

    A checkpoint that `is_old`, of an earlier version, may have statistics without a checksum; an
    Absent says so. Raises IntegrityFailure if index or statistics cannot be read; the errors of a
    missing or damaged file of tensors are passed on.
    """
    index = read_object(checkpoint / INDEX)
    statistics = read_object(checkpoint / STATISTICS)
    where = f"{checkpoint.name}/{STATISTICS}"
    yield Remade(f"{where}: tensors", sorted(statistics), sorted(index), f"{INDEX} has")
    files = chain.from_iterable(entry["files"] for entry in index.values())
    tensors = {file: _tensors(checkpoint / Path(file).name) for file in files}
    for name in index.keys() & statistics.keys():
        parts = [tensors[file][name] for file in index[name]["files"]]
        whole = (
            np.concatenate([bits for _, bits in parts], index[name]["dim"])
            if len(parts) > 1
            else parts[0][1]
        )
        due = {"shape": list(whole.shape), **{key: index[name][key] for key in ("dim", "files")}}
        yield Remade(f"{checkpoint.name}/{INDEX}: {name}", index[name], due, "its files give")
        numbers = _numbers(np.ascontiguousarray(whole).reshape(-1), parts[0][0])
        stated = statistics[name]
        if is_old and "checksum" not in stated:
            del numbers["checksum"]
            named = " and ".join(sorted(tensors))
            yield Absent(
                f"the last bits in {named} of {checkpoint.name}, of which an earlier version kept"
                " no checksums",
                ever=False,
            )
        yield Remade(f"{where}: {name}", stated, numbers, "its numbers give")


def _numbers(bits: Bits, kind: str) -> dict[str, float | int]:
    """Return a dict of a tensor's numbers: `norm`, `min` and `max` of its finite values,
    `nonfinite`, the count of the others, and `checksum`, as `engine.checkpoint.statistics` computes
    them before writing. `min` and `max` are 0 if no value is finite. `bits` are the flat tensor's
    values as signed integers, `kind` their format, such as F32."""
    values = (bits.astype("<i4") << 16).view("<f4") if kind == "BF16" else bits.view(FLOATS[kind])
    finite = values[np.isfinite(values)].astype(np.float64)
    extremes = finite if len(finite) else np.zeros(1)
    odd = np.arange(1, 2 * len(bits), 2, dtype=np.int64)
    return {
        "norm": math.sqrt(float(np.dot(finite, finite))),
        "min": float(extremes.min()),
        "max": float(extremes.max()),
        "nonfinite": len(values) - len(finite),
        "checksum": int(np.dot(bits.astype(np.int64), odd)) % 2**64,
    }


def _tensors(file: Path) -> dict[str, tuple[str, Bits]]:
    """Return a dict of a safetensors file's tensors: name → pair of its number format, such as F32,
    and its values' bits as an integer array in the tensor's shape. The values are mapped from the
    file, not read."""
    with file.open("rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
        header = parse_json(opened.read(size))
    data = np.memmap(file, np.uint8, "r", 8 + size)
    return {
        name: (
            entry["dtype"],
            data[slice(*entry["data_offsets"])].view(BITS[entry["dtype"]]).reshape(entry["shape"]),
        )
        for name, entry in header.items()
        if name != "__metadata__"
    }


CHECKPOINT = rf"(config|index|lineage|state)\.json|{PIECES}|{MARKER}"
KINDS = {
    "training": Kind(
        {METRICS: None, SUMMARY: TrainingSummary},
        rf"timeline\.json|tensorboard/events\.{NAME}|checkpoints/iter_[0-9]{{7,}}/({CHECKPOINT})"
        rf"|scores/iter_[0-9]{{7,}}/{NAME}\.json",
        lambda config: re.escape(config["name"]),
        PLACES,
        lambda config: differing(RunConfig, config),
        SCHEMA,
        (
            "timeline.json",
            "summary.json memory",
            "summary.json layout",
            "metrics.jsonl *.seconds",
            "metrics.jsonl *.tokens_per_second",
            "metrics.jsonl *.model_tflops",
            "metrics.jsonl *.spike",
            "scores/*",
            "checkpoints/* seconds",
            "checkpoints/* loss_scaler",
            "checkpoints/*/probe.json",
            "checkpoints/* *.dim",
            "manifest.json layouts",
            "a checkpoint before the newest, left out",
        ),
        (datasets, metrics, checkpoints),
    ),
    "checkpoint": Kind(
        dict.fromkeys(
            (CONFIG, INDEX, LINEAGE, STATE, STATISTICS, "probe.json", f"tokenizer/{FILE_NAME}")
        ),
        CHECKPOINT,
    ),
    "imported checkpoint": Kind(
        dict.fromkeys((INDEX, "origin.json")), rf"config\.json|{PIECES}|huggingface/.+"
    ),
}
