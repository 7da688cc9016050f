"""What the same bits at every layout rest on: a product's bits depend on the shapes of its operands alone."""

import torch

from engine.config import ModelConfig
from engine.linear import linear
from lineage.errors import HardwareMissing

SHIFTS = (1, 3, 8)
"""Elements by which an operand is moved in memory."""


def check_products(model: ModelConfig, virtual: int, dtype: torch.dtype, device: torch.device) -> None:
    """Raise HardwareMissing where a product of the model changes a bit with the place of its operands in memory."""
    s, h, vocabulary = model.seq_length, model.hidden_size, model.padded_vocab_size
    shapes = {
        (h, 3 * h // virtual),
        (h // virtual, h),
        (h, 4 * h // virtual),
        (4 * h // virtual, h),
        (h, vocabulary // virtual),
    }
    generator = torch.Generator().manual_seed(0)
    for inner, columns in sorted(shapes):
        x, weight = (torch.randn(rows, inner, generator=generator).to(device, dtype) for rows in (s, columns))
        expected = linear(x, weight), weight.t() @ linear(x, weight).t()
        for shift in SHIFTS:
            moved, other = _moved(x, shift), _moved(weight, shift)
            product = linear(moved, other)
            if not torch.equal(product, expected[0]) or not torch.equal(other.t() @ product.t(), expected[1]):
                raise HardwareMissing(
                    f"train.invariant is not for this machine: its {dtype} product of [{s}, {inner}] with "
                    f"[{inner}, {columns}] changes with the place of its operands in memory"
                )


def _moved(tensor: torch.Tensor, shift: int) -> torch.Tensor:
    """The same values `shift` elements after the beginning of a buffer."""
    buffer = tensor.new_empty(tensor.numel() + shift)
    return buffer[shift:].view(tensor.shape).copy_(tensor)
