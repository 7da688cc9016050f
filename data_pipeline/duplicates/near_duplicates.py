"""Decides which documents of a component are dropped, and which survivor stands for each."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from data_pipeline.duplicates.components import flatten, join
from data_pipeline.duplicates.lsh import agreement, histogram, required_agreement, runs
from data_pipeline.duplicates.similarity import ShingledTexts
from data_pipeline.fast.kernels import compiled
from data_pipeline.stages.deduplicate import DeduplicateConfig

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


@dataclass(frozen=True)
class Resolution:
    """The decisions for a component."""

    decisions: list[Decision]
    """Dropped documents, in order."""
    compared: NDArray[np.int64]
    """`lsh.histogram` of the similarities of all pairs whose texts were compared."""


def resolve(
    members: NDArray[np.int64],
    fingerprints: NDArray[np.uint64],
    text_of: Callable[[int], str],
    config: DeduplicateConfig,
) -> Resolution:
    """Decide for the documents `members`, in order, with their fingerprints [members, words].

    By the rule `verified`, a document is dropped if and only if its exact Jaccard similarity to an earlier document
    that is kept, shares a bucket with it and agrees with it in `min_agreement` minima is at least the threshold; its
    survivor is the first such document. If there are more than MOST_COMPARED such documents, those that agree in the
    most minima are compared. Members without such a partner may be added to the component or left out: nothing changes.

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
    return _verify(documents, held, texts, config.threshold)


class _Held:
    """The documents held in the buckets of a component, identified by their place among its members."""

    def __init__(self, fingerprints: NDArray[np.uint64], config: DeduplicateConfig) -> None:
        self._bucket_of, self._starts = _local_buckets(np.ascontiguousarray(fingerprints[:, : config.bands]))
        self._sketches = np.ascontiguousarray(fingerprints[:, config.bands :])
        self._required = required_agreement(config)
        self._held = np.empty(self._starts[-1], np.int64)
        self._counts = np.zeros(len(self._starts) - 1, np.int64)
        self._seen = np.full(len(fingerprints), -1)

    def candidates(self, place: int) -> list[int]:
        """Held documents, in order, that share a bucket with this document and agree with it often enough."""
        arrays = (self._bucket_of, self._starts, self._held, self._counts, self._seen, self._sketches)
        others, agreements = _candidates(place, *arrays, self._required)
        if len(others) > MOST_COMPARED:
            others = others[np.lexsort((others, -agreements))[:MOST_COMPARED]]
        candidates: list[int] = np.sort(others).tolist()
        return candidates

    def hold(self, place: int, most: int) -> None:
        """Hold a document in each of its buckets that holds fewer than `most`."""
        own = self._bucket_of[place]
        own = own[own >= 0]
        own = own[self._counts[own] < most]
        self._held[self._starts[own] + self._counts[own]] = place
        self._counts[own] += 1


def _verify(documents: list[int], held: _Held, texts: ShingledTexts, threshold: float) -> Resolution:
    decisions: list[Decision] = []
    similarities: list[float] = []
    for place, document in enumerate(documents):
        for candidate, similarity in texts.similarities(place, held.candidates(place)):
            similarities.append(similarity)
            if similarity >= threshold:
                decisions.append(Decision(document, documents[candidate], similarity))
                break
        else:
            held.hold(place, len(documents))
    return Resolution(decisions, histogram(similarities))


def _group(documents: list[int], held: _Held, texts: ShingledTexts, threshold: float) -> Resolution:
    forest = np.arange(len(documents))
    best = np.zeros(len(documents))
    similarities: list[float] = []
    for place in range(len(documents)):
        for candidate, similarity in texts.similarities(place, held.candidates(place)):
            similarities.append(similarity if texts.has_shingles(place) else 0.0)
            if similarities[-1] > LISTED_ABOVE and similarity >= threshold:
                join(forest, candidate, place)
                best[[candidate, place]] = np.maximum(best[[candidate, place]], similarity)
        held.hold(place, 1)
    first = flatten(forest).tolist()
    dropped = [place for place, survivor in enumerate(first) if survivor != place]
    decisions = [Decision(documents[place], documents[first[place]], float(best[place])) for place in dropped]
    return Resolution(decisions, histogram(similarities))


@compiled
def _local_buckets(keys: NDArray[np.uint64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Bucket of each member in each band, [members, bands], -1 where it is alone; and the start of each bucket."""
    members, bands = keys.shape
    bucket_of = np.full((members, bands), -1)
    starts = np.zeros(members * bands // 2 + 1, np.int64)
    buckets = 0
    for band in range(bands):
        own = keys[:, band].copy()
        order = np.argsort(own)
        shared, sizes = runs(order, own[order])
        filled = 0
        for size in sizes:
            bucket_of[shared[filled : filled + size], band] = buckets
            starts[buckets + 1] = starts[buckets] + size
            buckets += 1
            filled += size
    return bucket_of, starts[: buckets + 1].copy()


@compiled
def _candidates(
    place: int,
    bucket_of: NDArray[np.int64],
    starts: NDArray[np.int64],
    held: NDArray[np.int64],
    counts: NDArray[np.int64],
    seen: NDArray[np.int64],
    sketches: NDArray[np.uint64],
    required: int,
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Held documents that qualify, and their agreement; `seen` [members] is the last document that examined each."""
    most = 0
    for bucket in bucket_of[place]:
        if bucket >= 0:
            most += counts[bucket]
    others, agreements, count = np.empty(most, np.int64), np.empty(most, np.int64), 0
    for bucket in bucket_of[place]:
        if bucket < 0:
            continue
        for slot in range(starts[bucket], starts[bucket] + counts[bucket]):
            other = held[slot]
            if seen[other] != place:
                seen[other] = place
                agreements[count] = agreement(sketches[other], sketches[place])
                if agreements[count] >= required:
                    others[count] = other
                    count += 1
    return others[:count], agreements[:count]
