"""What the engine asks of a model, whatever its family."""

from abc import ABC, abstractmethod

import torch
from torch import nn

from engine.config import NO_RECOMPUTE, ModelConfig, Recompute
from engine.model.microbatch import PipelineInput
from engine.model.stages import Stage, whole_model
from engine.parallel.mesh import ParallelMesh
from engine.rng import Dropout


class StageModel(nn.Module, ABC):
    """A model, or one pipeline stage of it. Parameters bear the whole model's names.

    Stages hand on [s, b, h]; `inputs` are token ids [b, s] on the first stage, the previous stage's output elsewhere.
    """

    layers: nn.ModuleDict
    """This stage's, by their global numbers."""

    def __init__(
        self, config: ModelConfig, mesh: ParallelMesh, stage: Stage | None = None, recompute: Recompute = NO_RECOMPUTE
    ) -> None:
        super().__init__()
        self.config, self.mesh, self.recompute = config, mesh, recompute
        self.stage = stage or whole_model(config.num_layers)

    @abstractmethod
    def initialize(self, seed: int) -> None:
        """Give every parameter its initial value, which depends only on (seed, global name, global shape)."""

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
        """What the stage hands on, [s, b, h]; on the last stage what `logits` takes."""

    @abstractmethod
    def hidden_states_at(self, inputs: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """What the last stage's `hidden_states` has at positions [b, q], [q, b, h], up to rounding; no dropout."""

    @abstractmethod
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """States [..., h] → this rank's logits [..., v/t]."""
