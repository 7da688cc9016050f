"""One forward pass for requests that several tasks have in common."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from evaluation.protocol import Request, Scores


def share(tasks: Sequence[Sequence[Request]]) -> tuple[list[Request], list[NDArray[np.int64]]]:
    """The distinct requests of all tasks, and for each task where its own are among them.

    Requests of equal tokens are one, with the largest number of scored tokens.
    """
    distinct: dict[bytes, tuple[int, Request]] = {}
    places = []
    for requests in tasks:
        mine = np.empty(len(requests), dtype=np.int64)
        for number, request in enumerate(requests):
            key = request.tokens.tobytes()
            place, known = distinct.get(key, (len(distinct), request))
            distinct[key] = place, max(known, request, key=lambda r: r.num_scored)
            mine[number] = place
        places.append(mine)
    return [request for _, request in distinct.values()], places


def take(scores: Scores, places: NDArray[np.int64], requests: Sequence[Request]) -> Scores:
    """A task's scores: of the shared requests at `places`, the last tokens, as many as its own requests score."""
    counts = np.array([request.num_scored for request in requests], dtype=np.int64)
    ends = (scores.starts + scores.num_scored)[places]
    chosen = np.concatenate([np.arange(end - count, end) for end, count in zip(ends, counts, strict=True)])
    return Scores(scores.log_probabilities[chosen], scores.greedy[chosen], scores.greedy_allowed[chosen], counts)
