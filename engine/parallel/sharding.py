"""Global names, roles, shapes and shards of a model's parameters; initial values and state dicts
are built on them.

A module says in `roles` what each of its parameters is, and in `shard_dims` along which dim it is
divided over the tensor-parallel axis; parameters that are not named there are whole on every rank.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from torch import Tensor, nn

from mlm_repro.engine.parallel.mesh import Axis, ParallelMesh


class Role(Enum):
    """Kind of a parameter, from which its initial value and its weight decay follow (2019 paper,
    Section 4.2): a product's matrix, a branch's last matrix, an embedding, the tied word embedding,
    another vector, a bias or a norm's scale. The first four are decayed."""

    WEIGHT = "weight"
    """Matrix of a product: N(0, std), decayed."""
    LAST_WEIGHT = "last weight"
    """Last matrix of a branch, before its residual addition: N(0, std/√(2L)), in a Transformer-XL
    N(0, std), decayed."""
    EMBEDDING = "embedding"
    """Table of embedding vectors: N(0, std), decayed. The word embedding has a role of its own,
    unless it is a Transformer-XL's adaptive one."""
    TIED_EMBEDDING = "tied embedding"
    """Word embedding, held by the first pipeline stage, and by the last as its output head: N(0,
    std), decayed."""
    VECTOR = "vector"
    """Vector other than the bias of a product or a norm: N(0, std), not decayed."""
    BIAS = "bias"
    """Bias of a product or a norm: 0, not decayed."""
    NORM = "norm"
    """Scale of a norm: 1, not decayed."""

    @property
    def is_decayed(self) -> bool:
        """True if weight decay applies to parameters of this role: to matrices and embeddings, not
        to vectors, biases and norms."""
        return self in (Role.WEIGHT, Role.LAST_WEIGHT, Role.EMBEDDING, Role.TIED_EMBEDDING)


Roles = Mapping[str, Role]
"""Type of a mapping: name that a module has for one of its own parameters → the Role of that
parameter."""
ROLES_IN_TORCH: dict[type[nn.Module], Roles] = {
    nn.Linear: {"weight": Role.WEIGHT, "bias": Role.BIAS},
    nn.LayerNorm: {"weight": Role.NORM, "bias": Role.BIAS},
    nn.Embedding: {"weight": Role.EMBEDDING},
}


@dataclass(frozen=True)
class ShardedParameter:
    """One parameter as this rank holds it, with its name in the whole model, its role, and the axis
    and dim along which it is divided. `local` is this rank's part."""

    name: str
    local: nn.Parameter
    axis: Axis
    role: Role
    dim: int | None
    """Dim along which the parameter is divided over `axis`; None if every rank holds it whole."""
    is_copy: bool = False
    """True for the last pipeline stage's copy of the word embedding, which the first stage owns."""

    @property
    def global_shape(self) -> tuple[int, ...]:
        """Shape of the undivided parameter, as a tuple."""
        shape = list(self.local.shape)
        if self.dim is not None:
            shape[self.dim] *= self.axis.size
        return tuple(shape)

    @property
    def is_counted(self) -> bool:
        """True if this rank counts its part of the parameter in sums over the tensor- and
        pipeline-parallel axes, so that each element of the model is counted once."""
        # A norm would count a whole parameter once for each rank, and the tied embedding twice.
        return not self.is_copy and (self.dim is not None or self.axis.rank == 0)

    def shard(self, whole: Tensor) -> Tensor:
        """Return this rank's part of `whole`, a tensor of this parameter's global shape, as a view;
        return `whole` itself if the parameter is not divided."""
        return (
            whole if self.dim is None else whole.chunk(self.axis.size, dim=self.dim)[self.axis.rank]
        )


def sharded_parameters(model: nn.Module, mesh: ParallelMesh) -> list[ShardedParameter]:
    """Return the parameters of a model or pipeline stage as a list of ShardedParameters, in
    definition order, by the whole model's names.

    If torch has divided the model before, as under ZeRO stage 3, each `local` is a new parameter
    over this rank's shard, divided along dim 0 over the data axis. Raises TypeError for a parameter
    whose role is not declared.
    """
    stage = getattr(model, "stage", None)
    # With one stage the head is the embedding itself, and there is no copy.
    has_copy = stage is not None and stage.is_last and not stage.is_first
    parameters = []
    for name, parameter in model.named_parameters():
        owner, own_name = _declared(model, name)
        roles: Roles = getattr(owner, "roles", ROLES_IN_TORCH.get(type(owner), {}))
        if own_name not in roles:
            known = ", ".join(map(str, Role))
            raise TypeError(
                f"the role of parameter {name} is not declared: give it in"
                f" {type(owner).__name__}.roles, as one of {known}"
            )
        # Declared, not guessed from the name: initial values and weight decay follow from it.
        role = roles[own_name]
        # A DTensor, told by its method: its module takes half a second to import.
        if hasattr(parameter, "to_local"):
            parameters.append(
                ShardedParameter(
                    name, nn.Parameter(parameter.to_local().detach()), mesh.dp, role, 0
                )
            )
            continue
        # Declared on the module that divides it, so a new parallel layer needs no change here.
        dim = getattr(owner, "shard_dims", {}).get(own_name)
        is_copy = has_copy and role is Role.TIED_EMBEDDING
        parameters.append(ShardedParameter(name, parameter, mesh.tp, role, dim, is_copy))
    return parameters


def _declared(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Return a pair: the module that has to declare the role of the model's parameter `name`, the
    innermost that holds it, and the parameter's name there. A list of parameters is declared under
    the list's name."""
    prefix, _, own_name = name.rpartition(".")
    owner = model.get_submodule(prefix)
    return _declared(model, prefix) if isinstance(owner, nn.ParameterList) else (owner, own_name)
