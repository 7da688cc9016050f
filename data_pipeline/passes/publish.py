"""From a finished pipeline to the files of its output directory."""

import json
import os
import platform
import shutil
from collections.abc import Iterator
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from data_pipeline.append import append_file
from data_pipeline.config import DataConfig
from data_pipeline.duplicates.deduplicate import DECISIONS
from data_pipeline.ledger import Amount, Ledger, amount_json
from data_pipeline.passes.gather import SLICE_LINES, assemble
from data_pipeline.passes.prepare import QUARANTINE
from data_pipeline.pipeline import Result
from data_pipeline.stages import ALL
from data_pipeline.tokens.tokenizer import padded_vocab_size
from data_pipeline.work.corpus import Corpus
from data_pipeline.work.tasks import MARKER, Counts, Settings
from data_pipeline.work.workspace import Finished, Workspace
from lineage.atomic import sync_directory, write_json

UNSPLIT = "all"
DUPLICATES = "duplicates.jsonl"


def publish(result: Result, config: DataConfig, stages: tuple[str, ...], workspace: Workspace, directory: Path) -> None:
    """Move the pipeline's files to `directory` and describe them there. Nothing is lost if this is cut short."""
    files: dict[str, Path] = {}
    quarantine = workspace.one("quarantine", join_quarantine, {"shards": len(result.stages["prepare"].counts)},
                               result.stages["prepare"].input)  # fmt: skip
    files[QUARANTINE] = quarantine.path / "00000" / QUARANTINE
    if "decisions" in result.stages:
        files[DUPLICATES] = _duplicates(result, workspace)
    card = None
    if "tokenize" in stages:
        joined = _join(result, stages, workspace)
        for path in sorted((joined.path / "00000").iterdir()):
            if path.name != MARKER:
                files[path.name] = path
        card = _describe(result, config, stages, _files_of(joined))
    if stages != ALL and "tokenize" not in stages:
        files |= dict(_shards(result))
    for name, source in files.items():
        _move(source, directory / name)
    if result.tokenizer and "tokenize" in stages:
        result.tokenizer.save(directory / "tokenizer")
    ledger = result.ledger.to_json(_amounts(result))
    write_json(directory / "ledger.json", ledger | ({"near_duplicates": result.banding} if result.banding else {}))
    if card:
        write_json(directory / "dataset.json", card)


def join_quarantine(settings: Settings, inputs: list[Path], directory: Path) -> Counts:
    """What was no document in any shard, in order of the input."""
    with (directory / QUARANTINE).open("wb") as whole:
        for shard in range(settings["shards"]):
            append_file(inputs[0] / f"{shard:05d}" / QUARANTINE, whole)
    return {}


def name_duplicates(settings: Settings, inputs: list[Path], directory: Path) -> Counts:
    """Each duplicate with the document kept for it and their similarity, by id."""
    decisions, prepared, measured = inputs
    corpus = Corpus(prepared, measured, np.concatenate([[0], np.cumsum(settings["counts"], dtype=np.int64)]))
    with (directory / DUPLICATES).open("wb") as file:
        for document, survivor, jaccard in np.load(decisions / "00000" / DECISIONS, mmap_mode="r"):
            row = {"id": corpus[document].id, "survivor": corpus[survivor].id, "jaccard": round(float(jaccard), 6)}
            file.write(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE))
    return {}


def _duplicates(result: Result, workspace: Workspace) -> Path:
    measured = result.stages["measure"]
    settings = {"counts": [each["documents"] for each in measured.counts]}
    inputs = (result.stages["decisions"].input, result.stages["prepare"].input, measured.input)
    return workspace.one("duplicates", name_duplicates, settings, *inputs).path / "00000" / DUPLICATES


def _join(result: Result, stages: tuple[str, ...], workspace: Workspace) -> Finished:
    splits = [[name or UNSPLIT, slices[0], slices[-1] + 1] for name, slices in result.splits.items()]
    settings = {"splits": splits, "lines": stages == ALL, "tokens": True}
    return workspace.one("assemble", assemble, settings, result.slices.input)


def _shards(result: Result) -> Iterator[tuple[str, Path]]:
    for name, slices in result.splits.items():
        for number, task in enumerate(slices):
            yield str(Path(name, f"shard-{number:05d}.jsonl")), result.slices.path / f"{task:05d}" / SLICE_LINES


def _move(source: Path, target: Path) -> None:
    if target.is_dir():
        shutil.rmtree(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    os.replace(source, target)
    sync_directory(target.parent)


def _amounts(result: Result) -> dict[str, Any]:
    found = {}
    for name, slices in result.splits.items():
        amount = Amount()
        for number in slices:
            amount.add(Amount(**result.slices.counts[number]))
        found[name or UNSPLIT] = amount_json(amount, result.ledger.in_tokens)
    return found


def _files_of(joined: Finished) -> dict[str, Any]:
    marker = json.loads((joined.path / "00000" / MARKER).read_text(encoding="utf-8"))
    return {name: {"bytes": size, "sha256": digest} for name, (size, digest) in marker["files"].items()}


def _describe(result: Result, config: DataConfig, stages: tuple[str, ...], files: dict[str, Any]) -> dict[str, Any]:
    """The data card, `dataset.json`."""
    tokenizer = result.tokenizer
    assert tokenizer is not None
    splits = {name: {"prefix": f"{name}_text_document", **amount} for name, amount in _amounts(result).items()}
    values = config.model_dump(mode="json")
    card = {
        "name": config.name,
        "source": result.ledger.source,
        "seed": config.seed,
        "tokenizer": {"kind": config.tokenizer.kind, "digest": tokenizer.digest},
        "vocab_size": tokenizer.vocab_size,
        "padded_vocab_size": padded_vocab_size(tokenizer.vocab_size, config.tokenizer.multiple, config.tokenizer.tp),
        "end_of_text": tokenizer.end_of_text,
        "splits": splits,
        "files": files,
        "stages": _kept(result.ledger),
        "settings": {name: values[name] for name in stages if name in values},
    }
    if "language" in stages:
        card["language"] = {"langdetect": version("langdetect"), "seed": 0, "python": platform.python_version()}
    if result.banding:
        card["near_duplicates"] = result.banding
    return card


def _kept(ledger: Ledger) -> dict[str, Any]:
    return {stage.name: asdict(stage.kept) for stage in ledger.stages}
