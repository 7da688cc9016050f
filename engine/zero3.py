"""The baseline of the 2021 paper's Table 2: the same model under torch's own ZeRO stage 3 (FSDP2)."""

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from engine.model.gpt2 import GPT2


def shard_zero3(model: GPT2) -> GPT2:
    """Divide parameters, gradients and whatever optimizer is built on them over all ranks; gathered layer by layer.

    The model must be whole on every rank (a serial mesh) and the process group initialised; it is changed in place.
    """
    device = next(model.parameters()).device.type
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    for layer in model.layers.values():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model
