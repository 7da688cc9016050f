"""What the engine asks of a model, whatever its family."""

import math
from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import nn

from engine.config import SERIAL, ModelConfig, ParallelConfig
from engine.model.microbatch import PipelineInput
from engine.model.recompute import recomputed
from engine.model.transformer import run_layers
from engine.parallel.layout import Stage
from engine.parallel.mesh import ParallelMesh
from engine.parallel.sharding import sharded_parameters
from engine.rng import Dropout, initial_normal


class StageModel(nn.Module, ABC):
    """A model, or one pipeline stage of it. Parameters bear the whole model's names.

    Stages hand on [s, b, h]; `inputs` are token ids [b, s] on the first stage, the previous stage's output elsewhere.
    """

    layers: nn.ModuleDict
    """This stage's, by their global numbers."""
    scales_residual: ClassVar = True
    """Whether the two weights before residual additions begin smaller, by √(2L)."""

    def __init__(
        self, config: ModelConfig, mesh: ParallelMesh, stage: Stage | None = None, parallel: ParallelConfig = SERIAL
    ) -> None:
        """What is recomputed is all that it takes of `parallel`."""
        super().__init__()
        self.config, self.mesh, parallel = config, mesh, parallel or ParallelConfig()
        self.recomputed_layers, self.recomputes_attention = (
            parallel.recomputed_layers,
            parallel.recompute == "selective",
        )
        self.stage = stage or Stage(range(config.num_layers))

    @torch.no_grad()
    def initialize(self, seed: int) -> None:
        """Give every parameter its initial value, which depends only on (seed, global name, global shape).

        N(0, std) for weights, embeddings and vectors, std/√(2L) before residual additions, 0 for biases, 1 for layer
        norms (2019 paper, Section 4.2).
        """
        std = self.config.init_std
        for parameter in sharded_parameters(self, self.mesh):
            name = parameter.name
            if name.endswith(".bias"):
                parameter.local.zero_()
            elif "layernorm" in name:
                parameter.local.fill_(1.0)
            else:
                before_residual = name.endswith(("self_attention.dense.weight", "mlp.dense_4h_to_h.weight"))
                depth = 2 * self.config.num_layers if self.scales_residual and before_residual else 1
                whole = initial_normal(seed, name, parameter.global_shape, std / math.sqrt(depth))
                parameter.local.copy_(parameter.shard(whole))

    def run_layers(self, x: torch.Tensor, *others: object) -> torch.Tensor:
        """This stage's layers one after the other, in groups that are computed again if the recipe wants it.

        [s, b, h] → [s, b, h]; `others` is what each layer takes besides.
        """
        layers, every = list(self.layers.values()), self.recomputed_layers
        together = every or max(len(layers), 1)
        for start in range(0, len(layers), together):
            x = recomputed(every > 0, run_layers, layers[start : start + together], x, *others)
        return x

    @abstractmethod
    def run_stage(self, inputs: torch.Tensor, batch: PipelineInput) -> torch.Tensor:
        """What the stage hands on for this microbatch, [s, b, h]."""

    @abstractmethod
    def batch_loss(self, hidden: torch.Tensor, batch: PipelineInput) -> torch.Tensor:
        """Mean loss of the microbatch's sequences from the last stage's states, a scalar."""


class CausalModel(StageModel):
    """A model of each token from those before it, which can be scored and sampled from."""

    @abstractmethod
    def hidden_states(self, inputs: torch.Tensor, dropout: Dropout | None = None) -> torch.Tensor:
        """What the stage hands on, [s, b, h]; on the last stage, after its final layer norm, what `logits` takes."""

    @abstractmethod
    def hidden_states_at(self, inputs: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """What the last stage's `hidden_states` has at positions [b, q], [q, b, h], up to rounding; no dropout."""

    @abstractmethod
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """States [..., h] → this rank's logits [..., v/t]."""
