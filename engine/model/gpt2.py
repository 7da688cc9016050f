"""GPT-2 as Megatron-LM trains it: pre-LN layers, tanh GeLU, learned positions, tied embedding.

The one definition of the model. On a mesh of one rank its layers are ordinary linears, and that is
the serial model.

Shapes: b microbatch, s sequence, h hidden, n heads, d head dim, v padded vocabulary, t
tensor-parallel ranks.
"""

from torch import Tensor, nn

from mlm_repro.engine.config import ModelConfig
from mlm_repro.engine.kernels.products import linear
from mlm_repro.engine.kernels.registry import kernel
from mlm_repro.engine.model.cache import Cache, ScoredPositions
from mlm_repro.engine.model.microbatch import PipelineInput
from mlm_repro.engine.model.stage_model import CausalModel
from mlm_repro.engine.model.transformer import Embedding, TransformerLayer, run_layers
from mlm_repro.engine.parallel.collectives import enter_tensor_parallel
from mlm_repro.engine.parallel.mesh import ParallelMesh
from mlm_repro.engine.rng import Dropout


class GPT2(CausalModel):
    """GPT-2 language model over token ids [b, s], or one pipeline stage of it, which takes the
    previous stage's output if it is not the first. Its output is [s, b, h], or [s/t, b, h] where
    the sequence is divided; `logits` takes the last stage's output. Parameters have the whole
    model's names; the method `initialize` gives them their values."""

    def build(self, config: ModelConfig, mesh: ParallelMesh) -> None:
        if self.stage.is_first or self.stage.is_last:
            # The last stage holds the word embedding too, as its output head.
            self.embedding = Embedding(config, mesh, has_positions=self.stage.is_first)
        self.layers = self.layers_of(TransformerLayer)
        if self.stage.is_last:
            self.final_layernorm = nn.LayerNorm(config.hidden_size)

    def forward(
        self, inputs: Tensor, dropout: Dropout | None = None, cache: Cache | None = None
    ) -> Tensor:
        x = (
            self.embedding(inputs, dropout, cache.length if cache else 0)
            if self.stage.is_first
            else inputs
        )
        x = run_layers(
            list(self.layers.values()), x, dropout, cache, at_once=self.recomputed_layers
        )
        return self.final_layernorm(x) if self.stage.is_last else x

    def hidden_states_at(self, inputs: Tensor, positions: Tensor) -> Tensor:
        return self.forward(inputs, cache=ScoredPositions(positions, self.config.num_layers - 1))

    def logits(self, hidden: Tensor) -> Tensor:
        # f, because the head is a column-parallel product: the vocabulary is divided.
        hidden = enter_tensor_parallel(hidden, self.mesh.tp, self.mesh.sequence_parallel)
        return linear(hidden, self.embedding.word_embeddings.weight)

    def run_stage(self, inputs: Tensor, batch: PipelineInput) -> Tensor:
        return self.forward(inputs, batch.dropout)

    def batch_loss(self, hidden: Tensor, batch: PipelineInput) -> Tensor:
        hidden = enter_tensor_parallel(hidden, self.mesh.tp, self.mesh.sequence_parallel).flatten(
            0, 1
        )  # [s·b, h]
        # Targets are put into the order of the hidden states, position first, which moves the
        # smaller of the two.
        weight = self.embedding.word_embeddings.weight
        targets = batch.targets.transpose(0, 1).flatten()
        return kernel("linear_cross_entropy", hidden)(
            hidden, weight, targets, self.config.vocab_size, self.mesh.tp
        )
