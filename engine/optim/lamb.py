"""LAMB over flat storage: Adam's step, of each tensor scaled to the norm of its weights (You et al. 2020, Algorithm 2).

A tensor is a layer of the paper; its norms are those of the whole tensor, over every rank that holds a part of it.
"""

import torch

from engine.kernels.registry import kernel
from engine.optim.flat import FlatGroup, FlatOptimizer
from engine.parallel.sharding import TIED_EMBEDDING

CLAMP = 10.0
"""Largest weight norm that counts in the clamped form."""


class FlatLamb(FlatOptimizer):
    """x ← x − η·φ(‖x‖)/‖u‖·u with u = m̂/(√v̂ + ε) + λx; the ratio is 1 where either norm is 0.

    The paper's form corrects the moments' bias and has φ(z) = z. The clamped form of "Scaling Transformer-XL to 128
    GPUs" (cybertronai/pytorch-lamb) corrects nothing and has φ(z) = min(z, 10).
    """

    def update(self, learning_rate: float, clipping: float) -> None:
        """One step, with η = `learning_rate`; every rank of the model calls it."""
        for group in self.groups:
            direction = self._direction(group, clipping)
            weight_norms = self._norms(group, group.master)
            if self.train.optimizer == "lamb-clamped":
                weight_norms.clamp_(max=CLAMP)
            norms = self._norms(group, direction)
            ratios = torch.where((weight_norms > 0) & (norms > 0), weight_norms / norms, 1.0)
            scales = (-learning_rate * ratios).to(direction.dtype)
            for weights, step, scale in zip(group.pieces(group.master), group.pieces(direction), scales, strict=True):
                weights.addcmul_(step, scale)
            if (copy := group.own_copy) is not None:
                copy.copy_(group.master)

    def _direction(self, group: FlatGroup, clipping: float) -> torch.Tensor:
        """Adam's step with decay, u, of this owner's part; the moments move on."""
        direction: torch.Tensor = kernel("adam_direction", group.master)(
            group.master, group.own_gradient, group.exp_avg, group.exp_avg_sq, self.adam_step(group, 0.0, clipping),
            self.train.optimizer == "lamb",
        )  # fmt: skip
        return direction

    def _norms(self, group: FlatGroup, own: torch.Tensor) -> torch.Tensor:
        """Norm of every whole tensor of the group, [tensors], float64.

        The last pipeline stage takes the first's for its copy of the embedding: sums over other owners' parts could
        round otherwise, and the copies would part.
        """
        squares = torch.stack(torch._foreach_norm(group.pieces(own))).double().square()
        group.owners.all_reduce(squares)
        divided = torch.tensor([p.dim is not None for p in group.parameters], device=squares.device)
        squares = torch.where(divided, self.mesh.tp.all_reduce(squares * divided), squares)
        for number, parameter in enumerate(group.parameters):
            if parameter.name == TIED_EMBEDDING:
                self.mesh.embedding.all_reduce(squares[number].mul_(not parameter.is_copy))
        return squares.sqrt()
