"""LAMB over flat storage: Adam's step, of each tensor scaled to the norm of its weights (You et al. 2020, Algorithm 2).

A tensor is a layer of the paper; its norms are those of the whole tensor, over every rank that holds a part of it.
"""

import torch

from engine.optim.flat import FlatGroup, FlatOptimizer
from engine.parallel.sharding import TIED_EMBEDDING

CLAMP = 10.0
"""Largest weight norm that counts in the clamped form."""


class FlatLamb(FlatOptimizer):
    """x ← x − η·φ(‖x‖)/‖u‖·u with u = m̂/(√v̂ + ε) + λx; the ratio is 1 where either norm is 0.

    The paper's form corrects the moments' bias and has φ(z) = z. The clamped form of "Scaling Transformer-XL to 128
    GPUs" (cybertronai/pytorch-lamb) corrects nothing and has φ(z) = min(z, 10).
    """

    def update(self, learning_rate: float) -> None:
        """One step, with η = `learning_rate`; every rank of the model calls it."""
        for group in self.groups:
            direction = self._direction(group)
            weight_norms = self._norms(group, group.master)
            if self.train.optimizer == "lamb-clamped":
                weight_norms.clamp_(max=CLAMP)
            norms = self._norms(group, direction)
            ratios = torch.where((weight_norms > 0) & (norms > 0), weight_norms / norms, 1.0)
            scales = (-learning_rate * ratios).to(direction.dtype)
            for weights, step, scale in zip(group.pieces(group.master), group.pieces(direction), scales, strict=True):
                weights.addcmul_(step, scale)

    def _direction(self, group: FlatGroup) -> torch.Tensor:
        """Adam's step with decay, u, of this owner's part; the moments move on."""
        train, gradient = self.train, group.own_gradient
        group.exp_avg.lerp_(gradient, 1 - train.adam_beta1)
        group.exp_avg_sq.mul_(train.adam_beta2).addcmul_(gradient, gradient, value=1 - train.adam_beta2)
        is_corrected = train.optimizer == "lamb"
        first = 1 - train.adam_beta1**self.steps if is_corrected else 1.0
        second = 1 - train.adam_beta2**self.steps if is_corrected else 1.0
        root = (group.exp_avg_sq / second).sqrt_().add_(train.adam_epsilon)
        return (group.exp_avg / first).div_(root).add_(group.master, alpha=group.weight_decay)

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
