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
    """Memory of one microbatch in a model with memory (Transformer-XL): the previous segment's
    states by layer, [m, b, h], and the states that this segment leaves.

    A model with memory reads `before` and writes `after`, so a recomputed pass reads the same
    values. Where nothing is recomputed, both may be one dict.
    """

    # Two dicts, because a layer that is recomputed must not read what its first pass wrote.
    before: dict[int, Tensor] = field(default_factory=dict)
    after: dict[int, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class SentencePairs:
    """Inputs of a BERT besides the tokens, three tensors: `token_types`, the part of its sequence,
    0 or 1, to which each token belongs; `is_token`, False at padding; and `is_swapped`, 1 where the
    second part came first in its document, else 0."""

    token_types: Tensor
    """Tensor [b, s]: 0 for tokens of the first part, 1 for tokens of the second."""
    is_token: Tensor
    """Boolean tensor [b, s]: True for a token, False at padding."""
    is_swapped: Tensor
    """Tensor [b]: 1 where the second part came first in its document, else 0."""


@dataclass(frozen=True)
class PipelineInput:
    """One microbatch: token ids and targets, each an int64 tensor [b, s]; where the model has them,
    its source of dropout, memory of earlier segments and sentence pairs; its sequences' indices in
    the global batch; and, if given, the number that divides a BERT's loss in place of the
    microbatch's own number of targets. A BERT ignores negative targets; other models have none."""

    tokens: Tensor
    targets: Tensor
    dropout: Dropout | None = None
    recurrence: Recurrence | None = None
    """Memory of the segments before this one; None if the model sees this segment alone."""
    pairs: SentencePairs | None = None
    """Parts and padding of a BERT's sequences; None if each sequence is one part without padding,
    as in all other models."""
    places: tuple[int, ...] = ()
    """Indices of the microbatch's sequences in the global batch, in the order of its rows; empty
    outside of training."""
    mean_targets: Tensor | None = None
    """Mean number of targets per microbatch over the whole global batch, a scalar that divides a
    BERT's loss in training; None to divide by the microbatch's own number of targets."""

    def tensors(self) -> list[Tensor]:
        """Return a list of the microbatch's tensors that change from microbatch to microbatch,
        apart from a BERT's pairs and a model's memory, in this order: tokens, targets and, unless
        they are None, `mean_targets` and the table of dropout keys."""
        given = (
            self.tokens,
            self.targets,
            self.mean_targets,
            self.dropout.table if self.dropout else None,
        )
        return [tensor for tensor in given if tensor is not None]


def to_input(
    tokens: NDArray[np.int64],
    mesh: ParallelMesh,
    dropout: Dropout | None = None,
    recurrence: Recurrence | None = None,
    pairs: Sequence[PairSample] = (),
    places: tuple[int, ...] = (),
) -> PipelineInput:
    """Return the PipelineInput of one microbatch, whose token ids are the NumPy array `tokens`, on
    the device of `mesh`; on a CPU it shares their memory. `dropout`, `places` and `recurrence`, the
    memory of a model that has one, are stored as they are. Without `pairs` the ids are [b, s + 1],
    and each predicts the next: the PipelineInput's tokens and targets are [b, s].

    With `pairs`, for a BERT, one PairSample a row, the ids are [b, s]. The PairSamples give the
    targets and the PipelineInput's `pairs`: parts, padding and order of the parts. `recurrence` is
    then not used.
    """
    rows = _on_device(tokens, mesh)
    if not pairs:
        # Two views of one copy, which differ by a token.
        return PipelineInput(rows[:, :-1], rows[:, 1:], dropout, recurrence, places=places)
    # A pair's first field is its tokens, which `tokens` has already.
    _, *columns = zip(*pairs, strict=True)
    targets, types, lengths, is_swapped = (_on_device(np.array(column), mesh) for column in columns)
    is_token = torch.arange(rows.size(1), device=mesh.device) < lengths[:, None]
    return PipelineInput(
        rows, targets, dropout, None, SentencePairs(types, is_token, is_swapped), places
    )


def _on_device(array: NDArray[Any], mesh: ParallelMesh) -> Tensor:
    """Return a numpy array as a tensor of the same shape and dtype on the mesh's device; on a CPU
    both share their memory. The host does not wait for a copy to a GPU."""
    tensor = torch.from_numpy(array)
    # Only a copy from page-locked memory can run beside the host.
    return (tensor.pin_memory() if mesh.device.type == "cuda" else tensor).to(
        mesh.device, non_blocking=True
    )
