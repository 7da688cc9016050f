"""The loss on a few fixed samples, stored with a checkpoint and computed again from what was loaded."""

import math
from typing import Annotated, Any

import torch
from pydantic import Field, NonNegativeInt, field_validator

from engine.kernels.identity import numerics_identity
from engine.parallel.layout import Layout
from lineage.errors import IntegrityFailure
from lineage.files import FileSchema

FILE = "probe.json"
SAMPLES, LENGTH = 8, 64
"""The probe has the first 8 validation sequences, at most 64 tokens of each: a check costs one short batch."""
TOLERANCE = {"fp64": 1e-9, "fp32": 1e-4, "bf16": 3e-2, "fp16": 1e-2, "fp16-pure": 1e-2}
"""Largest relative difference that another layout, machine or library makes in each number format."""


class Probe(FileSchema):
    """Samples and the loss of the saved model on them."""

    tokens: Annotated[tuple[tuple[NonNegativeInt, ...], ...], Field(min_length=1, max_length=SAMPLES)]
    """[samples, length + 1] token ids."""
    loss: float
    """Mean cross-entropy without dropout."""
    precision: str
    computed_on: dict[str, Any]
    """Layout, numerics identity and threads, on which the bits of the loss may depend."""

    @field_validator("tokens")
    @classmethod
    def _is_a_batch(cls, tokens: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
        if len(set(map(len, tokens))) != 1 or not 2 <= len(tokens[0]) <= LENGTH + 1:
            raise ValueError(f"the sequences are not of one length from 2 to {LENGTH + 1}")
        return tokens

    def compare(self, loss: float, where: object, computed_on: dict[str, Any] | None = None) -> str | None:
        """A warning if the loss is near but not equal although it was computed in the same way, else None. Raises
        IntegrityFailure if the loss is not near: the weights changed."""
        change = f"the loss on {len(self.tokens)} fixed samples is {loss!r} and was {self.loss!r} when it was saved"
        if not math.isclose(loss, self.loss, rel_tol=TOLERANCE.get(self.precision, 1e-4)):
            raise IntegrityFailure(f"{where}: {change}: the weights changed, or this machine miscomputes")
        if computed_on == self.computed_on and loss != self.loss:
            return f"{change}, on the same layout and machine: training will not go on bit for bit as before"
        return None


def describe_computation(layout: Layout, device: torch.device) -> dict[str, Any]:
    """Layout, numerics identity and threads of this process."""
    return {**vars(layout), **numerics_identity(device.type == "cuda"), "threads": torch.get_num_threads()}
