"""Near-duplicates over all shards: exact copies, fingerprints side by side, components of linked
documents, decisions.

An exact copy of an earlier document shares that document's decision. Only distinct documents have
fingerprints, and they are numbered here. Every task is sized by documents alone, never by shards or
workers.
"""

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import lru_cache
from itertools import pairwise
from mmap import ACCESS_READ, MADV_DONTNEED, mmap
from pathlib import Path

import numpy as np

from mlm_repro.data_pipeline.arrays import Integers
from mlm_repro.data_pipeline.document import Document
from mlm_repro.data_pipeline.duplicates.lsh import (
    HISTOGRAM_BINS,
    Compared,
    Words,
    buckets,
    describe,
    fingerprint_words,
    required_agreement,
)
from mlm_repro.data_pipeline.duplicates.near_duplicates import (
    DECISION,
    Linked,
    flatten,
    link,
    merge,
    resolve,
)
from mlm_repro.data_pipeline.passes.measure import DIGESTS, FINGERPRINTS, NUMBERS
from mlm_repro.data_pipeline.stages.deduplicate import DeduplicateConfig
from mlm_repro.data_pipeline.work.document_shard import DocumentShard
from mlm_repro.data_pipeline.work.tasks import Counts, Settings
from mlm_repro.data_pipeline.work.workspace import Finished, Job, Workspace
from mlm_repro.lineage.environment import memory_bytes

LINK_TASKS = 17
SMALL_MEMORY_BYTES = 8 << 30
"""Memory assumed if the machine does not report it."""
MEMBERS_OF_A_TASK = 1 << 11
LINK_BYTES_PER_DOCUMENT = 40
BUCKETS_AT_ONCE = 1 << 10
ROWS_AT_ONCE = 1 << 10
OPEN_SHARDS = 128
COPY = np.dtype([("document", np.int64), ("first", np.int64)])
"""Record of a document and the first document with the same text, by their numbers in the
corpus."""
COPIES = "copies.npy"
FIRSTS = "firsts.npy"
STARTS = "starts.npy"
BAND = "band-{:04d}.bin"
SKETCHES = "sketches.bin"
DISTINCT = "distinct.bin"
FOREST = "forest.npy"
PARTLY = "partly.npy"
MEMBERS = "members.npy"
COMPONENTS = "components.npy"
DECISIONS = "decisions.npy"
COMPARED = "compared.npy"


class Corpus:
    """Reader of the documents that the token filters kept: `corpus[number]` is a Document by its
    number in the corpus. Only kept documents are counted, from 0 and through all shards. There is
    no `len`. `prepared` and `measured` are the folders of the two passes, and `starts` has each
    shard's first number, then the total."""

    def __init__(self, prepared: Path, measured: Path, starts: Integers) -> None:
        self._prepared = prepared
        self._measured = measured
        self._starts = starts
        self._shard = lru_cache(OPEN_SHARDS)(self._open_shard)

    def __getitem__(self, number: int) -> Document:
        shard = int(np.searchsorted(self._starts, number, side="right")) - 1
        documents, numbers = self._shard(shard)
        return documents[int(numbers[number - self._starts[shard]])]

    def _open_shard(self, shard: int) -> tuple[DocumentShard, Integers]:
        """Return the documents of the shard with number `shard`, as a DocumentShard, and a
        read-only int64 array of the indices in it of the documents that the token filters kept."""
        numbers = np.load(self._measured / f"{shard:05d}" / NUMBERS, mmap_mode="r")
        return DocumentShard(self._prepared / f"{shard:05d}"), numbers


def find_duplicates(
    workspace: Workspace,
    prepared: Finished,
    measured: Finished,
    config: DeduplicateConfig,
    held: int = 0,
) -> tuple[Finished, Compared]:
    """Decide, by tasks of the workspace and the settings `config`, which documents of the finished
    passes `prepared` and `measured` are near-duplicates. Returns the Finished stage of the task
    `collect_decisions`, whose `00000/decisions.npy` has a row for each dropped document and whose
    `00000/starts.npy` the number of each shard's first document, and a Compared with the counts of
    compared pairs.

    The first `held` documents are kept without a comparison; later ones are compared with them too.
    Prints a warning to standard error if pairs were left out.
    """
    corpus_settings = {
        "config": config.model_dump(mode="json"),
        "counts": [task_counts["documents"] for task_counts in measured.counts],
        "held": held,
    }
    copies = workspace.one("copies", find_copies, corpus_settings, measured.input)
    laid = workspace.one(
        "fingerprints", lay_side_by_side, corpus_settings, measured.input, copies.input
    )
    documents = laid.counts[0]["documents"]
    fixed = {"config": corpus_settings["config"], "documents": documents}
    jobs: list[Job] = [
        ({**fixed, "first": first}, (laid.input,))
        for first in range(min(LINK_TASKS, config.banding[0]))
    ]
    # Each link task holds a forest and the buckets of a band: together they get half the memory.
    at_once = max(
        1, (memory_bytes() or SMALL_MEMORY_BYTES) // 2 // (LINK_BYTES_PER_DOCUMENT * documents + 1)
    )
    forests = workspace.all("link", link_bands, jobs, "buckets", at_once)
    joined = workspace.one(
        "components", gather_components, {**fixed, "tasks": len(jobs)}, forests.input
    )
    inputs = (joined.input, laid.input, copies.input, prepared.input, measured.input)
    resolving: list[Job] = [
        ({**fixed, "held": held, "first": first, "last": last}, inputs)
        for first, last in joined.counts[0]["tasks"]
    ]
    decided = workspace.all("resolve", resolve_components, resolving, "duplicates")
    decisions = workspace.one(
        "decisions",
        collect_decisions,
        {"tasks": len(resolving), "linked": len(jobs)},
        decided.input,
        laid.input,
        copies.input,
        forests.input,
    )
    counted = decisions.counts[0]
    left = sum(task_counts["uncompared"] for task_counts in (*forests.counts, *decided.counts))
    compared = Compared(np.array(counted["compared"]), counted["partly"], left)
    if warning := describe(config, compared).left_out:
        print(f"warning: {warning}", file=sys.stderr)
    return decisions, compared


def find_copies(settings: Settings, inputs: list[Path], directory: Path) -> Counts:
    """Task: write three arrays of documents' numbers in the corpus: `copies.npy`, with the fields
    `document`, one whose text an earlier document has, and `first`, the first such document, in
    order of `document`; `firsts.npy`, these first documents, sorted, once for each copy; and
    `starts.npy`, the number of each shard's first document and the total.

    The first `held` documents are not looked at. The rule `megatron-2019` compares equal texts like
    any others, so that no copy is written under it. Settings: `config`, `counts` (for each shard
    the number of documents that the token filters kept) and `held`. The input is the folder
    of the pass `measure`, which has all shards. Returns the number of copies as `documents`.
    """
    held = settings["held"]
    np.save(directory / STARTS, np.cumsum([0, *settings["counts"]]))
    counts = settings["counts"] if settings["config"]["rule"] == "verified" else []
    # Texts are grouped by the first word of their digests; the second confirms each copy, so that
    # one word of all digests is in memory at a time.
    documents, starts = buckets(_digests(inputs[0], counts, 0)[held:])
    documents += held
    is_copy = np.ones(len(documents), np.bool_)
    is_copy[starts[:-1]] = False
    first = np.repeat(documents[starts[:-1]], np.diff(starts))
    rest = _digests(inputs[0], counts, 1)
    is_copy &= rest[documents] == rest[first]
    del rest
    order = np.argsort(documents[is_copy])
    copies = np.lib.format.open_memmap(directory / COPIES, "w+", COPY, (len(order),))
    copies["document"] = documents[is_copy][order]
    copies["first"] = first[is_copy][order]
    np.save(directory / FIRSTS, np.sort(copies["first"]))
    return {"documents": len(order)}


def _digests(measured: Path, counts: Sequence[int], word: int) -> Words:
    """Return one of the two 64-bit words, number `word` (0 or 1), of the digest of each text, a
    uint64 array [documents], in the order of shards. They are read from the files that the pass
    `measure` wrote below `measured`, where shard i has `counts[i]` texts."""
    words = np.empty(sum(counts), np.uint64)
    start = 0
    for shard, count in enumerate(counts):
        digests = np.fromfile(measured / f"{shard:05d}" / DIGESTS, np.uint64).reshape(-1, 2)
        words[start : start + count] = digests[:, word]
        start += count
    return words


def lay_side_by_side(settings: Settings, inputs: list[Path], directory: Path) -> Counts:
    """Task: write binary files, without headers, on the documents that are no copies, in order:
    `distinct.bin`, their numbers in the corpus, int64; `sketches.bin`, their sketches, several
    uint64 each; and for each band a file `band-NNNN.bin` of their keys in it, uint64. It takes the
    settings of `find_copies`; inputs are the folder of the pass `measure`, which has all shards,
    and the folder of the copies, which `find_copies` wrote. Returns the number of these documents
    as `documents`."""
    config = DeduplicateConfig(**settings["config"])
    measured = inputs[0]
    copies = np.load(inputs[1] / "00000" / COPIES, mmap_mode="r")["document"]
    number = 0
    with ExitStack() as stack:
        names = [*map(BAND.format, range(config.banding[0])), SKETCHES, DISTINCT]
        files = [stack.enter_context((directory / name).open("wb")) for name in names]
        for shard in range(len(settings["counts"])):
            for rows in _rows(measured / f"{shard:05d}" / FINGERPRINTS, fingerprint_words(config)):
                numbers = np.arange(number, number + len(rows))
                first, last = np.searchsorted(copies, [number, number + len(rows)])
                numbers = np.delete(numbers, copies[first:last] - number)
                distinct = rows[numbers - number]
                columns = (*distinct[:, : len(names) - 2].T, distinct[:, len(names) - 2 :], numbers)
                for file, column in zip(files, columns, strict=True):
                    file.write(np.ascontiguousarray(column).data)
                number += len(rows)
    return {"documents": number - len(copies)}


def _rows(path: Path, words: int) -> Iterator[Words]:
    """Yield the fingerprints in the file `path`, which have `words` 64-bit words each, in order,
    ROWS_AT_ONCE at a time, as uint64 arrays [rows, words]."""
    with path.open("rb") as file:
        while len(rows := np.fromfile(file, np.uint64, ROWS_AT_ONCE * words)):
            yield rows.reshape(-1, words)


def _open_sketches(folder: Path, config: DeduplicateConfig) -> tuple[Words, mmap]:
    """Return the sketches of all distinct documents, a read-only uint64 array [documents, words],
    as a view of the file `sketches.bin` in `folder` that is mapped into memory, and the map.
    `config` are the settings that the fingerprints were made with."""
    with (folder / SKETCHES).open("rb") as file:
        pages = mmap(file.fileno(), 0, access=ACCESS_READ)
    return np.frombuffer(pages, np.uint64).reshape(
        -1, fingerprint_words(config) - config.banding[0]
    ), pages


def link_bands(settings: Settings, inputs: list[Path], directory: Path) -> Counts:
    """Task: in the band `first` and each LINK_TASKS-th after it, join documents that share a bucket
    and whose sketches agree in enough bytes. Write the resulting union-find forest as pairs of a
    document and an earlier one of its set, [2, pairs], to `forest.npy`.

    Settings: `config`, `documents`, the number of distinct documents, and `first`. The input is the
    folder of `lay_side_by_side`. Documents are numbered without copies. Documents that were
    compared with only a part of a bucket are written to `partly.npy`. Sketches are read through a
    map whose pages are given back after every BUCKETS_AT_ONCE buckets. Returns `uncompared`, the
    number of pairs of different sets that were not compared, and `unlike`, that of compared pairs
    that do not agree.
    """
    config = DeduplicateConfig(**settings["config"])
    folder = inputs[0] / "00000"
    sketches, pages = _open_sketches(folder, config)
    forest = np.arange(settings["documents"])
    partly = np.zeros(settings["documents"], np.bool_)
    counts = np.zeros(2, np.int64)
    for band in range(settings["first"], config.banding[0], LINK_TASKS):
        documents, starts = buckets(np.fromfile(folder / BAND.format(band), np.uint64))
        for first in range(0, len(starts) - 1, BUCKETS_AT_ONCE):
            batch = starts[first : first + BUCKETS_AT_ONCE + 1]
            counts += link(forest, documents, batch, sketches, required_agreement(config), partly)
            pages.madvise(MADV_DONTNEED)
        del documents, starts
    later = np.flatnonzero(forest != np.arange(len(forest)))
    np.save(directory / FOREST, np.stack([later, forest[later]]))
    np.save(directory / PARTLY, np.flatnonzero(partly))
    return dict(zip(("uncompared", "unlike"), counts.tolist(), strict=True))


def gather_components(settings: Settings, inputs: list[Path], directory: Path) -> Counts:
    """Task: unite the forests of all link tasks, and write the components of two or more documents:
    `members.npy`, their documents component by component, and `components.npy`, the start of each
    component and the total. Settings: `documents`, the number of distinct documents, and `tasks`,
    the number of link tasks; the input is the folder with all of them. Returns `tasks`, a list of
    ranges of components, each a pair: the index of its first component, and one more than the index
    of its last. A range has about MEMBERS_OF_A_TASK documents, more with a larger component, and is
    for one task that follows."""
    forest = np.arange(settings["documents"])
    for task in range(settings["tasks"]):
        merge(forest, *np.load(inputs[0] / f"{task:05d}" / FOREST, mmap_mode="r"))
    first = flatten(forest)
    sizes = np.bincount(first, minlength=len(first))
    members = np.flatnonzero(sizes[first] > 1)
    members = members[np.argsort(first[members], kind="stable")]
    sizes = sizes[sizes > 1]
    starts = np.cumsum(np.append(0, sizes))
    np.save(directory / MEMBERS, members)
    np.save(directory / COMPONENTS, starts)
    of_task = starts[:-1] // MEMBERS_OF_A_TASK
    cuts = np.flatnonzero(np.diff(of_task, prepend=-1, append=-1))
    return {"tasks": [[int(a), int(b)] for a, b in pairwise(cuts)]}


def resolve_components(settings: Settings, inputs: list[Path], directory: Path) -> Counts:
    """Task: decide which documents of the components from `first` to before `last` are dropped.
    Write these, each with the document kept for it and the similarity of the two, to
    `decisions.npy`, the numbers of compared pairs by similarity, [HISTOGRAM_BINS], to
    `compared.npy`, and the documents that were not compared with every earlier document in their
    buckets to `partly.npy`. Documents are numbered without copies, but a pair counts again for each
    copy of its later document; documents below `held` are kept.

    Settings: `config`, `held`, `first` and `last`. Inputs: the components, the folder of
    `lay_side_by_side`, the folder of the copies, and the folders of the two passes, each with all
    shards. Returns `uncompared`, an upper bound on the number of pairs left uncompared, and the
    numbers of documents `offered` by buckets, pairs `compared` and `members`, and the `seconds`.
    """
    components, laid, copied = (folder / "00000" for folder in inputs[:3])
    config = DeduplicateConfig(**settings["config"])
    starts = np.load(components / COMPONENTS, mmap_mode="r")[
        settings["first"] : settings["last"] + 1
    ]
    members = np.array(np.load(components / MEMBERS, mmap_mode="r")[starts[0] : starts[-1]])
    numbers = np.memmap(laid / DISTINCT, np.int64, "r")
    corpus = Corpus(inputs[3], inputs[4], np.load(copied / STARTS))
    firsts = np.load(copied / FIRSTS, mmap_mode="r")
    copies = np.diff(np.searchsorted(firsts, [numbers[members], numbers[members] + 1]), axis=0)[0]
    sketches, pages = _open_sketches(laid, config)

    def keys_of(band: int) -> Words:
        return np.asarray(np.memmap(laid / BAND.format(band), np.uint64, "r")[members])

    def text_of(document: int) -> str:
        return corpus[int(numbers[document])].text

    start = time.perf_counter()
    linked = Linked(members, starts - starts[0], keys_of, sketches, text_of, copies, pages)
    *arrays, uncompared, offered = resolve(linked, config, settings["held"], directory)
    for name, array in zip((DECISIONS, COMPARED, PARTLY), arrays, strict=True):
        np.save(directory / name, array)
    return {
        "uncompared": uncompared,
        "offered": offered,
        "compared": int(arrays[1].sum()),
        "members": len(members),
        "seconds": time.perf_counter() - start,
    }


def collect_decisions(settings: Settings, inputs: list[Path], directory: Path) -> Counts:
    """Task: write all decisions, also the ones about copies, to `decisions.npy`: a row for each
    dropped document, in order, with its number in the column `document`, the number of the document
    kept for it in `survivor`, and in `jaccard` the similarity of the two, or under `megatron-2019`
    the dropped document's largest similarity to any that it was compared with. Write the number of
    each shard's first document, and then the number of all documents, to `starts.npy`. Documents
    are numbered from 0 in the whole corpus.

    Settings: `tasks`, the number of resolve tasks, and `linked`, that of link tasks. Inputs: the
    decisions of the resolve tasks, the folder of `lay_side_by_side`, the copies and the forests.
    Returns `documents`, the number of decisions; `compared`, a list of the numbers of compared
    pairs by similarity, to which each copy of a kept document adds one pair; and `partly`, the
    number of partly compared documents.
    """
    folders = [inputs[0] / f"{task:05d}" for task in range(settings["tasks"])]
    numbers = np.memmap(inputs[1] / "00000" / DISTINCT, np.int64, "r")
    copies = np.load(inputs[2] / "00000" / COPIES, mmap_mode="r")
    decisions = np.concatenate(
        [np.empty(0, DECISION), *(np.load(folder / DECISIONS) for folder in folders)]
    )
    decisions = decisions[np.argsort(decisions["document"])]
    for column in ("document", "survivor"):
        decisions[column] = numbers[decisions[column]]
    compared = sum(
        (np.load(folder / COMPARED) for folder in folders), np.zeros(HISTOGRAM_BINS, np.int64)
    )
    of_copies = np.empty(len(copies), DECISION)
    of_copies["document"] = copies["document"]
    of_copies["survivor"] = copies["first"]
    of_copies["jaccard"] = 1.0
    # A copy is dropped for its first document or, if that is dropped too, for its survivor.
    is_dropped = np.isin(copies["first"], decisions["document"])
    index = np.searchsorted(decisions["document"], copies["first"][is_dropped])
    for column in ("survivor", "jaccard"):
        of_copies[column][is_dropped] = decisions[column][index]
    compared[-1] += len(copies) - len(index)
    all_decisions = np.concatenate([decisions, of_copies])
    np.save(directory / DECISIONS, all_decisions[np.argsort(all_decisions["document"])])
    np.save(directory / STARTS, np.load(inputs[2] / "00000" / STARTS))
    folders += [inputs[3] / f"{task:05d}" for task in range(settings["linked"])]
    partly = np.unique(np.concatenate([np.load(folder / PARTLY) for folder in folders]))
    return {"compared": compared.tolist(), "documents": len(all_decisions), "partly": len(partly)}
