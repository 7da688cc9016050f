"""Decides which documents of a component are dropped, and which survivor stands for each."""

from array import array
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from data_pipeline.duplicates.components import flatten, join
from data_pipeline.duplicates.lsh import histogram, required_agreement
from data_pipeline.duplicates.similarity import ShingledTexts
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
    held_before: int = 0,
) -> Resolution:
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
        self._buckets = np.stack([_shared_buckets(keys) for keys in fingerprints[:, : config.banding[0]].T], axis=1)
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
        candidates: list[int] = others.tolist()
        return candidates

    def hold(self, place: int, most: int) -> None:
        """Hold a document in each of its buckets that holds fewer than `most`."""
        for bucket in self._buckets_of(place):
            if len(self._held[bucket]) < most:
                self._held[bucket].append(place)

    def _buckets_of(self, place: int) -> Iterator[tuple[int, int]]:
        """Band and number of each bucket of a document that others are in too."""
        return ((band, bucket) for band, bucket in enumerate(self._buckets[place].tolist()) if bucket >= 0)


def _shared_buckets(keys: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Number of the bucket of each member in one band, -1 where it is alone."""
    _, bucket, sizes = np.unique(keys, return_inverse=True, return_counts=True)
    return np.where(sizes[bucket] > 1, bucket, -1)


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
    return Resolution(decisions, histogram(similarities))


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
    return Resolution(decisions, histogram(similarities))
