"""AdamW over flat storage with fp32 master weights and Megatron's weight-decay rule."""

import math
from collections.abc import Iterator
from typing import cast

import torch

from engine.config import TrainConfig
from engine.parallel.mesh import ParallelMesh
from engine.parallel.sharding import ShardedParameter

MOMENTS = ("exp_avg", "exp_avg_sq")


class FlatGroup:
    """Parameters that share a weight decay, laid out as views of one flat tensor; so are their gradients.

    In fp16 and bf16 the optimizer works on fp32 copies, and gradients of successive microbatches are added in fp32.
    """

    def __init__(self, parameters: list[ShardedParameter], weight_decay: float) -> None:
        self.parameters, self.weight_decay = parameters, weight_decay
        first = parameters[0].local
        total = sum(p.local.numel() for p in parameters)
        self.flat = torch.empty(total, dtype=first.dtype, device=first.device)
        self.gradient = torch.zeros_like(self.flat)
        for parameter, value, gradient in zip(
            parameters, self.views(self.flat), self.views(self.gradient), strict=True
        ):
            value.copy_(parameter.local.data)
            parameter.local.data = value
            parameter.local.grad = gradient
        self.is_mixed = first.dtype in (torch.float16, torch.bfloat16)
        self.master = self.flat.float() if self.is_mixed else self.flat
        self.main_gradient = torch.zeros_like(self.master) if self.is_mixed else self.gradient
        self.leaf = torch.nn.Parameter(self.master, requires_grad=True)
        self.leaf.grad = self.main_gradient

    def views(self, flat: torch.Tensor) -> Iterator[torch.Tensor]:
        """The parts of a flat tensor, one per parameter, in the parameters' shapes."""
        offset = 0
        for parameter in self.parameters:
            count = parameter.local.numel()
            yield flat[offset : offset + count].view(parameter.local.shape)
            offset += count


class FlatAdamW:
    """AdamW with global-norm clipping. Biases and layer norms are not decayed, embeddings are."""

    def __init__(self, parameters: list[ShardedParameter], train: TrainConfig, mesh: ParallelMesh) -> None:
        self.mesh, self.clip = mesh, train.clip_gradient
        decayed = [p for p in parameters if not _is_undecayed(p.name)]
        undecayed = [p for p in parameters if _is_undecayed(p.name)]
        halves = ((decayed, train.weight_decay), (undecayed, 0.0))
        self.groups = [FlatGroup(half, decay) for half, decay in halves if half]
        self.adam = torch.optim.AdamW(
            [{"params": [group.leaf], "weight_decay": group.weight_decay} for group in self.groups],
            lr=train.learning_rate,
            betas=(train.adam_beta1, train.adam_beta2),
            eps=train.adam_epsilon,
            fused=True,
        )
        self.steps = 0

    def zero_gradients(self) -> None:
        """Forget the gradients of the last iteration."""
        for group in self.groups:
            group.main_gradient.zero_()

    def gradient_norm(self) -> float:
        """Norm of the whole gradient over tensor- and pipeline-parallel ranks, counting shared parameters once."""
        squares = torch.zeros((), dtype=torch.float64, device=self.groups[0].master.device)
        for group in self.groups:
            counted = [
                view
                for parameter, view in zip(group.parameters, group.views(group.main_gradient), strict=True)
                if parameter.is_counted
            ]
            if counted:
                squares += torch.nn.utils.get_total_norm(counted).double() ** 2
        return math.sqrt(self.mesh.pp.all_reduce(self.mesh.tp.all_reduce(squares)).item())

    def step(self, learning_rate: float, gradient_norm: float) -> None:
        """Clip, update the master weights and copy them to the model's."""
        if self.clip and gradient_norm > self.clip:
            for group in self.groups:
                group.main_gradient.mul_(self.clip / (gradient_norm + 1e-6))
        for settings in self.adam.param_groups:
            settings["lr"] = learning_rate
        self.adam.step()
        self.steps += 1
        for group in self.groups:
            if group.is_mixed:
                group.flat.copy_(group.master)

    def state(self) -> Iterator[tuple[ShardedParameter, str, torch.Tensor]]:
        """(parameter, what, local tensor) for both moments and, in mixed precision, the master weights."""
        for group in self.groups:
            if not self.adam.state[group.leaf]:
                self.adam.state[group.leaf] = {
                    "step": torch.zeros((), dtype=torch.float32, device=group.master.device),
                    "exp_avg": torch.zeros_like(group.master),
                    "exp_avg_sq": torch.zeros_like(group.master),
                }
            flat = {name: cast(torch.Tensor, self.adam.state[group.leaf][name]) for name in MOMENTS}
            if group.is_mixed:
                flat["master"] = group.master
            for name, tensor in flat.items():
                for parameter, view in zip(group.parameters, group.views(tensor), strict=True):
                    yield parameter, name, view

    def restore_steps(self, steps: int) -> None:
        """Set the number of updates made so far; the tensors of `state` are filled in place beside it."""
        self.steps = steps
        for group in self.groups:
            self.adam.state[group.leaf]["step"].fill_(float(steps))


def _is_undecayed(name: str) -> bool:
    return name.endswith("bias") or "layernorm" in name
