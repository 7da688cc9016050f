"""Components of linked documents; which documents of each are dropped, and which survivor stands for each.

A forest is an array that holds for each document an earlier one of its set, or itself for the first of a set. Two
documents are linked if they share a bucket and their sketches agree often enough. Sketches matter: in a corpus of a
hundred thousand documents almost all unrelated ones are connected through chance buckets of five rows.

The similarity of two texts is that of their sets of shingles, as sorted keys. A key of up to eight bytes is the shingle
itself (`shingles.pack`). A longer shingle has a hash of 56 bits, so about one comparison in ten million of two long
texts could count a shingle too many.
"""

from array import array
from collections import deque
from collections.abc import Callable
from hashlib import blake2b
from itertools import pairwise
from mmap import MADV_DONTNEED, mmap
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mlm_repro.data_pipeline.duplicates.lsh import HISTOGRAM_BINS, Words, agreement, required_agreement
from mlm_repro.data_pipeline.fast.shingles import CHUNK, as_bytes, first_end, pack
from mlm_repro.data_pipeline.stages.deduplicate import DeduplicateConfig
from mlm_repro.lineage.loops import compiled

CACHE_BYTES, SMALL_POOL = 1 << 29, 1 << 17
LARGE, SAMPLED, SAMPLED_KEYS, MOST_COMMON = 1000, 256, 1 << 22, 1 << 14
"""Documents of a component in which common keys are looked for; texts and keys of the sample; most common keys."""
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
def encode(keys: Keys, common: Keys, out: Keys) -> int:
    """Write keys as their number, the number of rare ones, a bit for each of the `common` keys, and the rare ones.

    Returns the words written, at most 2 + words for the bits + keys. Both inputs ascend.
    """
    first = 2 + (common.shape[0] + 63) // 64
    out[:first] = 0
    rare, place = first, 0
    for key in keys:
        while place < common.shape[0] and common[place] < key:
            place += 1
        if place < common.shape[0] and common[place] == key:
            out[2 + place // 64] |= np.uint64(1) << np.uint64(place % 64)
        else:
            out[rare] = key
            rare += 1
    out[0], out[1] = keys.shape[0], rare - first
    return rare


@compiled
def similarity(left: Keys, right: Keys, first: int) -> float:
    """Shared keys over all keys of two texts, encoded with their rare keys from word `first` on."""
    shared = np.int64(0)
    for word in range(2, first):
        bits = left[word] & right[word]
        bits -= (bits >> np.uint64(1)) & np.uint64(0x5555555555555555)
        bits = (bits & np.uint64(0x3333333333333333)) + ((bits >> np.uint64(2)) & np.uint64(0x3333333333333333))
        bits = (bits + (bits >> np.uint64(4))) & np.uint64(0x0F0F0F0F0F0F0F0F)
        shared += np.int64((bits * np.uint64(0x0101010101010101)) >> np.uint64(56))
    own, other = first, first
    own_end, other_end = first + np.int64(left[1]), first + np.int64(right[1])
    while own < own_end and other < other_end:
        ours, theirs = left[own], right[other]
        shared += ours == theirs
        own += ours <= theirs
        other += theirs <= ours
    return shared / (np.int64(left[0]) + np.int64(right[0]) - shared)


@compiled
def _similarities(text: Keys, pool: Keys, places: NDArray[np.int64], first: int, enough: float) -> NDArray[np.float64]:
    """Similarities of a text to those at places of the pool, up to the first that is `enough`."""
    similar = np.empty(places.shape[0])
    for number in range(places.shape[0]):
        similar[number] = similarity(text, pool[places[number] :], first)
        if similar[number] >= enough:
            return similar[: number + 1]
    return similar


class ShingledTexts:
    """Texts by number, read with `text_of`; the encoded keys of those last read are remembered up to `cache_bytes`.

    `common` keys cost a bit each: in a cluster of pages of one template nearly all shingles are common to many.
    """

    def __init__(
        self, text_of: Callable[[int], str], characters: int, count: int, cache_bytes: int = CACHE_BYTES
    ) -> None:
        self._text_of, self._characters = text_of, characters
        self._pool, self._free, self._most = np.empty(SMALL_POOL, np.uint64), 0, max(SMALL_POOL, cache_bytes // 8)
        self._places = np.full(count, -1, np.int64)
        self._in_pool = deque[int]()  # the oldest first
        self.common: Keys = np.empty(0, np.uint64)

    def choose_common(self, numbers: NDArray[np.int64]) -> None:
        """Take the keys that several of a sample of these texts have, the most frequent ones."""
        sample, taken = list[Keys](), 0
        for number in numbers[:: len(numbers) // SAMPLED] if len(numbers) > LARGE else ():
            sample.append(shingle_keys(self._text_of(int(number)), self._characters))
            taken += len(sample[-1])
            if taken > SAMPLED_KEYS:
                break
        keys, counts = np.unique(np.concatenate([np.empty(0, np.uint64), *sample]), return_counts=True)
        frequent = np.flatnonzero((counts > 1) & (keys < WHOLE))
        self.common = np.sort(keys[frequent[np.argsort(-counts[frequent], kind="stable")[:MOST_COMMON]]])

    @property
    def _first(self) -> int:
        return 2 + -(-len(self.common) // 64)

    def encoded(self, number: int) -> Keys:
        """The encoded keys of a text."""
        if self._places[number] >= 0:
            place = int(self._places[number])
            return self._pool[place : place + self._first + int(self._pool[place + 1])].copy()
        keys = shingle_keys(self._text_of(number), self._characters)
        out = np.empty(self._first + len(keys), np.uint64)
        return out[: encode(keys, self.common, out)]

    def has_shingles(self, text: Keys) -> bool:
        """True if an encoded text is at least one shingle long."""
        return not text[1] or bool(text[self._first] < WHOLE)

    def similarities(self, text: Keys, others: NDArray[np.int64], enough: float) -> NDArray[np.float64]:
        """Similarities of an encoded text to others, up to the first that is `enough`."""
        similar, start, size = [np.empty(0)], 0, 1
        while start < len(others):
            chunk = others[start : start + size]
            while (missing := chunk[self._places[chunk] < 0]).size:
                for number in missing.tolist():
                    self._remember(number)
                if (self._places[chunk] < 0).any():  # so many do not fit
                    chunk = chunk[: len(chunk) // 2]
            similar.append(_similarities(text, self._pool, self._places[chunk], self._first, enough))
            if similar[-1][-1] >= enough:
                break
            start, size = start + len(chunk), 4 * size
        return np.concatenate(similar)

    def _remember(self, number: int) -> None:
        keys = self.encoded(number)
        end = self._free + len(keys)
        if end > len(self._pool) and (end <= self._most or len(keys) > self._most):
            grown = max(end, min(2 * len(self._pool), self._most))
            self._pool = np.concatenate([self._pool, np.empty(grown - len(self._pool), np.uint64)])
        start = self._free if end <= len(self._pool) else 0
        while self._in_pool and self._is_in_the_way(int(self._places[self._in_pool[0]]), start, start + len(keys)):
            self._places[self._in_pool.popleft()] = -1
        self._pool[start : start + len(keys)] = keys
        self._places[number], self._free = start, start + len(keys)
        self._in_pool.append(number)

    def _is_in_the_way(self, place: int, start: int, end: int) -> bool:
        """True for the oldest text if it begins where another is to be written, or in the rest that is left empty."""
        return start <= place < end or (start < self._free <= place)


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
def merge(forest: Forest, documents: Forest, others: Forest) -> None:
    """Join, in place, the sets of documents and of others, pair by pair."""
    for pair in range(documents.shape[0]):
        join(forest, documents[pair], others[pair])


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


MOST_OFFERED = 4096
"""Most documents of a bucket that later ones are compared with, the first ones. So each of a million pages of one
template, all similar and none a duplicate, costs the same; pairs that are duplicates share rarer buckets as well."""


@compiled
def link(
    forest: Forest, documents: Forest, starts: Forest, sketches: Words, required: int, most: int = MOST_OFFERED
) -> None:  # fmt: skip
    """Join, in place, the sets of documents of each bucket whose sketches agree in `required` bytes.

    Each is compared with the `most` first of its bucket. Members of one set are not compared again, so a bucket of
    near-duplicates costs one comparison for each. They form a chain: `following` leads from `heads` to `tails`.
    """
    longest = 0
    for bucket in range(starts.shape[0] - 1):
        longest = max(longest, starts[bucket + 1] - starts[bucket])
    longest = min(longest, most)
    following, heads, tails = np.empty(longest, np.int64), np.empty(longest, np.int64), np.empty(longest, np.int64)
    for bucket in range(starts.shape[0] - 1):
        members = documents[starts[bucket] : starts[bucket + 1]]
        chains = 0
        for place in range(members.shape[0]):
            document, is_offered = members[place], place < most
            if is_offered:
                following[place] = -1
            own, chain = -1, 0
            while chain < chains:
                other = heads[chain]
                linked = _first(forest, members[other]) == _first(forest, document)
                while not linked and other >= 0:
                    linked = agreement(sketches[members[other]], sketches[document], required) >= required
                    other = following[other]
                if linked:
                    join(forest, members[heads[chain]], document)
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
            if own < 0 and is_offered:
                heads[chains] = tails[chains] = place
                chains += 1


LISTED_ABOVE = 0.5
"""Similarity above which Megatron-LM's find_duplicates.py lists a pair."""
MOST_COMPARED = 1000
"""Most earlier documents that a document is compared with, those that agree with it in the most minima."""
GIVEN_BACK = 1 << 12
"""Members after which the pages of mapped files are given back."""
DECISION = np.dtype([("document", np.int64), ("survivor", np.int64), ("jaccard", np.float64)])
"""A document that is dropped, the earlier one that is kept for it, and the exact similarity of the two. With
`megatron-2019`, the largest similarity of the document to any other."""


class Resolution(NamedTuple):
    """Decisions about some components."""

    decisions: NDArray[Any]
    """DECISION of each dropped document, component by component, in order in each."""
    compared: NDArray[np.int64]
    """Pairs whose texts were compared, by similarity, in HISTOGRAM_BINS equal bins of [0, 1], the last one closed."""


class _Held:
    """The documents of some components that later ones are compared with, by their place among the members.

    `buckets` [members, bands] are places of buckets in `slots` [bands, members], or -1 where a member is alone, or -2
    less the place for the last one of a bucket, which none comes after. There a bucket has its number of documents
    held, and then these.
    """

    def __init__(
        self, members: NDArray[np.int64], starts: NDArray[np.int64], keys_of: Callable[[int], Words], sketches: Words,
        config: DeduplicateConfig, scratch: Path | None,
    ) -> None:  # fmt: skip
        bands, size = config.banding[0], len(members)
        self.pages = [_mapped(4 * bands * max(1, size), scratch) for _ in range(2)]
        buckets, slots = (np.frombuffer(pages, np.int32)[: bands * size] for pages in self.pages)
        self._buckets, self._slots = buckets.reshape(size, bands), slots.reshape(bands, size)
        component = np.repeat(np.arange(len(starts) - 1, dtype=np.int32), np.diff(starts))
        for band in range(bands):
            keys = keys_of(band)
            _number_buckets(keys, np.argsort(keys, kind="stable"), component, self._buckets[:, band])
            self.pages[0].madvise(MADV_DONTNEED)
        self._most = 1 if config.rule == "megatron-2019" else MOST_OFFERED
        self._sketches, self._members, self._required = sketches, members, required_agreement(config)
        self._found = np.empty(size, np.int64), np.empty(size, np.int16), np.full(size, -1, np.int32)

    def candidates(self, place: int) -> NDArray[np.int64]:
        """Held documents, in order, that share a bucket with this document and agree with it often enough."""
        where = (self._buckets, self._slots, self._sketches, self._members)
        return np.asarray(_candidates(place, *where, self._required, MOST_COMPARED, *self._found))

    def hold(self, place: int) -> None:
        """Hold a document in each of its buckets that has room."""
        _hold(place, self._buckets, self._slots, self._most)


def _mapped(size: int, folder: Path | None) -> mmap:
    """A file of zeros without a name, in memory as far as it is looked at."""
    with TemporaryFile(dir=folder) as file:
        file.truncate(size)
        return mmap(file.fileno(), size)


@compiled
def _number_buckets(keys: Words, order: Forest, component: NDArray[np.int32], buckets: NDArray[np.int32]) -> None:
    start = 0
    for end in range(1, order.shape[0] + 1):
        first = order[start]
        if end < order.shape[0] and keys[order[end]] == keys[first] and component[order[end]] == component[first]:
            continue
        for place in range(start, end):
            buckets[order[place]] = start
        buckets[order[end - 1]] = -1 if end - start == 1 else -2 - start
        start = end


@compiled
def _candidates(
    place: int, buckets: NDArray[np.int32], slots: NDArray[np.int32], sketches: Words, members: Forest, required: int,
    most: int, found: Forest, agreements: NDArray[np.int16], seen: NDArray[np.int32],
) -> Forest:  # fmt: skip
    count, own = 0, sketches[members[place]]
    for band in range(buckets.shape[1]):
        bucket = buckets[place, band]
        if bucket == -1:
            continue
        start = bucket if bucket >= 0 else -2 - bucket
        for slot in range(start + 1, start + 1 + slots[band, start]):
            other = slots[band, slot]
            if seen[other] == place:
                continue
            seen[other] = place
            agreeing = agreement(own, sketches[members[other]], required)
            if agreeing >= required:
                found[count], agreements[count] = other, agreeing
                count += 1
    if count <= most:
        return np.sort(found[:count])
    frequency = np.zeros(8 * own.shape[0] + 1, np.int64)
    for number in range(count):
        frequency[agreements[number]] += 1
    least, room = frequency.shape[0] - 1, most
    while frequency[least] <= room:
        room -= frequency[least]
        least -= 1
    chosen = found[:count][agreements[:count] > least]
    last = np.sort(found[:count][agreements[:count] == least])[:room]
    return np.sort(np.concatenate((chosen, last)))


@compiled
def _hold(place: int, buckets: NDArray[np.int32], slots: NDArray[np.int32], most: int) -> None:
    for band in range(buckets.shape[1]):
        bucket = buckets[place, band]
        if bucket >= 0 and slots[band, bucket] < most:
            slots[band, bucket] += 1
            slots[band, bucket + slots[band, bucket]] = place


@compiled
def _join_similar(
    forest: Forest, best: NDArray[np.float64], place: int, others: Forest, similarities: NDArray[np.float64],
    threshold: float,
) -> None:  # fmt: skip
    for number in range(others.shape[0]):
        other, value = others[number], similarities[number]
        if value > LISTED_ABOVE and value >= threshold:
            join(forest, other, place)
            best[other], best[place] = max(best[other], value), max(best[place], value)


@compiled
def _count(compared: Forest, edges: NDArray[np.float64], similarities: NDArray[np.float64], times: int) -> None:
    for value in similarities:
        compared[min(np.searchsorted(edges, value, side="right"), compared.shape[0]) - 1] += times


def resolve(
    members: NDArray[np.int64], starts: NDArray[np.int64], keys_of: Callable[[int], Words], sketches: Words,
    text_of: Callable[[int], str], config: DeduplicateConfig, held_before: int = 0,
    copies: NDArray[np.int64] | None = None, pages: mmap | None = None, scratch: Path | None = None,
) -> Resolution:  # fmt: skip
    """Decide for the documents `members`, component by component from `starts` to the next, in order in each.

    `keys_of` gives the members' keys of a band, [members], and `sketches` those of all documents, in mapped `pages`.
    Buckets lie in files in `scratch`: a member takes 40 bytes of memory and 8 of disk for each band.

    By the rule `verified`, a document is dropped if and only if its exact Jaccard similarity to an earlier document
    that is kept, shares a bucket with it and agrees with it in `min_agreement` minima is at least the threshold; its
    survivor is the first such document. If there are more than MOST_COMPARED such documents, those that agree in the
    most minima are compared, and a bucket offers its MOST_OFFERED first documents that are kept. Documents before
    number `held_before` are kept. Members without such a partner may be added to the component or left out: nothing
    changes. Pairs of a document of which there are so many `copies` count as often.

    By the rule `megatron-2019` (tools/openwebtext/{find_duplicates,group_duplicate_url,remove_group_duplicates}.py of
    v2.6) one document of a bucket is compared with all others in it, pairs above 0.5 are listed, those of at least
    the threshold are linked, and one document of each linked group is kept. Where the published code takes an
    arbitrary one (of a bucket, of an unordered set), the first in input order is taken. As in that code, the last
    shingle of a text is left out of the comparison, and a text without shingles is similar to none.
    """
    is_published = config.rule == "megatron-2019"
    held = _Held(members, starts, keys_of, sketches, config, scratch)

    def text(place: int) -> str:
        whole = text_of(int(members[place]))
        return whole[:-1] if is_published else whole

    texts = ShingledTexts(text, config.shingle_characters, len(members))
    compared, edges = np.zeros(HISTOGRAM_BINS, np.int64), np.arange(HISTOGRAM_BINS + 1) / HISTOGRAM_BINS
    forest, best = (np.arange(len(members)), np.zeros(len(members))) if is_published else (members[:0], members[:0])
    gone, survivors, values = array("q"), array("q"), array("d")

    def drop(place: int, survivor: int, value: float) -> None:
        gone.append(int(members[place]))
        survivors.append(int(members[survivor]))
        values.append(value)

    for first, end in pairwise(starts.tolist()):
        texts.choose_common(np.arange(first, end))
        for place in range(first, end):
            document = int(members[place])
            others = held.candidates(place) if document >= held_before else members[:0]
            survivor = -1
            if len(others):
                keys, enough = texts.encoded(place), np.inf if is_published else config.threshold
                similarities = texts.similarities(keys, others, enough)
                if is_published:
                    similarities *= texts.has_shingles(keys)
                    _join_similar(forest, best, place, others, similarities, config.threshold)
                elif similarities[-1] >= enough:
                    survivor = int(others[len(similarities) - 1])
                    drop(place, survivor, float(similarities[-1]))
                _count(compared, edges, similarities, 1 if copies is None else 1 + int(copies[place]))
            if survivor < 0:
                held.hold(place)
            if place % GIVEN_BACK == 0:
                for mapped in (*held.pages, *([pages] if pages else ())):
                    mapped.madvise(MADV_DONTNEED)
    if is_published:
        for place, survivor in enumerate(flatten(forest).tolist()):
            if survivor != place:
                drop(place, survivor, float(best[place]))
    decisions = np.empty(len(gone), DECISION)
    decisions["document"], decisions["survivor"], decisions["jaccard"] = gone, survivors, values
    return Resolution(decisions, compared)
