"""AdamW over flat storage: Adam with decoupled weight decay (Kingma & Ba 2015; Loshchilov & Hutter 2019)."""

import torch

from engine.config import TrainConfig
from engine.optim.flat import FlatOptimizer
from engine.parallel.mesh import ParallelMesh
from engine.parallel.sharding import ShardedParameter


class FlatAdamW(FlatOptimizer):
    """AdamW, one fused update per group."""

    def __init__(
        self, parameters: list[ShardedParameter], train: TrainConfig, mesh: ParallelMesh, shard: bool = False
    ) -> None:
        super().__init__(parameters, train, mesh, shard)
        leaves = [torch.nn.Parameter(group.master) for group in self.groups]
        self.adam = torch.optim.AdamW(
            [{"params": [leaf], "weight_decay": g.weight_decay} for leaf, g in zip(leaves, self.groups, strict=True)],
            betas=(train.adam_beta1, train.adam_beta2),
            eps=train.adam_epsilon,
            fused=True,
        )
        for leaf, group in zip(leaves, self.groups, strict=True):
            leaf.grad = group.own_gradient
            step = torch.zeros((), dtype=torch.float32, device=group.master.device)
            self.adam.state[leaf] = {"step": step, "exp_avg": group.exp_avg, "exp_avg_sq": group.exp_avg_sq}

    def update(self, learning_rate: float) -> None:
        """One step of torch's fused AdamW on the master weights."""
        for settings in self.adam.param_groups:
            settings["lr"] = learning_rate
        for state in self.adam.state.values():
            state["step"].fill_(float(self.steps - 1))
        self.adam.step()
