"""Kinds of directories that mlm-data makes, and the checks that recompute their files: card,
ledger, token files, documents and tokenizer."""

import random
import re
import secrets
from functools import partial
from itertools import pairwise, product
from pathlib import Path

import numpy as np
from pydantic import BaseModel

from mlm_repro.data_pipeline.config import DataConfig, OverlapConfig, TokenizerConfig
from mlm_repro.data_pipeline.document import size_bytes, written_documents
from mlm_repro.data_pipeline.files import (
    DATASET,
    LEDGER,
    UNSPLIT,
    DataCard,
    Ledger,
    NearDuplicates,
)
from mlm_repro.data_pipeline.passes.overlap import RESULT as OVERLAP
from mlm_repro.data_pipeline.passes.prepare import QUARANTINE
from mlm_repro.data_pipeline.reading.config import INSTALLED_DOCS
from mlm_repro.data_pipeline.stages import STAGES
from mlm_repro.data_pipeline.stages.deduplicate import DeduplicateConfig
from mlm_repro.data_pipeline.stages.stage import SOURCE
from mlm_repro.data_pipeline.tokens.token_file import (
    TOKENS_OF,
    TokenFile,
    split_prefixes,
    texts_of,
)
from mlm_repro.data_pipeline.tokens.tokenizer import Tokenizer, padded_vocab_size
from mlm_repro.lineage.atomic import JSON, parse_json
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
TEST_SET_KEYS = {"texts", "percent", "occurrences", "distinct", "documents"}


def card(run: Path) -> Comparisons:
    """Yield comparisons, each a Remade, of the data card of the dataset in `run` with the sealed
    files, the manifest, the ledger, the token files, the documents and the tokenizer. Values are
    recomputed here; the caller decides if they differ.

    Up to SAMPLED_DOCUMENTS documents of each token file that has its documents' texts beside it,
    drawn at random, are tokenized anew. Raises IntegrityFailure if one of the files is damaged,
    BadInput if a token file or the tokenizer is missing.
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
    config = _config(run)
    asked = _asked(config, TokenizerConfig, "tokenizer")
    kind = "path" if asked["path"] else asked["kind"]
    seed = config.get("seed", DataConfig.model_fields["seed"].default)
    facts = {
        "seed": 0 if "prefix" in config else seed,  # tokens of another's file are not shuffled
        "tokenizer": {"kind": kind, "digest": tokenizer.digest},
        "vocab_size": tokenizer.vocab_size,
        "padded_vocab_size": padded_vocab_size(
            tokenizer.vocab_size, asked["multiple"], asked["tp"]
        ),
        "end_of_text": tokenizer.end_of_text,
    }
    yield as_said(card, facts, DATASET, f"{MANIFEST} and tokenizer give")
    if not any(INSTALLED_DOCS in name for name in read_document(run / MANIFEST, Manifest).parents):
        yield Remade(f"{DATASET}: packages", card.packages, {}, f"the sources in {MANIFEST} give")
    if "sources" in config:  # of a recipe
        made_with = {name: config[name] for name in card.stages if name in config}
        yield Remade(f"{DATASET}: settings", card.settings, made_with, f"{MANIFEST} has")
        yield from _banded(run, card.near_duplicates, DATASET)
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
        alone = f"{name}{TOKENS_OF}"
        whole = alone if (run / f"{alone}.bin").is_file() else f"{name}-*{TOKENS_OF}"
        yield Remade(f"{DATASET}: prefix of {name}", split.prefix, whole)
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
    """Yield comparisons, each a Remade, of the files that a verb of `mlm-data` wrote in the
    directory `run`: of the ledger with its own numbers, the manifest and the documents in the
    directory, or of `overlap.json` with the manifest and with its own counts. A directory with a
    data card is compared as a whole dataset. Raises IntegrityFailure if a file is damaged, and for
    such a dataset BadInput if a token file or the tokenizer is missing."""
    if (run / LEDGER).is_file():
        done = [stage.name for stage in read_document(run / LEDGER, Ledger).stages]
        asked = [SOURCE, *_config(run).get("stages", [])]
        yield Remade(f"{LEDGER}: stages", done, asked, f"{MANIFEST} has")
    if (run / DATASET).is_file():
        yield from card(run)
    elif (run / LEDGER).is_file():
        ledger = read_document(run / LEDGER, Ledger)
        yield from _attrition(run, ledger)
        yield from _banded(run, ledger.near_duplicates, LEDGER)
        named = []
        for name, split in ledger.splits.items():
            folder = "" if name == UNSPLIT else f"{name}/"
            count = len(list((run / folder).glob("shard-*.jsonl")))
            names = [f"{folder}shard-{number:05d}.jsonl" for number in range(count)]
            texts = []
            for name_of_file in names:
                texts += [document.text for document in written_documents(run / name_of_file)]
            amount = split.documents, split.bytes
            yield Remade(f"{LEDGER}: documents and bytes of {name}", amount, _amount(texts))
            named += names
        has = [path.relative_to(run).as_posix() for path in run.rglob("shard-*.jsonl")]
        yield Remade("shards", sorted(has), sorted(named), f"{LEDGER} gives")
    else:
        overlap = read_object(run / OVERLAP)
        said = {**overlap, "test_sets": [*overlap["test_sets"]]}
        gives = {
            **_asked(_config(run), OverlapConfig, "overlap"),
            "source": overlap.get("source"),
        }
        yield Remade(OVERLAP, said, gives, f"{MANIFEST} has")
        for name, measured in overlap["test_sets"].items():
            yield Remade(f"{OVERLAP}: keys of {name}", {*measured}, TEST_SET_KEYS)
            ngrams, present = (sum(column) for column in zip(*measured["documents"], strict=True))
            due = {
                "ngrams": ngrams,
                "found": present,
                "percent": 100 * present / ngrams if ngrams else 0.0,
            }
            stated = {**measured["occurrences"], "percent": measured["percent"]}
            yield Remade(f"{OVERLAP}: {name}", stated, due)


def _attrition(run: Path, ledger: Ledger) -> Comparisons:
    """Yield comparisons, each a Remade, of the numbers in each stage's ledger entry with one
    another and with the entry of the stage before, and of the ledger with the quarantine in `run`,
    the banding and the splits."""
    for stage in ledger.stages:
        if ":" not in stage.name:  # a stage of this program, whose reasons are in ASCII
            odd = [reason for reason in stage.dropped if not reason.isascii()]
            yield Remade(f"{LEDGER}: reasons of {stage.name} in other letters", odd, [])
        # A document loses tokens, and may become several.
        is_cut = stage.name == "decontaminate" and stage.changed
        for what in ("documents", "tokens")[: 2 - is_cut] if stage.changed else AMOUNTS:
            came = getattr(stage, f"{what}_in")
            left = getattr(stage.kept, what)
            if came is None or left is None:
                yield Remade(f"{LEDGER}: {what} into {stage.name}", came, left)
            else:
                amount = left + sum(getattr(dropped, what) for dropped in stage.dropped.values())
                yield Remade(
                    f"{LEDGER}: {what} into {stage.name}",
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
        from mlm_repro.data_pipeline.duplicates.lsh import CURVE, SIMILARITIES, recall  # with numba

        found_at = partial(
            recall, bands=alike.bands, rows=alike.rows, min_agreement=alike.min_agreement
        )
        yield as_said(
            alike,
            {
                "s_curve": [(similarity, found_at(similarity)) for similarity in CURVE],
                "expected_recall": {
                    str(each): found_at(each) for each in sorted({*SIMILARITIES, alike.threshold})
                },
                "compared_pairs": sum(alike.compared_pairs_by_similarity),
                "permutations": alike.bands * alike.rows,
            },
            f"{LEDGER}: near_duplicates",
            "its bands give",
        )
    if splits := ledger.splits.values():
        said = [sum(getattr(split, what) or 0 for split in splits) for what in AMOUNTS]
        due = [getattr(ledger.stages[-1].kept, what) or 0 for what in AMOUNTS]
        yield Remade(f"{LEDGER}: documents and bytes of its splits, and tokens", said, due)


def _asked(config: JSON, section: type[BaseModel], name: str) -> JSON:
    """Return the section called `name` of a recorded configuration as a dict by key. Keys that it
    lacks, such as newer ones, have the defaults of the class `section`; if there is no such
    section, all keys have these defaults. Nothing is validated."""
    return {**section().model_dump(), **config.get(name, {})}


def _banded(run: Path, alike: NearDuplicates | None, document: str) -> Comparisons:
    """Yield a comparison, a Remade, of the near-duplicate rule, threshold and shingle length in
    `alike`, an entry of the file called `document`, with the settings in the run's manifest;
    nothing if `alike` is None."""
    if alike:
        asked = _asked(_config(run), DeduplicateConfig, "deduplicate")
        rule = {name: asked[name] for name in ("rule", "threshold", "shingle_characters")}
        yield as_said(alike, rule, f"{document}: near_duplicates", f"{MANIFEST} has")


def _config(run: Path) -> JSON:
    return read_document(run / MANIFEST, Manifest).config


def _amount(texts: list[str]) -> tuple[int, int]:
    """Return a pair: the number of texts, and their size in UTF-8 in bytes."""
    return len(texts), sum(map(size_bytes, texts))


def counted(run: Path, card: DataCard) -> Comparisons:
    """Yield comparisons, each a Remade, of the data card `card` with the ledger beside it in `run`,
    of the ledger's numbers with one another, and of its malformed lines with the quarantine, if
    there is one. No token files or documents are read. Raises IntegrityFailure if the ledger is
    missing or damaged."""
    ledger = read_document(run / LEDGER, Ledger)
    yield from _attrition(run, ledger)
    stages = {stage.name: stage.kept for stage in ledger.stages}
    of_card = {name: amount for name, amount in card.stages.items() if name in stages}
    names = [stage.name for stage in ledger.stages]
    yield Remade(f"{LEDGER}: stages", names, [*of_card], f"{DATASET} has")
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
    "*.json near_duplicates.expected_candidate_precision",
    "*.json near_duplicates.compared_pairs_by_similarity",
    "*.json near_duplicates.partly_compared_documents",
    "*.json near_duplicates.uncompared_pairs",
    "*.json source",
)
FREE_TEXTS = (*FREE_COUNTS, "*shard-*.jsonl *.text", "the order of lines in shard-*.jsonl")
FREE_CARD = "dataset.json language", "tokenizer/*.json"
MADE_BY_VERBS = Kind(
    {LEDGER: Ledger, DATASET: DataCard}, FILES, free=FREE_COUNTS + FREE_CARD, made=(stages,)
)
KINDS = {
    **{
        f"data-{stage.verb}": Kind({LEDGER: Ledger}, DOCUMENTS, free=FREE_TEXTS, made=(stages,))
        for stage in STAGES
    },
    "data-tokenize": MADE_BY_VERBS,
    "data-import": MADE_BY_VERBS,
    "data-merge": MADE_BY_VERBS,  # of earlier versions
    "data-overlap": Kind(
        {OVERLAP: None},
        free=(
            *(f"{OVERLAP} {part}" for part in ("*.texts", "*.distinct", "source")),
            "the order of documents in overlap.json",
        ),
        made=(stages,),
    ),
    "data": MADE_BY_VERBS._replace(
        name=lambda config: re.escape(config["name"]),
        settings=lambda config: DataConfig.model_validate(config).identity(),
        made=(card,),
    ),
}
