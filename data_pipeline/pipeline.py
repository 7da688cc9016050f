"""The stages in order, each run over every document and entered in the ledger.

source, clean, language, length, deduplicate, decontaminate, split, tokenize. A stage itself is a pure function in
its own module; here are the files between stages, the workers and the counters.
"""

import json
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_pipeline.aggregates import CountTokens, run_decontaminate, run_deduplicate
from data_pipeline.clean import clean
from data_pipeline.config import DataConfig
from data_pipeline.document import Document, Drop
from data_pipeline.document_file import DocumentFile
from data_pipeline.early_counts import EarlyStage
from data_pipeline.language import keep_language
from data_pipeline.ledger import Amount, Ledger, Stage
from data_pipeline.length import keep_long
from data_pipeline.sources import OpenedSources
from data_pipeline.split import split
from data_pipeline.token_file import TokenFileWriter, token_dtype
from data_pipeline.tokenizer import Tokenizer, load_once, padded_vocab_size
from data_pipeline.workers import Workers
from lineage.atomic import write_json
from lineage.errors import BadInput

Judge = Callable[[Document], Document | Drop]
MakeTokenizer = Callable[[Iterable[str]], Tokenizer]
RunStage = Callable[[Stage, DocumentFile, DocumentFile], None]


class Pipeline:
    """One pass through all stages, writing a dataset into `directory`.

    `test_sets` are the files to search for, None for one that is missing; `make_tokenizer` is given the texts in the
    kept language.
    """

    def __init__(
        self,
        config: DataConfig,
        sources: OpenedSources,
        test_sets: dict[str, Path | None],
        make_tokenizer: MakeTokenizer,
        directory: Path,
        workers: Workers,
    ) -> None:
        self._config, self._sources, self._test_sets = config, sources, test_sets
        self._make_tokenizer, self._directory, self._workers = make_tokenizer, directory, workers
        self._work = directory / "work"
        self._ledger = Ledger(sources.describe())
        self._early: list[EarlyStage] = []

    def run(self) -> None:
        """Write every file of the dataset but the manifest."""
        config, workers = self._config, self._workers
        self._work.mkdir()
        documents = self._read_sources()
        judge_clean = partial(clean, normalization=config.clean.normalization)
        documents = self._stage("clean", documents, partial(self._judge, judge=judge_clean))
        judge_language = partial(keep_language, code=config.language.keep)
        documents = self._stage("language", documents, partial(self._judge, judge=judge_language))
        tokenizer = self._make_tokenizer(documents.texts("tokenizer"))
        tokenizer.save(self._directory / "tokenizer")
        count = partial(self._count, tokenizer)
        documents = self._stage("length", documents, partial(self._drop_short, count=count))
        deduplicate = partial(run_deduplicate, config=config.deduplicate, workers=workers)
        documents = self._stage("deduplicate", documents, deduplicate)
        decontaminate = partial(
            run_decontaminate,
            config=config.decontaminate,
            test_sets=self._test_sets,
            workers=workers,
            count=count,
        )
        documents = self._stage("decontaminate", documents, decontaminate)
        orders = self._split(documents)
        splits = self._tokenize(documents, orders, tokenizer)
        documents.discard()
        self._work.rmdir()
        write_json(self._directory / "ledger.json", self._ledger.to_json(splits))
        write_json(self._directory / "dataset.json", self._describe(tokenizer, splits))

    def _read_sources(self) -> DocumentFile:
        documents = DocumentFile(self._work / "source")
        quarantine_path = self._directory / "quarantine.jsonl"
        with self._ledger.stage("source") as stage, quarantine_path.open("w", encoding="ascii") as quarantine:
            for found in self._sources.read(self._workers):
                if isinstance(found, Document):
                    stage.take(found)
                    stage.keep(found)
                    documents.append(found)
                else:
                    self._ledger.malformed += 1
                    quarantine.write(json.dumps(asdict(found)) + "\n")
            self._ledger.source = self._sources.describe()
        if self._ledger.malformed:
            print(f"{self._ledger.malformed:,} malformed inputs are in quarantine.jsonl", file=sys.stderr)
        return documents

    def _stage(self, name: str, documents: DocumentFile, run: RunStage) -> DocumentFile:
        """Run one stage from its documents into a new file of those it kept."""
        kept = DocumentFile(self._work / name)
        with self._ledger.stage(name) as stage:
            run(stage, documents, kept)
        documents.discard()
        return kept

    def _judge(self, stage: Stage, documents: DocumentFile, kept: DocumentFile, judge: Judge) -> None:
        """A stage that judges each document by itself, before there is a tokenizer to count tokens with."""
        early = EarlyStage(stage, self._work)
        self._early.append(early)
        outcomes = self._workers.map(judge, documents.documents())
        for before, after in zip(documents.documents(stage.name), outcomes, strict=True):
            early.record(before, after)
            if isinstance(after, Document):
                kept.append(after)

    def _count(self, tokenizer: Tokenizer, texts: Iterable[str]) -> Iterator[int]:
        encode = partial(encode_text, directory=self._directory / "tokenizer", digest=tokenizer.digest)
        return (len(ids) for ids in self._workers.map(encode, texts))

    def _drop_short(self, stage: Stage, documents: DocumentFile, kept: DocumentFile, count: CountTokens) -> None:
        """The first stage that knows tokens: it completes the counts of the stages before it."""
        counts = count(documents.texts())
        for document, tokens in zip(documents.documents(stage.name), counts, strict=True):
            stage.take(document, tokens)
            outcome = keep_long(document, tokens, self._config.length.min_tokens)
            if isinstance(outcome, Drop):
                stage.drop(document, outcome, tokens)
            else:
                stage.keep(document, tokens)
                kept.append(document, tokens)
        total = stage.incoming.tokens
        for early in reversed(self._early):
            total = early.complete(total, count)
        source = self._ledger.stages[0]
        source.incoming.tokens = source.kept.tokens = total

    def _split(self, documents: DocumentFile) -> dict[str, NDArray[np.int64]]:
        """The document numbers of each split, whose texts are written out."""
        config, seed = self._config.split, self._config.seed
        with self._ledger.stage("split") as stage:
            if len(documents) < 2:
                raise BadInput("one document is left of the corpus, too few for a training and a validation split")
            order = split(len(documents), config.train, config.valid, seed)
            orders = dict(zip(("train", "valid"), order, strict=True))
            (self._directory / "documents").mkdir()
            for name, numbers in orders.items():
                with (self._directory / "documents" / f"{name}.jsonl").open("w", encoding="utf-8") as file:
                    for number in numbers:
                        document, tokens = documents[number]
                        stage.take(document, tokens)
                        stage.keep(document, tokens)
                        file.write(json.dumps(asdict(document), ensure_ascii=False) + "\n")
            stage.note = f"shuffled with seed {seed}; {config.train}:{config.valid} training to validation"
        return orders

    def _tokenize(
        self, documents: DocumentFile, orders: dict[str, NDArray[np.int64]], tokenizer: Tokenizer
    ) -> dict[str, Any]:
        """Write the token files; returns what each split holds."""
        splits: dict[str, Any] = {}
        encode = partial(encode_text, directory=self._directory / "tokenizer", digest=tokenizer.digest)
        with self._ledger.stage("tokenize") as stage:
            for name, numbers in orders.items():
                amount, prefix = Amount(), f"{name}_text_document"
                encoded = self._workers.map(encode, (documents[number][0].text for number in numbers))
                with TokenFileWriter(self._directory / prefix, token_dtype(tokenizer.vocab_size)) as writer:
                    for number, ids in zip(numbers, encoded, strict=True):
                        writer.add_document(ids)
                        for counter in (amount, stage.incoming, stage.kept):
                            counter.add(documents[number][0], len(ids))
                splits[name] = {"prefix": prefix, **asdict(amount)}
            stage.note = f"vocabulary of {tokenizer.vocab_size:,}; each document ends with an end-of-text token"
        return splits

    def _describe(self, tokenizer: Tokenizer, splits: dict[str, Any]) -> dict[str, Any]:
        config = self._config.tokenizer
        return {
            "name": self._config.name,
            "source": self._ledger.source,
            "seed": self._config.seed,
            "tokenizer": {"kind": config.kind, "digest": tokenizer.digest},
            "vocab_size": tokenizer.vocab_size,
            "padded_vocab_size": padded_vocab_size(tokenizer.vocab_size, config.multiple, config.tp),
            "end_of_text": tokenizer.end_of_text,
            "splits": splits,
        }


def encode_text(text: str, directory: Path, digest: str) -> NDArray[np.int32]:
    """Token ids of a text with the end-of-text token appended."""
    tokenizer = load_once(directory, digest)
    return np.array([*tokenizer.encode(text), tokenizer.end_of_text], np.int32)
