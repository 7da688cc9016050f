"""Preflight finds what is wrong with a machine, one sentence each."""

import os
from pathlib import Path

import pytest

from mlm_repro.experiments.preflight import Seen, checks, format_checks
from tests.commands import call

GOOD = Seen(
    rank=0, host="a", versions={"torch": "2.13", "commit": "12345678"}, product_is_right=True,
    product_flops_per_second=1e14, sum_is_right=True, bus_bytes_per_second=1e11, free_bytes=10**12,
    written_bytes_per_second=1e9, write_failure="",
)  # fmt: skip


def failures(other: Seen, needed_bytes: int = 0) -> list[str]:
    ranks = [GOOD, GOOD._replace(rank=1), other]
    found = checks(ranks, needed_bytes)
    assert format_checks(found).count("failed ") == sum(bool(one.failure) for one in found)
    return [one.failure for one in found if one.failure]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"versions": {"torch": "2.12", "commit": "12345678"}}, "torch is 2.13 on rank 0 (a) and 2.12 on rank 2 (b)"),
        ({"product_is_right": False}, "a matrix product is wrong on rank 2 (b)"),
        ({"product_flops_per_second": 4e13}, "rank 2 (b) reaches 40 TFLOP/s, under half of the median rank's 100"),
        ({"sum_is_right": False}, "an all-reduce gave a wrong sum on rank 2 (b)"),
        ({"free_bytes": 10**9}, "rank 2 (b) has 1.0 GB of disk for runs, and 2.0 GB are needed"),
        ({"write_failure": "no space"}, "rank 2 (b): no space"),
    ],
)
def test_each_fault_has_its_sentence(change: dict[str, object], words: str) -> None:
    assert failures(GOOD._replace(rank=2, host="b", **change), 2 * 10**9) == [words]  # type: ignore[arg-type]


def test_equal_ranks_pass() -> None:
    assert failures(GOOD._replace(rank=2, product_flops_per_second=6e13)) == []


def test_one_rank_has_nothing_to_reduce() -> None:
    assert not any(one.failure for one in checks([GOOD], 0))


def test_the_command_looks_at_this_machine(tmp_path: Path) -> None:
    machine = {**os.environ, "OMP_NUM_THREADS": "1"}
    runs = tmp_path / "runs"
    done = call(
        machine, "mlm-experiment", "preflight", "--runs", runs, "--ranks", "2", "--needed-gb", "1e9", "--quiet", ends=4
    )
    assert "GB of disk for runs, and 1000000000.0 GB are needed" in done.err
    assert done.err.count("\n") == 1
    assert done.out.count("\n") == 6
    assert "good    all-reduce       2 ranks" in done.out
    assert "good    matrix products  equal to what they must be" in done.out
    assert "failed  disk space" in done.out
    assert list(runs.iterdir()) == []
