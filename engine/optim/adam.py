"""Adam's step over flat storage: AdamW takes it as it is, LAMB scales it for each tensor (Kingma &
Ba 2015; Loshchilov & Hutter 2019; You et al. 2020, Algorithm 2)."""

import math
from dataclasses import replace
from importlib import import_module

import torch
from torch import Tensor

from mlm_repro.engine.config import OPTIMIZERS, TrainConfig
from mlm_repro.engine.kernels.adam import AdamStep, adam_direction
from mlm_repro.engine.kernels.registry import kernel
from mlm_repro.engine.optim.flat import FlatGroup, FlatOptimizer
from mlm_repro.engine.parallel.mesh import ParallelMesh
from mlm_repro.engine.parallel.sharding import Role, ShardedParameter


class FlatAdamW(FlatOptimizer):
    """AdamW: Adam with decoupled weight decay, one fused update for each group of parameters that
    have the same weight decay."""

    def update(self, group: FlatGroup, step: AdamStep) -> None:
        # The division that the reducer has left joins the clipping, and saves a pass over the
        # gradient.
        step = replace(step, clipping=step.clipping / group.divisor)
        gradient = group.main_gradient[group.own]
        kernel("adamw", group.master)(
            group.master, group.own_copy, gradient, group.exp_avg, group.exp_avg_sq, step
        )


class FlatLamb(FlatOptimizer):
    """LAMB: x ← x − η·φ(‖x‖)/‖u‖·u with u = m̂/(√v̂ + ε) + λx; the ratio is 1 where either norm is
    0.

    A tensor is a layer of the paper; its norms are of the whole tensor, over every rank that holds
    a part of it. This class has the paper's form, which corrects the moments' bias and has φ(z) =
    z; a subclass has another by its `is_corrected`, `largest_norm` and `largest_ratio`.
    """

    is_corrected = True
    largest_norm = math.inf
    largest_ratio = math.inf

    def update(self, group: FlatGroup, step: AdamStep) -> None:
        moments = group.exp_avg, group.exp_avg_sq
        direction = adam_direction(
            group.master, group.own_gradient, *moments, step, self.is_corrected
        )
        weight_norms = self._norms(group, group.master)
        norms = self._norms(group, direction)
        clamped = weight_norms.clamp(max=self.largest_norm)
        ratios = torch.where((clamped > 0) & (norms > 0), clamped / norms, 1.0).clamp(
            max=self.largest_ratio
        )
        # A tensor and not numbers, so that the host does not wait for a GPU to read the ratios.
        scales = (-step.learning_rate * ratios).to(direction.dtype)
        for weights, change, scale in zip(
            group.pieces(group.master), group.pieces(direction), scales, strict=True
        ):
            weights.addcmul_(change, scale)
        if (copy := group.own_copy) is not None:
            copy.copy_(group.master)

    def _norms(self, group: FlatGroup, own: Tensor) -> Tensor:
        """Return the norm of each parameter's whole tensor as one float64 tensor [parameters], in
        the group's order of parameters. `own` has this rank's part of the numbers to be normed, a
        flat tensor laid out as `group.master`. Every rank calls it.

        The last pipeline stage takes the first stage's norm for its copy of the embedding.
        """
        # Squares can be added over owners and ranks, norms cannot.
        squares = torch.stack(torch._foreach_norm(group.pieces(own))).double().square()
        group.owners.all_reduce(squares)
        # A tensor that is not divided is whole on every tensor-parallel rank and must not be
        # counted t times.
        divided = torch.tensor([p.dim is not None for p in group.parameters], device=squares.device)
        squares = torch.where(divided, self.mesh.tp.all_reduce(squares * divided), squares)
        for number, parameter in enumerate(group.parameters):
            # Sums over other owners' parts could round otherwise on the last stage, and its copy
            # would part from the first stage's embedding.
            if parameter.role is Role.TIED_EMBEDDING:
                self.mesh.embedding.all_reduce(squares[number].mul_(not parameter.is_copy))
        return squares.sqrt()


class ClampedLamb(FlatLamb):
    """LAMB optimizer of cybertronai/pytorch-lamb since 2019-06-16: the moments' bias is not
    corrected, and the weights' norm counts as 10 at most in the ratio, φ(z) = min(z, 10)."""

    is_corrected = False
    largest_norm = 10.0


class LambOfThePost(FlatLamb):
    """LAMB with which "Scaling Transformer-XL to 128 GPUs" trained: cybertronai/pytorch-lamb of
    2019-05 (ff2245e).

    The ratio is min(‖x‖/‖u‖, 10), and u = m/(√v + ε) is not corrected. The correction √(1 − β₂ᵗ)/(1
    − β₁ᵗ) multiplies the rate instead, where no ratio takes it out again. Weight decay is in the
    gradient.
    """

    is_corrected = False
    largest_ratio = 10.0

    def update(self, group: FlatGroup, step: AdamStep) -> None:
        # Divided by the clipping, which is applied to the sum: the decay itself is not clipped.
        group.own_gradient.add_(group.master, alpha=step.weight_decay / step.clipping)
        # On the rate, where the trust ratio cannot take it out again.
        outside = math.sqrt(1 - step.beta2**step.steps) / (1 - step.beta1**step.steps)
        super().update(
            group, replace(step, learning_rate=outside * step.learning_rate, weight_decay=0.0)
        )


def build_optimizer(
    parameters: list[ShardedParameter], train: TrainConfig, mesh: ParallelMesh, shard: bool = False
) -> FlatOptimizer:
    """Return the FlatOptimizer that `train.optimizer` names over these parameters, whose values
    become views of its flat storage. With `shard` its state is divided over the data-parallel ranks
    of `mesh` (ZeRO stage 1); otherwise each of them has all of it."""
    # By name, so that another optimizer needs no change here (`docs/extend/optimizer.md`).
    module, _, name = OPTIMIZERS[train.optimizer].partition(":")
    optimizer: type[FlatOptimizer] = getattr(import_module(module), name)
    return optimizer(parameters, train, mesh, shard)
