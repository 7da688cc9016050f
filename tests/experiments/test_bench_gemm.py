"""Products of matrices around multiples of 8 are measured at every size, and compared within a round."""

from experiments.bench import gemm


def test_every_size_and_neighbour_has_a_rate_in_each_round() -> None:
    points = gemm._measure("cpu", rounds=2, largest=128)
    assert {(one["precision"], one["size"], one["offset"]) for one in points} == {
        (precision, size, offset)
        for precision in ("fp32", "bf16", "fp16")
        for size in (64, 128)
        for offset in (-1, 0, 1)
    }
    assert all(len(one["gflops"]) == 2 and min(one["gflops"]) > 0 for one in points)


def test_the_ratio_is_that_of_large_sizes_within_a_round() -> None:
    points = [
        {"precision": "bf16", "size": size, "offset": offset, "gflops": rates}
        for size, at, above in (
            (64, [1.0, 1.0], [9.0, 9.0]),
            (256, [8.0, 4.0], [4.0, 2.0]),
            (512, [6.0, 6.0], [2.0, 2.0]),
        )
        for offset, rates in ((0, at), (1, above))
    ]
    assert gemm._ratio(points, "bf16", 1) == 2.5
