"""Base classes of the models of every family."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

import torch
from torch import Tensor, nn

from mlm_repro.engine.config import SERIAL, ModelConfig, ParallelConfig
from mlm_repro.engine.model.cache import rows_at
from mlm_repro.engine.model.microbatch import PipelineInput
from mlm_repro.engine.parallel.layout import PipelineStage
from mlm_repro.engine.parallel.mesh import ParallelMesh
from mlm_repro.engine.parallel.sharding import Role, ShardedParameter, sharded_parameters
from mlm_repro.engine.rng import Dropout, initial_normal


class StageModel(nn.Module, ABC):
    """Base class of the model of every family, or of one pipeline stage of it. A subclass defines
    `build`, `run_stage` and `batch_loss`.

    Parameters bear the whole model's names; the method `initialize` gives them their values, not
    the constructor. Stages hand on [s, b, h], or [s/t, b, h] where the sequence is divided;
    `inputs` are token ids [b, s] on the first stage, the previous stage's output elsewhere.
    """

    layers: nn.ModuleDict
    """This stage's layers, keyed by their global numbers as texts, in order."""
    scales_residual: ClassVar = True
    """True if the initial values of the last weight of each residual branch are drawn with a
    standard deviation divided by √(2L), L the number of layers."""

    def __init__(
        self,
        config: ModelConfig,
        mesh: ParallelMesh,
        stage: PipelineStage | None = None,
        parallel: ParallelConfig = SERIAL,
    ) -> None:
        """Build the modules of `stage`, or of the whole model if it is None, without meaningful
        values, which the method `initialize` gives them. Of `parallel` only the recomputation
        settings are used."""
        super().__init__()
        self.config = config
        self.mesh = mesh
        self.recomputed_layers = parallel.recomputed_layers
        self.recomputes_attention = parallel.recompute == "selective"
        self.stage = stage or PipelineStage(range(config.num_layers))
        self.build(config, mesh)

    def layers_of(self, kind: Callable[..., nn.Module]) -> nn.ModuleDict:
        """Return this stage's layers as a ModuleDict, keyed by their global numbers as texts, in
        order. Each is built by the function call
        `kind(config, mesh, number, is its attention recomputed)`."""
        # Keys are the layers' global numbers, from which parameters have the whole model's names.
        recomputes = self.recomputes_attention
        return nn.ModuleDict(
            {str(n): kind(self.config, self.mesh, n, recomputes) for n in self.stage.layers}
        )

    @abstractmethod
    def build(self, config: ModelConfig, mesh: ParallelMesh) -> None:
        """Create, as attributes of this object, the modules of `self.stage`, `layers` among them. A
        subclass defines this; `__init__` calls it once, and `initialize` fills the parameters
        afterwards. Nothing is returned."""

    def initialize(self, seed: int) -> None:
        """Fill in place every parameter of this stage, or this rank's part of it, with its initial
        value, which depends only on (seed, global name, global shape), its role and the model's
        configuration, and so not on the layout.

        The role, a `mlm_repro.engine.parallel.sharding.Role`, decides: biases become 0 and scales
        of norms 1; other parameters are drawn from a normal distribution with mean 0 and the
        configuration's `init_std` as standard deviation, which for the last matrix of a residual
        branch is divided by √(2 · number of layers) if the class attribute `scales_residual` is
        True.
        """
        std = self.config.init_std
        last_std = std / math.sqrt(2 * self.config.num_layers if self.scales_residual else 1)

        # On the inner function, because autograd is switched off for a thread, not for a process.
        @torch.no_grad()
        def fill(parameter: ShardedParameter) -> None:
            if parameter.role is Role.BIAS:
                parameter.local.zero_()
            elif parameter.role is Role.NORM:
                parameter.local.fill_(1.0)
            else:
                deviation = last_std if parameter.role is Role.LAST_WEIGHT else std
                whole = initial_normal(seed, parameter.name, parameter.global_shape, deviation)
                parameter.local.copy_(parameter.shard(whole))

        # torch draws normal values on one thread, so several parameters are drawn at a time. Each
        # has a generator of its own, and their order does not matter.
        with ThreadPoolExecutor(torch.get_num_threads()) as pool:
            list(pool.map(fill, sharded_parameters(self, self.mesh)))

    @abstractmethod
    def run_stage(self, inputs: Tensor, batch: PipelineInput) -> Tensor:
        """Run the stage on its inputs, token ids [b, s] on the first stage and the previous stage's
        output elsewhere; a subclass defines this. Return its output for the microbatch `batch`, [s,
        b, h], or [s/t, b, h] where the sequence is divided. Every tensor-parallel rank calls it."""

    @abstractmethod
    def batch_loss(self, hidden: Tensor, batch: PipelineInput) -> Tensor:
        """Return the mean loss of the sequences of the microbatch `batch` from `hidden`, the last
        stage's output, as a scalar tensor, differentiable; a subclass defines this. Every
        tensor-parallel rank calls it and gets the same loss. A BERT in training divides the loss of
        its masked tokens by the attribute `mean_targets` of `batch`, unless that is None, instead
        of by its number of targets."""


class CausalModel(StageModel):
    """Base class of the models that predict each token from the tokens before it, so that they can
    be scored and sampled from. A subclass defines `forward` and `logits`, and as every StageModel
    `build`, `run_stage` and `batch_loss`."""

    @abstractmethod
    def forward(self, inputs: Tensor, dropout: Dropout | None = None) -> Tensor:
        """Return the output of the stage, [s, b, h], or [s/t, b, h] where the sequence is divided,
        from its inputs: token ids [b, s] on the first stage, the previous stage's output elsewhere.
        On the last stage the output is the input of the method `logits`. Without `dropout` nothing
        is dropped. A subclass defines this, and every tensor-parallel rank calls it."""

    def hidden_states_at(self, inputs: Tensor, positions: Tensor) -> Tensor:
        """Return the output of the last stage, the input of the method `logits`, without dropout
        and at positions [b, q] alone: [q, b, h], equal to the whole output there up to rounding.
        `inputs` are those of the method `forward`: token ids [b, s], or on a pipeline the previous
        stage's output; the sequence must not be divided. By default everything is computed; a
        subclass may compute less. Every tensor-parallel rank calls it."""
        return rows_at(self.forward(inputs), positions)

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """Return this rank's logits [..., v/t], with its part of the vocabulary's padding, for
        `hidden`, states [..., h] that the last stage gave out; the ranks' logits are not gathered.
        A model with an adaptive softmax returns on every rank the log-probabilities of all words,
        [..., words], without padding. A subclass defines this, and every tensor-parallel rank calls
        it."""
