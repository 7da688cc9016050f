"""Moves the files of a finished pipeline to its output directory and describes them."""

import os
from dataclasses import asdict
from itertools import chain
from pathlib import Path

import numpy as np

from mlm_repro.data_pipeline.config import BY_NAME, TokenizerConfig
from mlm_repro.data_pipeline.document import json_line, write_table
from mlm_repro.data_pipeline.files import (
    DATASET,
    LEDGER,
    UNSPLIT,
    Amount,
    DataCard,
    DatasetFile,
    Ledger,
    Split,
    TokenizerFacts,
)
from mlm_repro.data_pipeline.passes.deduplicate import DECISIONS, STARTS, Corpus
from mlm_repro.data_pipeline.passes.dropped import DROPPED
from mlm_repro.data_pipeline.passes.gather import SLICE_LINES, SLICE_TOKENS
from mlm_repro.data_pipeline.passes.prepare import QUARANTINE
from mlm_repro.data_pipeline.passes.selection import LEFT_IN
from mlm_repro.data_pipeline.pipeline import Pipeline
from mlm_repro.data_pipeline.stages import TEXT_FILTERS
from mlm_repro.data_pipeline.stages.stage import SOURCE
from mlm_repro.data_pipeline.tokens.token_file import TOKENS_OF, join_files, merge_token_files
from mlm_repro.data_pipeline.tokens.tokenizer import Tokenizer, padded_vocab_size
from mlm_repro.data_pipeline.work.tasks import MARKER, Counts, Settings
from mlm_repro.data_pipeline.work.workspace import Job
from mlm_repro.lineage.atomic import JSON, read_json, sync
from mlm_repro.lineage.files import write_document

DUPLICATES = "duplicates.jsonl"
"""Name of the file in a dataset's directory that pairs each dropped duplicate with the document
kept for it, as JSON lines."""
NAMED = 1 << 14
"""Number of pairs of a duplicate and its survivor that one task writes."""


def publish(pipeline: Pipeline, directory: Path) -> dict[str, str]:
    """Move to `directory` the files of a pipeline that has run, and write its ledger and, if it has
    token files, its tokenizer and data card. Returns a dict path in `directory` → SHA-256 of the
    token files and of the documents beside them; an empty dict without token files.

    If it is cut short, nothing is lost: the same call goes on.
    """
    workspace = pipeline.workspace
    stages = pipeline.stages
    gathered = pipeline.finished["gather"]
    ledger = pipeline.ledger
    ledger.splits = _amounts(pipeline)
    ledger.finish(
        (SOURCE, *(name for name in stages if name in TEXT_FILTERS or not pipeline.tokenizer))
    )
    files = {QUARANTINE: pipeline.joined(QUARANTINE, "prepare")}
    if pipeline.left_in:
        files[LEFT_IN] = pipeline.joined(LEFT_IN, "select")
    if pipeline.config.keep_dropped:
        files[DROPPED] = pipeline.joined(DROPPED, "prepare", "measure", "select")
    if "decisions" in pipeline.finished:
        inputs = tuple(
            pipeline.finished[name].input for name in ("decisions", "prepare", "measure")
        )
        number = max(1, pipeline.finished["decisions"].counts[0]["documents"])
        rows = [
            ({"first": first, "last": first + NAMED}, inputs) for first in range(0, number, NAMED)
        ]
        pipeline.finished["duplicates"] = workspace.all("duplicates", name_duplicates, rows, "")
        files[DUPLICATES] = pipeline.joined(DUPLICATES, "duplicates")
    card = None
    written = JSON()
    if "tokenize" in stages:
        kinds = (
            ["tokens"]
            if len(stages) == 1
            else ["jsonl" if pipeline.config.shards is None else "parquet", "tokens"]
        )
        jobs: list[Job] = []
        for shards in pipeline.splits.values():
            for file_name, slices in shards.items():
                file = {"name": file_name, "first": slices[0], "last": slices[-1] + 1}
                jobs += [(file | {"kind": kind}, (gathered.input,)) for kind in kinds]
        joined = workspace.all("assemble", assemble, jobs).path
        for number in range(len(jobs)):
            here = read_json(joined / f"{number:05d}" / MARKER)["files"]
            written |= here
            files |= {name: joined / f"{number:05d}" / name for name in here}
        card = _describe(pipeline, dict(sorted(written.items())))
        card.packages = pipeline.sources.packages
    else:
        for name, shards in pipeline.splits.items():
            for number, task in enumerate(chain(*shards.values())):
                files[str(Path(name, f"shard-{number:05d}.jsonl"))] = (
                    gathered.path / f"{task:05d}" / SLICE_LINES
                )
    # Files are moved last, when all are made: a task whose files are gone would be done again.
    for name, source in files.items():
        _move(source, directory / name)
    if pipeline.tokenizer and card:
        pipeline.tokenizer.save(directory / "tokenizer")
    write_document(directory / LEDGER, ledger)
    if card:
        write_document(directory / DATASET, card)
    return {name: digest for name, (_, digest) in written.items()}


def assemble(settings: Settings, inputs: list[Path], directory: Path) -> Counts:
    """Task: join slices, in their order, into one file. Settings: `first` and `last`, for the
    slices from number `first` to before `last`; `name`, the file's name; and `kind`, which is jsonl
    or parquet to join the slices' documents in `documents/NAME.KIND`, or tokens to join their token
    files in the token file `NAME_text_document`. Its one input is the folder with all slices.
    Returns no counts."""
    folders = [inputs[0] / f"{number:05d}" for number in range(settings["first"], settings["last"])]
    name = settings["name"]
    kind = settings["kind"]
    (directory / "documents").mkdir()
    path = directory / "documents" / f"{name}.{kind}"
    slices = (folder / SLICE_LINES for folder in folders)
    if kind == "tokens":
        merge_token_files(
            [folder / SLICE_TOKENS for folder in folders], directory / f"{name}{TOKENS_OF}"
        )
    elif kind == "parquet":
        write_table(path, slices)
    else:
        with path.open("wb") as joined:
            join_files(slices, joined)
    return {}


def name_duplicates(settings: Settings, inputs: list[Path], directory: Path) -> Counts:
    """Task: write a JSON line to `duplicates.jsonl` for each of the decisions from `first` to
    before `last`. Its keys are `id`, the id of the dropped duplicate, `survivor`, the id of the
    document kept for it, and `jaccard`, their similarity with six decimals. If the two ids are
    equal, each is followed by its document's source, if the document has one, as in `7 (books)`.
    Inputs: the folder of the decisions, then those of the two passes, each with all shards. Returns
    no counts."""
    decisions, prepared, measured = inputs
    corpus = Corpus(prepared, measured, np.load(decisions / "00000" / STARTS))
    decisions_here = np.load(decisions / "00000" / DECISIONS, mmap_mode="r")[
        settings["first"] : settings["last"]
    ]
    with (directory / DUPLICATES).open("wb") as file:
        for document, survivor, jaccard in decisions_here.tolist():
            gone = corpus[document]
            stays = corpus[survivor]
            origins = [
                f" ({named.source})" if gone.id == stays.id and named.source else ""
                for named in (gone, stays)
            ]
            row = {
                "id": gone.id + origins[0],
                "survivor": stays.id + origins[1],
                "jaccard": round(jaccard, 6),
            }
            file.write(json_line(row))
    return {}


def _move(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    sync(source)
    os.replace(source, target)
    sync(target.parent)


def _amounts(pipeline: Pipeline) -> dict[str, Amount]:
    """Return a dict from the name of each split ("all" if there are no splits) to the Amount in it:
    its documents, bytes and tokens. Tokens are None if the pipeline has no tokenizer."""
    amounts = {}
    for name, shards in pipeline.splits.items():
        amount = Amount()
        for number in chain(*shards.values()):
            counts = pipeline.finished["gather"].counts[number]
            amount.add(counts["documents"], counts["bytes"], counts["tokens"])
        if not pipeline.tokenizer:
            amount.tokens = None
        amounts[name or UNSPLIT] = amount
    return amounts


def _describe(pipeline: Pipeline, files: JSON) -> DataCard:
    """Return the DataCard of the dataset that a pipeline made, with the settings of the pipeline's
    stages and such facts as the versions of the stages' libraries. The pipeline must have a
    tokenizer. `files` maps each file's name to its pair (bytes, SHA-256)."""
    config = pipeline.config
    stages = pipeline.stages
    assert pipeline.tokenizer
    values = config.model_dump(mode="json")
    made_with: JSON = {name: BY_NAME[name].made_with() for name in sorted(stages)}
    card = data_card(
        config.name, config.seed, pipeline.ledger, pipeline.tokenizer, config.tokenizer, files
    )
    more = {"settings": {name: values[name] for name in stages if name in values}}
    return card.model_copy(
        update=more | {name: facts for name, facts in made_with.items() if facts}
    )


def data_card(
    name: str, seed: int, ledger: Ledger, tokenizer: Tokenizer, config: TokenizerConfig, files: JSON
) -> DataCard:
    """Return the DataCard of a dataset with this name, seed, ledger and tokenizer, without its
    stages' settings. `files` maps each file's name to its pair (bytes, SHA-256); `config` says
    where the tokenizer came from and to what its vocabulary is padded."""
    card = DataCard(
        name=name,
        source=ledger.source,
        seed=seed,
        tokenizer=TokenizerFacts(kind=config.origin, digest=tokenizer.digest),
        vocab_size=tokenizer.vocab_size,
        padded_vocab_size=padded_vocab_size(tokenizer.vocab_size, config.multiple, config.tp),
        end_of_text=tokenizer.end_of_text,
        splits={
            name: Split(
                prefix=f"{name}{'-*' * (f'{name}{TOKENS_OF}.bin' not in files)}{TOKENS_OF}",
                **asdict(amount),
            )
            for name, amount in ledger.splits.items()
        },
        files={
            name: DatasetFile(bytes=size, sha256=digest) for name, (size, digest) in files.items()
        },
        stages={stage.name: stage.kept for stage in ledger.stages},
    )
    if ledger.near_duplicates:
        card.near_duplicates = ledger.near_duplicates
    return card
