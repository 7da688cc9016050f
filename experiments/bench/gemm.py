"""Products of square matrices around multiples of 8, after "Scaling Transformer-XL to 128 GPUs", Figures 1 and 2."""

import time
from collections.abc import Callable
from statistics import median
from typing import Any

from engine.config import Precision
from experiments.bench.timing import median_ratio, on_ranks
from lineage.environment import describe_environment
from lineage.progress import Progress, announce

OFFSETS = (-1, 0, 1)
"""From a multiple of 8."""
SMALLEST = 64
LEAST_FLOPS = 2e8
"""Of one measurement on a CPU; a hundred times as many on a GPU."""
LARGEST = {"cpu": 1024, "cuda": 8192}


def measure_gemm(rounds: int, largest: int | None = None) -> dict[str, Any]:
    """Rates at sizes that double, each with its neighbours, in every precision; plain JSON values."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    largest = largest or LARGEST[device]
    announce(
        f"{1 + rounds} rounds of products of {SMALLEST} to {largest} on one {'core' if device == 'cpu' else 'GPU'}"
    )
    if device == "cuda":
        points = _measure(device, rounds, largest)
    else:
        [points] = on_ranks("gemm", 1, _measure, device, rounds, largest)
    return {
        "benchmark": "gemm",
        "device": torch.cuda.get_device_name() if device == "cuda" else "CPU, one thread",
        "rounds": rounds,
        "points": points,
        "ratios": {
            precision: {f"multiple of 8 to {name}": _ratio(points, precision, offset)
                        for name, offset in (("one less", -1), ("one more", 1))}
            for precision in dict.fromkeys(point["precision"] for point in points)
        },
        "environment": describe_environment(),
        "notes": [
            "n × n by n × n, 2n³ operations; products of a size are timed in turn, after a round that is not counted",
            "seconds of the device" if device == "cuda" else "processor seconds of one thread",
            "a ratio is the median over sizes of 256 and more, and over rounds",
        ],
    }  # fmt: skip


def _ratio(points: list[dict[str, Any]], precision: str, offset: int) -> float:
    """How much faster a multiple of 8 is than its neighbour."""
    found = {(one["size"], one["offset"]): one["gflops"] for one in points if one["precision"] == precision}
    sizes = [size for size, place in found if place == 0]
    large = [size for size in sizes if size >= 256] or sizes[-1:]
    return round(median(median_ratio(found[size, 0], found[size, offset]) for size in large), 4)


def _measure(device: str, rounds: int, largest: int) -> list[dict[str, Any]]:
    import torch

    from engine.precision import DTYPES

    precisions: tuple[Precision, ...] = ("fp32", "bf16", "fp16")
    timed = _gpu_seconds if device == "cuda" else _cpu_seconds
    points = []
    sizes = [SMALLEST << double for double in range((largest // SMALLEST).bit_length())]
    with Progress("products", len(sizes), "sizes") as progress:
        for size in sizes:
            cases = {}
            for precision in precisions:
                for offset in OFFSETS:
                    n = size + offset
                    a, b = (torch.randn(n, n, device=device).to(DTYPES[precision]) for _ in range(2))
                    repeats = max(int(LEAST_FLOPS * (100 if device == "cuda" else 1) / (2 * n**3)), 1)
                    cases[precision, offset] = (a, b, torch.empty_like(a), repeats)
            rates: dict[tuple[Precision, int], list[float]] = {case: [] for case in cases}
            for _ in range(rounds + 1):
                for case, (a, b, out, repeats) in cases.items():
                    seconds = timed(lambda a=a, b=b, out=out: torch.mm(a, b, out=out), repeats)  # type: ignore[misc]
                    rates[case].append(2 * (size + case[1]) ** 3 * repeats / max(seconds, 1e-9) / 1e9)
            points += [
                {"precision": precision, "size": size, "offset": offset, "gflops": many[1:]}
                for (precision, offset), many in rates.items()
            ]
            progress.advance()
    return points


def _cpu_seconds(product: Callable[[], object], repeats: int) -> float:
    start = time.process_time()
    for _ in range(repeats):
        product()
    return time.process_time() - start


def _gpu_seconds(product: Callable[[], object], repeats: int) -> float:
    import torch

    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    for _ in range(repeats):
        product()
    last.record()
    torch.cuda.synchronize()
    return float(first.elapsed_time(last)) / 1e3
