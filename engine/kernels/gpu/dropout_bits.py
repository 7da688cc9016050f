"""Random bits of dropout masks from a Triton kernel, for dropout that is not fused."""

import torch
import triton
import triton.language as tl

from engine.kernels.gpu.masks import BLOCK, in_columns, random_words

ROWS = 4


def fused(keys: tuple[int, ...], first_row: int, rows: int, columns: int, device: torch.device) -> torch.Tensor:
    """Random bits as int16, [len(keys), rows, columns], starting at row `first_row`."""
    bits = torch.empty(len(keys), rows, columns, dtype=torch.int16, device=device)
    grid = (triton.cdiv(rows, ROWS), triton.cdiv(columns, BLOCK), len(keys))
    _fill[grid](torch.tensor(keys, dtype=torch.int64).to(device), bits, first_row, rows, columns, ROWS)
    return bits


@triton.jit
def _fill(keys, bits, first_row, rows, columns, r: tl.constexpr):
    row = tl.program_id(0) * r + tl.arange(0, r)
    key = tl.load(keys + tl.program_id(2)) + row.to(tl.int64) * 0
    w0, w1, w2, w3 = random_words(key, first_row + row, tl.program_id(1), 1)
    drawn = in_columns(
        w0.to(tl.int16), (w0 >> 16).to(tl.int16), w1.to(tl.int16), (w1 >> 16).to(tl.int16),
        w2.to(tl.int16), (w2 >> 16).to(tl.int16), w3.to(tl.int16), (w3 >> 16).to(tl.int16), r, 1,
    )  # fmt: skip
    column = tl.program_id(1) * 128 + tl.arange(0, 128)[None, :]
    at = (tl.program_id(2).to(tl.int64) * rows + row[:, None]) * columns + column
    tl.store(bits + at, drawn, (row[:, None] < rows) & (column < columns))
