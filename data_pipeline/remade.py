"""How the files of a dataset follow from one another: its card, ledger, token files, documents and tokenizer."""

import random
import secrets
from itertools import pairwise
from pathlib import Path

import numpy as np

from mlm_repro.data_pipeline.document import size_bytes, written_documents
from mlm_repro.data_pipeline.files import DATASET, LEDGER, DataCard, Ledger
from mlm_repro.data_pipeline.passes.overlap import RESULT as OVERLAP
from mlm_repro.data_pipeline.tokens.token_file import TokenFile, split_prefixes, texts_of
from mlm_repro.data_pipeline.tokens.tokenizer import Tokenizer
from mlm_repro.lineage.digest import read_digest, sealed_files
from mlm_repro.lineage.files import Comparisons, Manifest, Remade, read_document, read_object
from mlm_repro.lineage.run import MANIFEST

SAMPLED_DOCUMENTS = 64


def card(run: Path) -> Comparisons:
    """Compare the data card with the sealed files, the ledger, token files, documents and tokenizer."""
    card, sealed = read_document(run / DATASET, DataCard), sealed_files(run)
    files = {name: file.to_json() for name, file in card.files.items()}
    held = {*files, *(name for name in sealed if name.endswith((".bin", ".idx")))}
    yield Remade(f"{DATASET}: files", files, {name: sealed.get(name) for name in held})
    yield from counted(run, card)
    tokenizer = Tokenizer.load(run / "tokenizer")
    said = (card.tokenizer.digest, card.vocab_size, card.end_of_text)
    yield Remade(f"{DATASET}: tokenizer", said, (tokenizer.digest, tokenizer.vocab_size, tokenizer.end_of_text))
    config = read_document(run / MANIFEST, Manifest).config
    if "sources" in config:  # of a recipe
        made_with = {name: config[name] for name in card.stages if name in config}
        yield Remade(f"{DATASET}: settings", card.settings, made_with, f"{MANIFEST} has")
        yield Remade(f"{DATASET}: seed", card.seed, config["seed"], f"{MANIFEST} has")
    for name, split in card.splits.items():
        of_tokens, of_texts, are_there = np.zeros(2, np.int64), np.zeros(2, np.int64), False
        for prefix in split_prefixes(run, name):
            tokens, documents = TokenFile(prefix), texts_of(prefix)
            of_tokens += len(tokens.document_index) - 1, len(tokens.tokens)
            if not documents.is_file():
                continue
            are_there, texts = True, [document.text for document in written_documents(documents)]
            of_texts += len(texts), sum(map(size_bytes, texts))
            # nobody knows before the seal which documents these are
            draw = random.Random(f"{read_digest(run)} {secrets.token_hex()}")
            amount = min(len(tokens.document_index) - 1, len(texts))
            for place in sorted(draw.sample(range(amount), min(amount, SAMPLED_DOCUMENTS))):
                first, end = tokens.document_index[place : place + 2]
                has = np.concatenate([tokens[each] for each in range(first, end)]).tolist()
                due = [*tokenizer.encode(texts[place]), tokenizer.end_of_text]
                yield Remade(f"{prefix.name}: tokens of document {place}", has, due)
        where = f"{DATASET}: {split.prefix}"
        yield Remade(f"{where}: documents and tokens", (split.documents, split.tokens), tuple(of_tokens.tolist()))
        if are_there:
            yield Remade(f"{where}: documents and bytes", (split.documents, split.bytes), tuple(of_texts.tolist()))


def stages(run: Path) -> Comparisons:
    """Check what a verb of mlm-data states."""
    if (run / DATASET).is_file():
        yield from card(run)
    elif (run / LEDGER).is_file():
        yield from _attrition(read_document(run / LEDGER, Ledger))
    else:
        for name, measured in read_object(run / OVERLAP)["test_sets"].items():
            ngrams, present = (sum(column) for column in zip(*measured["documents"], strict=True))
            due = {"ngrams": ngrams, "found": present, "percent": 100 * present / ngrams if ngrams else 0.0}
            said = {**measured["occurrences"], "percent": measured["percent"]}
            yield Remade(f"{OVERLAP}: {name}", said, due)


def _attrition(ledger: Ledger) -> Comparisons:
    """Compare what stages took in, kept and dropped, and what the splits have."""
    for stage in ledger.stages:
        amount = stage.documents_out + sum(dropped.documents for dropped in stage.dropped.values())
        if stage.name == "decontaminate" and stage.changed:  # a document that is cut may become several
            amount = min(amount, stage.documents_in)
        yield Remade(f"{LEDGER}: documents into {stage.name}", stage.documents_in, amount)
    for before, after in pairwise(ledger.stages):
        yield Remade(f"{LEDGER}: documents into {after.name}", after.documents_in, before.documents_out)
    if splits := ledger.splits.values():
        said = sum(split.documents for split in splits), sum(split.bytes or 0 for split in splits)
        due = ledger.stages[-1].documents_out, ledger.stages[-1].bytes_out
        yield Remade(f"{LEDGER}: documents and bytes of its splits", said, due)


def counted(run: Path, card: DataCard) -> Comparisons:
    """Compare a data card with its ledger."""
    ledger = read_document(run / LEDGER, Ledger)
    yield from _attrition(ledger)
    stages = {stage.name: (stage.documents_out, stage.tokens_out) for stage in ledger.stages}
    of_card = {name: (x.documents, x.tokens) for name, x in card.stages.items() if name in stages}
    said, due = ({"source": each.source, "splits": {
        name: (split.documents, split.bytes, split.tokens) for name, split in each.splits.items()
    }} for each in (card, ledger))  # fmt: skip
    yield Remade(f"{DATASET}: near_duplicates", card.near_duplicates, ledger.near_duplicates, f"{LEDGER} says")
    yield Remade(DATASET, said | {"stages": of_card}, due | {"stages": stages}, f"{LEDGER} says")
