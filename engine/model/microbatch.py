"""What a model is given of one microbatch."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from engine.data.batches import PairArrays
from engine.parallel.mesh import ParallelMesh
from engine.rng import Dropout


@dataclass(frozen=True)
class Recurrence:
    """What earlier segments left for this one, by layer, [m, b, h], and what this one leaves for the next.

    A model with memory reads `before` and writes `after`; a pass over the same microbatch again meets the same values.
    Where nothing is computed again, both may be one.
    """

    before: dict[int, torch.Tensor] = field(default_factory=dict)
    after: dict[int, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class SentencePairs:
    """What a BERT knows of its sequences besides their tokens."""

    token_types: torch.Tensor
    """Which part each token belongs to, 0 or 1, [b, s]."""
    is_token: torch.Tensor
    """False at padding, [b, s]."""
    is_swapped: torch.Tensor
    """1 where the second part came first in its document, [b]."""


@dataclass(frozen=True)
class PipelineInput:
    """One microbatch: token ids and targets, each [b, s]; a negative target asks for nothing."""

    tokens: torch.Tensor
    targets: torch.Tensor
    dropout: Dropout | None = None
    recurrence: Recurrence | None = None
    """For a model with memory; without one it sees this segment alone."""
    pairs: SentencePairs | None = None
    """For a BERT; without them a sequence is one part without padding."""
    places: tuple[int, ...] = ()
    """Of its sequences in the global batch, where it is part of one."""


def to_input(
    tokens: NDArray[np.int64], mesh: ParallelMesh, dropout: Dropout | None = None,
    recurrence: Recurrence | None = None, pairs: PairArrays | None = None, places: tuple[int, ...] = (),
) -> PipelineInput:  # fmt: skip
    """A microbatch on the mesh's device: of token ids [b, s + 1] each predicts the next; of pairs [b, s] the masked."""
    rows = _on_device(tokens, mesh)
    if pairs is None:
        return PipelineInput(rows[:, :-1], rows[:, 1:], dropout, recurrence, places=places)
    targets, types, lengths, is_swapped = (
        _on_device(array, mesh) for array in (pairs.targets, pairs.token_types, pairs.lengths, pairs.is_swapped)
    )
    is_token = torch.arange(rows.size(1), device=mesh.device) < lengths[:, None]
    return PipelineInput(rows, targets, dropout, None, SentencePairs(types, is_token, is_swapped), places)


def _on_device(array: NDArray[Any], mesh: ParallelMesh) -> torch.Tensor:
    """The array on the mesh's device, which the host does not wait for."""
    tensor = torch.from_numpy(array)
    return (tensor.pin_memory() if mesh.device.type == "cuda" else tensor).to(mesh.device, non_blocking=True)
