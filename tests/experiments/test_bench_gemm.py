"""Products of matrices around multiples of 8 are measured at every size, and compared within a round."""

from experiments.bench.benchmarks import gemm


def test_every_size_and_neighbour_has_a_rate_in_each_round() -> None:
    rates = gemm._measure("cpu", rounds=2, largest=128)
    assert rates.keys() == {
        (precision, size, offset)
        for precision in ("fp32", "bf16", "fp16")
        for size in (64, 128)
        for offset in (-1, 0, 1)
    }
    assert all(len(many) == 2 and min(many) > 0 for many in rates.values())
    assert {(case.axis, case.at) for case in gemm.summarize(rates) if case.axis} == {
        (f"n, {precision}", float(size)) for precision, size, _ in rates
    }


def test_the_ratio_is_that_of_large_sizes_within_a_round() -> None:
    sizes = {64: ([1.0, 1.0], [9.0, 9.0]), 256: ([8.0, 4.0], [4.0, 2.0]), 512: ([6.0, 6.0], [2.0, 2.0])}
    rates = {("bf16", size, offset): both[offset] for size, both in sizes.items() for offset in (0, 1)}
    assert gemm._ratio(rates, "bf16", 1) == 2.5
