"""Products of square matrices around multiples of 8, after "Scaling Transformer-XL to 128 GPUs", Figures 1 and 2."""

from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Annotated

import typer

from engine.config import Precision
from experiments.bench.timing import device_seconds, in_turn, median_ratio, on_ranks, rounded, series
from lineage.benchmark import Benchmark, Case, Ratio
from lineage.progress import announce

PRECISIONS: tuple[Precision, ...] = ("fp32", "bf16", "fp16")
OFFSETS = {-1: "one less", 0: "multiple of 8", 1: "one more"}
"""From a multiple of 8."""
SMALLEST = 64
LEAST_FLOPS = 2e8
"""Of one measurement on a CPU; a hundred times as many on a GPU."""
LARGEST = {"cpu": 1024, "cuda": 8192}


Rates = dict[tuple[str, int, int], list[float]]
"""GFLOP/s of each round, by precision, multiple of 8 and distance from it."""


def measure(
    rounds: Annotated[int, typer.Option(min=1, help="How often every product is measured, in turn.")] = 5,
    largest: Annotated[int | None, typer.Option(min=64, help="Largest size; 1024 on a CPU, 8192 on a GPU.")] = None,
) -> Benchmark:
    """Products of n × n matrices with n a multiple of 8, one less and one more, in every number format.

    Tensor cores want dimensions that are multiples of 8; a GPU is measured where there is one.
    """
    device, rates = measure_rates(rounds, largest)
    return Benchmark(
        benchmark="gemm",
        title="Matrix products around multiples of 8",
        cases=summarize(rates),
        notes=[
            "n × n by n × n, 2n³ operations; products are timed in turn, after a round that is not counted",
            "processor seconds of one thread" if device.startswith("CPU") else "seconds of the device",
            "a ratio is the median over sizes of 256 and more, and over rounds",
        ],
        setting={"rounds": rounds, "device": device},
    )


def measure_rates(rounds: int, largest: int | None = None) -> tuple[str, Rates]:
    """The device, and the rates at sizes that double, each with its neighbours, in every precision."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    largest = largest or LARGEST[device]
    announce(
        f"{1 + rounds} rounds of products of {SMALLEST} to {largest} on one {'core' if device == 'cpu' else 'GPU'}"
    )
    if device == "cuda":
        return torch.cuda.get_device_name(), _measure(device, rounds, largest)
    return "CPU, one thread", on_ranks("gemm", 1, _measure, device, rounds, largest)[0]


def summarize(rates: Rates) -> list[Case]:
    """A case for each size, and one for each precision: how much faster a multiple of 8 is than its neighbours."""
    sizes = [
        Case(
            name=f"{precision}, n = {size}",
            axis=f"n, {precision}",
            at=size,
            series=[
                series(near, "speed", "GFLOP/s", *rates[precision, size, offset]) for offset, near in OFFSETS.items()
            ],
        )
        for precision, size in dict.fromkeys((precision, size) for precision, size, _ in rates)
    ]
    return sizes + [
        Case(
            name=precision,
            ratios=[
                Ratio(name=f"multiple of 8 to {OFFSETS[offset]}", value=_ratio(rates, precision, offset))
                for offset in (-1, 1)
            ],
        )
        for precision in dict.fromkeys(precision for precision, _, _ in rates)
    ]


def _ratio(rates: Rates, precision: str, offset: int) -> float:
    """How much faster a multiple of 8 is than its neighbour."""
    sizes = list(dict.fromkeys(size for _, size, _ in rates))
    large = [size for size in sizes if size >= 256] or sizes[-1:]
    return rounded(median(median_ratio(rates[precision, size, 0], rates[precision, size, offset]) for size in large))


def _measure(device: str, rounds: int, largest: int) -> Rates:
    sizes = [SMALLEST << double for double in range((largest // SMALLEST).bit_length())]
    keys = [(precision, size, offset) for size in sizes for precision in PRECISIONS for offset in OFFSETS]
    taken, _ = in_turn("products", rounds + 1, {key: _product(device, *key) for key in keys})
    return {key: many[1:] for key, many in taken.items()}


def _product(device: str, precision: Precision, size: int, offset: int) -> Callable[[], float]:
    """What multiplies square matrices and says with how many GFLOP/s."""
    import torch

    from engine.optim.precision import DTYPES

    n = size + offset
    a, b = (torch.randn(n, n, device=device).to(DTYPES[precision]) for _ in range(2))
    multiply = partial(torch.mm, a, b, out=torch.empty_like(a))
    repeats = max(int(LEAST_FLOPS * (100 if device == "cuda" else 1) / (2 * n**3)), 1)
    return lambda: 2 * n**3 * repeats / max(device_seconds(multiply, repeats), 1e-9) / 1e9
