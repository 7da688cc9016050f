"""Joins linked documents into components, and decides which documents of each are dropped for which
survivor.

A forest is an array that holds for each document an earlier one of its set, or itself for the first
of a set. Two documents are linked if they share a bucket and their sketches agree often enough.
Sketches matter: in a corpus of a hundred thousand documents almost all unrelated ones are connected
through chance buckets of five rows.
"""

from collections.abc import Callable
from itertools import starmap
from mmap import MADV_DONTNEED, mmap
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mlm_repro.data_pipeline.arrays import Integers, Integers32
from mlm_repro.data_pipeline.duplicates.lsh import (
    HISTOGRAM_BINS,
    Words,
    agreement,
    buckets,
    required_agreement,
)
from mlm_repro.data_pipeline.duplicates.similarity import ShingledTexts
from mlm_repro.data_pipeline.stages.deduplicate import DeduplicateConfig
from mlm_repro.lineage.loops import compiled

SPREAD = np.uint64(0x9E3779B97F4A7C15)
Forest = Integers


@compiled
def merge(forest: Forest, documents: Forest, others: Forest) -> None:
    """Join the set of document `documents[n]` with the set of document `others[n]` for each n, in
    the union-find `forest`, which is changed. The arrays `documents` and `others` are of one
    length."""
    for pair in range(documents.shape[0]):
        join(forest, documents[pair], others[pair])


@compiled
def flatten(forest: Forest) -> Forest:
    """Let each entry of the union-find `forest` [documents] be the first document of its set, in
    place, and return the same array. Each entry must be an earlier document of the set, or the
    document itself."""
    for document in range(forest.shape[0]):
        forest[document] = forest[forest[document]]
    return forest


@compiled
def _first(forest: Forest, document: int) -> int:
    while forest[document] != document:
        forest[document] = forest[forest[document]]
        document = forest[document]
    return document


@compiled
def join(forest: Forest, left: int, right: int) -> None:
    """Join two sets of the union-find `forest`, in place: the one with document number `left` and
    the one with document number `right`. The smaller of their roots becomes the root of both; if it
    is one set already, nothing is joined."""
    left = _first(forest, left)
    right = _first(forest, right)
    forest[max(left, right)] = min(left, right)


MOST_OFFERED = 4096
"""A document is compared with at most this many of the first documents in each of its buckets, so
that a million pages of one template, all similar and none a duplicate, cost linear time. Real
duplicates share rarer buckets as well. The pairs that are not compared are counted."""
MOST_COMPARED = 1000
"""The text of a document is compared with those of at most this many earlier documents: the ones
that agree with it in the most minima."""


@compiled
def link(
    forest: Forest,
    documents: Forest,
    starts: Forest,
    sketches: Words,
    required: int,
    partly: NDArray[np.bool_],
    most: int = MOST_OFFERED,
) -> tuple[int, int]:
    """Join, in the union-find `forest`, documents that share one of these buckets and whose
    sketches agree in at least `required` bytes, padding included. `documents` and `starts` are the
    buckets, as `buckets` returns them. `sketches` are those of all documents, [documents, words].
    `forest` and `partly` are changed.

    A document is compared with the first `most` documents of its bucket, by default MOST_OFFERED,
    but not with members of its own set, so a bucket of near-duplicates costs one comparison for
    each. The members of a set form a chain: `following` leads from its head in `heads` to its tail
    in `tails`.

    Returns the number of pairs that could have joined two sets but were not compared, and the
    number of compared pairs that do not agree. The later document of each pair left uncompared is
    marked in `partly` [documents].
    """
    uncompared = 0
    unlike = 0
    following = np.empty(most, np.int64)
    heads = np.empty(most, np.int64)
    tails = np.empty(most, np.int64)
    for bucket in range(starts.shape[0] - 1):
        members = documents[starts[bucket] : starts[bucket + 1]]
        chains = 0
        apart = 0
        for place in range(members.shape[0]):
            document = members[place]
            is_offered = place < most
            if is_offered:
                following[place] = -1
            own = -1
            chain = 0
            unlinked = 0
            while chain < chains:
                other = heads[chain]
                linked = _first(forest, members[other]) == _first(forest, document)
                while not linked and other >= 0:
                    linked = agreement(sketches[members[other]], sketches[document]) >= required
                    unlike += not linked
                    other = following[other]
                if linked:
                    join(forest, members[heads[chain]], document)
                else:
                    unlinked += 1
                if not linked or not is_offered:
                    chain += 1
                elif own < 0:
                    own = chain
                    following[tails[own]] = place
                    tails[own] = place
                    chain += 1
                else:
                    following[tails[own]] = heads[chain]
                    tails[own] = tails[chain]
                    chains -= 1
                    heads[chain], tails[chain] = heads[chains], tails[chains]
            if is_offered and own < 0:
                heads[chains] = tails[chains] = place
                chains += 1
            elif not is_offered:
                # One that is linked to every chain is of one set with all later ones but those
                # linked to none.
                missed = place - most if unlinked else apart
                uncompared += missed
                partly[document] |= missed > 0
                apart += unlinked == chains
    return uncompared, unlike


LISTED_ABOVE = 0.5
"""Similarity above which Megatron-LM's find_duplicates.py lists a pair."""
GIVEN_BACK = 1 << 12
"""Number of members of components, decided one by one, after which the pages of mapped files are
given back to the system."""
PLACE_BITS = 32
DECISION = np.dtype([("document", np.int64), ("survivor", np.int64), ("jaccard", np.float64)])
"""Record of a dropped document: its survivor, which is an earlier document, and the exact
similarity of the two. With `megatron-2019` the similarity is the largest to any document that it
was compared with."""


class Linked(NamedTuple):
    """Some components of linked documents, as input for the decision which documents are dropped:
    the numbers of their documents, component by component, and the index at which each component
    starts among them; a function that returns a document's text, and one that returns the members'
    keys of a band; and the sketches of all documents, also of documents in no component."""

    members: Integers
    """Numbers of the components' documents, component by component and ascending in each,
    [members]."""
    starts: Integers
    """Start of each component among the members, [components + 1]; the last start is the total."""
    keys_of: Callable[[int], Words]
    """Function that returns the members' keys of the band with a given number, from 0,
    [members]."""
    sketches: Words
    """Sketches of all documents, members or not, [documents, words]."""
    text_of: Callable[[int], str]
    """Function that returns the text of the document with the given number."""
    copies: Integers | None = None
    """Number of exact copies of each member, [members], or None if there are no copies; the
    member's pairs count once for each copy too."""
    pages: mmap | None = None
    """Memory map of the file with the sketches, or None if they are in memory. While documents are
    compared, its pages in memory are given back to the system now and then."""


class Resolution(NamedTuple):
    """Outcome of comparing the linked documents of some components: a DECISION record for each
    dropped document, a histogram of the compared pairs by similarity, the indices of the documents
    that were not compared with every earlier one in their buckets, an upper bound on the number of
    pairs that these documents left out, and the number of times that a bucket offered an earlier
    document for comparison."""

    decisions: NDArray[Any]
    """Array with a DECISION record for each dropped document, component by component; in a
    component the documents are in input order."""
    compared: Integers
    """Number of pairs whose texts were compared, by similarity, in HISTOGRAM_BINS equal bins of [0,
    1], the last one closed."""
    partly: Integers
    """Numbers of the documents that were not compared with every earlier document in their
    buckets."""
    uncompared: int
    """Upper bound on the number of pairs that the documents in `partly` left uncompared. A pair
    counts once for each bucket that it shares."""
    offered: int
    """Number of times that a bucket offered an earlier document for comparison, repetitions
    included."""


class _Held:
    """The kept documents of the components `linked` in their buckets. The buckets are empty at
    first; the method `hold` adds a kept document. `candidates` returns the held documents that a
    later one is to be compared with, then an upper bound on the number of held ones that its limits
    left out, and the number of all offers of its buckets. A document is given by its index among
    the members of `linked`.

    The attribute `_buckets` [members, bands] has the position of each member's bucket in the
    attribute `_slots` [bands, 1.5 members], or -1 if the member is alone in its bucket. From that
    position on, `_slots` has the number of kept documents in the bucket, then the first of these
    documents. Both are mapped files in the folder `scratch`, or in the system's temporary folder if
    that is None.
    """

    def __init__(self, linked: Linked, config: DeduplicateConfig, scratch: Path | None) -> None:
        bands = config.banding[0]
        size = len(linked.members)
        places = bands * size, bands * (size + size // 2)
        self.pages = [_mapped(4 * max(1, count), scratch) for count in places]
        own, slots = starmap(
            np.frombuffer, zip(self.pages, (np.int32, np.int32), places, strict=True)
        )
        self._buckets = own.reshape(size, bands)
        self._slots = slots.reshape(bands, -1)
        sizes = np.diff(linked.starts)
        component = np.repeat(np.arange(len(sizes), dtype=np.uint64) * SPREAD, sizes)
        for band in range(bands):
            sharing, first = buckets(linked.keys_of(band) ^ component)
            self._buckets[:, band] = -1
            self._buckets[sharing, band] = np.repeat(
                first[:-1] + np.arange(len(first) - 1), np.diff(first)
            )
            self.pages[0].madvise(MADV_DONTNEED)
        self._linked = linked
        self._required = required_agreement(config)
        self._most = 1 if config.rule == "megatron-2019" else MOST_OFFERED
        self._found = np.empty(size, np.int64)
        self._seen = np.full(size, -1, np.int32)

    def candidates(self, place: int) -> tuple[list[int], int, int]:
        """Return three values for the document of index `place` among the members. The first is a
        list of the held documents to compare it with, as ascending indices among the members. Each
        of its buckets offers the first MOST_OFFERED documents held there, under `megatron-2019` the
        first alone; the list has the ones that agree with it in enough minima, at most the
        MOST_COMPARED that agree in the most. The second is an upper bound on the number of held
        documents that these two limits leave out, the third the number of offers, repetitions
        included.

        The document is not held by this: if it is kept, the caller then calls `hold`. Call this
        once for each `place`, because a second call leaves out what the first one returned.
        """
        where = (self._buckets, self._slots, self._linked.sketches, self._linked.members)
        ranked, left, offered = _candidates(
            place, *where, self._required, self._most, self._found, self._seen
        )
        if len(ranked) > MOST_COMPARED:
            left += len(ranked) - MOST_COMPARED
            ranked = np.partition(ranked, MOST_COMPARED)[:MOST_COMPARED]
        return np.sort(ranked & ((1 << PLACE_BITS) - 1)).tolist(), left, offered

    def hold(self, place: int) -> None:
        """Add the kept document `place`, its index among the members, to each bucket that it shares
        with another member, so that `candidates` offers it to later documents. A bucket holds its
        first MOST_OFFERED documents, or under `megatron-2019` its first document alone; further
        documents are only counted."""
        _hold(place, self._buckets, self._slots, self._most)


def _mapped(size: int, folder: Path | None) -> mmap:
    """Return a new temporary file of `size` zero bytes as a memory map. The file lies in `folder`,
    or in the system's temporary folder if that is None, and has no name. Memory is taken only by
    pages that are touched."""
    with TemporaryFile(dir=folder) as file:
        file.truncate(size)
        return mmap(file.fileno(), size)


@compiled
def _candidates(
    place: int,
    buckets: Integers32,
    slots: Integers32,
    sketches: Words,
    members: Forest,
    required: int,
    most: int,
    found: Forest,
    seen: Integers32,
) -> tuple[Forest, int, int]:
    """Return three values: the candidates for the document whose index among the members is
    `place`, [candidates]; how many documents its buckets left out, because each bucket offers its
    first `most`; and how many the buckets offered, both with repetitions. A candidate is an offered
    document whose sketch agrees in at least `required` bytes. It is given as its own index, with
    the number of its differing sketch bytes in the bits above PLACE_BITS.

    `buckets` and `slots` are those of `_Held`. `found` [members], of which the candidates are a
    view, and `seen` [members], which begins at -1, are working memory and are changed, so each
    `place` is asked about once.
    """
    count = 0
    left = 0
    every = 0
    own = sketches[members[place]]
    for band in range(buckets.shape[1]):
        start = buckets[place, band]
        if start < 0:
            continue
        offered = min(slots[band, start], most)
        left += slots[band, start] - offered
        every += offered
        for slot in range(start + 1, start + 1 + offered):
            other = np.int64(slots[band, slot])
            if seen[other] != place:
                seen[other] = place
                agreeing = agreement(own, sketches[members[other]])
                if agreeing >= required:
                    found[count] = ((8 * own.shape[0] - agreeing) << PLACE_BITS) | other
                    count += 1
    return found[:count], left, every


@compiled
def _hold(place: int, buckets: Integers32, slots: Integers32, most: int) -> None:
    for band in range(buckets.shape[1]):
        start = buckets[place, band]
        if start >= 0:
            slots[band, start] += 1
            if slots[band, start] <= most:
                slots[band, start + slots[band, start]] = place


def histogram(similarities: NDArray[np.float64]) -> Integers:
    """Return the number of similarities in each of HISTOGRAM_BINS equal bins of [0, 1],
    [HISTOGRAM_BINS]; the last bin includes 1."""
    edges = np.arange(1, HISTOGRAM_BINS) / HISTOGRAM_BINS
    return np.bincount(np.searchsorted(edges, similarities, side="right"), minlength=HISTOGRAM_BINS)


def resolve(
    linked: Linked, config: DeduplicateConfig, held_before: int = 0, scratch: Path | None = None
) -> Resolution:
    """Decide by the settings `config` which of the linked documents are dropped, component by
    component and in input order within each. Returns a Resolution: `decisions`, an array with a
    DECISION record for each dropped document, and the counts of compared and uncompared pairs.

    Buckets lie in files in `scratch`, or in the system's temporary folder: a member takes about 90
    bytes of memory and, for each band, 10 of disk.

    By the rule `verified`, a document is compared, in input order, with the earlier documents that
    are kept, share a bucket with it and agree with it in at least `min_agreement` minima. It is
    dropped at the first whose exact Jaccard similarity to it is at least the threshold, and that
    one is its survivor; without such a one it is kept. A bucket offers only its first MOST_OFFERED
    kept documents, and of more than MOST_COMPARED that agree only the ones that agree in the most
    minima are compared; the pairs that these limits leave out are counted. Documents with a number
    below `held_before` are always kept. A member that no other member agrees with changes nothing:
    it may be in the component or not.

    By the rule `megatron-2019`
    (tools/openwebtext/{find_duplicates,group_duplicate_url,remove_group_duplicates}.py of v2.6) one
    document of a bucket is compared with all others in it, pairs above 0.5 are listed, pairs of at
    least the threshold are linked, and one document of each linked group is kept. Where the
    published code takes an arbitrary one (of a bucket, of an unordered set), the first in input
    order is taken. As in that code, the last shingle of a text is left out of the comparison, and a
    text without shingles has a similarity of 0 to all others. `held_before` must be 0.
    """
    is_published = config.rule == "megatron-2019"
    members, *_, copies, pages = linked
    size = len(members)
    held = _Held(linked, config, scratch)

    def text(place: int) -> str:
        whole = linked.text_of(int(members[place]))
        return whole[:-1] if is_published else whole

    texts = ShingledTexts(text, config.shingle_characters)
    compared = np.zeros(HISTOGRAM_BINS, np.int64)
    partly = np.zeros(size, np.bool_)
    uncompared = 0
    best = np.zeros(size)
    forest = np.arange(size if is_published else 0)
    every = 0
    decisions = np.empty(size, DECISION)
    dropped = 0
    for place, document in enumerate(members.tolist()):
        others, left, offered = held.candidates(place) if document >= held_before else ([], 0, 0)
        every += offered
        similarities = np.empty(0)
        if others:
            similarities = texts.similarities(
                place, others, np.inf if is_published else config.threshold
            )
            similarities *= not is_published or len(text(place)) >= config.shingle_characters
            compared += histogram(similarities) * (1 if copies is None else 1 + int(copies[place]))
        if is_published:
            for other, value in zip(others, similarities.tolist(), strict=True):
                if value > LISTED_ABOVE and value >= config.threshold:
                    join(forest, other, place)
                    best[other], best[place] = max(best[other], value), max(best[place], value)
        elif left:
            partly[place] = True
            uncompared += left
        if is_published or not len(similarities) or similarities[-1] < config.threshold:
            held.hold(place)
        else:
            decisions[dropped] = document, members[others[len(similarities) - 1]], similarities[-1]
            dropped += 1
        if place % GIVEN_BACK == 0:
            for mapped in (*held.pages, *([pages] if pages else ())):
                mapped.madvise(MADV_DONTNEED)
    if is_published:
        gone = np.flatnonzero(flatten(forest) != np.arange(size))
        dropped = len(gone)
        decisions["document"][:dropped], decisions["survivor"][:dropped] = (
            members[gone],
            members[forest[gone]],
        )
        decisions["jaccard"][:dropped] = best[gone]
    return Resolution(decisions[:dropped], compared, members[partly], uncompared, every)
