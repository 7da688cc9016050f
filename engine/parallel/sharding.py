"""Global names, shapes and shards of a model's parameters; initial values and state dicts are built on them."""

from dataclasses import dataclass

from torch import Tensor, nn

from mlm_repro.engine.parallel.mesh import Axis, ParallelMesh

TIED_EMBEDDING = "embedding.word_embeddings.weight"


@dataclass(frozen=True)
class ShardedParameter:
    """One parameter of this rank and how it lies in the whole model."""

    name: str
    local: nn.Parameter
    axis: Axis
    dim: int | None
    """Dim along which the parameter is divided over `axis`; None if every rank holds it whole."""
    is_copy: bool = False
    """The last pipeline stage's copy of the word embedding, which the first stage owns."""

    @property
    def global_shape(self) -> tuple[int, ...]:
        """Shape of the undivided parameter."""
        shape = list(self.local.shape)
        if self.dim is not None:
            shape[self.dim] *= self.axis.size
        return tuple(shape)

    @property
    def is_counted(self) -> bool:
        """True if this rank counts the parameter in sums over the tensor- and pipeline-parallel axes."""
        return not self.is_copy and (self.dim is not None or self.axis.rank == 0)

    def shard(self, whole: Tensor) -> Tensor:
        """This rank's part of a tensor of the global shape."""
        return whole if self.dim is None else whole.chunk(self.axis.size, dim=self.dim)[self.axis.rank]


def sharded_parameters(model: nn.Module, mesh: ParallelMesh) -> list[ShardedParameter]:
    """Parameters of a model or pipeline stage in definition order, by the whole model's names.

    Under ZeRO stage 3 they are this rank's shards, divided along dim 0 over the data axis.
    """
    stage = getattr(model, "stage", None)
    has_copy = stage is not None and stage.is_last and not stage.is_first
    parameters = []
    for prefix, module in model.named_modules():
        dims: dict[str, int] = getattr(module, "shard_dims", {})
        for name, parameter in module.named_parameters(recurse=False):
            full = f"{prefix}.{name}" if prefix else name
            if hasattr(parameter, "to_local"):  # a DTensor, whose module takes half a second to import
                parameters.append(ShardedParameter(full, nn.Parameter(parameter.to_local().detach()), mesh.dp, 0))
                continue
            is_copy = has_copy and full == TIED_EMBEDDING
            parameters.append(ShardedParameter(full, parameter, mesh.tp, dims.get(name), is_copy))
    return parameters
