"""ZeRO stage 3, the baseline of the 2021 paper's Table 2: parameters, gradients and optimizer
divided over data ranks.

torch's FSDP2 gathers a layer's parameters when it computes and reduces its gradients into shards.
The optimizer works on the shards, which are parameters divided along their first dim like any
other; so are checkpoints made of them.
"""

from collections.abc import Sequence
from functools import partial
from itertools import chain

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from mlm_repro.engine.model.stage_model import StageModel
from mlm_repro.engine.optim.flat import FlatGroup
from mlm_repro.engine.optim.gradients import GradientReducer
from mlm_repro.engine.parallel.mesh import GroupAxis, ParallelMesh
from mlm_repro.engine.parallel.sharding import ShardedParameter
from mlm_repro.lineage.errors import BadInput


def shard_zero3(model: StageModel, mesh: ParallelMesh) -> None:
    """Divide a whole model's parameters over the data-parallel ranks, in place (ZeRO stage 3 by
    torch's FSDP2); each layer is gathered when it computes. Every rank calls it. The parameters'
    values are lost and yet to be given, and a model on the meta device takes only its shards'
    memory.

    Gradients are reduced in fp32 or above, to their mean over the ranks. Raises BadInput unless the
    data axis has several ranks and they are processes.
    """
    if not isinstance(mesh.dp, GroupAxis):
        raise BadInput(
            "parallel.shard_parameters (ZeRO stage 3) needs a process for each rank: leave out"
            " --threads"
        )
    assert mesh.dp.group is not None
    ranks = DeviceMesh.from_group(mesh.dp.group, mesh.device.type)
    dtype = next(model.parameters()).dtype
    # Reduced in 16 bits, the sum over many ranks would round at each of them.
    wide = MixedPrecisionPolicy(reduce_dtype=dtype if dtype == torch.float64 else torch.float32)
    for layer in model.layers.values():
        fully_shard(layer, mesh=ranks, mp_policy=wide)
    # The layers first: the model then gathers only what lies outside of them, not all layers
    # together.
    fully_shard(model, mesh=ranks, mp_policy=wide)
    # FSDP2 gathers around `forward` alone, and the executor calls `run_stage`.
    register_fsdp_forward_method(model, "run_stage")
    # Only now does the model take memory, and only for its shards.
    model.to_empty(device=mesh.device)


class ShardedReducer(GradientReducer):
    """Gradient reducer for ZeRO stage 3: adds the gradients of shards, which FSDP2 reduces to their
    mean in every backward pass, to the optimizer's flat groups. So `arm` does nothing, and `finish`
    divides the gradients itself and leaves each group's `divisor` at 1.

    Building a ShardedReducer gives the model new parameters, so that FSDP2 reads the shards from
    the groups' storage, which the optimizer writes to.
    """

    def __init__(self, model: StageModel, groups: Sequence[FlatGroup]) -> None:
        self.groups = groups
        gradients = chain.from_iterable(group.gradients for group in groups)
        storage = {parameter.name: (parameter.local, gradient) for parameter, gradient in gradients}
        for prefix, module in list(model.named_modules()):
            for name, old in list(module.named_parameters(recurse=False)):
                assert isinstance(old, DTensor)
                local, gradient = storage[f"{prefix}.{name}" if prefix else name]
                # A new parameter over the group's storage: FSDP2 cannot be told where its shards
                # lie.
                shard = nn.Parameter(
                    DTensor.from_local(local.data, old.device_mesh, old.placements)
                )
                shard.register_post_accumulate_grad_hook(partial(_arrived, gradient))
                setattr(module, name, shard)

    def begin(self) -> None:
        for group in self.groups:
            group.main_gradient.zero_()

    def arm(self, parameters: Sequence[ShardedParameter]) -> None:
        pass  # FSDP2 reduces in every backward pass, not in the last alone

    def finish(self, divisor: float) -> None:
        # FSDP2 has taken the mean over ranks already, in every backward pass.
        for group in self.groups:
            group.main_gradient.div_(divisor)


def _arrived(main: Tensor, parameter: Tensor) -> None:
    assert isinstance(parameter.grad, DTensor)
    # Added here, in the type of the optimizer; left there, microbatches would add up in 16 bits.
    main.add_(parameter.grad.to_local())
    parameter.grad = None
