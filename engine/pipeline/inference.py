"""One batch forward through the pipeline's stages, without gradients. Batches follow each other down the stages.

Messages run in one direction only and in one order, so they need no schedule. Shapes: b rows, s sequence, q positions.
"""

import torch
import torch.distributed as dist

from engine.model.gpt2 import GPT2
from engine.parallel.mesh import ParallelMesh


def forward_at(network: GPT2, mesh: ParallelMesh, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor | None:
    """Final states [q, b, h] at positions [b, q] of token ids [b, s] on the last stage, None on the others.

    Every rank of the pipeline calls it with the same tokens.
    """
    stage, stages = mesh.pp.rank, mesh.pp.size
    inputs = tokens
    if stage > 0:
        parameter = next(network.parameters())
        inputs = parameter.new_empty(tokens.size(1), tokens.size(0), network.config.hidden_size)
        dist.recv(inputs, mesh.pipeline_peer(stage - 1), mesh.pp.group)
    if stage == stages - 1:
        return network.hidden_states_at(inputs, positions)
    dist.send(network.hidden_states(inputs).contiguous(), mesh.pipeline_peer(stage + 1), mesh.pp.group)
    return None
