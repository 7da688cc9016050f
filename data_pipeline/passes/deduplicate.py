"""Near-duplicates over all shards: fingerprints side by side, components of linked documents, decisions in each.

Every task here is sized by documents alone, never by shards or workers.
"""

import os
from collections.abc import Sequence
from contextlib import ExitStack
from functools import lru_cache
from itertools import pairwise
from mmap import ACCESS_READ, MADV_DONTNEED, mmap
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from mlm_repro.data_pipeline.document import Document
from mlm_repro.data_pipeline.duplicates.lsh import (
    HISTOGRAM_BINS,
    WORD_BYTES,
    buckets,
    fingerprint_words,
    required_agreement,
)
from mlm_repro.data_pipeline.duplicates.near_duplicates import Decision, flatten, link, merge, resolve
from mlm_repro.data_pipeline.passes.measure import FINGERPRINTS, NUMBERS
from mlm_repro.data_pipeline.stages.deduplicate import DeduplicateConfig
from mlm_repro.data_pipeline.work.document_shard import DocumentShard
from mlm_repro.data_pipeline.work.tasks import Counts, Settings
from mlm_repro.data_pipeline.work.workspace import Finished, Job, Workspace
from mlm_repro.lineage.environment import memory_bytes

LINK_TASKS = 5
SMALL_MEMORY_BYTES = 8 << 30
"""Memory assumed where the machine does not tell."""
MEMBERS_OF_A_TASK = 1 << 14
LINK_BYTES_PER_DOCUMENT = 40
BUCKETS_AT_ONCE = 1 << 10
OPEN_SHARDS = 128
DECISION = np.dtype([("document", np.int64), ("survivor", np.int64), ("jaccard", np.float64)])
BAND, SKETCHES, FOREST, MEMBERS, COMPONENTS, DECISIONS, COMPARED = (
    "band-{:04d}.bin", "sketches.bin", "forest.npy", "members.npy", "components.npy", "decisions.npy", "compared.npy",
)  # fmt: skip


class Corpus:
    """Long documents in order of shard; `counts` are their numbers in each."""

    def __init__(self, prepared: Path, measured: Path, counts: Sequence[int]) -> None:
        self._prepared, self._measured = prepared, measured
        self._starts = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
        self._shard = lru_cache(OPEN_SHARDS)(self._open_shard)

    def place(self, number: int) -> tuple[int, int]:
        """Shard of a document, and its number there."""
        shard = int(np.searchsorted(self._starts, number, side="right")) - 1
        return shard, number - int(self._starts[shard])

    def __getitem__(self, number: int) -> Document:
        shard, place = self.place(number)
        documents, numbers, _ = self._shard(shard)
        return documents[int(numbers[place])]

    def fingerprints(self, numbers: NDArray[np.int64], config: DeduplicateConfig) -> NDArray[np.uint64]:
        """Fingerprints of documents, [documents, words]."""
        size = WORD_BYTES * fingerprint_words(config)
        rows = []
        for number in numbers:
            shard, place = self.place(int(number))
            rows.append(os.pread(self._shard(shard)[2].fileno(), size, size * place))
        return np.frombuffer(b"".join(rows), np.uint64).reshape(len(rows), -1)

    def _open_shard(self, shard: int) -> tuple[DocumentShard, NDArray[np.int64], BinaryIO]:
        """Documents, the numbers of the long ones, and their fingerprints."""
        prepared, measured = (folder / f"{shard:05d}" for folder in (self._prepared, self._measured))
        numbers = np.load(measured / NUMBERS, mmap_mode="r")
        return DocumentShard(prepared), numbers, (measured / FINGERPRINTS).open("rb")


def find_duplicates(
    workspace: Workspace, prepared: Finished, measured: Finished, config: DeduplicateConfig, held: int = 0
) -> tuple[Finished, NDArray[np.int64]]:
    """The finished stage of all decisions, and the histogram of similarities of compared pairs.

    The first `held` documents are kept without a comparison.
    """
    section = config.model_dump(mode="json")
    counts = [each["documents"] for each in measured.counts]
    documents = sum(counts)
    whole = {"config": section, "counts": counts, "held": held}
    side_by_side = workspace.one("fingerprints", lay_side_by_side, whole, measured.input)
    groups = [list(range(first, config.banding[0], LINK_TASKS)) for first in range(min(LINK_TASKS, config.banding[0]))]
    jobs: list[Job] = [({"config": section, "bands": bands}, (side_by_side.input,)) for bands in groups]
    at_once = max(1, (memory_bytes() or SMALL_MEMORY_BYTES) // 2 // (LINK_BYTES_PER_DOCUMENT * documents + 1))
    forests = workspace.all("link", link_bands, jobs, "buckets", at_once)
    joined = workspace.one("components", gather_components, {"tasks": len(jobs)}, forests.input)
    inputs = (joined.input, prepared.input, measured.input)
    resolving: list[Job] = [
        ({**whole, "first": first, "last": last}, inputs) for first, last in joined.counts[0]["tasks"]
    ]
    decided = workspace.all("resolve", resolve_components, resolving, "duplicates")
    decisions = workspace.one("decisions", collect_decisions, {"tasks": len(resolving)}, decided.input)
    return decisions, np.array(decisions.counts[0]["compared"])


def lay_side_by_side(settings: Settings, inputs: list[Path], directory: Path) -> Counts:
    """Write the keys of each band, and the sketches, of all documents into files of their own."""
    config = DeduplicateConfig(**settings["config"])
    with ExitStack() as stack:
        bands = [stack.enter_context((directory / BAND.format(band)).open("wb")) for band in range(config.banding[0])]
        sketches = stack.enter_context((directory / SKETCHES).open("wb"))
        for shard in range(len(settings["counts"])):
            written = inputs[0] / f"{shard:05d}" / FINGERPRINTS
            rows = np.fromfile(written, np.uint64).reshape(-1, fingerprint_words(config))
            for band, file in enumerate(bands):
                file.write(np.ascontiguousarray(rows[:, band]).data)
            sketches.write(np.ascontiguousarray(rows[:, config.banding[0] :]).data)
    return {}


def link_bands(settings: Settings, inputs: list[Path], directory: Path) -> Counts:
    """Write a forest that joins the documents linked through some of the bands.

    Sketches are read where buckets need them, through a map whose pages are given back after every BUCKETS_AT_ONCE.
    """
    config, folder = DeduplicateConfig(**settings["config"]), inputs[0] / "00000"
    with (folder / SKETCHES).open("rb") as file:
        pages = mmap(file.fileno(), 0, access=ACCESS_READ)
    sketches = np.frombuffer(pages, np.uint64).reshape(-1, fingerprint_words(config) - config.banding[0])
    forest = np.arange(len(sketches))
    for band in settings["bands"]:
        documents, starts = buckets(np.fromfile(folder / BAND.format(band), np.uint64))
        for first in range(0, len(starts) - 1, BUCKETS_AT_ONCE):
            link(forest, documents, starts[first : first + BUCKETS_AT_ONCE + 1], sketches, required_agreement(config))
            pages.madvise(MADV_DONTNEED)
    np.save(directory / FOREST, forest)
    return {}


def gather_components(settings: Settings, inputs: list[Path], directory: Path) -> Counts:
    """Write the components of two or more documents, cut into tasks of about equal numbers of documents."""
    forest = np.load(inputs[0] / "00000" / FOREST)
    for task in range(1, settings["tasks"]):
        merge(forest, np.load(inputs[0] / f"{task:05d}" / FOREST, mmap_mode="r"))
    first = flatten(forest)
    sizes = np.bincount(first, minlength=len(first))
    members = np.flatnonzero(sizes[first] > 1)
    members = members[np.argsort(first[members], kind="stable")]
    sizes = sizes[sizes > 1]
    starts = np.concatenate([[0], np.cumsum(sizes)])
    np.save(directory / MEMBERS, members)
    np.save(directory / COMPONENTS, starts)
    of_task = starts[:-1] // MEMBERS_OF_A_TASK
    cuts = np.flatnonzero(np.diff(of_task, prepend=-1, append=-1)) if len(sizes) else np.empty(0, np.int64)
    return {"tasks": [[int(a), int(b)] for a, b in pairwise(cuts)]}


def resolve_components(settings: Settings, inputs: list[Path], directory: Path) -> Counts:
    """Write the decisions for the components from `first` to before `last`."""
    components, prepared, measured = inputs
    config = DeduplicateConfig(**settings["config"])
    members = np.load(components / "00000" / MEMBERS, mmap_mode="r")
    starts = np.load(components / "00000" / COMPONENTS, mmap_mode="r")
    corpus = Corpus(prepared, measured, settings["counts"])
    decisions: list[Decision] = []
    compared = np.zeros(HISTOGRAM_BINS, np.int64)
    for component in range(settings["first"], settings["last"]):
        own = np.array(members[starts[component] : starts[component + 1]])
        fingerprints = corpus.fingerprints(own, config)
        dropped, similar = resolve(own, fingerprints, lambda number: corpus[number].text, config, settings["held"])
        decisions += dropped
        compared += similar
    np.save(directory / DECISIONS, np.array(decisions, DECISION))
    np.save(directory / COMPARED, compared)
    return {}


def collect_decisions(settings: Settings, inputs: list[Path], directory: Path) -> Counts:
    """Join all decisions in order of document."""
    folders = [inputs[0] / f"{task:05d}" for task in range(settings["tasks"])]
    decisions = np.concatenate([np.empty(0, DECISION), *(np.load(folder / DECISIONS) for folder in folders)])
    np.save(directory / DECISIONS, decisions[np.argsort(decisions["document"])])
    compared = sum((np.load(folder / COMPARED) for folder in folders), np.zeros(HISTOGRAM_BINS, np.int64))
    return {"compared": compared.tolist(), "documents": len(decisions)}
