"""Log-probabilities of scored tokens, whatever the batch size and the number of workers.

The number of workers changes no bit, the batch size only the last ones. Rows are padded on the right only,
where no scored position of a causal model can look, so learned positions stay true. The padded columns of
the vocabulary are cut off before the softmax. The softmax is float32, its logarithm and every sum after it
float64. Only scored positions go through the output layer.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evaluation.protocol import Request, Scores
from evaluation.workers import in_workers
from lineage.environment import available_cores
from lineage.errors import BadInput

ACTIVATIONS_PER_TOKEN = 16  # vectors of hidden size alive at once in a layer, rounded up
MAX_ACTIVATION_BYTES = {"cpu": 16 * 2**20, "cuda": 4 * 2**30}  # on a CPU what its caches hold is fastest
MAX_LOGIT_BYTES = {"cpu": 128 * 2**20, "cuda": 4 * 2**30}


class LanguageModel(Protocol):
    """A causal model, as the engine defines it."""

    def hidden_states(self, tokens: Tensor) -> Tensor:
        """Token ids int64 [b, s] → states after the final layer norm [s, b, h]."""

    def logits(self, hidden: Tensor) -> Tensor:
        """States [..., h] → [..., padded vocabulary]."""


@dataclass(frozen=True)
class ScoringModel:
    """A causal model and what must be known about it to score with it."""

    network: LanguageModel
    vocab_size: int
    """Real entries; logits beyond them are padding."""
    seq_length: int
    """Longest input."""
    hidden_size: int
    dtype: torch.dtype
    device: torch.device

    def default_batch_size(self, width: int) -> int:
        """Rows of `width` inputs whose activations fit a fixed share of memory."""
        bytes_per_row = width * self.hidden_size * ACTIVATIONS_PER_TOKEN * self.dtype.itemsize
        return max(1, MAX_ACTIVATION_BYTES[self.device.type] // bytes_per_row)

    def rows_per_head(self) -> int:
        """Scored rows that go through the output layer together, counting float32 logits and two copies."""
        return max(1, MAX_LOGIT_BYTES[self.device.type] // (3 * 4 * self.vocab_size))


def score(
    model: ScoringModel,
    requests: Sequence[Request],
    batch_size: int | None = None,
    workers: int | None = None,
    on_progress: Callable[[int], None] = lambda count: None,
    banned: NDArray[np.int64] | None = None,
) -> Scores:
    """Score every request; `on_progress` is told how many more are done, `banned` token ids are not allowed.

    Requests are batched in order of length. On a CPU, contiguous ranges of the batches go to `workers`
    processes of one thread each (all available cores unless given); elsewhere there is one worker. Raises
    BadInput for a request longer than the model's context, an unknown token, or several workers on a GPU.
    """
    widest = max(len(request.tokens) for request in requests) - 1
    if widest > model.seq_length:
        raise BadInput(f"a request of {widest} tokens does not fit the model's context of {model.seq_length}")
    if max(int(request.tokens.max()) for request in requests) >= model.vocab_size:
        raise BadInput(f"the text has token ids beyond the model's vocabulary of {model.vocab_size}")
    on_cpu = model.device.type == "cpu"
    workers = workers or (available_cores() if on_cpu else 1)
    if workers > 1 and not on_cpu:
        raise BadInput(f"{workers} workers were asked for, but a model on a GPU is scored by one")
    size = batch_size or model.default_batch_size(widest)
    order = sorted(range(len(requests)), key=lambda index: len(requests[index].tokens))
    batches = [order[first : first + size] for first in range(0, len(order), size)]

    counts = np.array([request.num_scored for request in requests], dtype=np.int64)
    starts = np.cumsum(counts) - counts
    scores = Scores(np.empty(counts.sum()), *np.empty((2, counts.sum()), dtype=np.bool_), counts)

    def score_one(batch: int) -> Scores:
        return score_batch(model, [requests[index] for index in batches[batch]], banned)

    for batch, part in in_workers(score_one, len(batches), workers, one_thread=on_cpu):
        places = np.concatenate([np.arange(starts[i], starts[i] + counts[i]) for i in batches[batch]])
        scores.log_probabilities[places] = part.log_probabilities
        scores.greedy[places], scores.greedy_allowed[places] = part.greedy, part.greedy_allowed
        on_progress(len(batches[batch]))
    return scores


@torch.inference_mode()
def score_batch(model: ScoringModel, requests: Sequence[Request], banned: NDArray[np.int64] | None = None) -> Scores:
    """Score requests in one forward pass."""
    b = len(requests)
    s = max(len(request.tokens) for request in requests) - 1
    inputs = np.zeros((b, s), dtype=np.int64)
    for row, request in enumerate(requests):
        inputs[row, : len(request.tokens) - 1] = request.tokens[:-1]
    positions = np.concatenate([_scored_rows(request, row, b) for row, request in enumerate(requests)])
    targets = np.concatenate([request.tokens[-request.num_scored :] for request in requests])
    hidden = model.network.hidden_states(torch.from_numpy(inputs).to(model.device))  # [s, b, h]
    scored = hidden.flatten(0, 1).index_select(0, torch.from_numpy(positions).to(model.device))  # [n, h]
    mask = None if banned is None else torch.from_numpy(banned).to(model.device)
    parts = [
        _score_rows(model, rows, labels, mask)
        for rows, labels in zip(
            scored.split(model.rows_per_head()),
            torch.from_numpy(targets).to(model.device).split(model.rows_per_head()),
            strict=True,
        )
    ]
    counts = np.array([request.num_scored for request in requests], dtype=np.int64)
    log_probabilities, greedy, allowed = (np.concatenate(part) for part in zip(*parts, strict=True))
    return Scores(log_probabilities, greedy, allowed, counts)


def _scored_rows(request: Request, row: int, b: int) -> NDArray[np.int64]:
    """Rows of the flattened [s, b] states from which the request's scored tokens are predicted."""
    stop = len(request.tokens) - 1
    return np.arange(stop - request.num_scored, stop, dtype=np.int64) * b + row


def _score_rows(
    model: ScoringModel, hidden: Tensor, targets: Tensor, banned: Tensor | None
) -> tuple[NDArray[np.float64], NDArray[np.bool_], NDArray[np.bool_]]:
    """Log-probability of each target [n], whether it is the best and the best allowed, from states [n, h]."""
    logits = model.network.logits(hidden)[:, : model.vocab_size].float()  # [n, v]
    highest, best = logits.max(dim=1)
    target = logits.gather(1, targets[:, None]).squeeze(1)
    greedy = best == targets
    allowed = greedy if banned is None else logits.index_fill(1, banned, float("-inf")).argmax(dim=1) == targets
    total = (logits - highest[:, None]).exp_().sum(dim=1)
    log_probability = target.double() - highest.double() - total.double().log()
    return log_probability.cpu().numpy(), greedy.cpu().numpy(), allowed.cpu().numpy()
