"""GPT-2 as Megatron-LM trains it: pre-LN layers, tanh GeLU, learned positions, tied embedding.

The one definition of the model. On a mesh of one rank its layers are ordinary linears, and that is the serial model.

Shapes: b microbatch, s sequence, h hidden, n heads, d head dim, v padded vocabulary, t tensor-parallel ranks.
"""

import math
from collections.abc import Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from engine.config import ModelConfig
from engine.parallel.collectives import enter_tensor_parallel
from engine.parallel.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from engine.parallel.mesh import ParallelMesh
from engine.parallel.sharding import sharded_parameters
from engine.parallel.vocab import vocab_parallel_cross_entropy
from engine.pipeline.stages import Stage, whole_model
from engine.recompute import NO_RECOMPUTE, Recompute
from engine.rng import Dropout, initial_normal


class SelfAttention(nn.Module):
    """Causal multi-head attention with heads divided over the tensor-parallel axis.

    The rows of `query_key_value` are ordered [n, 3, d] (Megatron checkpoint versions 2 and 3), so that a contiguous
    slice holds whole heads.
    """

    def __init__(self, config: ModelConfig, mesh: ParallelMesh, layer: int, recompute: bool = False) -> None:
        super().__init__()
        self.layer, self.axis, self.recompute = layer, mesh.tp, recompute
        self.num_heads, self.head_dim = config.num_heads, config.head_dim
        self.query_key_value = ColumnParallelLinear(
            config.hidden_size, 3 * config.hidden_size, mesh.tp, mesh.sequence_parallel
        )
        self.dense = RowParallelLinear(config.hidden_size, config.hidden_size, mesh.tp, mesh.sequence_parallel)

    def forward(self, x: torch.Tensor, dropout: Dropout | None) -> torch.Tensor:
        heads = self.num_heads // self.axis.size
        qkv = self.query_key_value(x)  # [s, b, 3h/t]
        s, b, _ = qkv.shape
        qkv = qkv.view(s, b, heads, 3, self.head_dim)
        query, key, value = qkv.permute(3, 1, 2, 0, 4).unbind(0)  # each [b, n/t, s, d]
        if dropout is None:
            context = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        elif self.recompute and torch.is_grad_enabled():
            context = checkpoint(self._attend_with_dropout, query, key, value, dropout, use_reentrant=False,
                                 preserve_rng_state=False)  # fmt: skip
        else:
            context = self._attend_with_dropout(query, key, value, dropout)
        return self.dense(context.permute(2, 0, 1, 3).reshape(s, b, heads * self.head_dim))  # [s, b, h]

    def forward_at(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The output at positions [b, q] alone, without dropout: [s, b, h] → [q, b, h]."""
        heads, columns = self.num_heads // self.axis.size, x.size(2)
        rows = x.gather(0, positions.T.unsqueeze(-1).expand(-1, -1, columns))  # [q, b, h]
        weight = self.query_key_value.weight.view(heads, 3, self.head_dim, columns)
        bias = self.query_key_value.bias.view(heads, 3, self.head_dim)
        query = F.linear(rows, weight[:, 0].flatten(0, 1), bias[:, 0].flatten())  # [q, b, h/t]
        query = query.unflatten(2, (heads, self.head_dim)).permute(1, 2, 0, 3)  # [b, n/t, q, d]
        key_value = F.linear(x, weight[:, 1:].flatten(0, 2), bias[:, 1:].flatten())  # [s, b, 2h/t]
        key, value = key_value.unflatten(2, (heads, 2, self.head_dim)).permute(3, 1, 2, 0, 4)  # each [b, n/t, s, d]
        is_past = torch.arange(x.size(0), device=x.device) <= positions[:, None, :, None]  # [b, 1, q, s]
        context = F.scaled_dot_product_attention(query, key, value, attn_mask=is_past)
        return self.dense(context.permute(2, 0, 1, 3).flatten(2))

    def _attend_with_dropout(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout: Dropout
    ) -> torch.Tensor:
        s, heads = query.size(2), query.size(1)
        scores = torch.matmul(query * (1.0 / math.sqrt(self.head_dim)), key.transpose(-1, -2))  # [b, n/t, s, s]
        future = torch.ones(s, s, dtype=torch.bool, device=scores.device).triu_(1)
        work = scores.dtype if scores.dtype == torch.float64 else torch.float32
        weights = torch.softmax(scores.masked_fill(future, float("-inf")), dim=-1, dtype=work).to(scores.dtype)
        keep = dropout.keep(f"layers.{self.layer}.attention", (self.num_heads, s, s), scores.device)
        keep = keep[:, self.axis.rank * heads : (self.axis.rank + 1) * heads]
        return torch.matmul(weights * dropout.scale(keep, weights.dtype), value)


class MLP(nn.Module):
    """h → 4h → h with tanh GeLU, divided by columns then by rows: one all-reduce."""

    def __init__(self, config: ModelConfig, mesh: ParallelMesh) -> None:
        super().__init__()
        self.dense_h_to_4h = ColumnParallelLinear(
            config.hidden_size, 4 * config.hidden_size, mesh.tp, mesh.sequence_parallel
        )
        self.dense_4h_to_h = RowParallelLinear(
            4 * config.hidden_size, config.hidden_size, mesh.tp, mesh.sequence_parallel
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dense_4h_to_h(F.gelu(self.dense_h_to_4h(x), approximate="tanh"))


class TransformerLayer(nn.Module):
    """x + attention(LN(x)), then x + MLP(LN(x)), each branch with dropout: [s, b, h] → [s, b, h]."""

    def __init__(self, config: ModelConfig, mesh: ParallelMesh, layer: int, recompute_attention: bool = False) -> None:
        super().__init__()
        self.layer, self.mesh = layer, mesh
        self.input_layernorm = nn.LayerNorm(config.hidden_size)
        self.self_attention = SelfAttention(config, mesh, layer, recompute_attention)
        self.post_attention_layernorm = nn.LayerNorm(config.hidden_size)
        self.mlp = MLP(config, mesh)

    def forward(self, x: torch.Tensor, dropout: Dropout | None) -> torch.Tensor:
        attention = self.self_attention(self.input_layernorm(x), dropout)
        x = x + drop(attention, f"layers.{self.layer}.attention_output", dropout, self.mesh)
        mlp = self.mlp(self.post_attention_layernorm(x))
        return x + drop(mlp, f"layers.{self.layer}.mlp_output", dropout, self.mesh)

    def forward_at(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The output at positions [b, q] alone, without dropout: [s, b, h] → [q, b, h]."""
        rows = x.gather(0, positions.T.unsqueeze(-1).expand(-1, -1, x.size(2)))
        rows = rows + self.self_attention.forward_at(self.input_layernorm(x), positions)
        return rows + self.mlp(self.post_attention_layernorm(rows))


class Embedding(nn.Module):
    """Word plus position embedding with dropout: token ids [b, s] → [s, b, h].

    The last stage of a pipeline holds a copy of the word embedding alone, for the output head.
    """

    def __init__(self, config: ModelConfig, mesh: ParallelMesh, has_positions: bool) -> None:
        super().__init__()
        self.mesh = mesh
        self.word_embeddings = VocabParallelEmbedding(
            config.padded_vocab_size, config.hidden_size, mesh.tp, mesh.sequence_parallel
        )
        if has_positions:
            self.position_embeddings = nn.Embedding(config.seq_length, config.hidden_size)

    def forward(self, tokens: torch.Tensor, dropout: Dropout | None) -> torch.Tensor:
        words = self.word_embeddings(tokens)  # [s, b, h]
        first = self.mesh.sequence_rank * words.size(0)
        positions = torch.arange(first, first + words.size(0), device=tokens.device)
        embedded = words + self.position_embeddings(positions).unsqueeze(1)
        return drop(embedded, "embedding", dropout, self.mesh)


class GPT2(nn.Module):
    """Language model over token ids, or one pipeline stage of it. Parameters bear the whole model's names."""

    def __init__(
        self, config: ModelConfig, mesh: ParallelMesh, stage: Stage | None = None, recompute: Recompute = NO_RECOMPUTE
    ) -> None:
        super().__init__()
        self.config, self.mesh, self.recompute = config, mesh, recompute
        self.stage = stage or whole_model(config.num_layers)
        if self.stage.is_first or self.stage.is_last:
            self.embedding = Embedding(config, mesh, has_positions=self.stage.is_first)
        self.layers = nn.ModuleDict(
            {str(i): TransformerLayer(config, mesh, i, recompute.attention) for i in self.stage.layers}
        )
        if self.stage.is_last:
            self.final_layernorm = nn.LayerNorm(config.hidden_size)

    def hidden_states(self, inputs: torch.Tensor, dropout: Dropout | None = None) -> torch.Tensor:
        """What the stage hands on, [s, b, h]; after the final layer norm on the last stage.

        `inputs` are token ids [b, s] on the first stage, the previous stage's output elsewhere.
        """
        x = self.embedding(inputs, dropout) if self.stage.is_first else inputs
        layers = list(self.layers.values())
        every = self.recompute.every_layers
        if every and torch.is_grad_enabled():
            for start in range(0, len(layers), every):
                x = checkpoint(_run_layers, layers[start : start + every], x, dropout, use_reentrant=False,
                               preserve_rng_state=False)  # fmt: skip
        else:
            x = _run_layers(layers, x, dropout)
        return self.final_layernorm(x) if self.stage.is_last else x

    def hidden_states_at(self, inputs: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """What `hidden_states` of the last stage has at positions [b, q], [q, b, h], up to rounding; no dropout.

        The last layer computes keys and values everywhere, all else only there. Not for a divided sequence.
        """
        x = self.embedding(inputs, None) if self.stage.is_first else inputs
        *layers, last = self.layers.values()
        x = _run_layers(layers, x, None)
        return self.final_layernorm(cast(TransformerLayer, last).forward_at(x, positions))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """States [..., h] → this rank's logits [..., v/t], through the tied word embedding."""
        hidden = enter_tensor_parallel(hidden, self.mesh.tp, self.mesh.sequence_parallel)
        return F.linear(hidden, self.embedding.word_embeddings.weight)

    def loss(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Mean cross-entropy of targets [b, s] from the last stage's states [s, b, h], a scalar."""
        logits = self.logits(hidden).flatten(0, 1)  # [s·b, v/t]
        losses = vocab_parallel_cross_entropy(
            logits, targets.transpose(0, 1).flatten(), self.config.vocab_size, self.mesh.tp
        )
        return losses.mean()

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor, dropout: Dropout | None = None) -> torch.Tensor:
        """Loss of the whole model, a scalar, from token ids and targets [b, s]."""
        return self.loss(self.hidden_states(tokens, dropout), targets)

    @torch.no_grad()
    def initialize(self, seed: int) -> None:
        """Give every parameter its initial value, which depends only on (seed, global name, global shape).

        N(0, std) for weights and embeddings, std/√(2L) for the two weights before residual additions, 0 for biases,
        1 for layer norms (2019 paper, Section 4.2).
        """
        config = self.config
        residual_std = config.init_std / math.sqrt(2 * config.num_layers)
        for parameter in sharded_parameters(self, self.mesh):
            name = parameter.name
            if name.endswith("bias"):
                parameter.local.zero_()
            elif "layernorm" in name:
                parameter.local.fill_(1.0)
            else:
                before_residual = name.endswith(("self_attention.dense.weight", "mlp.dense_4h_to_h.weight"))
                std = residual_std if before_residual else config.init_std
                whole = initial_normal(seed, name, parameter.global_shape, std)
                parameter.local.copy_(parameter.shard(whole))


def _run_layers(layers: Sequence[nn.Module], x: torch.Tensor, dropout: Dropout | None) -> torch.Tensor:
    for layer in layers:
        x = layer(x, dropout)
    return x


def drop(x: torch.Tensor, site: str, dropout: Dropout | None, mesh: ParallelMesh) -> torch.Tensor:
    """Dropout on the residual stream, [s, b, h]: a divided sequence has its rows of the mask, so layouts agree."""
    if dropout is None:
        return x
    s, _, h = x.shape
    parts = mesh.tp.size if mesh.sequence_parallel else 1
    keep = dropout.keep(site, (s * parts, h), x.device).transpose(0, 1)  # [s, b, h]
    return x * dropout.scale(keep.narrow(0, mesh.sequence_rank * s, s), x.dtype)
