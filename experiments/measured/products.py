"""Products of matrices in fp16 beside fp32, after "Scaling Transformer-XL to 128 GPUs", Figures 1 and 2."""

import time
from collections.abc import Callable
from functools import partial
from statistics import median

import torch

from engine.config import Precision
from engine.launch.forked import run_forked
from engine.optim.precision import DTYPES
from experiments.sealed import Line, lines
from lineage.progress import Progress, announce

PRECISIONS: tuple[Precision, ...] = ("fp32", "bf16", "fp16")
PLACES = {0: ("", "multiple of 8"), 1: ("_shifted", "one more")}
"""Suffix of the claim's quantity and of the curve's name, by the distance from a multiple of 8."""
ROUNDS = 5
SMALLEST = 64
LARGEST = {"cpu": 1024, "cuda": 8192}
LEAST_FLOPS = {"cpu": 2e8, "cuda": 2e10}
"""Operations of one measurement."""

Rates = dict[tuple[Precision, int, int], list[float]]
"""GFLOP/s of each round, by precision, multiple of 8 and distance from it."""


def measure_products(rounds: int = ROUNDS, largest: int | None = None) -> list[Line]:
    """Rates of n × n products in each precision at multiples of 8 and one above; fp16's over fp32's at the largest."""
    place, what = ("cuda", "GPU") if torch.cuda.is_available() else ("cpu", "core")
    largest = largest or LARGEST[place]
    announce(f"{1 + rounds} rounds of products of {SMALLEST} to {largest} on one {what}")
    if place == "cuda":
        device, rates = torch.cuda.get_device_name(), _measure(place, rounds, largest)
    else:
        device, rates = "CPU, one thread", run_forked(_measure, 1, place, rounds, largest)[0]
    largest = max(size for _, size, _ in rates)
    numbers = []
    for (precision, size, offset), many in rates.items():
        series, at = f"{precision}, {PLACES[offset][1]}", {"x": float(size + offset), "x_name": "n"}
        numbers += lines(series, {"product_gflops": median(many)}, "scaled", note=device, **at)
    for offset, (end, where) in PLACES.items():
        pairs = zip(rates["fp16", largest, offset], rates["fp32", largest, offset], strict=True)
        note = f"{device}, n = {largest + offset}, {where}"
        speedup = median(fp16 / fp32 for fp16, fp32 in pairs)
        numbers += lines("fp16 over fp32", {f"gemm_speedup{end}": speedup}, "scaled", note=note)
    return numbers


def _measure(device: str, rounds: int, largest: int) -> Rates:
    """Every product in turn, in each of the rounds after one that is not counted."""
    sizes = [SMALLEST << double for double in range((largest // SMALLEST).bit_length())]
    rates: Rates = {(precision, size, offset): [] for size in sizes for precision in PRECISIONS for offset in PLACES}
    multiply = {key: _product(device, *key) for key in rates}
    with Progress("products", (rounds + 1) * len(rates), "products") as progress:
        for _ in range(rounds + 1):
            for key, measure in multiply.items():
                rates[key].append(measure())
                progress.advance()
    return {key: many[1:] for key, many in rates.items()}


def _product(device: str, precision: Precision, size: int, offset: int) -> Callable[[], float]:
    """A function that multiplies square matrices and returns its GFLOP/s."""
    n = size + offset
    a, b = (torch.randn(n, n, device=device).to(DTYPES[precision]) for _ in range(2))
    multiply = partial(torch.mm, a, b, out=torch.empty_like(a))
    repeats = max(int(LEAST_FLOPS[device] / (2 * n**3)), 1)

    def measure() -> float:
        if device == "cpu":
            start = time.process_time()
            for _ in range(repeats):
                multiply()
            seconds = time.process_time() - start
        else:
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
            for _ in range(repeats):
                multiply()
            last.record()
            last.synchronize()
            seconds = first.elapsed_time(last) / 1e3
        return 2 * n**3 * repeats / max(seconds, 1e-9) / 1e9

    return measure
