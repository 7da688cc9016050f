"""Turns a token file of another program into a dataset."""

import sys
from itertools import pairwise
from pathlib import Path

import numpy as np

from mlm_repro.data_pipeline.config import TokenizerConfig
from mlm_repro.data_pipeline.files import DATASET, LEDGER, Amount, Ledger, StageAttrition
from mlm_repro.data_pipeline.stages.stage import SOURCE
from mlm_repro.data_pipeline.tokens.token_file import (
    TOKENS_OF,
    TokenFile,
    TokenFileWriter,
    token_paths,
)
from mlm_repro.data_pipeline.tokens.tokenizer import Tokenizer
from mlm_repro.data_pipeline.work.origin import made_by
from mlm_repro.lineage.digest import sha256_file
from mlm_repro.lineage.errors import BadInput
from mlm_repro.lineage.files import write_document
from mlm_repro.lineage.run import RunDirectory

VALID_SHARE = 30
"""One document in this many goes to the validation split: the last ones."""


def import_tokens(prefix: Path, config: TokenizerConfig, out: Path) -> RunDirectory:
    """Make a dataset in the directory `out` from the token file `prefix.bin` and `prefix.idx`,
    whose tokenizer is at `config.path`, or find it complete there, and return its RunDirectory.
    Documents keep their order; the last thirtieth of them, at least one, is for validation.

    Prints a warning to standard error if documents do not end with the end-of-text token. Raises
    BadInput if a file is missing, if the tokenizer is missing, damaged or without its end-of-text
    token, if there are fewer than two documents, for a token that the tokenizer does not have, or
    if `out` holds anything else; IntegrityFailure if the token file is damaged.
    """
    assert config.path
    file = TokenFile(prefix)
    tokenizer = Tokenizer.open(config.path, config.end_of_text)
    for extreme in (file.tokens.min(initial=0), file.tokens.max(initial=0)):
        if not 0 <= extreme < tokenizer.vocab_size:
            raise BadInput(
                f"the token file {prefix} has the token id {extreme}, and the tokenizer"
                f" {config.path} only ids from 0 to {tokenizer.vocab_size - 1:,}: give as"
                " --tokenizer the tokenizer that made the file"
            )
    documents = len(file.document_index) - 1
    if documents < 2:
        raise BadInput(
            f"the token file {prefix} has {documents} documents, too few for a dataset, which needs"
            " one for training and one for validation"
        )
    cut = documents - max(1, round(documents / VALID_SHARE))
    bounds = np.cumsum(np.append(0, file.sizes))[file.document_index].tolist()
    texts = [file.tokens[start:end] for start, end in pairwise(bounds)]
    ended = sum(int(ids[-1:].sum()) == tokenizer.end_of_text for ids in texts)
    unended = documents - ended
    if unended:
        print(
            f"warning: {unended:,} of {documents:,} documents do not end with"
            f" {tokenizer.end_token}",
            file=sys.stderr,
        )

    values = {"prefix": str(prefix), "tokenizer": config.model_dump(mode="json")}
    parents = made_by() | {"tokenizer": tokenizer.digest}
    parents |= {path.name: sha256_file(path) for path in token_paths(prefix)}
    run = RunDirectory.begin_at(out, "data-import", values, parents)
    with run.filled():
        if run.is_complete:
            return run
        from mlm_repro.data_pipeline.publish import data_card

        stage = StageAttrition.begin(SOURCE)
        ledger = Ledger(source=f"tokens:{prefix}", stages=[stage], splits={}, shards=[])
        for name, first, last in (("train", 0, cut), ("valid", cut, documents)):
            amount = ledger.splits[name] = Amount(last - first)
            index = file.document_index[first : last + 1]
            with TokenFileWriter(run.path / f"{name}{TOKENS_OF}", file.dtype) as writer:
                tokens = file.tokens[bounds[first] : bounds[last]]
                writer.add_documents(tokens, file.sizes[index[0] : index[-1]], np.diff(index))
            for ids in texts[first:last]:
                text = tokenizer.decode(ids[ids != tokenizer.end_of_text])
                amount.add(0, len(text.encode("utf-8")), len(ids))
            counted = amount.bytes, amount.tokens, amount.documents
            stage.enter(*counted)
            stage.keep(*counted)
        tokenizer.save(run.path / "tokenizer")
        write_document(run.path / LEDGER, ledger)
        names = sorted(run.path.glob(f"*{TOKENS_OF}.*"))
        files = {path.name: [path.stat().st_size, sha256_file(path)] for path in names}
        write_document(
            run.path / DATASET, data_card(run.path.name, 0, ledger, tokenizer, config, files)
        )
        run.complete()
    return run
