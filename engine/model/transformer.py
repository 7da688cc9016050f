"""What Megatron-LM's transformers have in common: embedding, pre-LN layer, MLP with tanh GeLU, dropout on the residual.

Shapes: b microbatch, s sequence, h hidden, n heads, d head dim, v padded vocabulary, t tensor-parallel ranks.
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import nn

from engine.config import ModelConfig
from engine.kernels.registry import kernel
from engine.model.attention import KeyValueCache, SelfAttention
from engine.parallel.collectives import columns, copies, join_columns, shards
from engine.parallel.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from engine.parallel.mesh import ParallelMesh
from engine.rng import Dropout, DropoutMask


class LayerNorm(nn.LayerNorm):
    """Layer norm over the hidden dim: [s, b, h] → [s, b, h]."""

    def __init__(self, hidden_size: int, mesh: ParallelMesh, eps: float = 1e-5) -> None:
        super().__init__(hidden_size, eps=eps)
        self.mesh = mesh

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return in_row_blocks(self.mesh, self._rows, (self.weight, self.bias), x)

    def _rows(self, _: int, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = kernel("layer_norm", x)(x, weight, bias, self.eps)
        return normed


class MLP(nn.Module):
    """h → 4h → h with tanh GeLU, divided by columns then by rows: one all-reduce.

    The bias of the second product is left to `add_branch`.
    """

    def __init__(self, config: ModelConfig, mesh: ParallelMesh) -> None:
        super().__init__()
        self.count, h = mesh.tp.virtual, config.hidden_size
        self.dense_h_to_4h = ColumnParallelLinear(h, 4 * h, mesh.tp, mesh.sequence_parallel)
        self.dense_4h_to_h = RowParallelLinear(4 * h, h, mesh.tp, mesh.sequence_parallel)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, count = self.dense_h_to_4h(x, add_bias=False), self.count
        parts = zip(columns(x, count), shards(self.dense_h_to_4h.bias, count, 0), strict=True)
        return self.dense_4h_to_h(join_columns([kernel("bias_gelu", x)(*part) for part in parts]), add_bias=False)


class TransformerLayer(nn.Module):
    """x + attention(LN(x)), then x + MLP(LN(x)), each branch with dropout: [s, b, h] → [s, b, h]."""

    attention_class: type[SelfAttention] = SelfAttention
    mlp_class: type[MLP] = MLP

    def __init__(self, config: ModelConfig, mesh: ParallelMesh, layer: int, recompute_attention: bool = False) -> None:
        super().__init__()
        self.layer, self.mesh = layer, mesh
        self.input_layernorm = LayerNorm(config.hidden_size, mesh)
        self.self_attention = self.attention_class(config, mesh, layer, recompute_attention)
        self.post_attention_layernorm = LayerNorm(config.hidden_size, mesh)
        self.mlp = self.mlp_class(config, mesh)

    def forward(self, x: torch.Tensor, dropout: Dropout | None) -> torch.Tensor:
        x = self._with_attention(x, self.self_attention(self.input_layernorm(x), dropout), dropout)
        return self._with_mlp(x, self.mlp(self.post_attention_layernorm(x)), dropout)

    def forward_at(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The output at positions [b, q] alone, without dropout: [s, b, h] → [q, b, h]."""
        rows = x.gather(0, positions.T.unsqueeze(-1).expand(-1, -1, x.size(2)))
        rows = self._with_attention(rows, self.self_attention.forward_at(self.input_layernorm(x), positions))
        return self._with_mlp(rows, self.mlp(self.post_attention_layernorm(rows)))

    def forward_next(self, x: torch.Tensor, cache: KeyValueCache) -> torch.Tensor:
        """The output at the positions after those in the cache, without dropout: [q, b, h] → [q, b, h]."""
        x = self._with_attention(x, self.self_attention.forward_next(self.input_layernorm(x), cache))
        return self._with_mlp(x, self.mlp(self.post_attention_layernorm(x)))

    def _with_attention(self, x: torch.Tensor, branch: torch.Tensor, dropout: Dropout | None = None) -> torch.Tensor:
        bias = self.self_attention.dense.bias
        return add_branch(x, branch, bias, f"layers.{self.layer}.attention_output", dropout, self.mesh)

    def _with_mlp(self, x: torch.Tensor, branch: torch.Tensor, dropout: Dropout | None = None) -> torch.Tensor:
        bias = self.mlp.dense_4h_to_h.bias
        return add_branch(x, branch, bias, f"layers.{self.layer}.mlp_output", dropout, self.mesh)


class Embedding(nn.Module):
    """Word plus position embedding with dropout: token ids [b, s], the first at position `start`, → [s, b, h].

    The last stage of a pipeline holds a copy of the word embedding alone, for the output head.
    """

    def __init__(self, config: ModelConfig, mesh: ParallelMesh, has_positions: bool) -> None:
        super().__init__()
        self.mesh = mesh
        self.word_embeddings = VocabParallelEmbedding(
            config.padded_vocab_size, config.hidden_size, mesh.tp, mesh.sequence_parallel, is_alone=mesh.pp.size > 1
        )
        if has_positions:
            self.position_embeddings = embedding_table(config.seq_length, config.hidden_size)

    def forward(self, tokens: torch.Tensor, dropout: Dropout | None, start: int = 0) -> torch.Tensor:
        return drop(self.embedded(tokens, start), "embedding", dropout, self.mesh)

    def embedded(self, tokens: torch.Tensor, start: int = 0) -> torch.Tensor:
        """The same without dropout."""
        words = self.word_embeddings(tokens)  # [s, b, h]
        first = start + self.mesh.sequence_rank * words.size(0)
        positions = torch.arange(first, first + words.size(0), device=tokens.device)
        (table,) = copies(self.position_embeddings.weight, 1, self.mesh.row_axis)
        return words + F.embedding(positions, table).unsqueeze(1)


def embedding_table(rows: int, columns: int) -> nn.Embedding:
    """A table [rows, columns] that `initialize` fills: torch's own initial values import its compiler on `meta`."""
    return nn.Embedding.from_pretrained(torch.empty(rows, columns), freeze=False)


def run_layers(layers: Sequence[nn.Module], x: torch.Tensor, *others: object) -> torch.Tensor:
    """The layers one after the other: [s, b, h] → [s, b, h]; `others` is what each takes besides."""
    for layer in layers:
        x = layer(x, *others)
    return x


def add_branch(
    x: torch.Tensor, branch: torch.Tensor, bias: torch.Tensor, site: str, dropout: Dropout | None, mesh: ParallelMesh
) -> torch.Tensor:
    """x + dropout(branch + bias), of x and branch [s, b, h] and bias [h]."""

    def add(first_row: int, branch: torch.Tensor, rows: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        mask = _mask(site, x.size(0), first_row, dropout, mesh)
        added: torch.Tensor = kernel("bias_dropout_add", branch)(branch, bias, rows, mask)
        return added

    return in_row_blocks(mesh, add, (bias,), branch, x)


def in_row_blocks(
    mesh: ParallelMesh, function: Callable[..., torch.Tensor], parameters: Sequence[torch.Tensor], *inputs: torch.Tensor
) -> torch.Tensor:
    """function(first row, inputs, parameters) of [s, b, h] and of parameters that every rank holds whole.

    Where the layout must change no bit, each block of rows is computed alone, and the parameters' gradients, which are
    sums over rows, are added up in a tree over all blocks.
    """
    if not mesh.in_order or not torch.is_grad_enabled():
        return function(0, *inputs, *parameters)
    count = mesh.row_blocks
    own = [copies(parameter, count, mesh.row_axis) for parameter in parameters]
    rows = inputs[0].size(0) // count
    blocks = [
        function(number * rows, *(x[number * rows : (number + 1) * rows] for x in inputs), *uses)
        for number, uses in enumerate(zip(*own, strict=True))
    ]
    return blocks[0] if count == 1 else torch.cat(blocks)


def drop(x: torch.Tensor, site: str, dropout: Dropout | None, mesh: ParallelMesh) -> torch.Tensor:
    """Dropout on the residual stream, [s, b, h]."""
    mask = _mask(site, x.size(0), 0, dropout, mesh)
    if mask is None:
        return x
    dropped: torch.Tensor = kernel("dropout", x)(x, mask)
    return dropped


def _mask(site: str, rows: int, first_row: int, dropout: Dropout | None, mesh: ParallelMesh) -> DropoutMask | None:
    """From one of this rank's `rows` on; a divided sequence has its rows of the mask, so layouts agree."""
    return dropout.mask(site, mesh.sequence_rank * rows + first_row) if dropout else None
