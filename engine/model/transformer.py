"""Parts that Megatron-LM's transformers share: embedding, pre-LN layer, self-attention with heads
divided over the tensor-parallel axis, MLP with tanh GeLU, dropout on the residual stream.

Shapes: b microbatch, s sequence, h hidden, n heads, d head dim, v padded vocabulary, t
tensor-parallel ranks.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mlm_repro.engine.config import ModelConfig
from mlm_repro.engine.kernels import registry
from mlm_repro.engine.kernels.attention import reference
from mlm_repro.engine.kernels.dropout import normed_sum
from mlm_repro.engine.kernels.registry import kernel
from mlm_repro.engine.model.cache import Cache
from mlm_repro.engine.parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from mlm_repro.engine.parallel.mesh import Axis, ParallelMesh
from mlm_repro.engine.rng import Dropout, DropoutMask


class SelfAttention(nn.Module):
    """Causal multi-head attention with heads divided over the tensor-parallel axis: [s, b, h] → [s,
    b, h], without the bias of the output projection `dense`; TransformerLayer adds this bias. With
    sequence parallelism s is this rank's part. With a cache, an argument of the call, the output is
    [q, b, h], of the q positions that the cache asks for. `dropout`, an argument of the call too,
    decides which attention weights are dropped; without it, and with a cache, none are. With
    `recompute` the backward pass runs the reference kernel again, and its scores are not kept;
    other kernels never keep scores.

    The rows of `query_key_value` are ordered [n, 3, d] (Megatron checkpoint versions 2 and 3), so
    that a contiguous slice holds whole heads. Positions are learned and added by `Embedding`;
    rotary ones would turn queries and keys here, in `forward`.
    """

    def __init__(
        self, config: ModelConfig, mesh: ParallelMesh, layer: int, recompute: bool = False
    ) -> None:
        super().__init__()
        self.layer = layer
        self.axis = mesh.tp
        self.recompute = recompute
        self.heads = config.num_heads // mesh.tp.size
        self.head_dim = config.head_dim
        h = config.hidden_size
        self.query_key_value = ColumnParallelLinear(h, 3 * h, mesh)
        self.dense = RowParallelLinear(h, h, mesh)

    def forward(
        self, x: Tensor, dropout: Dropout | None = None, cache: Cache | None = None
    ) -> Tensor:
        qkv = self.query_key_value(x).unflatten(
            2, (self.heads, 3, self.head_dim)
        )  # [s, b, n/t, 3, d]
        if cache:
            return self.dense(cache.attend(self.layer, qkv), add_bias=False)  # [q, b, h]
        # Rows of a mask are numbered over the heads of all ranks, so that every layout drops the
        # same.
        attend = kernel("attention", qkv)
        first_row = self.axis.rank * self.heads * len(qkv)
        mask = dropout.mask(f"layers.{self.layer}.attention", first_row) if dropout else None
        # Only the reference keeps its scores; the faster kernels recompute them in any case.
        context = recomputed(
            self.recompute and attend is reference, attend, qkv, mask
        )  # [s, b, h/t]
        return self.dense(context, add_bias=False)  # [s, b, h]


class MLP(nn.Module):
    """Two products h → 4h → h with tanh GeLU between, for states [s, b, h], with sequence
    parallelism this rank's positions [s/t, b, h]. Divided over the tensor-parallel axis by columns
    then by rows: one all-reduce, or with sequence parallelism an all-gather and a reduce-scatter.

    The output lacks the bias of the second product, which the layer adds.
    """

    def __init__(self, config: ModelConfig, mesh: ParallelMesh) -> None:
        super().__init__()
        h = config.hidden_size
        self.dense_h_to_4h = ColumnParallelLinear(h, 4 * h, mesh)
        self.dense_4h_to_h = RowParallelLinear(4 * h, h, mesh)

    def forward(self, x: Tensor) -> Tensor:
        # GeLU's kernel adds the bias in its own pass.
        x = self.dense_h_to_4h(x, add_bias=False)
        return self.dense_4h_to_h(
            kernel("bias_gelu", x)(x, self.dense_h_to_4h.bias), add_bias=False
        )


class TransformerLayer(nn.Module):
    """x + attention(LN(x)), then x + MLP(LN(x)), each branch with dropout: [s, b, h] → [s, b, h],
    where s is this rank's part with sequence parallelism. A call without `dropout` drops nothing.
    The constructor is given `layer`, the layer's number in the whole model, which names its dropout
    masks and its place in the cache, and `recompute_attention`, the `recompute` of SelfAttention.
    All tensor-parallel ranks call it.

    With a cache, for evaluation only, the output is [q, b, h], at the cache's positions.
    """

    attention_class: type[SelfAttention] = SelfAttention
    mlp_class: type[MLP] = MLP

    def __init__(
        self, config: ModelConfig, mesh: ParallelMesh, layer: int, recompute_attention: bool = False
    ) -> None:
        super().__init__()
        self.layer = layer
        self.mesh = mesh
        self.input_layernorm = nn.LayerNorm(config.hidden_size)
        self.self_attention = self.attention_class(config, mesh, layer, recompute_attention)
        self.post_attention_layernorm = nn.LayerNorm(config.hidden_size)
        self.mlp = self.mlp_class(config, mesh)

    def forward(
        self, x: Tensor, dropout: Dropout | None = None, cache: Cache | None = None
    ) -> Tensor:
        x, normed = normed_sum(self.input_layernorm, x)
        attention = self.self_attention(normed, dropout, cache)
        # The residual at the branch's positions, which may be fewer than the layer's inputs.
        x = cache.rows(self.layer, x) if cache else x
        bias_and_mask = self.bias_and_mask(len(x), "attention", dropout)
        x, normed = normed_sum(self.post_attention_layernorm, x, attention, *bias_and_mask)
        return self.add(x, self.mlp(normed), "mlp", dropout)

    def add(self, x: Tensor, branch: Tensor, of: str, dropout: Dropout | None = None) -> Tensor:
        """Return x + dropout(branch + bias), [s, b, h], for x [s, b, h] and the output [s, b, h] of
        a branch; s is this rank's part with sequence parallelism. The text `of` names the branch,
        `attention` or `mlp`, and so the bias [h], a parameter of this layer. `dropout` is a
        Dropout, from which the branch's mask is drawn; if it is None, nothing is dropped."""
        bias, mask = self.bias_and_mask(len(x), of, dropout)
        return kernel("bias_dropout_add", branch)(branch, bias, x, mask)

    def bias_and_mask(
        self, rows: int, of: str, dropout: Dropout | None
    ) -> tuple[Tensor, DropoutMask | None]:
        """Return a pair: the bias [h] that the caller must add to the output of a branch of this
        layer, as the branch's last product leaves it out, and the DropoutMask for that output, None
        without dropout. The text `of` names the branch, `attention` or `mlp`. `rows` is the number
        of the output's positions on this rank: s or, with sequence parallelism, s/t; with a cache
        it may be less."""
        # Not added by the product: with tensor parallelism it would be summed once for each rank.
        bias = (self.mlp.dense_4h_to_h if of == "mlp" else self.self_attention.dense).bias
        return bias, _mask(f"layers.{self.layer}.{of}_output", rows, dropout, self.mesh)


class Embedding(nn.Module):
    """Word plus position embedding with dropout: token ids [b, s], the first at position `start`, →
    [s, b, h], or this rank's positions [s/t, b, h] with sequence parallelism. `start`, by default
    0, and `dropout`, a Dropout or None for none, are arguments of the call. Every tensor-parallel
    rank calls it.

    The constructor's `has_positions` is False for a last stage of a pipeline that is not the first
    too: it holds a copy of the word embedding alone, for the output head, and does not call it. The
    parameters are not initialized here.
    """

    def __init__(self, config: ModelConfig, mesh: ParallelMesh, has_positions: bool) -> None:
        super().__init__()
        self.mesh = mesh
        self.word_embeddings = VocabParallelEmbedding(
            config.padded_vocab_size, config.hidden_size, mesh
        )
        if has_positions:
            self.position_embeddings = embedding_table(config.seq_length, config.hidden_size)

    def forward(self, tokens: Tensor, dropout: Dropout | None, start: int = 0) -> Tensor:
        return drop(self.embedded(tokens, start), "embedding", dropout, self.mesh)

    def embedded(self, tokens: Tensor, start: int = 0) -> Tensor:
        """Return word plus position embedding of token ids [b, s], the first of which is at
        position `start`, without dropout, [s, b, h], or this rank's positions [s/t, b, h] with
        sequence parallelism. Every tensor-parallel rank calls it."""
        words = self.word_embeddings(tokens)  # [s, b, h]
        # With sequence parallelism a rank has its own part of the positions.
        first = start + self.mesh.sequence_rank * words.size(0)
        positions = torch.arange(first, first + words.size(0), device=tokens.device)
        return words + F.embedding(positions, self.position_embeddings.weight).unsqueeze(1)


def embedding_table(rows: int, columns: int) -> nn.Embedding:
    """Return a trainable nn.Embedding, a table [rows, columns], with arbitrary values;
    `StageModel.initialize` sets them."""
    # Not `nn.Embedding(rows, columns)`: torch's own initial values import its compiler on `meta`,
    # which took seconds of every command.
    return nn.Embedding.from_pretrained(torch.empty(rows, columns), freeze=False)


def run_layers(layers: Sequence[nn.Module], x: Tensor, *others: object, at_once: int = 0) -> Tensor:
    """Apply the modules `layers` in order to x [s, b, h], each to the output of the one before, and
    return the last one's output; without layers x itself. `others` are further arguments that every
    layer gets.

    With `at_once`, the backward pass recomputes groups of `at_once` layers, and only the input of
    each group is kept.
    """

    def run(group: Sequence[nn.Module], x: Tensor) -> Tensor:
        for layer in group:
            x = layer(x, *others)
        return x

    step = at_once or max(len(layers), 1)
    for start in range(0, len(layers), step):
        x = recomputed(at_once > 0, run, layers[start : start + step], x)
    return x


def recomputed(is_wanted: bool, function: Callable[..., Any], *arguments: Any) -> Any:
    """Return the result of function(*arguments), differentiable. If `is_wanted`, the function runs
    again in the backward pass, and its intermediate results are not kept; if gradients are
    disabled, `is_wanted` changes nothing."""
    # Without gradients nothing is kept, and nothing needs to be recomputed.
    if not (is_wanted and torch.is_grad_enabled()):
        return function(*arguments)
    # Dropout is keyed by its site (`mlm_repro.engine.rng`), so no generator's state has to be kept.
    return checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False)


def drop_weights(weights: Tensor, layer: int, dropout: Dropout | None, axis: Axis) -> Tensor:
    """Return `weights`, a layer's attention weights [b, n/t, s, k], after dropout, a new tensor of
    that shape; the tensor itself if `dropout` is None. `layer` is the layer's global number, and
    `axis` the tensor-parallel axis, which divides the heads."""
    if dropout is None:
        return weights
    rows = weights.size(1) * weights.size(2)
    k = weights.size(3)
    mask = dropout.mask(f"layers.{layer}.attention", axis.rank * rows)
    # The kernel drops while it reads; the factors below would be a second tensor of the size of the
    # scores.
    if registry.on_gpu(weights.device):
        dropped: Tensor = kernel("dropout", weights)(
            weights.flatten(1, 2).transpose(0, 1), mask
        )  # [n/t·s, b, k]
        return dropped.transpose(0, 1).view_as(weights)
    return weights * mask.factors(rows, k, weights.device, weights.dtype).view_as(weights)


def drop(x: Tensor, site: str, dropout: Dropout | None, mesh: ParallelMesh) -> Tensor:
    """Return x, a tensor of the residual stream, [s, b, h] or with sequence parallelism this rank's
    part, after the dropout of `site`, a name that selects the mask: a new tensor, or the tensor
    itself if `dropout` is None."""
    mask = _mask(site, len(x), dropout, mesh)
    return x if mask is None else kernel("dropout", x)(x, mask)


def _mask(site: str, rows: int, dropout: Dropout | None, mesh: ParallelMesh) -> DropoutMask | None:
    """Return the DropoutMask that the name `site` selects for this rank's `rows` positions, or None
    if `dropout` is None. With sequence parallelism it is the rank's part of the whole mask, so that
    layouts agree."""
    return dropout.mask(site, mesh.sequence_rank * rows) if dropout else None
