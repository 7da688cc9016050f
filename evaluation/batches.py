"""Which requests go through the model together. The plan does not depend on who computes it or on how many do."""

import hashlib
from collections.abc import Callable, Sequence

import numpy as np

from evaluation.protocol import Request

Batches = list[list[int]]
"""Indices of requests, batch by batch."""


def plan_batches(requests: Sequence[Request], rows: Callable[[int], int]) -> Batches:
    """Requests of like length and like number of scored tokens together, the longest first.

    `rows(width)` is how many requests of at most `width` inputs make a batch.
    """
    order = sorted(range(len(requests)), key=lambda i: (-len(requests[i].tokens), -requests[i].num_scored))
    batches: Batches = []
    while order:
        size = rows(len(requests[order[0]].tokens) - 1)
        batches.append(order[:size])
        order = order[size:]
    return batches


def digest_batches(requests: Sequence[Request], batches: Batches) -> str:
    """SHA-256 of all tokens, of what is scored of them and of how they are batched."""
    digest = hashlib.sha256()
    for batch in batches:
        shape = [len(batch), *(len(requests[i].tokens) for i in batch), *(requests[i].num_scored for i in batch)]
        digest.update(np.array(shape, dtype="<i8").tobytes())
        for i in batch:
            digest.update(requests[i].tokens.astype("<i8", copy=False).tobytes())
    return digest.hexdigest()
