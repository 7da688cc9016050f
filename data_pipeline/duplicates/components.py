"""Connected components of the graph of candidate pairs. Each component is decided independently.

A forest is an array that holds for each document an earlier one of its set, or itself for the first of a set. Two
documents are linked if they share a bucket and their sketches agree often enough. Sketches matter: in a corpus of a
hundred thousand documents almost all unrelated ones are connected through chance buckets of five rows.
"""

import numpy as np
from numpy.typing import NDArray

from data_pipeline.duplicates.lsh import Buckets, agreement, required_agreement
from data_pipeline.fast.kernels import compiled
from data_pipeline.stages.deduplicate import DeduplicateConfig

Forest = NDArray[np.int64]


def link(forest: Forest, groups: Buckets, sketches: NDArray[np.uint64], config: DeduplicateConfig) -> None:
    """Join, in place, the sets of linked documents of each bucket.

    Members of one set are not compared again, so a bucket of near-duplicates costs one comparison for each.
    """
    _link(forest, *groups, np.asarray(sketches), required_agreement(config))


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
def _link(forest: Forest, documents: Forest, starts: Forest, sketches: NDArray[np.uint64], required: int) -> None:
    """Members of a bucket that are in one set form a chain: `following` leads from `heads` to `tails`."""
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
