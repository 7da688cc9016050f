"""`python -m benchmarks gpu` up to the GPU: the same code at toy size on CPU tensors, its kernels interpreted."""

import json
import os
import re
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu, kernels
from benchmarks.__main__ import main
from benchmarks.contenders import OurLayout, Peer
from benchmarks.gpu import ITEMS, OURS, ItemRecord
from mlm_repro.engine.kernels import registry
from mlm_repro.experiments.benchmark import Case, read_benchmark
from mlm_repro.lineage.errors import UserError
from tests.benchmarks.test_train import small_size
from tests.commands import Command
from tests.engine.triton_interpreter import interpret

SHAPE = kernels.KernelShape(s=5, b=1, n=2, d=8, v=40)


def test_without_a_gpu_each_item_says_so(command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("torch.version.cuda", None)
    for gpus, sentence in (([], "there is no NVIDIA GPU here"), ([{"name": "a GPU"}], "is built without CUDA")):
        monkeypatch.setattr(gpu, "list_gpus", lambda gpus=gpus: gpus)
        out = tmp_path / str(len(gpus))
        asked = ("--items", "all", "--deadline", "560", "--out", out, "--json", tmp_path / "a")
        done = command(main, "benchmarks", "gpu", *asked, ends=4)
        assert done.error.endswith(f"{sentence}: nothing was measured")
        lines = [json.loads(line) for line in done.out.splitlines()]
        assert [line["item"] for line in lines] == list(ITEMS)
        assert all(line["missing"].endswith(sentence) for line in lines)
        assert (out / "gpu.jsonl").read_text() == done.out
    assert not (tmp_path / "a").exists()
    assert "no item is called 'gemm'; there are: versions, compile" in command(
        main, "benchmarks", "gpu", "--items", "tiny,gemm", ends=2
    ).error  # fmt: skip


@pytest.fixture
def at_toy_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every stage in this process, on CPU tensors, at sizes for it."""

    def here(seconds: float, measure: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return measure(*arguments)
        except Exception as error:
            raise UserError(f"{type(error).__name__}: {error}") from error

    interpret(monkeypatch)
    for name, number in (("REPEATS", 1), ("WARM_UP", 0), ("GEMM_WIDTH", 64), ("COPIED_BYTES", 1 << 16)):
        monkeypatch.setattr(kernels, name, number)
    toy = dict.fromkeys((gpu.KernelShape(), gpu.SMALL, gpu.LONG), SHAPE)
    for name, (seconds, measure) in ITEMS.items():
        if isinstance(measure, partial):
            given = [toy.get(each, each) if isinstance(each, kernels.KernelShape) else each for each in measure.args]
            monkeypatch.setitem(ITEMS, name, (seconds, partial(measure.func, *given)))
    monkeypatch.setitem(ITEMS, "mlm-train", (60, lambda: 1 / 0))
    monkeypatch.setattr(gpu, "KernelShape", lambda: SHAPE)
    monkeypatch.setattr("torch.compile", lambda function: function)
    monkeypatch.setattr(gpu, "in_new_process", here)
    monkeypatch.setattr(gpu, "list_gpus", lambda: [{"name": "a GPU", "memory_bytes": 2**40}])
    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.setattr("os.cpu_count", lambda: 1)  # the interpreter is for one thread
    model = small_size().model
    monkeypatch.setattr(gpu, "full_size", lambda name, batch, *_: gpu.size_of(model, batch, "bf16", 3, 1))
    monkeypatch.setattr(gpu, "read_size", small_size)
    monkeypatch.setattr(gpu, "CONTENDERS", (OurLayout(OURS), Peer("nanoGPT")))


@pytest.mark.usefixtures("at_toy_size")
@pytest.mark.timeout(300)
def test_each_item_leaves_lines_and_a_record(command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In the order of their worth; one that fails loses nothing else, and is alone tried again."""
    from mlm_repro.engine.kernels.gpu import bias_gelu

    with monkeypatch.context() as patch:
        patch.setattr(bias_gelu, "fused", lambda *_: 1 / 0)
        registry.implementation.cache_clear()
        command(main, "benchmarks", "gpu", "--out", tmp_path, ends=0)
    registry.implementation.cache_clear()
    lines = [json.loads(line) for line in (tmp_path / "gpu.jsonl").read_text().splitlines()]
    assert list(dict.fromkeys(line["item"] for line in lines)) == list(ITEMS)
    failed = {line["item"] for line in lines if "failed" in line}
    assert failed == {"compile", "tiny", "mlm-train", "exact-bf16", "exact-fp16", "exact-fp32", "bias_gelu"}
    kernels_checked = [line["case"]["name"].split()[0] for line in lines if line["item"] == "exact-fp16-head"]
    assert kernels_checked == ["linear_cross_entropy"]
    command(main, "benchmarks", "gpu", "--out", tmp_path, ends=0)
    again = [json.loads(line) for line in (tmp_path / "gpu.jsonl").read_text().splitlines()][len(lines) :]
    assert {line["item"] for line in again} == failed
    assert {line["item"] for line in again if "failed" in line} == {"tiny", "mlm-train"}, "these need a GPU"
    record = read_benchmark(tmp_path / "gpu.json")
    cases = {case.name: case for case in record.cases}
    assert record.disagreements == []
    assert {
        "limits", "products of a layer", "attention bfloat16, 5 tokens", "attention's layout, bfloat16", "2.5b, 8 × 1",
    } <= {*cases}  # fmt: skip
    assert all(ratio.is_reached for name in cases if name.endswith(" tokens") for ratio in cases[name].ratios)
    assert cases["2.5b, 8 × 8"].ratios[0].goal == gpu.BEST_UTILISATION
    assert [ratio.name for ratio in cases["355m beside peers"].ratios] == ["× nanoGPT", "utilisation"]
    spent = {each.contender: each.samples[0] for each in cases["attention"].series}
    assert cases["attention"].ratios[-1].value == pytest.approx(spent["floor"] / spent["ours"], rel=1e-3)


@pytest.mark.usefixtures("at_toy_size")
def test_a_wrong_kernel_is_found_and_ends_with_code_3(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlm_repro.engine.kernels.gpu import bias_gelu

    right = bias_gelu.fused
    monkeypatch.setattr(bias_gelu, "fused", lambda x, bias: right(x, bias) * 1.1)
    registry.implementation.cache_clear()
    done = command(main, "benchmarks", "gpu", "--items", "exact-fp16,exact-bf16", ends=3)
    registry.implementation.cache_clear()
    assert set(re.findall(r"(\w+) \w+, 5 tokens has [\d.]+ times the reference's error", done.error)) == {"bias_gelu"}


def test_what_comes_after_the_deadline_is_not_begun_and_what_fails_is_ended(tmp_path: Path) -> None:
    record = ItemRecord(tmp_path, deadline=0.1)
    record.attempt("late", 30, list)
    assert json.loads((tmp_path / "gpu.jsonl").read_text())["failed"] == "the deadline came first"
    with pytest.raises(UserError, match=r"^nothing was measured: every item's line has its reason$"):
        _ = record.result
    assert gpu.in_new_process(60, abs, -3) == 3
    with pytest.raises(UserError, match=r"^ValueError: invalid literal"):
        gpu.in_new_process(60, int, "no number")
    with pytest.raises(UserError, match=r"^it took longer than 3 seconds$"):
        gpu.in_new_process(3, time.sleep, 60)
    with pytest.raises(UserError, match=r"^its process ended with code 7$"):
        gpu.in_new_process(60, os._exit, 7)


@pytest.mark.timeout(300)
def test_the_program_is_stopped_resumed_and_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """The item of `mlm-train` itself, with the processor in the place of the GPU."""
    small = " model.hidden_size=32 model.seq_length=32 model.num_layers=1 train.precision=fp32 train.iterations=600"
    monkeypatch.setattr(gpu, "TRIED", gpu.TRIED + small)
    case, *wrong = gpu.try_program()
    assert wrong == []
    assert isinstance(case, Case)
    assert {name: len(losses) for name, losses in case.losses.items()} == {"cpu": 600, "cuda": 600}
