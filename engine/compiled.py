"""Loops compiled by numba, and their arithmetic: bf16 elements, exponentials, random bits.

Loops see bf16 tensors as int16 arrays. All arithmetic is in fp32. Sums may be taken in any order.
"""

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
import torch
from numba.extending import overload
from numpy.typing import NDArray

from mlm_repro.lineage.loops import call_first, compiled

LANES = 16
PIECES = 8
BLOCK = LANES * PIECES
"""Number of elements, 128, of a row of 16-bit random numbers that are drawn together: LANES
counters give PIECES elements each."""
ROWS_TOGETHER = 32
"""Number of rows whose gradients are summed before they join the total: short sums round less."""
# All of `fastmath` but `nnan`, `ninf` and `afn`: a loss that is not finite has to stay so, and no
# function may be approximated.
FLOAT_RULES = {"reassoc", "contract", "arcp", "nsz"}
Array = NDArray[Any]


class Compiled:
    """Callable form of a Python function with loops over arrays. Numba compiles it at the first
    call with arrays of new dtypes, and keeps the machine code on disk, from which later processes
    load it, unless no folder for it can be written. A first call waits for the first calls of other
    processes."""

    def __init__(self, function: Callable[..., Any]) -> None:
        # numpy's error model, because Python's would test every division for a zero. Without the
        # GIL, so that ranks that are threads compute side by side.
        self._dispatcher = compiled(function, fastmath=FLOAT_RULES, error_model="numpy", nogil=True)
        self._known: set[Any] = set()

    def __call__(self, *arguments: Any) -> Any:
        kinds = tuple(a.dtype.char if isinstance(a, np.ndarray) else "" for a in arguments)
        if kinds in self._known:
            return self._dispatcher(*arguments)
        self._known.add(kinds)
        # Of several processes that start together one compiles, and the others load.
        return call_first(self._dispatcher, *arguments)


def array(tensor: torch.Tensor) -> Array:
    """Return a contiguous CPU tensor as a numpy array of the same shape for a compiled loop. It is
    no copy: what the loop writes is in the tensor. A bf16 tensor gives an int16 array with the same
    bits."""
    detached = tensor.detach()
    detached = detached.view(torch.int16) if detached.dtype == torch.bfloat16 else detached
    # `numpy()` would keep a parameter's memory from being freed, and ZeRO stage 3 frees a layer
    # after computing it.
    return np.from_dlpack(detached) if isinstance(tensor, torch.nn.Parameter) else detached.numpy()


inline = numba.njit(fastmath=FLOAT_RULES, error_model="numpy", inline="never", nogil=True)
in_written_order = numba.njit(
    fastmath=FLOAT_RULES - {"reassoc"}, error_model="numpy", inline="never", nogil=True
)
"""Decorator that compiles a function for use in compiled loops, as this module's `inline` does, but
keeps the written order of its arithmetic. It is for arithmetic whose errors cancel: reordered, a
result can be wrong by up to 68 units in the last place."""


def load(row: Array, i: int) -> np.float32:
    """Return element i of the array `row` as an fp32 number. The row is fp32, or int16 with the
    bits of bf16. Only loops that numba compiles can call it: a call from Python raises
    NotImplementedError."""
    raise NotImplementedError("only loops that numba compiles can call this")


@overload(load)
def _load(row: Any, i: Any) -> Any:
    def load_fp32(row: Any, i: Any) -> Any:
        return row[i]

    def load_bf16(row: Any, i: Any) -> Any:
        # bf16 is the upper half of fp32.
        return np.uint32(np.uint32(np.uint16(row[i])) << np.uint32(16)).view(np.float32)

    return load_bf16 if row.dtype == numba.types.int16 else load_fp32


def store(row: Array, i: int, value: np.float32) -> None:
    """Write an fp32 value to element i of the array `row`, which is fp32, or int16 with the bits of
    bf16, to which the value is rounded, to nearest even. Only loops that numba compiles can call
    it: a call from Python raises NotImplementedError."""
    raise NotImplementedError("only loops that numba compiles can call this")


@overload(store)
def _store(row: Any, i: Any, value: Any) -> Any:
    def store_fp32(row: Any, i: Any, value: Any) -> Any:
        row[i] = value

    def store_bf16(row: Any, i: Any, value: Any) -> Any:
        bits = np.float32(value).view(np.uint32)
        # Half a unit, less one bit unless the kept part is odd: ties round to even.
        bits = np.uint32(bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))
        row[i] = np.int16(bits >> np.uint32(16))

    return store_bf16 if row.dtype == numba.types.int16 else store_fp32


@in_written_order
def exponential(x: np.float32) -> np.float32:
    """Return eˣ of an fp32 number, as fp32, to 2 units in the last place, for x ≤ 88; 0 below −87,
    where results are no longer normal."""
    clamped = np.float32(-87.0) if x < np.float32(-87.0) else x
    n = np.floor(clamped * np.float32(1.4426950408889634) + np.float32(0.5))
    # ln 2 in two parts (Cody and Waite): the first has 16 bits, so that its product with n is
    # exact. The polynomial is that used by Cephes' `expf`.
    r = (clamped - n * np.float32(0.693145751953125)) - n * np.float32(1.428606765330187e-06)
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    p = p * r * r + r + np.float32(1.0)
    # 2ⁿ by its exponent's bits, which hold normal numbers alone.
    power = np.int32((np.int32(n) + np.int32(127)) << np.int32(23)).view(np.float32)
    return np.float32(0.0) if x < np.float32(-87.0) else p * power


@inline
def largest(row: Array, count: int) -> np.float32:
    """Return the largest of a row's first `count` elements, fp32 or bf16, as fp32; −∞ if `count` is
    0. A NaN may be ignored."""
    # The search compares integers in the order of the numbers, which compiles to vector
    # instructions.
    most = _in_order(np.float32(-np.inf).view(np.int32))
    for i in range(count):
        key = _in_order(np.float32(load(row, i)).view(np.int32))
        most = key if key > most else most
    return np.int32(_in_order(most)).view(np.float32)


@inline
def _in_order(bits: np.int32) -> np.int32:
    """Return an int32 for the bits of an fp32 number; these integers have the order of the numbers.
    The function is its own inverse."""
    return np.int32(bits ^ ((bits >> np.int32(31)) & np.int32(0x7FFFFFFF)))


@inline
def random_bits(key: np.uint64, row: int, columns: int, out: Array) -> None:
    """Write 16 random bits, drawn under `key`, to each element of the uint16 array `out`, for the
    first `columns` elements of row number `row` of a mask. The last BLOCK of 128 elements is filled
    to its end, for which `out` needs room.

    Philox 4×32-10 with counter (16 · block + lane, row, 0, 0), as in `engine/kernels/dropout.py`.
    """
    low = np.uint64(0xFFFFFFFF)
    half = np.uint64(32)
    piece = np.uint64(16)
    for block in range((columns + BLOCK - 1) // BLOCK):
        for lane in range(LANES):
            c0 = np.uint64(block * LANES + lane)
            c1 = np.uint64(row)
            c2 = np.uint64(0)
            c3 = np.uint64(0)
            k0 = key & low
            k1 = key >> half
            for _ in range(10):
                # Products in 64 bits, because Philox takes both halves of each.
                first = np.uint64(0xD2511F53) * c0
                second = np.uint64(0xCD9E8D57) * c2
                c0 = (second >> half) ^ c1 ^ k0
                c2 = (first >> half) ^ c3 ^ k1
                c1 = second & low
                c3 = first & low
                k0 = (k0 + np.uint64(0x9E3779B9)) & low
                k1 = (k1 + np.uint64(0xBB67AE85)) & low
            # Pieces lie 16 columns apart, so that lanes next to each other write columns next to
            # each other.
            at = block * BLOCK + lane
            out[at] = np.uint16(c0)
            out[at + 16] = np.uint16(c0 >> piece)
            out[at + 32] = np.uint16(c1)
            out[at + 48] = np.uint16(c1 >> piece)
            out[at + 64] = np.uint16(c2)
            out[at + 80] = np.uint16(c2 >> piece)
            out[at + 96] = np.uint16(c3)
            out[at + 112] = np.uint16(c3 >> piece)
