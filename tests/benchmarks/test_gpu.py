"""`python -m benchmarks gpu` up to the GPU: the same code at toy size on CPU tensors, its kernels interpreted."""

import json
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu, kernels
from benchmarks.__main__ import main
from benchmarks.contenders import OurLayout, Peer
from benchmarks.gpu import OURS, STAGES, FullModel, StagedRun
from engine.kernels import registry
from experiments.benchmark import read_benchmark
from lineage.errors import UserError
from tests.benchmarks.test_train import small_size
from tests.commands import Command
from tests.engine.triton_interpreter import interpret

SHAPE = kernels.KernelShape(s=5, b=1, n=2, d=8, v=40)


def test_without_a_gpu_one_sentence_says_so(command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("torch.version.cuda", None)
    for gpus, sentence in (([], "there is no NVIDIA GPU here"), ([{"name": "a GPU"}], "is built without CUDA")):
        monkeypatch.setattr(gpu, "list_gpus", lambda gpus=gpus: gpus)
        out = tmp_path / str(len(gpus))
        done = command(main, "benchmarks", "gpu", "--stage", "peers", "--out", out, "--json", tmp_path / "a", ends=4)
        assert done.error.endswith(f"{sentence}: nothing was measured")
        line = json.loads(done.out)
        assert (line["stage"], line["item"]) == ("peers", "hardware")
        assert (out / "gpu.jsonl").read_text() == done.out
    assert not (tmp_path / "a").exists()


@pytest.fixture
def at_toy_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every stage in this process, on CPU tensors, at sizes for it."""

    def here(seconds: float, function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except Exception as error:
            raise UserError(f"{type(error).__name__}: {error}") from error

    interpret(monkeypatch)
    for name, number in (("REPEATS", 1), ("WARM_UP", 0), ("GEMM_WIDTH", 64), ("COPIED_BYTES", 1 << 16)):
        monkeypatch.setattr(kernels, name, number)
    monkeypatch.setattr(gpu, "KernelShape", lambda **_: SHAPE)
    monkeypatch.setattr("torch.compile", lambda function: function)
    monkeypatch.setattr(gpu, "in_new_process", here)
    monkeypatch.setattr(gpu, "list_gpus", lambda: [{"name": "a GPU", "memory_bytes": 2**40}])
    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.setattr(gpu, "full_size", lambda *_: small_size(precision="bf16"))
    monkeypatch.setattr(gpu, "read_size", small_size)
    monkeypatch.setattr(gpu, "MODELS", (FullModel("355m", 4, 0.45), FullModel("2.5b", 4, 0.50)))
    monkeypatch.setattr(gpu, "MICROBATCHES", (4,))
    monkeypatch.setattr(gpu, "ACCUMULATIONS", (1, 2))
    monkeypatch.setattr(gpu, "CONTENDERS", (OurLayout(OURS), Peer("nanoGPT")))


@pytest.mark.usefixtures("at_toy_size")
@pytest.mark.timeout(300)
def test_every_stage_leaves_lines_and_one_record(command: Command, tmp_path: Path) -> None:
    from engine.kernels.gpu import attention

    chosen = attention.tiles_for
    for name in STAGES:
        command(main, "benchmarks", "gpu", "--stage", name, "--out", tmp_path, ends=0)
    assert attention.tiles_for is chosen, "the tiles that were tried last stay"
    items = {line["item"]: line for line in map(json.loads, (tmp_path / "gpu.jsonl").read_text().splitlines())}
    assert {item for item, line in items.items() if "failed" in line} == {"tiny, cuda"}
    assert {"limits", "kernels", "355m", "2.5b, 4 × 2", "2.5b, nanoGPT, round 2"} <= items.keys()
    record = read_benchmark(tmp_path / "gpu.json")
    cases = {case.name: case for case in record.cases}
    assert record.disagreements == []
    assert {"limits", "products of a layer", "attention bfloat16", "attention's tiles", "2.5b"} <= cases.keys()
    assert all(
        ratio.is_reached for name in cases if name.endswith(("bfloat16", "float32")) for ratio in cases[name].ratios
    )
    assert cases["2.5b, best, 20 iterations"].ratios[0].goal == gpu.BEST_UTILISATION
    assert [ratio.name for ratio in cases["2.5b beside peers"].ratios] == ["× nanoGPT", "utilisation"]
    spent = {each.contender: each.samples[0] for each in cases["attention"].series}
    assert cases["attention"].ratios[0].value == pytest.approx(spent["floor"] / spent["ours"], rel=1e-3)


@pytest.mark.usefixtures("at_toy_size")
def test_a_kernel_that_is_wrong_is_found_and_ends_with_code_3(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    from engine.kernels.gpu import bias_gelu

    right = bias_gelu.fused
    monkeypatch.setattr(bias_gelu, "fused", lambda x, bias: right(x, bias) * 1.1)
    registry.implementation.cache_clear()
    done = command(main, "benchmarks", "gpu", "--stage", "first", ends=3)
    registry.implementation.cache_clear()
    assert set(re.findall(r"(\w+) \w+ has [\d.]+ times the reference's error", done.error)) == {"bias_gelu"}


def test_what_comes_after_the_deadline_is_not_begun_and_what_fails_is_ended(tmp_path: Path) -> None:
    run = StagedRun(tmp_path, deadline=0.1)
    assert run.attempt("late", 30, abs, -3) is None
    assert json.loads((tmp_path / "gpu.jsonl").read_text())["failed"] == "the deadline came first"
    with pytest.raises(UserError, match=r"^nothing was measured: late: the deadline came first$"):
        _ = run.result
    assert gpu.in_new_process(60, abs, -3) == 3
    with pytest.raises(UserError, match=r"^ValueError: invalid literal"):
        gpu.in_new_process(60, int, "no number")
    with pytest.raises(UserError, match=r"^it took longer than 3 seconds$"):
        gpu.in_new_process(3, time.sleep, 60)
    with pytest.raises(UserError, match=r"^its process ended with code 7$"):
        gpu.in_new_process(60, os._exit, 7)
