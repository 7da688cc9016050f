"""Kinds of directories that mlm-data makes, and the checks that recompute their files: card,
ledger, token files, documents and tokenizer."""

import random
import re
import secrets
from functools import partial
from itertools import chain, pairwise, product
from pathlib import Path

import numpy as np

from mlm_repro.data_pipeline.config import DataConfig
from mlm_repro.data_pipeline.document import size_bytes, written_documents
from mlm_repro.data_pipeline.files import DATASET, LEDGER, DataCard, Ledger
from mlm_repro.data_pipeline.passes.overlap import RESULT as OVERLAP
from mlm_repro.data_pipeline.passes.prepare import QUARANTINE
from mlm_repro.data_pipeline.stages import STAGES
from mlm_repro.data_pipeline.tokens.token_file import TokenFile, split_prefixes, texts_of
from mlm_repro.data_pipeline.tokens.tokenizer import Tokenizer
from mlm_repro.lineage.atomic import parse_json
from mlm_repro.lineage.digest import read_digest, sealed_files
from mlm_repro.lineage.files import (
    Comparisons,
    Manifest,
    Remade,
    as_said,
    read_document,
    read_object,
)
from mlm_repro.lineage.kinds import NAME, Kind
from mlm_repro.lineage.run import MANIFEST

SAMPLED_DOCUMENTS = 64
AMOUNTS = "documents", "bytes", "tokens"


def card(run: Path) -> Comparisons:
    """Compare the data card with the sealed files, the ledger, the token files, the documents and
    the tokenizer.

    Up to SAMPLED_DOCUMENTS documents of each token file are tokenized anew.
    """
    card = read_document(run / DATASET, DataCard)
    sealed = sealed_files(run)
    files = {name: file.to_json() for name, file in card.files.items()}
    held = {
        *files,
        *(
            name
            for name in sealed
            if name.endswith((".bin", ".idx")) or name.startswith("documents/")
        ),
    }
    yield Remade(f"{DATASET}: files", files, {name: sealed.get(name) for name in held})
    yield from counted(run, card)
    tokenizer = Tokenizer.load(run / "tokenizer")
    stated_tokenizer = (card.tokenizer.digest, card.vocab_size, card.end_of_text)
    yield Remade(
        f"{DATASET}: tokenizer",
        stated_tokenizer,
        (tokenizer.digest, tokenizer.vocab_size, tokenizer.end_of_text),
    )
    config = read_document(run / MANIFEST, Manifest).config
    if "sources" in config:  # an imported dataset has none
        made_with = {name: config[name] for name in card.stages if name in config}
        yield Remade(f"{DATASET}: settings", card.settings, made_with, f"{MANIFEST} has")
        stated = card.seed, card.tokenizer.kind
        asked = (
            config.get("seed", card.seed),
            config.get("tokenizer", {}).get("kind", card.tokenizer.kind),
        )
        yield Remade(f"{DATASET}: seed and tokenizer", stated, asked, f"{MANIFEST} has")
    for name, split in card.splits.items():
        of_tokens = np.zeros(2, np.int64)
        of_texts = np.zeros(2, np.int64)
        are_there = False
        for prefix in split_prefixes(run, name):
            tokens = TokenFile(prefix)
            documents = texts_of(prefix)
            of_tokens += len(tokens.document_index) - 1, len(tokens.tokens)
            if not documents.is_file():
                continue
            are_there = True
            texts = [document.text for document in written_documents(documents)]
            of_texts += _amount(texts)
            # The draw depends on the seal and on chance: nobody can know beforehand which documents
            # to leave intact.
            draw = random.Random(f"{read_digest(run)} {secrets.token_hex()}")
            amount = min(len(tokens.document_index) - 1, len(texts))
            for number in sorted(draw.sample(range(amount), min(amount, SAMPLED_DOCUMENTS))):
                first, end = tokens.document_index[number : number + 2]
                has = np.concatenate([tokens[sequence] for sequence in range(first, end)]).tolist()
                due = [*tokenizer.encode(texts[number]), tokenizer.end_of_text]
                yield Remade(f"{prefix.name}: tokens of document {number}", has, due)
        where = f"{DATASET}: {split.prefix}"
        yield Remade(
            f"{where}: documents and tokens",
            (split.documents, split.tokens),
            tuple(of_tokens.tolist()),
        )
        if are_there:
            yield Remade(
                f"{where}: documents and bytes",
                (split.documents, split.bytes),
                tuple(of_texts.tolist()),
            )


def stages(run: Path) -> Comparisons:
    """Compare the ledger of a verb's result with its documents, or `overlap.json` with its own
    counts. A dataset is checked by `card`."""
    if (run / DATASET).is_file():
        yield from card(run)
    elif (run / LEDGER).is_file():
        ledger = read_document(run / LEDGER, Ledger)
        yield from _attrition(run, ledger)
        last = ledger.stages[-1]
        files = run.rglob("shard-*.jsonl")
        documents = chain.from_iterable(map(written_documents, files))
        texts = [document.text for document in documents]
        yield Remade(
            f"{LEDGER}: documents and bytes", (last.documents_out, last.bytes_out), _amount(texts)
        )
    else:
        for name, measured in read_object(run / OVERLAP)["test_sets"].items():
            ngrams, present = (sum(column) for column in zip(*measured["documents"], strict=True))
            due = {
                "ngrams": ngrams,
                "found": present,
                "percent": 100 * present / ngrams if ngrams else 0.0,
            }
            stated = {**measured["occurrences"], "percent": measured["percent"]}
            yield Remade(f"{OVERLAP}: {name}", stated, due)


def _attrition(run: Path, ledger: Ledger) -> Comparisons:
    """Compare the numbers of each stage's ledger entry with one another, with the stages before,
    and with quarantine, banding and splits."""
    for stage in ledger.stages:
        # A document that is cut loses tokens and may become several, so that sums do not hold.
        is_cut = stage.name == "decontaminate" and stage.changed
        for unit in ("documents", "tokens")[: 2 - is_cut] if stage.changed else AMOUNTS:
            if (came := getattr(stage, f"{unit}_in")) is not None:
                amount = getattr(stage.kept, unit) + sum(
                    getattr(dropped, unit) for dropped in stage.dropped.values()
                )
                yield Remade(
                    f"{LEDGER}: {unit} into {stage.name}",
                    came,
                    min(amount, came) if is_cut else amount,
                )
    for (before, after), unit in product(pairwise(ledger.stages), AMOUNTS):
        came = getattr(after, f"{unit}_in")
        went = getattr(before.kept, unit)
        if None not in (came, went):
            yield Remade(f"{LEDGER}: {unit} into {after.name}", came, went, f"{before.name} kept")
    if (run / QUARANTINE).is_file():
        bad = sum(parse_json(line)["line"] > 0 for line in (run / QUARANTINE).open("rb"))
        yield Remade(f"{LEDGER}: malformed_lines", ledger.malformed_lines, bad, f"{QUARANTINE} has")
    if alike := ledger.near_duplicates:
        from mlm_repro.data_pipeline.duplicates.lsh import CURVE, recall  # imports numba

        found_at = partial(
            recall, bands=alike.bands, rows=alike.rows, min_agreement=alike.min_agreement
        )
        yield as_said(
            alike,
            {
                "s_curve": [(similarity, found_at(similarity)) for similarity in CURVE],
                "expected_recall": {name: found_at(float(name)) for name in alike.expected_recall},
                "compared_pairs": sum(alike.compared_pairs_by_similarity),
                "permutations": alike.bands * alike.rows,
            },
            f"{LEDGER}: near_duplicates",
            "its bands give",
        )
    if splits := ledger.splits.values():
        stated = sum(split.documents for split in splits), sum(split.bytes or 0 for split in splits)
        due = ledger.stages[-1].documents_out, ledger.stages[-1].bytes_out
        yield Remade(f"{LEDGER}: documents and bytes of its splits", stated, due)


def _amount(texts: list[str]) -> tuple[int, int]:
    """Return the number of documents and of their bytes."""
    return len(texts), sum(map(size_bytes, texts))


def counted(run: Path, card: DataCard) -> Comparisons:
    """Compare a data card with its ledger."""
    ledger = read_document(run / LEDGER, Ledger)
    yield from _attrition(run, ledger)
    stages = {stage.name: stage.kept for stage in ledger.stages}
    of_card = {name: amount for name, amount in card.stages.items() if name in stages}
    stated, due = (
        {
            "source": file.source,
            "splits": {
                name: (split.documents, split.bytes, split.tokens)
                for name, split in file.splits.items()
            },
        }
        for file in (card, ledger)
    )
    yield Remade(
        f"{DATASET}: near_duplicates",
        card.near_duplicates,
        ledger.near_duplicates,
        f"{LEDGER} says",
    )
    yield Remade(DATASET, stated | {"stages": of_card}, due | {"stages": stages}, f"{LEDGER} says")


DOCUMENTS = rf"(quarantine|duplicates|dropped|left_in|({NAME}/)?shard-[0-9]+)\.jsonl"
FILES = (
    rf"{DOCUMENTS}|documents/{NAME}\.(jsonl|parquet)|{NAME}_text_document\.(bin|idx)"
    r"|tokenizer/tokenizer(_config)?\.json"
)
FREE_COUNTS = (
    "ledger.json *.samples",
    "ledger.json *.seconds",
    "ledger.json *.note",
    "ledger.json *.changed",
    "ledger.json shards",
    "ledger.json blank_lines",
    "duplicates.jsonl",
    "left_in.jsonl",
    "quarantine.jsonl",
    "dropped.jsonl",
    "*.jsonl *.id",
    "ledger.json near_duplicates.expected_candidate_precision",
)
FREE_CARD = "dataset.json language", "tokenizer/*.json"
MADE_BY_VERBS = Kind(
    {LEDGER: Ledger, DATASET: DataCard}, FILES, free=FREE_COUNTS + FREE_CARD, made=(stages,)
)
KINDS = {
    **{
        f"data-{stage.verb}": Kind({LEDGER: Ledger}, DOCUMENTS, free=FREE_COUNTS, made=(stages,))
        for stage in STAGES
    },
    "data-tokenize": MADE_BY_VERBS,
    "data-import": MADE_BY_VERBS,
    "data-merge": MADE_BY_VERBS,  # a verb of earlier versions
    "data-overlap": Kind({OVERLAP: None}, made=(stages,)),
    "data": MADE_BY_VERBS._replace(
        name=lambda config: re.escape(config["name"]),
        settings=lambda config: DataConfig.model_validate(config).identity(),
        made=(card,),
    ),
}
