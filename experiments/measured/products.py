"""Products of matrices in fp16 beside fp32, after "Scaling Transformer-XL to 128 GPUs", Figures 1 and 2."""

from statistics import median

from experiments.bench.benchmarks.gemm import measure_rates
from experiments.bench.timing import median_ratio
from experiments.sealed import Line, lines

ROUNDS = 5
PLACES = {0: ("", "multiple of 8"), 1: ("_shifted", "one more")}
"""By the distance from a multiple of 8: the end of the claim's quantity, and of the curve's name."""


def measure_products(rounds: int = ROUNDS, largest: int | None = None) -> list[Line]:
    """Rates of n × n products in each precision at multiples of 8 and one above; fp16's over fp32's at the largest."""
    device, rates = measure_rates(rounds, largest)
    largest = max(size for _, size, _ in rates)
    found = []
    for (precision, size, offset), many in rates.items():
        if offset in PLACES:
            series, place = f"{precision}, {PLACES[offset][1]}", {"x": float(size + offset), "x_name": "n"}
            found += lines(series, {"product_gflops": median(many)}, "scaled", note=device, **place)
    for offset, (end, where) in PLACES.items():
        ratio = median_ratio(rates["fp16", largest, offset], rates["fp32", largest, offset])
        note = f"{device}, n = {largest + offset}, {where}"
        found += lines("fp16 over fp32", {f"gemm_speedup{end}": ratio}, "scaled", note=note)
    return found
