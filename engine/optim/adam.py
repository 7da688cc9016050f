"""AdamW over flat storage: Adam with decoupled weight decay (Kingma & Ba 2015; Loshchilov & Hutter 2019)."""

from engine.kernels.registry import kernel
from engine.optim.flat import FlatOptimizer


class FlatAdamW(FlatOptimizer):
    """AdamW, one fused update per group."""

    def update(self, learning_rate: float, clipping: float) -> None:
        """One step on the master weights and the model's."""
        for group in self.groups:
            kernel("adamw", group.master)(
                group.master, group.own_copy, group.own_gradient, group.exp_avg, group.exp_avg_sq,
                self.adam_step(group, learning_rate, clipping),
            )  # fmt: skip
