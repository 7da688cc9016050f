"""`mlm-bench gpu` up to the GPU: the same code at toy size on CPU tensors, its kernels interpreted."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from experiments.bench import gpu, gpu_kernels, sizes
from experiments.bench.cli import app
from experiments.bench.gpu import CASES, OURS, Case, Measured, contenders, measure_forward_backward, measure_steps
from experiments.bench.gpu import summarize as summarize_case
from experiments.bench.sizes import read_size
from experiments.bench.table_gpu import show_gpu
from lineage.command import run_command
from lineage.errors import UserError
from tests.engine.triton_interpreter import interpret

SMALL = {"num_layers": 1, "hidden_size": 32, "num_heads": 2, "seq_length": 32, "padded_vocab_size": 256}
LIMITS = {"copied_bytes_per_second": 1e9, "operations_per_second": 1e9}


def small_size() -> sizes.BenchSize:
    tiny = read_size("tiny").in_precision("bf16")
    return replace(tiny, model=tiny.model.model_copy(update=SMALL | {"vocab_size": 256}), warm_up=1)


def test_without_a_gpu_one_sentence_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("sys.argv", ["mlm-bench", "gpu", "--json", str(tmp_path / "gpu.json")])
    monkeypatch.setattr("torch.version.cuda", None)
    for gpus, sentence in (([], "there is no NVIDIA GPU here"), ([{"name": "a GPU"}], "is built without CUDA")):
        monkeypatch.setattr(gpu, "list_gpus", lambda found=gpus: found)
        with pytest.raises(SystemExit) as ended:
            run_command(app)
        assert ended.value.code == 4
        printed = capsys.readouterr()
        assert printed.err.startswith("error: ")
        assert printed.err.endswith(f"{sentence}: nothing was measured\n")
        assert printed.err.count("\n") == 1
        assert printed.out == ""
    assert list(tmp_path.iterdir()) == []


def test_kernels_are_checked_and_held_against_their_floor(monkeypatch: pytest.MonkeyPatch) -> None:
    interpret(monkeypatch)
    monkeypatch.setattr(gpu_kernels, "REPEATS", 1)
    monkeypatch.setattr(gpu_kernels, "WARM_UP", 0)
    shape = gpu_kernels.Shape(s=5, b=1, n=2, d=8, v=40)
    exactness = gpu_kernels.check_kernels(shape)
    assert all(row["is_exact"] for row in exactness)
    rows = gpu_kernels.measure_kernels(LIMITS, shape, is_compared=False)
    assert {row["kernel"] for row in rows} == {row["kernel"].split()[0] for row in exactness}
    for row in rows:
        spent = row["milliseconds"]
        assert row["ratios"]["to_floor"] == pytest.approx(spent["floor"] / spent["ours"], rel=0.05, abs=1e-3)
    by_name = {row["kernel"]: row for row in rows}
    assert by_name["bias_gelu"]["milliseconds"]["floor"] == pytest.approx(1000 * 5 * 4 * 5 * 16 * 2 / 1e9)
    assert by_name["linear_cross_entropy"]["bound"] == "products"


def test_a_kernel_that_is_wrong_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    interpret(monkeypatch)
    from engine.kernels.gpu import bias_gelu

    right = bias_gelu.fused
    monkeypatch.setattr(bias_gelu, "fused", lambda x, bias: right(x, bias) * 1.1)
    from engine.kernels import registry

    registry.implementation.cache_clear()
    rows = gpu_kernels.check_kernels(gpu_kernels.Shape(s=3, b=1, n=1, d=8, v=40))
    registry.implementation.cache_clear()
    assert {row["kernel"].split()[0] for row in rows if not row["is_exact"]} == {"bias_gelu"}


def test_all_contenders_train_the_same_model() -> None:
    size = small_size()
    here = [replace(each, is_compiled=False) for each in contenders()]
    found = {each.name: [measure_steps(each, size)] for each in here}
    row = summarize_case(CASES[0], size, found, {})
    assert row["disagreements"] == []
    assert set(row["ratios"]) == {f"to_{each.name}" for each in here[1:]} | {"utilisation"}
    largest = measure_forward_backward(size)
    assert largest.losses[0] == pytest.approx(found[OURS][0].losses[0], abs=0.02)
    assert len(largest.seconds) == size.train.iterations - size.warm_up


def test_a_row_holds_ratios_goals_and_who_failed() -> None:
    size = small_size()
    peer = contenders()[1].name
    found = {OURS: [Measured([1.0], [3.0], 10)], peer: [Measured([1.1], [4.0], 20)]}
    row = summarize_case(Case("355m", 32, 0.5), size, found, {"Hugging Face": "out of memory"})
    assert row["ratios"][f"to_{peer}"] == pytest.approx(1.1)
    assert not any(row["reached"].values())
    assert row["disagreements"] == [f"355m: losses of {peer} differ from ours by up to 1"]
    assert row["failures"] == {"Hugging Face": "out of memory"}


def test_the_whole_result_is_printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """From planted measurements; each is made in a process of its own on a GPU."""
    peer = contenders()[1].name
    kernel = {"kernel": "dropout", "bound": "memory", "milliseconds": {"ours": 2.0}, "ratios": {"to_floor": 0.9}}
    planted: dict[str, Any] = {
        "measure_limits": LIMITS,
        "check_kernels": [{"kernel": "dropout bfloat16", "error_ratio": 3.0, "is_exact": False}],
        "measure_kernels": [kernel | {"goals": {"to_floor": 0.85}, "reached": {"to_floor": True}}],
        "measure_steps": Measured([1.0], [3.0], 10),
        "measure_forward_backward": Measured([1.0], [3.0], 10),
    }

    def measured(name: str, function: Any, *arguments: Any) -> Any:
        if name == peer:
            raise UserError(f"{name}: OutOfMemoryError")
        return planted[function.__name__]

    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setattr(gpu, "list_gpus", lambda: [{"name": "a GPU"}])
    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.setattr(gpu, "in_new_process", measured)
    result = gpu.measure_gpu(1)
    assert result["disagreements"] == ["dropout bfloat16 has 3.0 times the reference's error"]
    assert [row["failures"] for row in result["training"]] == [{peer: f"{peer}: OutOfMemoryError"}] * len(CASES)
    show_gpu(result)
    printed = capsys.readouterr().out
    assert "0.90 (goal 0.85)" in printed
    assert "8.3b" in printed


def test_a_process_that_fails_is_named() -> None:
    with pytest.raises(UserError, match=r"^limits: ValueError: "):
        gpu.in_new_process("limits", int, "no number")
