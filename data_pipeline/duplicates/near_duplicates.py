"""Components of linked documents; which documents of each are dropped, and which survivor stands for each.

A forest is an array that holds for each document an earlier one of its set, or itself for the first of a set. Two
documents are linked if they share a bucket and their sketches agree often enough. Sketches matter: in a corpus of a
hundred thousand documents almost all unrelated ones are connected through chance buckets of five rows.

The similarity of two texts is that of their sets of shingles, as sorted keys. A key of up to eight bytes is the shingle
itself (`shingles.pack`). A longer shingle has a hash of 56 bits, so about one comparison in ten million of two long
texts could count a shingle too many.
"""

from array import array
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from hashlib import blake2b
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mlm_repro.data_pipeline.duplicates.lsh import agreement, histogram, required_agreement
from mlm_repro.data_pipeline.fast.shingles import CHUNK, as_bytes, first_end, pack
from mlm_repro.data_pipeline.stages.deduplicate import DeduplicateConfig
from mlm_repro.lineage.loops import compiled

CACHE_BYTES = 1 << 29
WHOLE = np.uint64(0xFF << 56)
"""The lowest key of a text that is shorter than a shingle; all others are below."""

Keys = NDArray[np.uint64]


def shingle_keys(text: str, characters: int) -> Keys:
    """Keys of the distinct shingles of a text, ascending; a shorter text is its own only shingle."""
    data = as_bytes(text)
    if len(text) >= characters:
        every = np.sort(_keys(data, characters))
        return every[np.diff(every, prepend=~every[0]) != 0]
    return WHOLE | np.frombuffer(blake2b(data.tobytes(), digest_size=7).digest() + b"\0", "<u8")


@compiled
def similarity(left: Keys, right: Keys) -> float:
    """Shared keys over all keys."""
    shared = own = other = 0
    while own < left.shape[0] and other < right.shape[0]:
        first, second = left[own], right[other]
        shared += first == second
        own += first <= second
        other += second <= first
    return shared / (left.shape[0] + right.shape[0] - shared)


class ShingledTexts:
    """Texts by number, read with `text_of`; the keys of those last used are remembered up to `cache_bytes`."""

    def __init__(self, text_of: Callable[[int], str], characters: int, cache_bytes: int = CACHE_BYTES) -> None:
        self._text_of, self._characters = text_of, characters
        self._cached: OrderedDict[int, Keys] = OrderedDict()
        self._free_bytes = cache_bytes

    def similarity(self, left: int, right: int) -> float:
        """Similarity of two texts."""
        return float(similarity(self[left], self[right]))

    def has_shingles(self, number: int) -> bool:
        """True if the text is at least one shingle long."""
        return bool(self[number][0] < WHOLE)

    def __getitem__(self, number: int) -> Keys:
        """The keys of a text."""
        if number in self._cached:
            self._cached.move_to_end(number)
            return self._cached[number]
        keys = self._cached[number] = shingle_keys(self._text_of(number), self._characters)
        self._free_bytes -= keys.nbytes
        while self._free_bytes < 0 and len(self._cached) > 1:
            self._free_bytes += self._cached.popitem(last=False)[1].nbytes
        return keys


@compiled
def _keys(data: NDArray[np.uint8], characters: int) -> Keys:
    every = np.empty(data.shape[0], np.uint64)
    keys, starts, ends = np.empty(CHUNK, np.uint64), np.empty(CHUNK, np.int64), np.empty(CHUNK, np.int64)
    filled, start, end = 0, 0, first_end(data, characters)
    while end <= data.shape[0]:
        count, start, end = pack(data, start, end, keys, starts, ends)
        every[filled : filled + count] = keys[:count]
        filled += count
    return every[:filled]


Forest = NDArray[np.int64]


@compiled
def merge(forest: Forest, other: Forest) -> None:
    """Join, in place, the sets of another forest over the same documents."""
    for document in range(forest.shape[0]):
        join(forest, document, other[document])


@compiled
def flatten(forest: Forest) -> Forest:
    """The first document of each document's set, [documents], in place."""
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
    """Join the sets of two documents, in place."""
    left, right = _first(forest, left), _first(forest, right)
    forest[max(left, right)] = min(left, right)


@compiled
def link(forest: Forest, documents: Forest, starts: Forest, sketches: NDArray[np.uint64], required: int) -> None:
    """Join, in place, the sets of documents of each bucket whose sketches agree in `required` bytes.

    Members of one set are not compared again, so a bucket of near-duplicates costs one comparison for each. They form a
    chain: `following` leads from `heads` to `tails`.
    """
    longest = 0
    for bucket in range(starts.shape[0] - 1):
        longest = max(longest, starts[bucket + 1] - starts[bucket])
    following, heads, tails = np.empty(longest, np.int64), np.empty(longest, np.int64), np.empty(longest, np.int64)
    for bucket in range(starts.shape[0] - 1):
        members = documents[starts[bucket] : starts[bucket + 1]]
        chains = 0
        for place in range(members.shape[0]):
            document = members[place]
            following[place] = -1
            own, chain = -1, 0
            while chain < chains:
                other = heads[chain]
                linked = _first(forest, members[other]) == _first(forest, document)
                while not linked and other >= 0:
                    linked = agreement(sketches[members[other]], sketches[document]) >= required
                    other = following[other]
                if not linked:
                    chain += 1
                    continue
                join(forest, members[heads[chain]], document)
                if own < 0:
                    own = chain
                    following[tails[own]] = place
                    tails[own] = place
                    chain += 1
                else:
                    following[tails[own]] = heads[chain]
                    tails[own] = tails[chain]
                    chains -= 1
                    heads[chain], tails[chain] = heads[chains], tails[chains]
            if own < 0:
                heads[chains] = tails[chains] = place
                chains += 1


LISTED_ABOVE = 0.5
"""Similarity above which Megatron-LM's find_duplicates.py lists a pair."""


MOST_COMPARED = 1000
"""Most earlier documents that a document is compared with. Without a limit, a hundred thousand pages of one template,
each similar to all others but below the threshold, would take more than a day."""


class Decision(NamedTuple):
    """A document that is dropped."""

    document: int
    survivor: int
    """The earlier document that is kept for it."""
    jaccard: float
    """Exact similarity of the two. With `megatron-2019`, the largest similarity of the document to any other."""


Resolution = tuple[list[Decision], NDArray[np.int64]]
"""A component's dropped documents, in order; `lsh.histogram` of the similarities of pairs whose texts were compared."""


def resolve(
    members: NDArray[np.int64], fingerprints: NDArray[np.uint64], text_of: Callable[[int], str],
    config: DeduplicateConfig, held_before: int = 0,
) -> Resolution:  # fmt: skip
    """Decide for the documents `members`, in order, with their fingerprints [members, words].

    By the rule `verified`, a document is dropped if and only if its exact Jaccard similarity to an earlier document
    that is kept, shares a bucket with it and agrees with it in `min_agreement` minima is at least the threshold; its
    survivor is the first such document. If there are more than MOST_COMPARED such documents, those that agree in the
    most minima are compared. Documents before number `held_before` are kept. Members without such a partner may be
    added to the component or left out: nothing changes.

    By the rule `megatron-2019` (tools/openwebtext/{find_duplicates,group_duplicate_url,remove_group_duplicates}.py of
    v2.6) one document of a bucket is compared with all others in it, pairs above 0.5 are listed, those of at least
    the threshold are linked, and one document of each linked group is kept. Where the published code takes an
    arbitrary one (of a bucket, of an unordered set), the first in input order is taken. As in that code, the last
    shingle of a text is left out of the comparison, and a text without shingles is similar to none.
    """
    held = _Held(fingerprints, config)
    documents: list[int] = members.tolist()
    if config.rule == "megatron-2019":
        texts = ShingledTexts(lambda place: text_of(documents[place])[:-1], config.shingle_characters)
        return _group(documents, held, texts, config.threshold)
    texts = ShingledTexts(lambda place: text_of(documents[place]), config.shingle_characters)
    return _verify(documents, held, texts, config.threshold, held_before)


class _Held:
    """The documents held in the buckets of a component, identified by their place among its members."""

    def __init__(self, fingerprints: NDArray[np.uint64], config: DeduplicateConfig) -> None:
        self._buckets = _shared_buckets(fingerprints[:, : config.banding[0]])
        self._minima = np.ascontiguousarray(fingerprints[:, config.banding[0] :]).view(np.uint8)
        self._required = required_agreement(config)
        self._held: dict[tuple[int, int], array[int]] = defaultdict(lambda: array("q"))

    def candidates(self, place: int) -> list[int]:
        """Held documents, in order, that share a bucket with this document and agree with it often enough."""
        is_near = np.zeros(len(self._minima), np.bool_)
        for bucket in self._buckets_of(place):
            if bucket in self._held:
                is_near[np.frombuffer(self._held[bucket], np.int64)] = True
        others = np.flatnonzero(is_near)
        agreements = (self._minima[others] == self._minima[place]).sum(axis=1)
        others, agreements = others[agreements >= self._required], agreements[agreements >= self._required]
        if len(others) > MOST_COMPARED:
            others = np.sort(others[np.lexsort((others, -agreements))[:MOST_COMPARED]])
        return others.tolist()

    def hold(self, place: int, most: int) -> None:
        """Hold a document in each of its buckets that holds fewer than `most`."""
        for bucket in self._buckets_of(place):
            if len(self._held[bucket]) < most:
                self._held[bucket].append(place)

    def _buckets_of(self, place: int) -> Iterator[tuple[int, int]]:
        """Band and number of each bucket of a document that others are in too."""
        return ((band, bucket) for band, bucket in enumerate(self._buckets[place].tolist()) if bucket >= 0)


def _shared_buckets(keys: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Number of the bucket of each member in each band, [members, bands], -1 where it is alone."""
    order = np.argsort(keys, axis=0)
    ordered = np.take_along_axis(keys, order, axis=0)
    is_new = np.ones((len(keys) + 1, keys.shape[1]), np.bool_)
    is_new[1:-1] = ordered[1:] != ordered[:-1]
    numbers = np.empty(keys.shape, np.int64)
    np.put_along_axis(numbers, order, np.where(is_new[:-1] & is_new[1:], -1, is_new[:-1].cumsum(axis=0)), axis=0)
    return numbers


def _verify(
    documents: list[int], held: _Held, texts: ShingledTexts, threshold: float, held_before: int
) -> Resolution:  # fmt: skip
    decisions: list[Decision] = []
    similarities: list[float] = []
    for place, document in enumerate(documents):
        for candidate in held.candidates(place) if document >= held_before else ():
            similarities.append(similarity := texts.similarity(place, candidate))
            if similarity >= threshold:
                decisions.append(Decision(document, documents[candidate], similarity))
                break
        else:
            held.hold(place, len(documents))
    return decisions, histogram(similarities)


def _group(documents: list[int], held: _Held, texts: ShingledTexts, threshold: float) -> Resolution:
    forest = np.arange(len(documents))
    best = np.zeros(len(documents))
    similarities: list[float] = []
    for place in range(len(documents)):
        for candidate in held.candidates(place):
            similarity = texts.similarity(place, candidate) if texts.has_shingles(place) else 0.0
            similarities.append(similarity)
            if similarity > LISTED_ABOVE and similarity >= threshold:
                join(forest, candidate, place)
                best[[candidate, place]] = np.maximum(best[[candidate, place]], similarity)
        held.hold(place, 1)
    first = flatten(forest).tolist()
    dropped = [place for place, survivor in enumerate(first) if survivor != place]
    decisions = [Decision(documents[place], documents[first[place]], float(best[place])) for place in dropped]
    return decisions, histogram(similarities)
