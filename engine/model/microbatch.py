"""Inputs of a model for one microbatch."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mlm_repro.data_pipeline.tokens.sentence_pairs import PairSample
from mlm_repro.engine.parallel.mesh import ParallelMesh
from mlm_repro.engine.rng import Dropout


@dataclass(frozen=True)
class Recurrence:
    """States of the segment before, by layer, [m, b, h], and those that this segment leaves for the
    next.

    A model with memory reads `before` and writes `after`; a pass over the same microbatch again
    meets the same values. Where nothing is computed again, both may be one.
    """

    before: dict[int, Tensor] = field(default_factory=dict)
    after: dict[int, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class SentencePairs:
    """A BERT's inputs besides the tokens."""

    token_types: Tensor
    """0 for tokens of the first part, 1 for those of the second, [b, s]."""
    is_token: Tensor
    """False at padding, [b, s]."""
    is_swapped: Tensor
    """1 where the second part came first in its document, [b]."""


@dataclass(frozen=True)
class PipelineInput:
    """One microbatch: token ids and targets, each [b, s]; negative targets are ignored."""

    tokens: Tensor
    targets: Tensor
    dropout: Dropout | None = None
    recurrence: Recurrence | None = None
    """Memory of earlier segments; None if the model sees this segment alone."""
    pairs: SentencePairs | None = None
    """Parts and padding, for a BERT; None if a sequence is one part without padding."""
    places: tuple[int, ...] = ()
    """Places of its sequences in the global batch; empty outside one."""
    mean_targets: Tensor | None = None
    """Mean number of targets of a microbatch over the whole global batch, a scalar; None for this
    one's own number."""

    def tensors(self) -> list[Tensor]:
        """Tensors that differ between microbatches of one sequence each."""
        given = (
            self.tokens,
            self.targets,
            self.mean_targets,
            self.dropout.table if self.dropout else None,
        )
        return [each for each in given if each is not None]


def to_input(
    tokens: NDArray[np.int64],
    mesh: ParallelMesh,
    dropout: Dropout | None = None,
    recurrence: Recurrence | None = None,
    pairs: Sequence[PairSample] = (),
    places: tuple[int, ...] = (),
) -> PipelineInput:
    """A microbatch on the mesh's device. Without `pairs` the tokens are [b, s + 1] and each
    predicts the next."""
    rows = _on_device(tokens, mesh)
    if not pairs:
        return PipelineInput(rows[:, :-1], rows[:, 1:], dropout, recurrence, places=places)
    _, *columns = zip(*pairs, strict=True)
    targets, types, lengths, is_swapped = (_on_device(np.array(column), mesh) for column in columns)
    is_token = torch.arange(rows.size(1), device=mesh.device) < lengths[:, None]
    return PipelineInput(
        rows, targets, dropout, None, SentencePairs(types, is_token, is_swapped), places
    )


def _on_device(array: NDArray[Any], mesh: ParallelMesh) -> Tensor:
    """The array on the mesh's device; the host does not wait for the copy."""
    tensor = torch.from_numpy(array)
    return (tensor.pin_memory() if mesh.device.type == "cuda" else tensor).to(
        mesh.device, non_blocking=True
    )
