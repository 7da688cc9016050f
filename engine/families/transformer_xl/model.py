"""Transformer-XL: segments read one after the other, with a memory of earlier states (Dai et al. 2019).

Post-LN layers, ReLU, relative positions, and an embedding scaled by √h and tied to the output head, as in the authors'
code for WikiText-103. Two things differ: each layer has its own u and v, and the encoding of distances has no dropout.
Full recomputation goes layer by layer, because the memory holds every layer's input anyway.

Shapes: b microbatch, s segment, m memory, h hidden, v padded vocabulary, t tensor-parallel ranks.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

from engine.config import SERIAL, ModelConfig, ParallelConfig
from engine.families.transformer_xl.adaptive import AdaptiveEmbedding
from engine.families.transformer_xl.relative_attention import RelativeAttention, distance_encoding
from engine.kernels.vocab_cross_entropy import vocab_parallel_cross_entropy
from engine.model.microbatch import PipelineInput, Recurrence
from engine.model.stage_model import CausalModel
from engine.model.transformer import LayerNorm, drop, recomputed
from engine.parallel.collectives import enter_tensor_parallel
from engine.parallel.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding, linear
from engine.parallel.layout import PipelineStage
from engine.parallel.mesh import ParallelMesh
from engine.rng import Dropout


class TiedEmbedding(nn.Module):
    """Word embedding at full width, divided over the tensor-parallel axis."""

    def __init__(self, config: ModelConfig, mesh: ParallelMesh) -> None:
        super().__init__()
        self.vocab_size, self.axis = config.vocab_size, mesh.tp
        self.word_embeddings = VocabParallelEmbedding(config.padded_vocab_size, config.hidden_size, mesh.tp)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Embeddings of token ids [b, s], [s, b, h]."""
        return self.word_embeddings(tokens)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """States [..., h] → this rank's logits [..., v/t]."""
        return linear(enter_tensor_parallel(hidden, self.axis, False), self.word_embeddings.weight)

    def losses(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Cross-entropy of each target [n] from states [n, h]."""
        return vocab_parallel_cross_entropy(self.logits(hidden), targets, self.vocab_size, self.axis)


class TransformerXLLayer(nn.Module):
    """LN(x + attention(x, memory)), then LN(x + MLP(x)), each branch with dropout: [s, b, h] → [s, b, h]."""

    def __init__(self, config: ModelConfig, mesh: ParallelMesh, layer: int, recompute_attention: bool = False) -> None:
        super().__init__()
        self.layer, self.mesh, self.inner_size = layer, mesh, config.inner_size
        self.self_attention = RelativeAttention(config, mesh, layer, recompute_attention)
        self.attention_layernorm = LayerNorm(config.hidden_size)
        self.dense_h_to_inner = ColumnParallelLinear(config.hidden_size, config.inner_size, mesh.tp)
        self.dense_inner_to_h = RowParallelLinear(config.inner_size, config.hidden_size, mesh.tp)
        self.mlp_layernorm = LayerNorm(config.hidden_size)

    def forward(
        self, x: torch.Tensor, memory: torch.Tensor | None, encoding: torch.Tensor, dropout: Dropout | None
    ) -> torch.Tensor:
        """[s, b, h] and a memory [m, b, h] of this layer's earlier inputs → [s, b, h]."""
        site = f"layers.{self.layer}"
        attention = self.self_attention(x, memory, encoding, dropout)
        x = self.attention_layernorm(x + drop(attention, f"{site}.attention_output", dropout, self.mesh))
        inner = F.relu(self.dense_h_to_inner(x))  # [s, b, inner/t]
        if dropout is not None:
            keep = dropout.keep(f"{site}.mlp_inner", (len(x), self.inner_size), x.device).transpose(0, 1)
            keep = keep.chunk(self.mesh.tp.size, dim=-1)[self.mesh.tp.rank]
            inner = inner * dropout.scale(keep, x.dtype)
        mlp = self.dense_inner_to_h(inner)
        return self.mlp_layernorm(x + drop(mlp, f"{site}.mlp_output", dropout, self.mesh))


class TransformerXL(CausalModel):
    """Language model with memory, or one pipeline stage of it. Post-LN layers need no scaling by depth."""

    embedding: TiedEmbedding | AdaptiveEmbedding
    scales_residual = False

    def __init__(
        self,
        config: ModelConfig,
        mesh: ParallelMesh,
        stage: PipelineStage | None = None,
        parallel: ParallelConfig = SERIAL,
    ) -> None:
        super().__init__(config, mesh, stage, parallel)
        if self.stage.is_first or self.stage.is_last:
            is_adaptive = bool(config.transformer_xl.cutoffs)
            self.embedding = AdaptiveEmbedding(config) if is_adaptive else TiedEmbedding(config, mesh)
        self.layers = nn.ModuleDict(
            {str(i): TransformerXLLayer(config, mesh, i, self.recomputes_attention) for i in self.stage.layers}
        )

    def run_stage(self, inputs: torch.Tensor, batch: PipelineInput) -> torch.Tensor:
        return self.hidden_states(inputs, batch.dropout, batch.recurrence)

    def batch_loss(self, hidden: torch.Tensor, batch: PipelineInput) -> torch.Tensor:
        return self.embedding.losses(hidden.flatten(0, 1), batch.targets.transpose(0, 1).flatten()).mean()

    def hidden_states(
        self, inputs: torch.Tensor, dropout: Dropout | None = None, recurrence: Recurrence | None = None
    ) -> torch.Tensor:
        """Output of the stage, [s, b, h]. Without a recurrence the segment has no memory."""
        x = inputs
        if self.stage.is_first:
            x = drop(self.embedding(inputs) * math.sqrt(self.config.hidden_size), "embedding", dropout, self.mesh)
        before = recurrence.before if recurrence else {}
        length = len(x) + len(before.get(self.stage.layers[0], ()))
        encoding = distance_encoding(length, self.config.hidden_size, x.device).to(x.dtype)
        for number, layer in zip(self.stage.layers, self.layers.values(), strict=True):
            memory = before.get(number)
            if recurrence:
                recurrence.after[number] = self._remember(memory, x)
            x = recomputed(self.recomputed_layers > 0, layer, x, memory, encoding, dropout)
        return drop(x, "output", dropout, self.mesh) if self.stage.is_last else x

    def hidden_states_at(self, inputs: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = self.hidden_states(inputs)
        return x.gather(0, positions.T.unsqueeze(-1).expand(-1, -1, x.size(2)))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """States [..., h] → this rank's logits [..., v/t], or log-probabilities of an adaptive softmax."""
        return self.embedding.logits(hidden)

    def _remember(self, memory: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor:
        """The newest states of memory and segment, detached."""
        states = x if memory is None else torch.cat([memory, x])
        return states[max(len(states) - self.config.transformer_xl.memory_length, 0) :].detach()
