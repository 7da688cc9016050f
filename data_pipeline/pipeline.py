"""The stages in order, as tasks in a workspace, each entered in the ledger.

Two passes go over every shard: `prepare` (source and the stages that need only text) and `measure`
(everything that later decisions need). Then decisions are made on numbers alone, `select` keeps or
cuts each shard's documents, and `gather` writes them in their final order.
"""

import math
import shutil
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from time import monotonic
from typing import Self

import numpy as np
import orjson

from mlm_repro.data_pipeline.config import DataConfig
from mlm_repro.data_pipeline.contamination.testsets import find_gpt2_vocabulary
from mlm_repro.data_pipeline.duplicates.lsh import describe as describe_banding
from mlm_repro.data_pipeline.files import UNSPLIT, InputShard, Ledger, StageAttrition
from mlm_repro.data_pipeline.passes.deduplicate import find_duplicates
from mlm_repro.data_pipeline.passes.gather import choose_order, gather_slice, slice_documents
from mlm_repro.data_pipeline.passes.measure import measure
from mlm_repro.data_pipeline.passes.prepare import QUARANTINE, join_lists, prepare
from mlm_repro.data_pipeline.passes.selection import LEFT_IN, find_rare_ngrams, select_documents
from mlm_repro.data_pipeline.passes.train_tokenizer import copy, train
from mlm_repro.data_pipeline.reading.pieces import Piece, choose_shard_bytes
from mlm_repro.data_pipeline.reading.readers import check_damaged
from mlm_repro.data_pipeline.reading.sources import OpenedSources
from mlm_repro.data_pipeline.stages import TEXT_FILTERS, TOKEN_FILTERS, Known, own_code
from mlm_repro.data_pipeline.stages.stage import SOURCE
from mlm_repro.data_pipeline.tokens.token_file import token_dtype
from mlm_repro.data_pipeline.tokens.tokenizer import Tokenizer, load_once
from mlm_repro.data_pipeline.work.tasks import Input
from mlm_repro.data_pipeline.work.workspace import Finished, Job, Workspace
from mlm_repro.lineage.atomic import JSON
from mlm_repro.lineage.errors import BadInput
from mlm_repro.lineage.progress import announce, format_bytes


@dataclass
class Pipeline:
    """Build of a dataset by the recipe `config` from its opened `sources`, as tasks in `workspace`.
    Nothing runs before the method `run`, which runs all stages; then `ledger`, `tokenizer`,
    `finished` and `splits` have their results, and `publish` makes the dataset.

    `test_sets` has, by the test set's name, the file whose n-grams the stage `decontaminate`
    searches for, or None if it is missing. `digests` has the digest of each part of the input.
    """

    config: DataConfig
    sources: OpenedSources
    test_sets: dict[str, Path | None]
    workspace: Workspace
    digests: dict[str, str]
    """Dict from the name of each part of the input, such as `tokenizer` or `test set lambada`, to
    its digest."""
    ledger: Ledger = field(init=False)
    tokenizer: Tokenizer | None = field(init=False, default=None)
    finished: dict[str, Finished] = field(init=False, default_factory=dict)
    """Dict from the name of each finished stage to its Finished: `prepare`, `measure`, `select`,
    `gather`, and `decisions` if duplicates were searched for; `publish` adds `duplicates` then."""
    compared: int = field(init=False, default=0)
    """Number of shards that hold the datasets of `deduplicate.against`; they come before the
    recipe's own shards."""
    splits: dict[str, dict[str, list[int]]] = field(init=False, default_factory=dict)
    """Dict from each split to a dict from each of its files to a list of the numbers of the
    `gather` tasks that write that file. A file is named without its ending."""

    @property
    def stages(self) -> tuple[str, ...]:
        """A tuple of the names of the stages that the recipe `config` asks for, in the order in
        which they run."""
        return self.config.stages

    def run(self) -> Self:
        """Run all stages of the recipe and return this pipeline, with its ledger and finished
        stages filled; tasks that are done already are not repeated. The files stay in the
        workspace, and `publish` makes the dataset of them. Raises BadInput if no document is left,
        or one alone for a split, if more input is damaged or malformed than the recipe allows, or
        if the text is too small for its vocabulary; also the errors of the sources and of the
        executor, such as DataMissing and Interrupted."""
        size = choose_shard_bytes(self.config.shard_bytes, self.sources.total_bytes)
        compared = self.sources.shards(self.workspace, size, compared=True)
        shards = [*compared, *self.sources.shards(self.workspace, size)]
        self.compared = len(compared)
        self.ledger = Ledger(
            source=self.sources.describe(),
            stages=[
                StageAttrition.begin(name)
                for name in (SOURCE, *(n for n in self.stages if n in TEXT_FILTERS))
            ],
            shards=[],
        )
        prepared = self._prepare(shards)
        tokenizer = self._make_tokenizer(prepared)
        measured = self.finished["measure"] = self._measure(prepared, tokenizer)
        selected = self._select(prepared, measured, tokenizer)
        splits = [shard[0].split for shard in shards[self.compared :]]
        jobs = self._order([*splits[:1] * self.compared, *splits], prepared, measured, selected)
        self.finished["gather"] = self._gather(jobs)
        return self

    def _section(self, name: str) -> JSON | None:
        """Return the section of the stage called `name` in the recipe, with its defaults, as JSON
        values by key, or None if the recipe does not run the stage or the stage has no section,
        such as one of the user's own code."""
        section = getattr(self.config, name, None)
        return section.model_dump(mode="json") if section and name in self.stages else None

    def _filters(self, kind: Known) -> JSON:
        """Return a dict of settings for the tasks of a pass that applies the recipe's filters of a
        `kind`, which is TEXT_FILTERS or TOKEN_FILTERS: `filters`, pairs of a filter's name and
        section; `own`, digests of the filters that are the user's own code; and `keep_dropped`,
        whether dropped documents are written."""
        names = [name for name in self.stages if name in kind]
        return {
            "filters": [(name, self._section(name) or {}) for name in names],
            "own": own_code(names),
            "keep_dropped": self.config.keep_dropped,
        }

    def _prepare(self, shards: list[list[Piece]]) -> Finished:
        """Run the first pass over all shards, which are lists of Pieces, enter it in the ledger,
        and return the finished stage, a Finished. The first `compared` shards, which are only
        compared with, pass no filters, and of them the ledger counts malformed and blank lines
        alone. Raises BadInput if too many files are damaged, no document is left, or too many
        lines are malformed, which are then all copied to `RUN.quarantine.jsonl` beside the run's
        directory RUN; prints to standard error a warning of fewer damaged files."""
        filters = self._filters(TEXT_FILTERS)
        names = [name for name, _ in filters["filters"]]
        limit = self.config.sources.max_bad_files
        fixed = {"max_line_bytes": self.config.sources.max_line_bytes, "goes_on": limit > 0}
        jobs: list[Job] = [
            (
                {
                    **fixed,
                    "pieces": shard,
                    **(filters if number >= self.compared else {"filters": []}),
                },
                (),
            )
            for number, shard in enumerate(shards)
        ]
        prepared = self.workspace.all("prepare", prepare, jobs, " and ".join(["read", *names]))
        self.ledger.enter(prepared.counts[self.compared :])
        self.ledger.malformed_lines = sum(counts["malformed"] for counts in prepared.counts)
        self.ledger.blank_lines = sum(counts["blank"] for counts in prepared.counts)
        for shard, counts, digest in list(
            zip(shards, prepared.counts, prepared.digests, strict=True)
        )[self.compared :]:
            read = [(piece.name, piece.start, piece.end) for piece in shard]
            self.ledger.shards.append(
                InputShard(read=read, documents=counts["documents"], digest=digest)
            )
        self.finished["prepare"] = prepared
        damaged = list(chain.from_iterable(counts["damaged"] for counts in prepared.counts))
        check_damaged(damaged, limit)
        self._check_malformed()
        self.ledger.check()
        return prepared

    def _check_malformed(self) -> None:
        """Raise BadInput, with the first reasons, if the share of malformed lines is above the
        recipe's `sources.max_bad_fraction`. All malformed lines are then copied to
        `RUN.quarantine.jsonl` beside the run's directory RUN."""
        bad = self.ledger.malformed_lines
        lines = self.ledger.lines
        limit = self.config.sources.max_bad_fraction
        if bad <= limit * lines:
            return
        run = self.workspace.path.parent
        quarantine = run.with_name(f"{run.name}.{QUARANTINE}")
        shutil.copyfile(self.joined(QUARANTINE, "prepare"), quarantine)
        with quarantine.open("rb") as file:
            rows = [*map(orjson.loads, islice(file, 3))]
        raise BadInput(
            f"{bad:,} of {lines:,} lines are not documents, more than sources.max_bad_fraction ="
            f" {limit:g} allows:"
            f" {'; '.join(map('{source}, line {line}: {reason}'.format_map, rows))}; all of them"
            f" are in {quarantine}: correct them, or raise that fraction"
        )

    def joined(self, name: str, *stages: str) -> Path:
        """Join, by a task, all files called `name`, such as all malformed input, that the tasks of
        some finished stages wrote, and return the path of the joined file in the workspace. The
        further arguments name these stages. Tasks without such a file are skipped. The files follow
        one another stage by stage, and within a stage by shard; every stage must have as many tasks
        as the first."""
        finished = [self.finished[stage] for stage in stages]
        settings = {"shards": len(finished[0].counts), "name": name}
        inputs = (stage_tasks.input for stage_tasks in finished)
        return (
            self.workspace.one(f"join-{name}", join_lists, settings, *inputs).path / "00000" / name
        )

    def _make_tokenizer(self, prepared: Finished) -> Finished | None:
        """Train the tokenizer on the documents of the finished first pass, `prepared`, or copy it,
        by a task, load it into the attribute `tokenizer`, and return the finished stage, a
        Finished; do nothing and return None if no stage needs a tokenizer. Raises BadInput if the
        text is too small for a vocabulary to be trained on, BadInput or IntegrityFailure if the
        tokenizer of the recipe cannot be used, DataMissing if GPT-2's files cannot be found."""
        if not self.config.needs_tokenizer:
            return None
        config = self.config.tokenizer
        shards = (self.compared, len(prepared.counts))
        if config.is_trained:
            size = self.ledger.stages[-1].bytes_out or 0
            settings = {
                "kind": config.kind,
                "vocab_size": config.vocab_size,
                "shards": shards,
                "bytes": size,
            }
            # It takes minutes for gigabytes, and one task shows no progress.
            announce(
                f"trains a tokenizer of {config.vocab_size:,} tokens on"
                f" {format_bytes(size)} of text, by one process"
            )
            made = self.workspace.one("tokenizer", train, settings, prepared.input)
        else:
            files = [] if config.path else [str(path.resolve()) for path in find_gpt2_vocabulary()]
            origin = {
                "path": config.path and str(config.path.resolve()),
                "end_of_text": config.end_of_text,
            }
            made = self.workspace.one(
                "tokenizer", copy, {"files": files, **origin, "digest": self.digests["tokenizer"]}
            )
        self.tokenizer = load_once(made.path / "00000", made.digest)
        return made

    def _measure(self, prepared: Finished, tokenizer: Finished | None) -> Finished:
        """Run the second pass over all shards of the first, `prepared`: as the recipe asks, this
        pass applies the filters on tokens, counts tokens, fingerprints documents and searches for
        test-set text; shards that are only compared with are only fingerprinted. Enter the counts
        of all other shards in the ledger, and return the finished stage, a Finished. `tokenizer` is
        the stage that made the tokenizer, or None. Raises BadInput if no document is left."""
        config = self.config.deduplicate
        search = self.config.decontaminate
        bands, rows = config.banding
        # The tasks rebuild this section without its threshold, so its recall is not checked there.
        banding = {
            "bands": bands,
            "rows": rows,
            "shingle_characters": config.shingle_characters,
            "min_recall": 0,
        }
        words = {"ngram_words": search.ngram_words, "min_ngram_words": search.min_ngram_words}
        present = {name: path for name, path in self.test_sets.items() if path}
        settings = {
            **self._filters(TOKEN_FILTERS),
            "deduplicate": banding if "deduplicate" in self.stages else None,
            "decontaminate": words if "decontaminate" in self.stages else None,
            "test_sets": [str(path) for path in present.values()],
            "digests": [self.digests[f"test set {name}"] for name in present],
            "tokenizer": tokenizer.digest if tokenizer else None,
        }
        shared = (tokenizer.input,) if tokenizer else ()
        # Datasets that are compared with are only fingerprinted.
        alone = settings | {
            "filters": [],
            "decontaminate": None,
            "test_sets": [],
            "tokenizer": None,
        }
        jobs = [
            (settings if number >= self.compared else alone, (prepared.task(number), *shared))
            for number in range(len(prepared.counts))
        ]
        measured = self.workspace.all("measure", measure, jobs)
        self.ledger.enter(measured.counts[self.compared :])
        self.ledger.check()
        return measured

    def _select(
        self, prepared: Finished, measured: Finished, tokenizer: Finished | None
    ) -> Finished:
        """Run the task `select_documents` for each shard and return the Finished of these tasks,
        which becomes `select` in the attribute `finished`: each writes an index of the shard's
        remaining documents, whose text is left in place, and the parts of those that were cut, but
        neither for a shard that is only compared with. Before that, decide about duplicates and
        test-set text, where the recipe has these stages. Enter these stages in the ledger, with a
        note if n-grams of test sets are left. `prepared` and `measured` are the finished passes,
        `tokenizer` the stage that made the tokenizer, or None. Raises BadInput if no document is
        left."""
        counts = [task_counts["documents"] for task_counts in measured.counts]
        starts = np.cumsum([0, *counts]).tolist()
        decided: list[Input] = []
        for name, decide in (
            ("deduplicate", self._deduplicate),
            ("decontaminate", self._decontaminate),
        ):
            if name in self.stages:
                start = monotonic()
                decided.append(decide(prepared, measured, list(decided)))
                stage = self.ledger.stage(name)
                stage.seconds = (
                    monotonic()
                    - start
                    + sum(task_counts["seconds"].get(name, 0) for task_counts in measured.counts)
                )
        fixed = {
            "keep_dropped": self.config.keep_dropped,
            "deduplicate": "deduplicate" in self.stages,
            "decontaminate": self._section("decontaminate"),
            "tokenizer": tokenizer.digest if tokenizer else None,
        }
        shared = (*decided, *((tokenizer.input,) if tokenizer else ()))
        jobs = [
            (
                {**fixed, "start": starts[n], "count": counts[n], "is_written": n >= self.compared},
                (prepared.task(n), measured.task(n), *shared),
            )
            for n in range(len(counts))
        ]
        selected = self.finished["select"] = self.workspace.all("select", select_documents, jobs)
        self.ledger.enter(selected.counts)
        if self.left_in:
            entry = self.ledger.stage("decontaminate")
            entry.note += (
                f"; {self.left_in:,} documents hold such n-grams still, and {LEFT_IN} lists them"
            )
        self.ledger.check()
        return selected

    @property
    def left_in(self) -> int:
        """Number of documents, or parts of them, that still have n-grams of a test set, because
        these are frequent in the corpus. The stage `select` must be finished."""
        return sum(counts["left_in"] for counts in self.finished["select"].counts)

    def _deduplicate(self, prepared: Finished, measured: Finished, decided: list[Input]) -> Input:
        """Decide by tasks which documents of the finished passes `prepared` and `measured` are
        near-duplicates, describe the search in the ledger, and enter the finished stage in this
        object's attribute `finished` as `decisions`. Return the stage's directory, whose
        `00000/decisions.npy` has a row for each dropped document, as an Input of a further task.
        `decided` is not used."""
        held = sum(task_counts["documents"] for task_counts in measured.counts[: self.compared])
        decisions, compared = find_duplicates(
            self.workspace, prepared, measured, self.config.deduplicate, held
        )
        self.finished["decisions"] = decisions
        banding = self.ledger.near_duplicates = describe_banding(self.config.deduplicate, compared)
        recall = banding.expected_recall
        against = self.config.deduplicate.against
        expected = ", ".join(f"{recall[j]:.3f} at {j}" for j in recall)
        self.ledger.stage("deduplicate").note = (
            f"{banding.bands} bands of {banding.rows} rows, {banding.compared_pairs:,} pairs"
            " compared; a duplicate has a Jaccard similarity of at least"
            f" {self.config.deduplicate.threshold} with the document kept for it; expected recall"
            f" {expected}"
            + (
                f"; compared with {held:,} documents of {', '.join(map(str, against))}"
                if against
                else ""
            )
        )
        return decisions.input

    def _decontaminate(self, prepared: Finished, measured: Finished, decided: list[Input]) -> Input:
        """Decide in a task which n-grams of the test sets are cut out, the ones that are not too
        frequent in the corpus, describe the search in the ledger, and return these n-grams as an
        Input of a further task. `measured` is the finished second pass. `decided` has the decisions
        on duplicates, if there are any: n-grams in duplicates do not count. `prepared` is not
        used."""
        frequent = self.config.decontaminate.frequent
        settings = {
            "counts": [task_counts["documents"] for task_counts in measured.counts],
            "frequent": None if frequent == "never" else frequent,
        }
        rare = self.workspace.one("ngrams", find_rare_ngrams, settings, measured.input, *decided)
        searched = [name for name, path in self.test_sets.items() if path]
        missing = [name for name, path in self.test_sets.items() if not path]
        documents = rare.counts[0]["documents"]
        common = rare.counts[0]["common"]
        note = (
            f"searched for {' and '.join(searched) or 'no test set'}: {documents:,} documents"
            " matched"
        )
        if common:
            note += f"; {common:,} n-grams found {frequent} times or more were left in"
        if missing:
            note += f"; NOT searched for {' and '.join(missing)}, which this machine does not have"
        self.ledger.stage("decontaminate").note = note
        return rare.input

    def _order(
        self, of_shards: list[str], prepared: Finished, measured: Finished, selected: Finished
    ) -> list[Job]:
        """Choose by a task the final order of the documents that the stage `selected` has left, and
        return a list of the jobs, pairs of settings and inputs; each job is to write a slice of a
        split, and its inputs are the order, `prepared`, `measured` and `selected`. Enter in the
        field `splits`, for each split and each of its files, a list of the indices of the jobs that
        write the file, and describe the split and the vocabulary in the ledger. `of_shards` is the
        split that the sources name for each shard, or ""; it counts only without the stage `split`.
        Raises BadInput if fewer than two documents are left to split."""
        config = self.config.split
        counts = [each["documents"] for each in selected.counts]
        is_split = "split" in self.stages
        if is_split and sum(counts) < 2:
            raise BadInput(
                "the stage split needs two documents, one for training and one for validation, and"
                f" the stages before it leave {sum(counts)}: add text to the sources (text: reads a"
                " file as one document), or loosen the stages"
            )
        shuffle = (
            {"train": config.train, "valid": config.valid, "seed": self.config.seed}
            if is_split
            else None
        )
        order = self.workspace.one(
            "order", choose_order, {"counts": counts, "splits": of_shards, "shuffle": shuffle}
        )
        of_slice = slice_documents(sum(counts), self.ledger.stages[-1].bytes_out or 0)
        dtype = (
            token_dtype(self.tokenizer.vocab_size)
            if self.tokenizer and "tokenize" in self.stages
            else None
        )
        fixed = {"lines": self.stages != ("tokenize",), "dtype": dtype and str(dtype)}
        inputs = (order.input, prepared.input, measured.input, selected.input)
        jobs: list[Job] = []
        in_split: dict[str, int] = order.counts[0]["documents"]
        for name, count in in_split.items():
            shards = max(
                1,
                min(
                    count,
                    math.ceil((self.config.shards or 1) * count / max(1, *in_split.values())),
                ),
            )
            self.splits[name] = {}
            for number in range(shards):
                start, end = (count * each // shards for each in (number, number + 1))
                firsts = range(start, max(start + 1, end), of_slice)
                suffix = f"-{number:05d}-of-{shards:05d}" if self.config.shards else ""
                self.splits[name][f"{name or UNSPLIT}{suffix}"] = [
                    *range(len(jobs), len(jobs) + len(firsts))
                ]
                jobs += (
                    (
                        {
                            **fixed,
                            "split": name,
                            "first": first,
                            "last": min(first + of_slice, end),
                        },
                        inputs,
                    )
                    for first in firsts
                )
        if is_split:
            self.ledger.stage("split").note = (
                f"shuffled with seed {self.config.seed}; {config.train}:{config.valid} training to"
                " validation"
            )
        if self.tokenizer and dtype:
            self.ledger.stage("tokenize").note = (
                f"vocabulary of {self.tokenizer.vocab_size:,}; each document ends with an"
                " end-of-text token"
            )
        return jobs

    def _gather(self, jobs: list[Job]) -> Finished:
        """Write the slices of the splits by tasks, the `jobs`; enter the stages `split` and
        `tokenize`, if the recipe has them, in the ledger, with equal shares of the time; and return
        the finished stage, a Finished."""
        start = monotonic()
        slices = self.workspace.all("gather", gather_slice, jobs)
        for name in ("split", "tokenize"):
            if name in self.stages:
                stage = self.ledger.stage(name)
                for amount in slices.counts:
                    counted = (amount["bytes"], amount["tokens"], amount["documents"])
                    stage.enter(*counted)
                    stage.keep(*counted)
                stage.seconds = (monotonic() - start) / len(
                    {"split", "tokenize"} & set(self.stages)
                )
        return slices
