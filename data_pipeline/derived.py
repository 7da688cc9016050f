"""What the files of a dataset follow from: token files, documents, tokenizer and each other."""

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from mlm_repro.data_pipeline.files import DATASET, LEDGER, DataCard, Ledger
from mlm_repro.data_pipeline.passes.overlap import RESULT as OVERLAP
from mlm_repro.data_pipeline.tokens.token_file import TokenFile
from mlm_repro.data_pipeline.tokens.tokenizer import Tokenizer
from mlm_repro.lineage.atomic import parse_json
from mlm_repro.lineage.derived import Checked, Partly
from mlm_repro.lineage.digest import sealed_files
from mlm_repro.lineage.errors import IntegrityFailure
from mlm_repro.lineage.files import read_document, read_values

SAMPLED_DOCUMENTS = 64


def dataset(run: Checked) -> Iterator[tuple[str, Any, Any]]:
    """The data card, by ledger, sealed files and tokenizer; the ledger, also by token files and documents."""
    said, tokenizer = read_values(run.path / DATASET), Tokenizer.load(run.path / "tokenizer")
    sealed = sealed_files(run.path)
    own = {
        "files": {name: sealed.get(name) for name in said["files"]},
        "tokenizer": Partly(digest=tokenizer.digest), "vocab_size": tokenizer.vocab_size,
    }  # fmt: skip
    yield DATASET, said, Partly(own | card_by_ledger(run.path))
    yield from ledger(run)
    splits = read_document(run.path / DATASET, DataCard).splits
    counted = {name: _counted(run.path, name, split.prefix, tokenizer) for name, split in splits.items()}
    yield LEDGER, read_values(run.path / LEDGER), Partly(splits=counted)


def card_by_ledger(directory: Path) -> Partly:
    """What a data card says by the ledger beside it."""
    ledger = read_document(directory / LEDGER, Ledger)
    stages = {each.name: Partly(documents=each.documents_out, tokens=each.tokens_out) for each in ledger.stages}
    splits = {name: Partly(asdict(amount)) for name, amount in ledger.splits.items()}
    return Partly(source=ledger.source, splits=splits, stages=Partly(stages))


def ledger(run: Checked) -> Iterator[tuple[str, Any, Any]]:
    """The ledger, by its own counts."""
    yield LEDGER, read_values(run.path / LEDGER), ledger_by_itself(read_document(run.path / LEDGER, Ledger))


def ledger_by_itself(said: Ledger) -> Partly:
    """What a ledger says by its own counts: what a stage keeps goes into the next, and the last into the splits."""
    stages = []
    for place, stage in enumerate(said.stages):
        into = stage.documents_out + sum(dropped.documents for dropped in stage.dropped.values())
        after = (following.documents_in for following in said.stages[place + 1 : place + 2])
        stages.append(Partly(documents_in=into, documents_out=next(after, stage.documents_out)))
    if splits := said.splits.values():
        documents, size = sum(split.documents for split in splits), sum(split.bytes or 0 for split in splits)
        stages[-1] |= {"documents_out": documents, "bytes_out": size}
    return Partly(stages=stages)


def overlap(run: Checked) -> Iterator[tuple[str, Any, Any]]:
    """The shares of test sets, by the counts of their documents."""
    for name, measured in read_values(run.path / OVERLAP)["test_sets"].items():
        ngrams, present = (sum(column) for column in zip(*measured["documents"], strict=True))
        percent = 100 * present / ngrams if ngrams else 0.0
        yield f"{OVERLAP}: {name}", measured, Partly(occurrences=Partly(ngrams=ngrams, found=present), percent=percent)


def _counted(directory: Path, name: str, prefix: str, tokenizer: Tokenizer) -> Partly:
    """The size of a split, by its files.

    Raises IntegrityFailure if the tokens of a document, of some that are spread over the split, are not of its text.
    """
    tokens, documents = TokenFile(directory / prefix), directory / "documents" / f"{name}.jsonl"
    counted = Partly(documents=len(tokens.document_index) - 1, tokens=len(tokens.tokens))
    if not documents.is_file():
        return counted
    with documents.open("rb") as file:
        texts = [str(parse_json(line)["text"]) for line in file]
    if len(texts) != counted["documents"]:
        raise IntegrityFailure(f"{prefix} has {counted['documents']} documents and {documents.name} {len(texts)}")
    for place in np.linspace(0, len(texts) - 1, min(len(texts), SAMPLED_DOCUMENTS), dtype=int):
        first, end = tokens.document_index[place : place + 2]
        has = np.concatenate([tokens[each] for each in range(first, end)]).tolist()[:-1]
        if has != tokenizer.encode(texts[place]):
            raise IntegrityFailure(f"{prefix}: the tokens of document {place} are not those of its text")
    return Partly(counted | {"bytes": sum(len(text.encode("utf-8", "surrogatepass")) for text in texts)})
