"""The GPU path without a GPU: kernels compiled for GPUs, and a training step in which nothing waits for one."""

import multiprocessing
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from pathlib import Path

import pytest

from experiments.bench.benchmarks.gpu_compiled import MEASURES, compile_case
from lineage.benchmark import Benchmark, Case, read_benchmark

ROOT = Path(__file__).parents[2]
KEPT = sorted((ROOT / "results" / "bench").glob("gpu-compiled*.json"))
SAMPLE = [(90, "bfloat16", 96), (80, "float16", 128), (100, "float32", 160)]
"""Together every kernel, target and number format; `mlm-bench gpu-compiled` compiles all."""
ALLOWED_GROWTH = 1.1
GROWING = ("registers", "stack", "shared", "instructions", "in loop")
KERNELS = {
    "attention draw", "attention forward", "attention inner", "attention to_query", "attention to_key_value",
    "bias_gelu bias_gelu", "bias_gelu bias_gelu_gradient", "bias_dropout_add bias_dropout_add",
    "bias_dropout_add gradient", "layer_norm normalize", "layer_norm gradient", "masked_softmax softmax",
    "masked_softmax gradient", "linear_cross_entropy log_sum", "divided cross_entropy softmax_gradient",
    "dropout_bits fill", "adamw adam",
}  # fmt: skip


def counts(case: Case) -> dict[tuple[str, str], float]:
    return {(each.contender, each.measure): each.samples[0] for each in case.series}


@cache
def compiled() -> dict[str, Case]:
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(2, mp_context=spawn, max_tasks_per_child=1) as pool:
        return {case.name: case for case in pool.map(compile_case, *zip(*SAMPLE, strict=True))}


@pytest.fixture
def cases() -> dict[str, Case]:
    pytest.importorskip("triton")
    return compiled()


def grown(now: Case, kept: Case) -> list[tuple[str, str]]:
    """Kernels and measures that take more than a tenth more than they did."""
    before = counts(kept)
    return [key for key, value in counts(now).items() if key[1] in GROWING and value > before[key] * ALLOWED_GROWTH]


@pytest.mark.timeout(400)
def test_every_kernel_fits_and_attention_uses_tensor_cores(cases: dict[str, Case]) -> None:
    assert {name for case in cases.values() for name, _ in counts(case)} >= KERNELS
    for case in cases.values():
        assert {each.measure for each in case.series} == {name.replace("_", " ") for name in MEASURES}
        for ratio in case.ratios:
            assert ratio.is_reached, (case.name, ratio)
    assert len(cases["sm_90 bfloat16 head dim 96"].ratios) == 3


def test_what_the_kernels_take_has_not_grown(cases: dict[str, Case]) -> None:
    import triton

    records = {str(kept.setting["triton"]): kept for kept in map(read_benchmark, KEPT)}
    assert len(records) > 1, "kept of the newest Triton and of the one that GPU images carry"
    same = records.get(triton.__version__)
    if same is None:
        pytest.skip(f"there is no record of Triton {triton.__version__}")
    kept = {case.name: case for case in same.cases}
    for name, case in cases.items():
        assert grown(case, kept[name]) == [], name
    name, case = next(iter(cases.items()))
    series = [each.model_copy(update={"samples": [each.samples[0] * 1.2]}) for each in case.series]
    assert grown(case.model_copy(update={"series": series}), kept[name])


@pytest.mark.parametrize("path", KEPT, ids=lambda path: path.stem)
def test_the_kept_record_covers_the_matrix(path: Path) -> None:
    kept: Benchmark = read_benchmark(path)
    assert len({case.name for case in kept.cases}) == 45
    for case in kept.cases:
        shared, *others = case.ratios
        assert shared.is_reached, case.name
        assert len(others) == (0 if "float32" in case.name else 2)
        assert all(each.value > 0.75 for each in others)


def test_a_training_step_waits_for_a_gpu_at_one_place() -> None:
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "tests.engine.valueless"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.returncode == 0, done.stderr
    asked, launched = map(int, done.stdout.split())
    assert asked == 2
    assert launched >= 12
    planted = subprocess.run([*command, "planted"], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert planted.returncode == 1
    assert "meta tensor" in planted.stderr
