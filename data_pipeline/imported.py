"""Token files of others as a dataset, and datasets of one tokenizer as one."""

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

from mlm_repro.data_pipeline.config import TokenizerConfig
from mlm_repro.data_pipeline.files import DATASET, LEDGER, Amount, DataCard, Ledger, StageAttrition, dataset_digest
from mlm_repro.data_pipeline.stages.stage import SOURCE
from mlm_repro.data_pipeline.tokens.token_file import (
    TOKENS_OF,
    TokenFile,
    TokenFileWriter,
    join_files,
    merge_token_files,
    split_prefixes,
    token_paths,
)
from mlm_repro.data_pipeline.tokens.tokenizer import Tokenizer
from mlm_repro.data_pipeline.work.origin import made_by
from mlm_repro.lineage.digest import is_sealed, sha256_file
from mlm_repro.lineage.errors import BadInput
from mlm_repro.lineage.files import read_document, write_document
from mlm_repro.lineage.run import RunDirectory

VALID_SHARE = 30
"""One document in so many, of the last ones, is for validation."""
CHECKED_TOKENS = 1 << 24


def import_tokens(prefix: Path, config: TokenizerConfig, out: Path) -> RunDirectory:
    """Make a dataset of the `.bin` and `.idx` at a prefix, whose documents keep their order; the last ones validate.

    Raises BadInput for one document, and for tokens that the tokenizer does not have.
    """
    assert config.path
    file, tokenizer = TokenFile(prefix), Tokenizer.open(config.path, config.end_of_text)
    for first in range(0, len(file.tokens), CHECKED_TOKENS):
        if (highest := file.tokens[first : first + CHECKED_TOKENS].max()) >= tokenizer.vocab_size:
            raise BadInput(f"{prefix} has the token {highest}, and {config.path} only {tokenizer.vocab_size:,} tokens")
    documents = len(file.document_index) - 1
    if documents < 2:
        raise BadInput(f"{prefix} has {documents} documents, too few for a training and a validation split")
    cut = documents - max(1, round(documents / VALID_SHARE))
    ends = file.document_index[1:][np.diff(file.document_index) > 0] - 1
    if unended := documents - sum(int(file[end][-1:].sum()) == tokenizer.end_of_text for end in ends.tolist()):
        print(f"warning: {unended:,} of {documents:,} documents do not end with {tokenizer.end_token}", file=sys.stderr)

    def write(run: Path) -> dict[str, Amount]:
        amounts = {}
        for name, first, last in (("train", 0, cut), ("valid", cut, documents)):
            amounts[name] = Amount(last - first)
            with TokenFileWriter(run / f"{name}{TOKENS_OF}", file.dtype) as writer:
                for document in range(first, last):
                    parts = slice(*file.document_index[document : document + 2].tolist())
                    ids = np.concatenate([file[part] for part in range(parts.start, parts.stop)] or [file.tokens[:0]])
                    writer.add_documents(ids, file.sizes[parts], [parts.stop - parts.start])
                    text = tokenizer.decode(ids[ids != tokenizer.end_of_text])
                    amounts[name].add(0, len(text.encode("utf-8")), len(ids))
        return amounts

    values = {"prefix": str(prefix), "tokenizer": config.model_dump(mode="json")}
    parents = made_by(["import", "tokenizer"]) | {"tokenizer": tokenizer.digest}
    parents |= {path.name: sha256_file(path) for path in token_paths(prefix)}
    run = RunDirectory.begin_at(out, "data-import", values, parents)
    return _made(run, f"tokens:{prefix}", tokenizer, config, write)


def merge_datasets(datasets: list[Path], out: Path) -> RunDirectory:
    """Join the splits of datasets, in their order. Raises BadInput unless all have the same tokenizer and splits."""
    if open_ones := [path for path in datasets if not is_sealed(path)]:
        raise BadInput(f"{open_ones[0]} is not a complete dataset")
    cards = [read_document(path / DATASET, DataCard) for path in datasets]
    kinds = [
        (card.tokenizer.digest, [(name, TokenFile(split_prefixes(path, name)[0]).dtype) for name in card.splits])
        for path, card in zip(datasets, cards, strict=True)
    ]
    if other := next((path for path, kind in zip(datasets, kinds, strict=True) if kind != kinds[0]), None):
        raise BadInput(f"{other} and {datasets[0]} differ in tokenizer, splits or type of token: they cannot be merged")
    config = TokenizerConfig(path=datasets[0])

    def write(run: Path) -> dict[str, Amount]:
        amounts = {name: Amount() for name in cards[0].splits}
        for name, amount in amounts.items():
            for card in cards:
                amount.add(*(getattr(card.splits[name], what) for what in ("documents", "bytes", "tokens")))
            parts = [prefix for path in datasets for prefix in split_prefixes(path, name)]
            merge_token_files(parts, run / f"{name}{TOKENS_OF}")
            texts = [path / "documents" / f"{name}.jsonl" for path in datasets]
            if all(path.is_file() for path in texts):
                (run / "documents").mkdir(exist_ok=True)
                with (run / "documents" / f"{name}.jsonl").open("wb") as whole:
                    join_files(texts, whole)
        return amounts

    parents = made_by(["import", "tokenizer"])
    parents |= {f"dataset {number}": dataset_digest(path) for number, path in enumerate(datasets, 1)}
    run = RunDirectory.begin_at(out, "data-merge", {"datasets": list(map(str, datasets))}, parents)
    return _made(run, "; ".join(card.source for card in cards), Tokenizer.open(datasets[0]), config, write)


def _made(
    run: RunDirectory, source: str, tokenizer: Tokenizer, config: TokenizerConfig,
    write: Callable[[Path], dict[str, Amount]],
) -> RunDirectory:  # fmt: skip
    """Fill the run's directory, unless it is complete, and seal it."""
    with run.filled():
        if run.is_complete:
            return run
        from mlm_repro.data_pipeline.publish import data_card

        splits, stage = write(run.path), StageAttrition.begin(SOURCE)
        for amount in splits.values():
            stage.enter(amount.bytes, amount.tokens, amount.documents)
            stage.keep(amount.bytes, amount.tokens, amount.documents)
        ledger = Ledger(source=source, stages=[stage], splits=splits, shards=[])
        tokenizer.save(run.path / "tokenizer")
        write_document(run.path / LEDGER, ledger)
        names = (*run.path.glob(f"*{TOKENS_OF}.*"), *run.path.glob("documents/*.jsonl"))
        files = {str(path.relative_to(run.path)): [path.stat().st_size, sha256_file(path)] for path in sorted(names)}
        write_document(run.path / DATASET, data_card(run.path.name, 0, ledger, tokenizer, config, files))
        run.complete()
    return run
