"""`mlm-bench gpu` up to the GPU: the same code at toy size on CPU tensors, its kernels interpreted."""

import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.config import ParallelConfig
from engine.costs import flops_per_token
from engine.run.resolved import read_run_config
from experiments.bench import stage
from experiments.bench.benchmarks import gpu
from experiments.bench.benchmarks.gpu import DROPOUT, MODELS, OURS, STAGES, Model, contenders
from experiments.bench.benchmarks.gpu import summarize as summarize_model
from experiments.bench.cli import main
from experiments.bench.contender import BenchSize, Contender, read_size
from experiments.bench.contenders import kernels
from experiments.bench.contenders.ours import build_without_optimizer
from experiments.bench.timing import Timed, time_contender
from lineage.benchmark import Case, Ratio, read_benchmark
from lineage.errors import UserError
from lineage.shipped import model_file
from reports.benchmarks import load_benchmarks
from tests.commands import Command
from tests.engine.triton_interpreter import interpret

SMALL = {"num_layers": 1, "hidden_size": 32, "num_heads": 2, "seq_length": 32, "padded_vocab_size": 256}
SHAPE = kernels.Shape(s=5, b=1, n=2, d=8, v=40)
LIMITS = {"copied_bytes_per_second": 1e9, "operations_per_second": 1e9}


def small_size(batch: int = 4) -> BenchSize:
    tiny = read_size("tiny").in_precision("bf16")
    model = tiny.model.model_copy(update=SMALL | {"vocab_size": 256})
    train = tiny.train.model_copy(update={"global_batch_size": batch, "microbatch_size": batch, "iterations": 3})
    return replace(tiny, model=model, train=train, warm_up=1)


def test_without_a_gpu_one_sentence_says_so(command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("torch.version.cuda", None)
    for gpus, sentence in (([], "there is no NVIDIA GPU here"), ([{"name": "a GPU"}], "is built without CUDA")):
        monkeypatch.setattr(gpu, "list_gpus", lambda found=gpus: found)
        for name in STAGES:
            out = tmp_path / f"{name}-{len(gpus)}"
            done = command(main, "mlm-bench", "gpu", "--stage", name, "--out", out, "--json", tmp_path / "gpu.json")
            assert done.code == 4
            assert done.error.endswith(f"{sentence}: nothing was measured")
            assert done.err.count("\n") == 1
            line = json.loads(done.out)
            assert (line["stage"], line["item"]) == (name, "hardware")
            assert line["missing"].endswith(sentence)
            assert (out / "gpu.jsonl").read_text() == done.out
    assert not (tmp_path / "gpu.json").exists()


def refusing(*arguments: Any) -> Any:
    raise RuntimeError("no kernel\nand more")


def test_kernels_are_checked_and_held_against_their_floor(monkeypatch: pytest.MonkeyPatch) -> None:
    interpret(monkeypatch)
    monkeypatch.setattr(kernels, "REPEATS", 1)
    monkeypatch.setattr(kernels, "WARM_UP", 0)
    shape = kernels.Shape(s=5, b=1, n=2, d=8, v=40)
    monkeypatch.setattr(kernels, "_torch_attention", refusing)
    exactness = kernels.check_kernels("bfloat16", shape)
    assert all(ratio.is_reached for case in exactness for ratio in case.ratios)
    cases = kernels.measure_kernels(LIMITS, shape, is_compared=False)
    assert {case.name for case in cases} == {case.name.split()[0] for case in exactness}
    floors = {}
    for case in cases:
        spent = {one.contender: one.samples[0] for one in case.series}
        assert case.ratios[0].value == pytest.approx(spent["floor"] / spent["ours"], rel=1e-3)
        floors[case.name] = spent["floor"]
    assert floors["bias_gelu"] == pytest.approx(1000 * 5 * 4 * 5 * 16 * 2 / 1e9)
    assert {case.name: case.setting["bound"] for case in cases}["linear_cross_entropy"] == "products"
    assert {case.name: case.missing for case in cases}["attention"] == {"SDPA with dropout": "RuntimeError: no kernel"}


def test_a_kernel_that_is_wrong_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    interpret(monkeypatch)
    from engine.kernels.gpu import bias_gelu

    right = bias_gelu.fused
    monkeypatch.setattr(bias_gelu, "fused", lambda x, bias: right(x, bias) * 1.1)
    from engine.kernels import registry

    registry.implementation.cache_clear()
    cases = kernels.check_kernels("bfloat16", kernels.Shape(s=3, b=1, n=1, d=8, v=40))
    registry.implementation.cache_clear()
    assert {case.name.split()[0] for case in cases if not case.ratios[0].is_reached} == {"bias_gelu"}


def test_all_contenders_train_the_same_model() -> None:
    size = small_size()
    here = [replace(each, is_compiled=False) for each in contenders()]
    found = {each.name: [time_contender(each, size, DROPOUT)] for each in here}
    case, differing = summarize_model(MODELS[0], size, found, {})
    assert differing == []
    assert {each.name for each in case.ratios} == {f"× {each.name}" for each in here[1:]} | {"utilisation"}
    alone = Contender(OURS, 1, build_without_optimizer, parallel=ParallelConfig(recompute="full"))
    largest = time_contender(alone, size, DROPOUT)
    assert largest.losses[0] == pytest.approx(found[OURS][0].losses[0], abs=0.02)
    assert len(largest.seconds) == size.train.iterations - size.warm_up


def test_a_row_holds_ratios_goals_and_who_failed() -> None:
    size = small_size()
    peer = contenders()[1].name
    found = {OURS: [Timed([1.0], [3.0], 10)], peer: [Timed([1.1], [4.0], 20)]}
    case, differing = summarize_model(Model("355m", 32, 0.5), size, found, {"Hugging Face": "out of memory"})
    assert case.ratios[0].name == f"× {peer}"
    assert case.ratios[0].value == pytest.approx(1.1)
    assert not any(ratio.is_reached for ratio in case.ratios)
    assert differing == [f"355m: losses of {peer} differ from those of ours by up to 1"]
    assert case.missing == {"Hugging Face": "out of memory"}


def here(seconds: float, function: Callable[..., Any], *arguments: Any) -> Any:
    """An item in this process."""
    try:
        return function(*arguments)
    except Exception as error:
        raise UserError(f"{type(error).__name__}: {error}") from error


@pytest.fixture
def at_toy_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every stage in this process, on CPU tensors, at sizes for it."""
    interpret(monkeypatch)
    for name, number in (("REPEATS", 1), ("WARM_UP", 0), ("GEMM_WIDTH", 64), ("COPIED_BYTES", 1 << 16)):
        monkeypatch.setattr(kernels, name, number)
    monkeypatch.setattr(kernels, "Shape", lambda **_: SHAPE)
    monkeypatch.setattr(kernels.torch, "compile", lambda function: function)
    monkeypatch.setattr(stage, "in_new_process", here)
    monkeypatch.setattr(gpu, "list_gpus", lambda: [{"name": "a GPU", "memory_bytes": 2**40}])
    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.setattr(gpu, "size_of", lambda model, iterations=1, warm_up=1: small_size(model.batch))
    monkeypatch.setattr(gpu, "read_size", lambda name: small_size(2).in_precision("fp32"))
    monkeypatch.setattr(gpu, "MODELS", (Model("355m", 2, 0.45), Model("2.5b", 2, 0.50)))
    monkeypatch.setattr(gpu, "MICROBATCHES", (1, 2))
    monkeypatch.setattr(gpu, "ACCUMULATIONS", (1, 2))
    monkeypatch.setattr(gpu, "TEXT_SECONDS", 0.1)
    every = contenders()
    monkeypatch.setattr(gpu, "contenders", lambda: [replace(each, is_compiled=False) for each in every])


def lines(out: Path) -> dict[str, dict[str, Any]]:
    return {line["item"]: line for line in map(json.loads, (out / "gpu.jsonl").read_text().splitlines())}


@pytest.mark.usefixtures("at_toy_size")
@pytest.mark.timeout(300)
def test_every_stage_leaves_lines_and_one_result(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    for name in STAGES:
        done = command(main, "mlm-bench", "gpu", "--stage", name, "--out", tmp_path)
        assert done.code == 0, done.err
    items = lines(tmp_path)
    failed = {item for item, line in items.items() if "failed" in line}
    assert failed == {"tiny, cuda", "compute-sanitizer"}
    assert {"limits", "kernels", "355m", "2.5b", "2.5b, 2 × 2", "8.3b", "355m on text"} <= items.keys()
    found = load_benchmarks(tmp_path)
    assert found.problems == ()
    (exhibit,) = found.exhibits
    measured = {row[0] for table in exhibit.tables for row in table.rows}
    assert {"attention", "attention bfloat16", "limits", "355m beside peers", "2.5b, 1 × 2"} <= measured
    rows = [tuple(row) for table in exhibit.tables for row in table.rows]
    assert any(row[:2] == ("2.5b, best, 20 iterations", "utilisation") and "at least 0.58" in row[4] for row in rows)
    assert any(row[:2] == ("attention", "SDPA with dropout ÷ ours") and "at least 1" in row[4] for row in rows)


@pytest.mark.usefixtures("at_toy_size")
def test_an_error_is_said_on_the_page_and_ends_with_its_code(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    error = Ratio(name="largest error ÷ the reference's", value=3.0, goal=2, less_is_better=True)

    def planted(seconds: float, function: Callable[..., Any], *arguments: Any) -> Any:
        if function is kernels.check_kernels:
            return [Case(name="dropout bfloat16", ratios=[error])]
        raise UserError("no time")

    monkeypatch.setattr(stage, "in_new_process", planted)
    done = command(main, "mlm-bench", "gpu", "--stage", "first", "--json", tmp_path / "gpu.json", ends=3)
    assert done.error == "error: dropout bfloat16 has 3.0 times the reference's error"
    found = load_benchmarks(tmp_path)
    (exhibit,) = found.exhibits
    assert "dropout bfloat16 has 3.0 times the reference's error" in exhibit.caption


def test_what_comes_after_the_deadline_is_not_begun(tmp_path: Path) -> None:
    run = stage.Stage(tmp_path, deadline=6)
    run.begin("first")
    assert run.attempt("begun", 30, abs, -3) == 3
    time.sleep(1.5)
    assert run.attempt("late", 30, abs, -3) is None
    assert lines(tmp_path)["late"]["failed"] == "the deadline came first"
    with pytest.raises(UserError, match=r"^nothing was measured: late: the deadline came first$"):
        _ = run.result


def test_a_process_that_fails_or_takes_too_long_is_ended() -> None:
    with pytest.raises(UserError, match=r"^ValueError: invalid literal"):
        stage.in_new_process(60, int, "no number")
    with pytest.raises(UserError, match=r"^it took longer than 3 seconds$"):
        stage.in_new_process(3, time.sleep, 60)
    with pytest.raises(UserError, match=r"^its process ended with code 7$"):
        stage.in_new_process(60, os._exit, 7)


@pytest.mark.timeout(300)
def test_the_modelled_share_of_the_peak_reaches_its_goal(command: Command, tmp_path: Path) -> None:
    pytest.importorskip("triton")
    done = command(main, "mlm-bench", "gpu", "--model", "--json", tmp_path / "model.json")
    assert done.code == 0
    result = read_benchmark(tmp_path / "model.json")
    goals = {case.name: case.ratios[0] for case in result.cases if case.ratios[0].goal}
    assert [name.split(",")[:2] for name in goals] == [["2.5b", " H100"], ["2.5b", " H200"]]
    assert max(each.value for each in goals.values()) >= 0.52
    for case in result.cases:
        spent = sum(each.samples[0] for each in case.series if each.unit == "ms")
        name, _, split = case.name.split(", ")
        batch, count = map(int, split.split(" × "))
        flops = flops_per_token(read_run_config(model_file(name)).model, causal=True) * 1024 * batch * count
        assert case.ratios[0].value == pytest.approx(flops / (spent / 1000) / 989e12, rel=1e-3)
        assert {each.kind for each in case.series} == {"computed"}
