"""The GPU path without a GPU: kernels compiled for GPUs, and a training step in which nothing waits
for one."""

import csv
import multiprocessing
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
COUNTS, KEPT_TRITON = Path(__file__).with_name("gpu_targets.csv"), "3.9.0"
"""The counts of every kernel, target, number format and head dim, and the Triton that gave them."""
SHARED_BYTES = {80: 166_912, 90: 232_448, 100: 232_448}
"""Shared memory that a program may have, by compute capability (CUDA C++ Programming Guide, Section
20.2)."""
HEADS = {64: 16, 80: 32, 96: 20, 128: 24, 160: 160}
"""Heads by head dim: 355m, a GPT-2 of hidden 2,560, 2.5b, 8.3b, 1008b."""
WHOLE = (96, 160)
"""Head dims at which kernels that know no heads are compiled too: a width of 1,920 and the widest,
25,600."""
DTYPES = ("bfloat16", "float16", "float32")
SAMPLE = [(90, "bfloat16", 96), (80, "float16", 128), (100, "float32", 128)]
"""Together every kernel, target and number format; `python -m tests.engine.test_gpu_targets`
compiles all."""
ALLOWED_GROWTH = 1.1
GROWING = ("registers", "stack", "shared", "instructions", "in_loop")
FIELDS = (*GROWING, "tensor_core")
PRODUCTS = ("attention forward", "attention to_query", "attention to_key_value")
KERNELS = {
    "adamw adamw",
    "attention draw",
    *PRODUCTS,
    "add_norm bias_dropout_add",
    "add_norm gradient",
    "bias_gelu bias_gelu",
    "bias_gelu bias_gelu_gradient",
    "bias_dropout_add bias_dropout_add",
    "bias_dropout_add gradient",
    "masked_softmax softmax",
    "masked_softmax gradient",
    "linear_cross_entropy log_sum",
    "divided cross_entropy softmax_gradient",
}

Counts = dict[str, dict[str, int]]
"""By kernel and field."""


def compile_case(capability: int, dtype: str, head_dim: int) -> Counts:
    """In a process of its own: the kernels for a GPU, in a number format, at a head dim."""
    import torch

    from benchmarks.kernels import KernelShape
    from tests.engine.compiled import compile_kernels

    shape = KernelShape(n=HEADS[head_dim], d=head_dim)
    names = () if head_dim in WHOLE else ("attention",)
    compiled = compile_kernels(capability, getattr(torch, dtype), shape, names)
    return {each.kernel: {name: getattr(each, name) for name in FIELDS} for each in compiled}


def compile_all(
    matrix: list[tuple[int, str, int]], processes: int | None = None
) -> dict[tuple[int, str, int], Counts]:
    """In processes forked from one, which imports what they need once."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as fresh:
        return fresh.submit(compile_forked, matrix, processes).result()


def compile_forked(
    matrix: list[tuple[int, str, int]], processes: int | None
) -> dict[tuple[int, str, int], Counts]:
    import tests.engine.compiled  # noqa: F401

    with multiprocessing.get_context("fork").Pool(processes, maxtasksperchild=1) as pool:
        return dict(zip(matrix, pool.starmap(compile_case, matrix, chunksize=1), strict=True))


@cache
def compiled() -> dict[tuple[int, str, int], Counts]:
    pytest.importorskip("triton")
    return compile_all(SAMPLE, 2)


def kept_counts() -> dict[tuple[int, str, int], Counts]:
    kept: dict[Any, Counts] = {}
    with COUNTS.open(newline="") as file:
        for row in csv.DictReader(file):
            case = int(row["capability"]), row["dtype"], int(row["head_dim"])
            kept.setdefault(case, {})[row["kernel"]] = {name: int(row[name]) for name in FIELDS}
    return kept


def grown(now: Counts, before: Counts) -> list[tuple[str, str]]:
    """Kernels and fields that take more than a tenth more than they did."""
    return [
        (kernel, name)
        for kernel, counts in now.items()
        for name in GROWING
        if counts[name] > before[kernel][name] * ALLOWED_GROWTH
    ]


def misfits(case: tuple[int, str, int], kernels: Counts) -> list[str]:
    """Kernels that spill registers, or have too much shared memory; in 16 bits those of attention
    that use no tensor cores."""
    capability, dtype, _ = case
    large = [
        name
        for name, counts in kernels.items()
        if counts["stack"] or counts["shared"] > SHARED_BYTES[capability]
    ]
    return large + [
        name for name in PRODUCTS if dtype != "float32" and not kernels[name]["tensor_core"]
    ]


def test_every_kernel_fits_without_spills_and_attention_uses_tensor_cores() -> None:
    assert {name for kernels in compiled().values() for name in kernels} >= KERNELS
    for case, kernels in compiled().items():
        assert misfits(case, kernels) == [], case


def test_what_the_kernels_take_has_not_grown() -> None:
    triton = pytest.importorskip("triton")
    if triton.__version__ != KEPT_TRITON:
        pytest.skip(f"the kept counts are of Triton {KEPT_TRITON}")
    kept = kept_counts()
    for case, kernels in compiled().items():
        assert grown(kernels, kept[case]) == [], case
    case, kernels = next(iter(compiled().items()))
    assert grown(
        {
            name: {key: 2 * count for key, count in counts.items()}
            for name, counts in kernels.items()
        },
        kept[case],
    )


def test_the_kept_counts_cover_the_matrix() -> None:
    kept = kept_counts()
    assert kept.keys() == set(product(SHARED_BYTES, DTYPES, HEADS))
    for case, kernels in kept.items():
        assert misfits(case, kernels) == [], case


def test_a_training_step_waits_for_a_gpu_at_one_place() -> None:
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "tests.engine.valueless"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=600)
    assert done.stdout, done.stderr
    asked, launched = map(int, done.stdout.split())
    assert asked == 2
    assert launched >= 9
    assert done.returncode == 1
    assert "in reading" in done.stderr
    assert "meta tensor" in done.stderr


if __name__ == "__main__":
    with COUNTS.open("w", newline="") as out:
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(["capability", "dtype", "head_dim", "kernel", *FIELDS])
        for case, kernels in compile_all(list(product(SHARED_BYTES, DTYPES, HEADS))).items():
            writer.writerows([*case, name, *counts.values()] for name, counts in kernels.items())
