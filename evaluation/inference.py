"""One batch forward through the pipeline's stages, without gradients. Batches follow each other down the stages.

Messages run in one direction only and in one order, so they need no schedule. Shapes: b rows, s sequence, q positions.
"""

from collections.abc import Callable

import torch
from torch import nn

from engine.model.gpt2 import GPT2
from engine.model.stage_model import CausalModel
from engine.model.transformer import KeyValueCache
from engine.parallel.layers import ColumnParallelLinear, RowParallelLinear
from engine.parallel.mesh import ParallelMesh
from engine.torch_names import onednn


def pack_weights(network: CausalModel) -> None:
    """Put the layers' weights into the order in which oneDNN multiplies them; the network can be trained no more.

    A product takes less time at many rows and at a few, but more at one.
    """
    weight = next(network.layers.parameters())
    if not onednn or weight.device.type != "cpu":
        return
    if weight.dtype not in (torch.float32, torch.bfloat16):
        return
    for module in network.layers.modules():
        if isinstance(module, ColumnParallelLinear | RowParallelLinear):
            ordered = onednn._reorder_linear_weight(module.weight.detach(), None)
            module.weight = nn.Parameter(ordered, requires_grad=False)


def forward_at(
    network: CausalModel, mesh: ParallelMesh, tokens: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor | None:
    """Final states [q, b, h] at positions [b, q] of token ids [b, s] on the last stage, None on the others.

    Every rank of the pipeline calls it with the same tokens.
    """
    return _pass_down(
        network, mesh, tokens, network.hidden_states, lambda inputs: network.hidden_states_at(inputs, positions)
    )


def forward_next(
    network: GPT2, mesh: ParallelMesh, tokens: torch.Tensor, cache: KeyValueCache
) -> torch.Tensor | None:  # fmt: skip
    """Final states [q, b, h] of the token ids [b, q] that follow those in the cache on the last stage, else None.

    Every rank of the pipeline calls it with the same tokens and the cache of its own stage.
    """

    def step(inputs: torch.Tensor) -> torch.Tensor:
        return network.hidden_states_next(inputs, cache)

    return _pass_down(network, mesh, tokens, step, step)


def _pass_down(
    network: CausalModel, mesh: ParallelMesh, tokens: torch.Tensor,
    run: Callable[[torch.Tensor], torch.Tensor], run_last: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor | None:  # fmt: skip
    stage, stages = mesh.pp.rank, mesh.pp.size
    inputs = tokens
    if stage > 0:
        parameter = next(network.parameters())
        inputs = parameter.new_empty(tokens.size(1), tokens.size(0), network.config.hidden_size)
        mesh.pp.start_receive(inputs, stage - 1).wait()
    if stage == stages - 1:
        return run_last(inputs)
    mesh.pp.start_send(run(inputs).contiguous(), stage + 1).wait()
    return None
