"""Which optimizer a recipe names."""

from engine.config import TrainConfig
from engine.optim.adam import FlatAdamW
from engine.optim.flat import FlatOptimizer
from engine.optim.lamb import FlatLamb
from engine.parallel.mesh import ParallelMesh
from engine.parallel.sharding import ShardedParameter

OPTIMIZERS: dict[str, type[FlatOptimizer]] = {"adam": FlatAdamW, "lamb": FlatLamb, "lamb-clamped": FlatLamb}
"""By the names of `train.optimizer`."""


def build_optimizer(
    parameters: list[ShardedParameter], train: TrainConfig, mesh: ParallelMesh, shard: bool = False
) -> FlatOptimizer:
    """The recipe's optimizer over these parameters; with `shard` its state is divided (ZeRO stage 1)."""
    return OPTIMIZERS[train.optimizer](parameters, train, mesh, shard)
