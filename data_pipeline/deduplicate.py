"""Near-duplicate groups: locality-sensitive hashing proposes pairs, exact Jaccard similarity decides."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from datasketch import MinHashLSH
from numpy.typing import NDArray

from data_pipeline.minhash import as_sketch
from data_pipeline.shingles import jaccard, shingles


@dataclass(frozen=True)
class Duplicates:
    """Which document stands for each document."""

    survivor: list[int]
    """For each document the first document of its group; itself if it is kept."""
    candidate_pairs: int
    """Pairs proposed by the hashing."""
    bands: int
    rows: int


def find_duplicates(
    signatures: Iterable[NDArray[np.uint32]],
    text_of: Callable[[int], str],
    threshold: float = 0.7,
    num_permutations: int = 128,
    shingle_characters: int = 5,
) -> Duplicates:
    """Group documents connected by pairs whose Jaccard similarity is at least `threshold`.

    Candidates share a band of their signatures, with datasketch's banding for the threshold; a pair already in one
    group is not compared again. The first document in input order survives.
    """
    index = MinHashLSH(threshold=threshold, num_perm=num_permutations)
    first: list[int] = []
    pairs = 0

    def root(document: int) -> int:
        while first[document] != document:
            first[document] = first[first[document]]
            document = first[document]
        return document

    @lru_cache(maxsize=256)
    def shingles_of(document: int) -> frozenset[str]:
        return shingles(text_of(document), shingle_characters)

    for document, values in enumerate(signatures):
        first.append(document)
        sketch = as_sketch(values, num_permutations)
        candidates = sorted(index.query(sketch))
        index.insert(document, sketch, check_duplication=False)
        pairs += len(candidates)
        for candidate in candidates:
            left, right = root(candidate), root(document)
            if left != right and jaccard(shingles_of(candidate), shingles_of(document)) >= threshold:
                first[max(left, right)] = min(left, right)
    return Duplicates([root(document) for document in range(len(first))], pairs, index.b, index.r)
