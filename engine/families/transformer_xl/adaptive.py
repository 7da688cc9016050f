"""Adaptive embedding and softmax, which spend less on rare words (Grave et al. 2017; Baevski & Auli 2019).

Token ids are sorted by falling frequency. The head, ids below the first cutoff, has the full width. Each tail cluster
has a projection and a width smaller by `div_value`. Input and output share embeddings and projections. Shapes: n rows,
h hidden, v vocabulary.
"""

import torch
import torch.nn.functional as F
from torch import nn

from engine.config import ModelConfig
from engine.parallel.layers import linear


class AdaptiveEmbedding(nn.Module):
    """Token ids [b, s] → [s, b, h], and states → log-probabilities or losses."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        xl = config.transformer_xl
        self.bounds = [0, *xl.cutoffs, config.vocab_size]
        widths = [config.hidden_size // xl.div_value**i for i in range(len(self.bounds) - 1)]
        sizes = [high - low for low, high in zip(self.bounds, self.bounds[1:], strict=False)]
        self.words = nn.ParameterList(torch.empty(size, width) for size, width in zip(sizes, widths, strict=True))
        self.projections = nn.ParameterList(torch.empty(config.hidden_size, width) for width in widths[1:])
        self.clusters = nn.Parameter(torch.empty(len(xl.cutoffs), config.hidden_size))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Embeddings of token ids [b, s], [s, b, h]."""
        flat = tokens.transpose(0, 1).flatten()
        embedded = self.words[0].new_zeros(len(flat), self.words[0].size(1))
        for cluster, words in enumerate(self.words):
            rows, local = self._members(flat, cluster)
            embedded = embedded.index_copy(0, rows, self._project(F.embedding(local, words), cluster))
        return embedded.view(tokens.size(1), tokens.size(0), -1)

    def losses(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Cross-entropy of each target [n] from states [n, h]. A tail computes logits for its own targets only."""
        head = self._head(hidden)  # [n, first cutoff + tails]
        places = targets.clamp(max=self.bounds[1])
        for cluster in range(1, len(self.words)):
            places = torch.where(targets >= self.bounds[cluster], self.bounds[1] + cluster - 1, places)
        losses = -head.gather(1, places[:, None]).squeeze(1)
        for cluster in range(1, len(self.words)):
            rows, local = self._members(targets, cluster)
            tail = self._tail(hidden[rows], cluster)
            losses = losses.index_add(0, rows, -tail.gather(1, local[:, None]).squeeze(1))
        return losses

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Log-probabilities of all words, [..., h] → [..., v]."""
        first, head = self.bounds[1], self._head(hidden)
        tails = [
            head[..., first + cluster - 1, None] + self._tail(hidden, cluster) for cluster in range(1, len(self.words))
        ]
        return torch.cat([head[..., :first], *tails], dim=-1)

    def _head(self, hidden: torch.Tensor) -> torch.Tensor:
        return _log_softmax(linear(hidden, torch.cat([self.words[0], self.clusters])))

    def _tail(self, hidden: torch.Tensor, cluster: int) -> torch.Tensor:
        return _log_softmax(linear(hidden @ self.projections[cluster - 1], self.words[cluster]))

    def _project(self, embedded: torch.Tensor, cluster: int) -> torch.Tensor:
        return linear(embedded, self.projections[cluster - 1]) if cluster else embedded

    def _members(self, tokens: torch.Tensor, cluster: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Indices of the tokens in the cluster, and their ids within it."""
        low, high = self.bounds[cluster], self.bounds[cluster + 1]
        rows = ((tokens >= low) & (tokens < high)).nonzero().squeeze(1)
        return rows, tokens[rows] - low


def _log_softmax(logits: torch.Tensor) -> torch.Tensor:
    return F.log_softmax(logits, dim=-1, dtype=logits.dtype if logits.dtype == torch.float64 else torch.float32)
