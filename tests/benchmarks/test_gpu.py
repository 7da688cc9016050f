"""`python -m benchmarks gpu` up to the GPU: the same code at toy size on CPU tensors, its kernels
interpreted."""

import json
import os
import re
import time
from collections.abc import Callable
from contextlib import nullcontext
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
from tests.engine.triton_interpreter import add_in_fp32, interpret

SHAPE = kernels.KernelShape(s=5, b=1, n=2, d=8, v=40)


def test_without_a_gpu_each_item_says_so(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("torch.version.cuda", None)
    for gpus, sentence in (
        ([], "there is no NVIDIA GPU here"),
        ([{"name": "a GPU"}], "is built without CUDA"),
    ):
        monkeypatch.setattr(gpu, "list_gpus", lambda gpus=gpus: gpus)
        out = tmp_path / str(len(gpus))
        asked = ("--items", "all", "--deadline", "560", "--out", out, "--json", tmp_path / "a")
        done = command(main, "benchmarks", "gpu", *asked, ends=4)
        remedy = "run this where a torch with CUDA has an NVIDIA GPU"
        assert done.error.endswith(f"{sentence}: nothing was measured; {remedy}")
        lines = [json.loads(line) for line in done.out.splitlines()]
        assert [line["item"] for line in lines] == list(ITEMS)
        assert all(line["missing"].endswith(sentence) for line in lines)
        assert (out / "gpu.jsonl").read_text() == done.out
    assert not (tmp_path / "a").exists()
    assert (
        "no item is called 'gemm'; there are: versions, 2.5b"
        in command(main, "benchmarks", "gpu", "--items", "2.5b,gemm", ends=2).error
    )


def test_a_dry_run_prints_the_order_and_its_seconds(command: Command) -> None:
    lines = command(
        main, "benchmarks", "gpu", "--items", "all", "--deadline", "560", "--dry-run", ends=0
    ).out.splitlines()
    assert [line.partition(":")[0] for line in lines] == list(ITEMS)
    assert lines[1] == "2.5b: 50 s, 65 s in all"
    until = {line.partition(":")[0]: float(line.split(", ")[1].split()[0]) for line in lines}
    assert until["mlm-train"] == 565
    assert list(ITEMS)[-4:] == [name for name in ITEMS if name.startswith("exact-")]


def test_spans_of_kernels_are_busy_or_idle() -> None:
    assert gpu.busy_and_idle([]) == (0, 0)
    assert gpu.busy_and_idle([(7, 9), (1, 3), (2, 5), (4, 4.5), (9, 10)]) == (7, 2)
    assert gpu.busy_and_idle([(1, 1), (4, 6)]) == (2, 3)


@pytest.fixture
def at_toy_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every stage in this process, on CPU tensors, at sizes for it."""

    def here(
        worker: gpu.Worker, seconds: float, measure: Callable[..., Any], *arguments: Any
    ) -> Any:
        try:
            return measure(*arguments)
        except Exception as error:
            raise UserError(f"{type(error).__name__}: {error}") from error

    interpret(monkeypatch)
    add_in_fp32(monkeypatch)
    sizes = {
        "REPEATS": 1,
        "FEW": 1,
        "WARM_UP": 0,
        "GEMM_WIDTH": 64,
        "COPIED_BYTES": 1 << 16,
        "WIDTHS": (16,),
    }
    for name, number in sizes.items():
        monkeypatch.setattr(kernels, name, number)
    toy = dict.fromkeys((gpu.KernelShape(), gpu.SMALL, gpu.LONG), SHAPE)
    for name, (seconds, measure) in ITEMS.items():
        if isinstance(measure, partial):
            given = [
                toy.get(each, each) if isinstance(each, kernels.KernelShape) else each
                for each in measure.args
            ]
            monkeypatch.setitem(ITEMS, name, (seconds, partial(measure.func, *given)))
    monkeypatch.setitem(ITEMS, "mlm-train", (60, lambda: 1 / 0))
    monkeypatch.setattr("torch.compile", lambda function: function)
    monkeypatch.setattr(gpu.Worker, "answer", here)
    monkeypatch.setattr(gpu, "list_gpus", lambda: [{"name": "a GPU", "memory_bytes": 2**40}])
    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.setattr("torch.cuda.Stream", lambda: None)
    monkeypatch.setattr("torch.cuda.stream", nullcontext)
    model = small_size().model
    monkeypatch.setattr(gpu, "full_size", lambda *_: gpu.size_of(model, 4, "bf16", 3, 1))
    monkeypatch.setattr(gpu, "EAGER", OurLayout(OURS, microbatches=2))
    monkeypatch.setattr(gpu, "CONTENDERS", (OurLayout(OURS, is_captured=True), Peer("nanoGPT")))
    gpu.built.cache_clear()


@pytest.mark.usefixtures("at_toy_size")
def test_each_item_leaves_lines_and_a_record(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In their order; one that fails loses nothing else, and is alone tried again. Only a GPU
    captures."""
    from mlm_repro.engine.kernels.gpu import bias_gelu
    from mlm_repro.engine.kernels.gpu.attention import BACKENDS

    with monkeypatch.context() as patch:
        patch.setattr(bias_gelu, "fused", lambda *_: 1 / 0)
        registry.implementation.cache_clear()
        command(main, "benchmarks", "gpu", "--out", tmp_path, ends=0)
    registry.implementation.cache_clear()
    lines = [json.loads(line) for line in (tmp_path / "gpu.jsonl").read_text().splitlines()]
    assert list(dict.fromkeys(line["item"] for line in lines)) == list(ITEMS)
    failed = {line["item"] for line in lines if "failed" in line}
    assert failed == {
        "2.5b-captured",
        "kernels",
        "mlm-train",
        "exact-bf16",
        "exact-fp16",
        "exact-fp32",
    }
    kernels_checked = [
        line["case"]["name"].split()[0] for line in lines if line["item"] == "exact-fp16-head"
    ]
    assert kernels_checked == ["linear_cross_entropy"]
    command(main, "benchmarks", "gpu", "--out", tmp_path, ends=0)
    again = [json.loads(line) for line in (tmp_path / "gpu.jsonl").read_text().splitlines()][
        len(lines) :
    ]
    assert {line["item"] for line in again} == failed
    assert {line["item"] for line in again if "failed" in line} == {"2.5b-captured", "mlm-train"}
    record = read_benchmark(tmp_path / "gpu.json")
    cases = {case.name: case for case in record.cases}
    assert record.disagreements == []
    backends = {f"without dropout, {each.name}" for each in BACKENDS}
    assert cases["attention"].missing.keys() <= backends, (
        "a CPU has not each of torch's, and has all of ours"
    )
    assert {
        "products of a layer",
        "attention",
        "attention without dropout",
        "attention bfloat16, 5 tokens",
        "add_norm",
        "a copy to the host",
        "timeline, 2.5b, 8 × 8",
        "2.5b, without dropout, 8 × 8",
        "2.5b, 24 × 8",
    } <= {*cases}
    assert all(
        ratio.is_reached
        for name in cases
        if name.endswith(" tokens")
        for ratio in cases[name].ratios
    )
    assert cases["2.5b, 8 × 8"].ratios[0].goal == 0.50
    assert cases["2.5b, without dropout, 8 × 8"].ratios[0].goal == 0.58
    assert [ratio.name for ratio in cases["355m beside peers"].ratios] == [
        "× nanoGPT",
        "utilisation",
    ]
    assert len(cases["products of a layer"].series) == 4 * 4 * 5


@pytest.mark.usefixtures("at_toy_size")
def test_a_wrong_kernel_is_found_and_ends_with_code_3(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlm_repro.engine.kernels.gpu import bias_gelu

    right = bias_gelu.fused
    monkeypatch.setattr(bias_gelu, "fused", lambda x, bias: right(x, bias) * 1.1)
    registry.implementation.cache_clear()
    done = command(main, "benchmarks", "gpu", "--items", "exact-fp16,exact-bf16", ends=3)
    registry.implementation.cache_clear()
    assert set(
        re.findall(r"(\w+) \w+, 5 tokens has [\d.]+ times the reference's error", done.error)
    ) == {"bias_gelu"}


def test_what_comes_after_the_deadline_is_not_begun_and_what_fails_is_ended(tmp_path: Path) -> None:
    record = ItemRecord(tmp_path, deadline=0.1)
    record.attempt("late", 30, list)
    assert json.loads((tmp_path / "gpu.jsonl").read_text())["failed"] == (
        "too little time is left before --deadline, so the item was not begun: give --deadline"
        " more seconds"
    )
    with pytest.raises(
        UserError, match=r"^nothing was measured: the line of each item above has the reason$"
    ):
        _ = record.result
    assert record.worker.answer(600, abs, -3) == 3
    process = record.worker.answer(600, os.getpid)
    assert record.worker.answer(600, os.getpid) == process, "a model is built once"
    for sentence, seconds, function, argument in (
        ("ValueError: invalid literal", 600, int, "no number"),
        ("the item took longer than 3 seconds", 3, time.sleep, 60),
        ("the process that measures ended with code 7", 600, os._exit, 7),
    ):
        with pytest.raises(UserError, match=f"^{sentence}"):
            record.worker.answer(seconds, function, argument)
    assert record.worker.answer(600, os.getpid) != process
    record.worker.end()


def test_the_program_is_stopped_resumed_and_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """The item of `mlm-train` itself, with the processor in the place of the GPU."""
    small = (
        " model.hidden_size=32 model.seq_length=32 model.num_layers=1 train.precision=fp32"
        " train.iterations=600"
    )
    monkeypatch.setattr(gpu, "TRIED", gpu.TRIED + small)
    case, *wrong = gpu.try_program()
    assert wrong == []
    assert isinstance(case, Case)
    assert {name: len(losses) for name, losses in case.losses.items()} == {"cpu": 600, "cuda": 600}
