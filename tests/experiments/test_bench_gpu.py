"""`mlm-bench gpu` up to the GPU: the same code at toy size on CPU tensors, its kernels interpreted."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.config import ParallelConfig
from experiments.bench.benchmarks import gpu
from experiments.bench.benchmarks.gpu import DROPOUT, MODELS, OURS, Model, contenders
from experiments.bench.benchmarks.gpu import summarize as summarize_model
from experiments.bench.cli import main
from experiments.bench.contender import BenchSize, Contender, read_size
from experiments.bench.contenders import kernels
from experiments.bench.contenders.ours import build_without_optimizer
from experiments.bench.timing import Timed, ratio, series, time_contender
from lineage.benchmark import Case, Ratio
from lineage.errors import UserError
from reports.benchmarks import load_benchmarks
from tests.commands import Command
from tests.engine.triton_interpreter import interpret

SMALL = {"num_layers": 1, "hidden_size": 32, "num_heads": 2, "seq_length": 32, "padded_vocab_size": 256}
LIMITS = {"copied_bytes_per_second": 1e9, "operations_per_second": 1e9}


def small_size() -> BenchSize:
    tiny = read_size("tiny").in_precision("bf16")
    return replace(tiny, model=tiny.model.model_copy(update=SMALL | {"vocab_size": 256}), warm_up=1)


def test_without_a_gpu_one_sentence_says_so(command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("torch.version.cuda", None)
    for gpus, sentence in (([], "there is no NVIDIA GPU here"), ([{"name": "a GPU"}], "is built without CUDA")):
        monkeypatch.setattr(gpu, "list_gpus", lambda found=gpus: found)
        done = command(main, "mlm-bench", "gpu", "--json", tmp_path / "gpu.json")
        assert (done.code, done.out) == (4, "")
        assert done.error.endswith(f"{sentence}: nothing was measured")
        assert done.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_kernels_are_checked_and_held_against_their_floor(monkeypatch: pytest.MonkeyPatch) -> None:
    interpret(monkeypatch)
    monkeypatch.setattr(kernels, "REPEATS", 1)
    monkeypatch.setattr(kernels, "WARM_UP", 0)
    shape = kernels.Shape(s=5, b=1, n=2, d=8, v=40)
    exactness = kernels.check_kernels(shape)
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


def test_a_kernel_that_is_wrong_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    interpret(monkeypatch)
    from engine.kernels.gpu import bias_gelu

    right = bias_gelu.fused
    monkeypatch.setattr(bias_gelu, "fused", lambda x, bias: right(x, bias) * 1.1)
    from engine.kernels import registry

    registry.implementation.cache_clear()
    cases = kernels.check_kernels(kernels.Shape(s=3, b=1, n=1, d=8, v=40))
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


def test_the_whole_result_is_printed_kept_and_shown_on_the_page(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """From planted measurements; each is made in a process of its own on a GPU."""
    peer = contenders()[1].name
    error = Ratio(name="largest error ÷ the reference's", value=3.0, goal=2, less_is_better=True)
    kernel = Case(
        name="dropout", series=[series("ours", "time", "ms", 2.0)], ratios=[ratio("floor ÷ ours", [0.9], [1.0], 0.85)]
    )
    planted: dict[str, Any] = {
        "measure_limits": LIMITS,
        "check_kernels": [Case(name="dropout bfloat16", ratios=[error])],
        "measure_kernels": [kernel],
        "time_contender": Timed([1.0], [3.0], 10),
    }

    def measured(name: str, function: Any, *arguments: Any) -> Any:
        if name == peer:
            raise UserError(f"{name}: OutOfMemoryError")
        return planted[function.__name__]

    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setattr(gpu, "list_gpus", lambda: [{"name": "a GPU"}])
    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.setattr(gpu, "in_new_process", measured)
    done = command(main, "mlm-bench", "gpu", "--rounds", 1, "--json", tmp_path / "gpu.json", ends=3)
    assert done.error == "error: dropout bfloat16 has 3.0 times the reference's error"
    assert "8.3b, forward and backward" in done.out
    found = load_benchmarks(tmp_path)
    assert found.problems == ()
    (exhibit,) = found.exhibits
    rows = [tuple(row) for table in exhibit.tables for row in table.rows]
    assert ("dropout", "floor ÷ ours", "0.90", "—", "at least 0.85") in rows
    assert {row for row in rows if peer in row} == {(model.name, peer, f"{peer}: OutOfMemoryError") for model in MODELS}
    assert exhibit.draw is not None
    assert "dropout bfloat16 has 3.0 times the reference's error" in exhibit.caption


def test_a_process_that_fails_is_named() -> None:
    with pytest.raises(UserError, match=r"^limits: ValueError: "):
        gpu.in_new_process("limits", int, "no number")
