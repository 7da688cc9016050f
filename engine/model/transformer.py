"""What Megatron-LM's transformers have in common: embedding, pre-LN layer, MLP with tanh GeLU, dropout on the residual.

Shapes: b microbatch, s sequence, h hidden, n heads, d head dim, v padded vocabulary, t tensor-parallel ranks.
"""

from collections.abc import Sequence

import torch
from torch import nn

from engine.config import ModelConfig
from engine.kernels.registry import kernel
from engine.model.attention import SelfAttention
from engine.model.key_value_cache import KeyValueCache
from engine.parallel.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from engine.parallel.mesh import ParallelMesh
from engine.rng import Dropout


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
        x = self.dense_h_to_4h(x)
        return self.dense_4h_to_h(kernel("gelu", x)(x))


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

    def forward_next(self, x: torch.Tensor, cache: KeyValueCache) -> torch.Tensor:
        """The output at the positions after those in the cache, without dropout: [q, b, h] → [q, b, h]."""
        x = x + self.self_attention.forward_next(self.input_layernorm(x), cache)
        return x + self.mlp(self.post_attention_layernorm(x))


class Embedding(nn.Module):
    """Word plus position embedding with dropout: token ids [b, s], the first at position `start`, → [s, b, h].

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

    def forward(self, tokens: torch.Tensor, dropout: Dropout | None, start: int = 0) -> torch.Tensor:
        words = self.word_embeddings(tokens)  # [s, b, h]
        first = start + self.mesh.sequence_rank * words.size(0)
        positions = torch.arange(first, first + words.size(0), device=tokens.device)
        embedded = words + self.position_embeddings(positions).unsqueeze(1)
        return drop(embedded, "embedding", dropout, self.mesh)


def run_layers(layers: Sequence[nn.Module], x: torch.Tensor, dropout: Dropout | None) -> torch.Tensor:
    """The layers one after the other: [s, b, h] → [s, b, h]."""
    for layer in layers:
        x = layer(x, dropout)
    return x


def drop(x: torch.Tensor, site: str, dropout: Dropout | None, mesh: ParallelMesh) -> torch.Tensor:
    """Dropout on the residual stream, [s, b, h]: a divided sequence has its rows of the mask, so layouts agree."""
    if dropout is None:
        return x
    mask = dropout.mask(site, first_row=mesh.sequence_rank * x.size(0))
    dropped: torch.Tensor = kernel("dropout", x)(x, mask)
    return dropped
