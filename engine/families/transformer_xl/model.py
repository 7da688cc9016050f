"""Transformer-XL: segments read one after the other, with a memory of earlier states (Dai et al.
2019).

Post-LN layers, ReLU, relative positions, and an embedding scaled by √h and tied to the output head,
as in the authors' code for WikiText-103. Two things differ: each layer has its own u and v, and the
encoding of distances has no dropout. Full recomputation goes layer by layer, because the memory
holds every layer's input anyway.

Shapes: b microbatch, s segment, m memory, k = m + s, h hidden, n heads (of embeddings and losses:
rows), d head dim, v padded vocabulary, t tensor-parallel ranks.
"""

import math
from itertools import starmap
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mlm_repro.engine.config import ModelConfig
from mlm_repro.engine.kernels.cross_entropy import vocab_parallel_cross_entropy
from mlm_repro.engine.kernels.products import linear
from mlm_repro.engine.kernels.registry import kernel
from mlm_repro.engine.model.cache import by_head
from mlm_repro.engine.model.microbatch import PipelineInput, Recurrence
from mlm_repro.engine.model.stage_model import CausalModel
from mlm_repro.engine.model.transformer import drop, drop_weights, recomputed
from mlm_repro.engine.parallel.collectives import enter_tensor_parallel
from mlm_repro.engine.parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from mlm_repro.engine.parallel.mesh import ParallelMesh
from mlm_repro.engine.parallel.sharding import Role, Roles
from mlm_repro.engine.rng import Dropout


class TiedEmbedding(nn.Module):
    """Word embedding at full width, with its rows divided over the tensor-parallel axis. It is the
    output head too: a call gives the embeddings of token ids, the method `logits` this rank's
    logits of states, and `losses` the loss of each target. Every rank of the axis calls them."""

    def __init__(self, config: ModelConfig, mesh: ParallelMesh) -> None:
        super().__init__()
        self.vocab_size = config.vocab_size
        self.axis = mesh.tp
        self.word_embeddings = VocabParallelEmbedding(
            config.padded_vocab_size, config.hidden_size, mesh
        )

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the word embeddings [s, b, h] of token ids [b, s]: not yet times √h, and without
        positions. Collective over the tensor-parallel axis."""
        return self.word_embeddings(tokens)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return this rank's logits [..., v/t], the products of states [..., h] with this rank's
        rows of the word embedding. The gradient of the states is summed over the tensor-parallel
        axis, so every rank of it calls this."""
        return linear(enter_tensor_parallel(hidden, self.axis), self.word_embeddings.weight)

    def losses(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Return the cross-entropy [n], in nats, of each token id in `targets` [n] under the logits
        of the states `hidden` [n, h], their products with the word embedding without its padding
        rows. The result is in fp32 (fp64 stays fp64). Every tensor-parallel rank calls it with the
        same whole states and targets, and gets the same whole result. Backward can run only
        once."""
        return vocab_parallel_cross_entropy(
            self.logits(hidden), targets, self.vocab_size, self.axis
        )


class AdaptiveEmbedding(nn.Module):
    """Adaptive embedding and softmax, whole on every rank, with less work for rare words. A call
    turns token ids [b, s] into embeddings [s, b, h]; the method `logits` turns states into
    log-probabilities, and `losses` states and targets into cross-entropies.

    Token ids are sorted by falling frequency. The head, ids below the first cutoff, has the full
    width. Each tail cluster has a projection, and a width that is the one before divided by
    `div_value`. Input and output share embeddings and projections (Grave et al. 2017; Baevski &
    Auli 2019).
    """

    roles: ClassVar[Roles] = {
        "words": Role.EMBEDDING,
        "projections": Role.WEIGHT,
        "clusters": Role.EMBEDDING,
    }

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        xl = config.transformer_xl
        self.bounds = [0, *xl.cutoffs, config.vocab_size]
        widths = [config.hidden_size // xl.div_value**i for i in range(len(self.bounds) - 1)]
        sizes = [high - low for low, high in zip(self.bounds, self.bounds[1:], strict=False)]
        self.words = nn.ParameterList(starmap(torch.empty, zip(sizes, widths, strict=True)))
        self.projections = nn.ParameterList(
            torch.empty(config.hidden_size, width) for width in widths[1:]
        )
        self.clusters = nn.Parameter(torch.empty(len(xl.cutoffs), config.hidden_size))

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the word embeddings [s, b, h] of token ids [b, s]: not yet multiplied by √h, and
        without positions. An id outside of the vocabulary gives zeros."""
        flat = tokens.transpose(0, 1).flatten()
        embedded = self.words[0].new_zeros(len(flat), self.words[0].size(1))
        for cluster, words in enumerate(self.words):
            rows, local = self._members(flat, cluster)
            vectors = F.embedding(local, words)
            vectors = linear(vectors, self.projections[cluster - 1]) if cluster else vectors
            embedded = embedded.index_copy(0, rows, vectors)
        return embedded.view(tokens.size(1), tokens.size(0), -1)

    def losses(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Return the cross-entropy [n], in nats, of each token id in `targets` [n] under the states
        `hidden` [n, h], in fp32 (fp64 stays fp64), the same on every rank, without communication. A
        tail, a cluster of rare tokens, computes logits for its own targets only."""
        head = self._head(hidden)  # [n, first cutoff + tails]
        columns = targets.clamp(max=self.bounds[1])
        for cluster in range(1, len(self.words)):
            columns = torch.where(
                targets >= self.bounds[cluster], self.bounds[1] + cluster - 1, columns
            )
        losses = -head.gather(1, columns[:, None]).squeeze(1)
        for cluster in range(1, len(self.words)):
            rows, local = self._members(targets, cluster)
            tail = self._tail(hidden[rows], cluster)
            losses = losses.index_add(0, rows, -tail.gather(1, local[:, None]).squeeze(1))
        return losses

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the log-probabilities of all words of the vocabulary, [..., words], in fp32 (fp64
        stays fp64), for states [..., h]; padding has none. Every rank computes all of them by
        itself, without communication."""
        first = self.bounds[1]
        head = self._head(hidden)
        clusters = range(1, len(self.words))
        tails = [
            head[..., first + cluster - 1, None] + self._tail(hidden, cluster)
            for cluster in clusters
        ]
        return torch.cat([head[..., :first], *tails], dim=-1)

    def _head(self, hidden: Tensor) -> Tensor:
        return _log_softmax(linear(hidden, torch.cat([self.words[0], self.clusters])))

    def _tail(self, hidden: Tensor, cluster: int) -> Tensor:
        return _log_softmax(linear(hidden @ self.projections[cluster - 1], self.words[cluster]))

    def _members(self, tokens: Tensor, cluster: int) -> tuple[Tensor, Tensor]:
        """Return a pair of tensors for the ids of `tokens` [n] that lie in a cluster, numbered from
        the head, 0: their indices in `tokens`, and their ids less the cluster's first."""
        low = self.bounds[cluster]
        high = self.bounds[cluster + 1]
        rows = ((tokens >= low) & (tokens < high)).nonzero().squeeze(1)
        return rows, tokens[rows] - low


def _log_softmax(logits: Tensor) -> Tensor:
    return F.log_softmax(
        logits, dim=-1, dtype=logits.dtype if logits.dtype == torch.float64 else torch.float32
    )


def distance_encoding(length: int, hidden_size: int, device: torch.device) -> Tensor:
    """Return the encoding R of distances length − 1 … 0, [length, h] float64 on the device: h/2
    sines, then h/2 cosines, of 10000^(−2i/h) · distance. h, `hidden_size`, must be even.

    Dai et al. 2019, from Vaswani et al. 2017, Section 3.5, in the order of the authors' code.
    """
    distances = torch.arange(length - 1, -1, -1, dtype=torch.float64, device=device)
    powers = torch.arange(0, hidden_size, 2, dtype=torch.float64, device=device) / hidden_size
    angles = torch.outer(distances, 10000.0**-powers)
    return torch.cat([angles.sin(), angles.cos()], dim=1)


class RelativeAttention(nn.Module):
    """Causal attention of a segment [s, b, h] to itself and to its memory, → [s, b, h], with scores
    ((q + u)·k + (q + v)·r(distance)) / √d and heads divided over the tensor-parallel axis. A call
    is given the segment, the memory or None, the encoding of the distances, from which a layer of
    weights computes r, and the dropout of the attention weights or None.

    u and v are learned vectors of each head and layer (Dai et al. 2019, Section 3.3). There are no
    biases. With `recompute` the scores are not kept: the backward pass computes them again.
    """

    shard_dims: ClassVar[dict[str, int]] = {"content_bias": 0, "position_bias": 0}
    roles: ClassVar[Roles] = {"content_bias": Role.VECTOR, "position_bias": Role.VECTOR}

    def __init__(
        self, config: ModelConfig, mesh: ParallelMesh, layer: int, recompute: bool = False
    ) -> None:
        super().__init__()
        self.layer = layer
        self.axis = mesh.tp
        self.recompute = recompute
        self.heads = config.num_heads // mesh.tp.size
        self.head_dim = config.head_dim
        width = config.num_heads * config.head_dim
        self.query_key_value = ColumnParallelLinear(config.hidden_size, 3 * width, mesh, bias=False)
        self.distance = ColumnParallelLinear(config.hidden_size, width, mesh, bias=False)
        self.dense = RowParallelLinear(width, config.hidden_size, mesh, bias=False)
        self.content_bias = nn.Parameter(torch.empty(self.heads, self.head_dim))
        self.position_bias = nn.Parameter(torch.empty(self.heads, self.head_dim))

    def forward(
        self, x: Tensor, memory: Tensor | None, encoding: Tensor, dropout: Dropout | None
    ) -> Tensor:
        """Return the attention's output [s, b, h], the same on every rank, for x [s, b, h], a
        `memory` [m, b, h] of the inputs before x or None, and the `encoding` [k, h] of distances
        k − 1 … 0, with k = m + s. A position attends to the memory and to x up to itself. If
        `dropout` is None, no attention weight is dropped. Every tensor-parallel rank calls it."""
        context = x if memory is None else torch.cat([memory, x])  # [k, b, h]
        qkv = self.query_key_value(context).unflatten(2, (self.heads, 3, self.head_dim))
        query, key, value = by_head(qkv)  # each [b, n/t, k, d]
        query = query[:, :, -len(x) :]
        distance = (
            self.distance(encoding).unflatten(1, (self.heads, self.head_dim)).transpose(0, 1)
        )  # [n/t, k, d]
        attended = recomputed(self.recompute, self._attend, query, key, value, distance, dropout)
        return self.dense(attended.permute(2, 0, 1, 3).flatten(2))

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        distance: Tensor,
        dropout: Dropout | None,
    ) -> Tensor:
        by_content = torch.matmul(
            query + self.content_bias[:, None], key.transpose(-1, -2)
        )  # [b, n/t, s, k]
        by_distance = torch.matmul(query + self.position_bias[:, None], distance.transpose(-1, -2))
        scores = by_content + _shift(by_distance)
        weights: Tensor = kernel("masked_softmax", scores)(scores, 1.0 / math.sqrt(self.head_dim))
        return torch.matmul(drop_weights(weights, self.layer, dropout, self.axis), value)


def _shift(scores: Tensor) -> Tensor:
    """Return scores [b, n, s, k] with a column for each key, from `scores` [b, n, s, k] with a
    column for each distance, k − 1 … 0.

    With m = k − s, column j of row i then has the distance i + m − j. Row i moves left by s − 1 − i
    places (Dai et al. 2019, Appendix B). Columns of future keys are undefined.
    """
    b, n, s, k = scores.shape
    return F.pad(scores, (1, 0)).view(b, n, k + 1, s)[:, :, 1:].view(b, n, s, k)


class TransformerXLLayer(nn.Module):
    """Layer of a Transformer-XL with norms after the additions: LN(x + attention(x, memory)), then
    LN(x + MLP(x)), [s, b, h] → [s, b, h]. A call takes x, the memory or None, the encoding of
    distances, and the Dropout, None for none. Each branch has dropout at its end, and the MLP, a
    ReLU between two products, also after the ReLU."""

    def __init__(
        self, config: ModelConfig, mesh: ParallelMesh, layer: int, recompute_attention: bool = False
    ) -> None:
        super().__init__()
        self.layer = layer
        self.mesh = mesh
        self.inner_size = config.inner_size
        self.self_attention = RelativeAttention(config, mesh, layer, recompute_attention)
        self.attention_layernorm = nn.LayerNorm(config.hidden_size)
        self.dense_h_to_inner = ColumnParallelLinear(config.hidden_size, config.inner_size, mesh)
        self.dense_inner_to_h = RowParallelLinear(config.inner_size, config.hidden_size, mesh)
        self.mlp_layernorm = nn.LayerNorm(config.hidden_size)

    def forward(
        self, x: Tensor, memory: Tensor | None, encoding: Tensor, dropout: Dropout | None
    ) -> Tensor:
        """Return the layer's output [s, b, h], the same on every rank, for x [s, b, h], a memory
        [m, b, h] of the layer's earlier inputs or None, and the encoding [k, h] of distances k − 1
        … 0, with k = m + s. Without `dropout` nothing is dropped. Every tensor-parallel rank calls
        it."""
        site = f"layers.{self.layer}"
        attention = self.self_attention(x, memory, encoding, dropout)
        x = self.attention_layernorm(
            x + drop(attention, f"{site}.attention_output", dropout, self.mesh)
        )
        inner = F.relu(self.dense_h_to_inner(x))  # [s, b, inner/t]
        if dropout is not None:
            mask = dropout.mask(f"{site}.mlp_inner")
            keep = mask.keep(len(x), self.inner_size, x.device).transpose(0, 1)
            inner = inner * keep.chunk(self.mesh.tp.size, dim=-1)[self.mesh.tp.rank].to(
                x.dtype
            ).mul_(mask.scale)
        mlp = self.dense_inner_to_h(inner)
        return self.mlp_layernorm(x + drop(mlp, f"{site}.mlp_output", dropout, self.mesh))


class TransformerXL(CausalModel):
    """Transformer-XL as a language model with memory, or one pipeline stage of it. Since its norms
    follow the additions, no initial weight is scaled down by depth."""

    embedding: TiedEmbedding | AdaptiveEmbedding
    scales_residual = False

    def build(self, config: ModelConfig, mesh: ParallelMesh) -> None:
        if self.stage.is_first or self.stage.is_last:
            is_adaptive = bool(config.transformer_xl.cutoffs)
            self.embedding = (
                AdaptiveEmbedding(config) if is_adaptive else TiedEmbedding(config, mesh)
            )
        self.layers = self.layers_of(TransformerXLLayer)

    def run_stage(self, inputs: Tensor, batch: PipelineInput) -> Tensor:
        return self.forward(inputs, batch.dropout, batch.recurrence)

    def batch_loss(self, hidden: Tensor, batch: PipelineInput) -> Tensor:
        return self.embedding.losses(
            hidden.flatten(0, 1), batch.targets.transpose(0, 1).flatten()
        ).mean()

    def forward(
        self, inputs: Tensor, dropout: Dropout | None = None, recurrence: Recurrence | None = None
    ) -> Tensor:
        """Return the output of the stage, [s, b, h], from token ids [b, s] on the first stage,
        elsewhere from the previous stage's output. With a recurrence, read each layer's memory [m,
        b, h] from its dict `before`, and write each layer's last inputs, at most `memory_length`,
        into its dict `after`, as the next segment's memory; both dicts are by layer number. Without
        a recurrence the segment has no memory. Without `dropout` nothing is dropped. Every
        tensor-parallel rank calls it."""
        x = inputs
        if self.stage.is_first:
            x = drop(
                self.embedding(inputs) * math.sqrt(self.config.hidden_size),
                "embedding",
                dropout,
                self.mesh,
            )
        before = recurrence.before if recurrence else {}
        length = len(x) + len(before.get(self.stage.layers[0], ()))
        encoding = distance_encoding(length, self.config.hidden_size, x.device).to(x.dtype)
        for number, layer in zip(self.stage.layers, self.layers.values(), strict=True):
            memory = before.get(number)
            if recurrence:
                states = x if memory is None else torch.cat([memory, x])
                first = max(len(states) - self.config.transformer_xl.memory_length, 0)
                recurrence.after[number] = states[first:].detach()
            x = recomputed(self.recomputed_layers > 0, layer, x, memory, encoding, dropout)
        return drop(x, "output", dropout, self.mesh) if self.stage.is_last else x

    def logits(self, hidden: Tensor) -> Tensor:
        """Return this rank's logits [..., v/t] for the last stage's states [..., h]; with an
        adaptive softmax the log-probabilities of all words, [..., words]."""
        return self.embedding.logits(hidden)
