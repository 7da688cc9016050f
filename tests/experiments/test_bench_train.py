"""`mlm-bench train`, `kernels` and `compare`: figures are what was measured, and a ratio that fell is flagged."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.costs import flops_per_token
from engine.kernels.registry import KERNELS
from experiments.bench import growth
from experiments.bench import kernels as bench_kernels
from experiments.bench.cli import app
from experiments.bench.compare import compare
from experiments.bench.sizes import read_size
from experiments.bench.table_train import show_train
from experiments.bench.timing import Timed
from experiments.bench.train import (
    CASES,
    MEASURES,
    OURS,
    STOCK,
    TUNED,
    Case,
    Measured,
    contenders,
    disagreements,
    gemm_gflops,
    measure_steps,
    summarize,
)
from experiments.bench.train_layouts import pipeline_ideal, summarize_layouts
from lineage.command import run_command
from lineage.errors import BadInput

CASE = Case("tiny", "fp32", 0.0, to_stock=2.0, to_limit=0.5, memory_to_stock=0.5)
SIZE = read_size("tiny")


def measured(seconds: float, loss: float = 1.0, peak: int = 100) -> Measured:
    return Measured([seconds, seconds, 100 * seconds], [loss, loss], peak)


def test_a_row_holds_ratios_goals_and_whether_they_are_reached() -> None:
    flops = flops_per_token(SIZE.model, causal=True) * SIZE.tokens
    found = {OURS: [measured(1.0)], STOCK: [measured(3.0, peak=150)], TUNED: [measured(0.5)]}
    row = summarize(CASE, SIZE, found, [2 * flops / 1e9])
    assert row["each_round"]["to_stock"] == [3.0]
    expected = {"to_stock": 3.0, "to_tuned": 0.5, "to_limit": 0.5, "memory_to_stock": 0.6667}
    assert row["ratios"] == pytest.approx(expected)
    assert row["goals"] == {"to_stock": 2.0, "to_limit": 0.5, "memory_to_stock": 0.5}
    assert row["reached"]["to_stock"]
    assert not row["reached"]["memory_to_stock"]
    assert row["disagreements"] == []


def test_losses_that_differ_are_named() -> None:
    found = {OURS: [measured(1.0)], STOCK: [measured(1.0, loss=1.01)], TUNED: [measured(1.0, loss=float("nan"))]}
    assert [sentence.split("losses of ")[1].split(" differ")[0] for sentence in disagreements(CASE, found)] == [
        STOCK,
        TUNED,
    ]
    assert len(disagreements(replace(CASE, dropout=0.1), found)) == 1  # with masks of their own only the NaN
    assert len(disagreements(replace(CASE, precision="bf16"), found)) == 1


def test_all_contenders_compute_the_same() -> None:
    """Each trains in this process a model of one small layer, in both number formats."""
    small = {"num_layers": 1, "hidden_size": 32, "num_heads": 2, "seq_length": 32, "padded_vocab_size": 256}
    for precision in ("fp32", "bf16"):
        size = SIZE.in_precision(precision)
        size = replace(size, model=SIZE.model.model_copy(update=small | {"vocab_size": 256}), warm_up=2)
        case = Case("tiny", precision, 0.0)
        found = {each.name: [measure_steps(each, size, 0.0)] for each in contenders()}
        assert disagreements(case, found) == []
        assert all(
            one[0].peak_bytes >= 0 and len(one[0].cpu_seconds) == size.train.iterations - 2 for one in found.values()
        )
    assert gemm_gflops("fp32") > 1


def test_every_case_of_the_table_has_a_goal() -> None:
    assert len({case.name for case in CASES}) == len(CASES)
    assert {read_size(case.size).name for case in CASES} == {"small", "tiny", "twin"}
    assert all(any((case.to_stock, case.to_tuned, case.to_limit)) for case in CASES)


def test_layouts_are_held_to_one_process_and_to_its_losses() -> None:
    found = {
        "serial": [Timed([2.0], [3.0, 2.0])],
        "tp2": [Timed([1.0], [3.0, 2.0])],
        "dp2": [Timed([1.6], [3.0, 2.1])],
        "pp2": [Timed([2.0 / pipeline_ideal(SIZE.model, 2)], [3.0, 2.0])],
    }
    row = summarize_layouts(SIZE, found)
    assert row["ratios"] == {"tp2": 2.0, "dp2": 1.25, "pp2": 1.0}
    assert row["reached"] == {"tp2": True, "dp2": False, "pp2": True}
    assert row["disagreements"] == ["losses of dp2 differ from those of serial by up to 0.1"]


def test_the_result_shows_every_goal_met_or_not(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    found = {OURS: [measured(1.0)], STOCK: [measured(3.0, peak=150)], TUNED: [measured(0.5)]}
    timed = {name: [Timed([1.0], [3.0])] for name in ("serial", "tp2", "dp2", "pp2")}
    row, layouts = summarize(CASE, SIZE, found, [1.0]), summarize_layouts(SIZE, timed)
    result = {"benchmark": "train", "rounds": 1, "measures": MEASURES, "cases": [row], "layouts": layouts, "notes": []}
    show_train(result | {"where_time_went": {"case": "x", "shares": {}}, "copy_gigabytes_per_second": 1.0})
    lines = [line.split("│") for line in capsys.readouterr().out.splitlines() if "│" in line]
    met = {cells[2].strip(): cells[-2].strip() for cells in lines if len(cells) == 8}
    assert met["× stock nanoGPT"] == "met"
    assert met["of stock nanoGPT's memory"] == "not met"
    assert met.keys() >= {MEASURES[name] for name in layouts["goals"]}


def test_growth_is_measured_beside_the_closed_form() -> None:
    base = growth.points(1)
    assert {point.axis for point in base if growth._is_base(point)} == {point.axis for point in base}
    assert {point.ranks for point in growth.points(2)} == {1, 2}
    rates = [[1000.0 * point.ranks, 1000.0 * point.ranks] for point in base]
    for point, row in zip(base, growth.summarize(base, rates), strict=True):
        if growth._is_base(point):
            assert row["ratio"] == 1.0
            assert row["predicted"] == 1000.0
        else:
            cost, of_base = (flops_per_token(one, causal=True) for one in (point.size.model, growth._size().model))
            relative = cost / of_base
            assert row["predicted"] == pytest.approx(1000.0 / relative, rel=1e-3)
            assert row["ratio"] == pytest.approx(relative, rel=1e-3)


def test_the_ideal_of_a_pipeline_counts_the_head() -> None:
    assert pipeline_ideal(SIZE.model, 1) == 1.0
    assert 1.0 < pipeline_ideal(SIZE.model, 2) < 1.5
    assert pipeline_ideal(SIZE.model.model_copy(update={"vocab_size": 1}), 2) == pytest.approx(2.0, abs=0.01)


def test_kernels_are_measured_beside_their_references(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"HEADS": 2, "HEAD_DIM": 4, "SEQUENCE": 8, "VOCABULARY": 16}.items():
        monkeypatch.setattr(bench_kernels, name, value)
    monkeypatch.setattr(bench_kernels.shutil, "which", lambda name: None)
    result = bench_kernels.measure_kernels(1)
    assert {row["kernel"].split()[0] for row in result["kernels"]} == {
        name for name, places in KERNELS.items() if "cpu" in places
    } - {"dropout_bits"}
    assert all(row["ratios"]["to_reference"] > 0 for row in result["kernels"])
    assert "no C++ compiler" in result["notes"][1]


def result(path: Path, **ratios: Any) -> Path:
    path.write_text(
        json.dumps({"benchmark": "train", "ratios": {"small": ratios}, "rows": [{"case": "x", "ratio": 2}]})
    )
    return path


@given(old=st.floats(0.1, 10), factor=st.floats(0.1, 2))
def test_a_ratio_that_lost_more_than_a_tenth_is_flagged(
    old: float, factor: float, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("compare")
    rows = compare(
        result(folder / "old.json", speed=old, memory_to_stock=old),
        result(folder / "new.json", speed=old * factor, memory_to_stock=old * factor),
    )
    fell = {row["ratio"]: row["fell"] for row in rows}
    assert fell.keys() == {"ratios / small / speed", "ratios / small / memory_to_stock", "rows / x / ratio"}
    assert not fell["rows / x / ratio"]
    if abs(factor - 0.9) > 1e-9:
        assert fell["ratios / small / speed"] == (factor < 0.9)
    if abs(factor - 1.1) > 1e-9:
        assert fell["ratios / small / memory_to_stock"] == (factor > 1.1)


def test_compare_ends_with_its_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = result(tmp_path / "old.json", speed=2.0), result(tmp_path / "new.json", speed=1.0)
    for arguments, code in (((old, new), 3), ((new, old), 0), ((old, tmp_path / "missing.json"), 2)):
        monkeypatch.setattr("sys.argv", ["mlm-bench", "compare", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            run_command(app)
        assert (ended.value.code or 0) == code
        printed = capsys.readouterr()
        assert "Traceback" not in printed.err
        assert ("fell by more than a tenth: ratios / small / speed" in printed.err) == (code == 3)


@pytest.mark.parametrize("text", ["{", "[]", '{"benchmark": "data"}', '{"benchmark": "train"}'])
def test_what_cannot_be_compared_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text(text)
    with pytest.raises(BadInput):
        compare(result(tmp_path / "old.json", speed=2.0), tmp_path / "other.json")
