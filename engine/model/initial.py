"""Initial values of a transformer's parameters, the same for every layout."""

import math

import torch
from torch import nn

from engine.config import ModelConfig
from engine.parallel.mesh import ParallelMesh
from engine.parallel.sharding import sharded_parameters
from engine.rng import initial_normal


@torch.no_grad()
def initialize_normal(model: nn.Module, config: ModelConfig, mesh: ParallelMesh, seed: int) -> None:
    """Give every parameter its initial value, which depends only on (seed, global name, global shape).

    N(0, std) for weights and embeddings, std/√(2L) for the two weights before residual additions, 0 for biases,
    1 for layer norms (2019 paper, Section 4.2).
    """
    residual_std = config.init_std / math.sqrt(2 * config.num_layers)
    for parameter in sharded_parameters(model, mesh):
        name = parameter.name
        if name.endswith("bias"):
            parameter.local.zero_()
        elif "layernorm" in name:
            parameter.local.fill_(1.0)
        else:
            before_residual = name.endswith(("self_attention.dense.weight", "mlp.dense_4h_to_h.weight"))
            std = residual_std if before_residual else config.init_std
            whole = initial_normal(seed, name, parameter.global_shape, std)
            parameter.local.copy_(parameter.shard(whole))
