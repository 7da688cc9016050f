"""`mlm-bench train`, `kernels` and `compare`: figures are what was measured, and a ratio that fell is flagged."""

from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
import typer
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.costs import flops_per_token
from engine.kernels.registry import KERNELS
from experiments.bench.benchmarks import kernels as bench_kernels
from experiments.bench.benchmarks.train import (
    LAYOUTS,
    OURS,
    ROWS,
    SEPARATE,
    STOCK,
    TUNED,
    Row,
    contenders,
    differing,
    pipeline_ideal,
    separate,
    summarize,
    summarize_layouts,
)
from experiments.bench.cli import add_benchmarks, main
from experiments.bench.contender import TOLERANCE, read_size
from experiments.bench.show import compare, show
from experiments.bench.timing import (
    Timed,
    differing_losses,
    gemm_gflops,
    measure_contender,
    shaped_gflops,
    time_contender,
)
from lineage.benchmark import Benchmark, Case, Ratio, read_benchmark, write_benchmark
from lineage.command import run_command
from lineage.environment import describe_environment
from lineage.errors import BadInput
from lineage.files import Environment
from reports.benchmarks import load_benchmarks
from tests.commands import Command

ROW = Row("tiny", "fp32", 0.0, to_stock=2.0, to_limit=0.5, memory_to_stock=0.5)
SIZE = read_size("tiny")


def measured(seconds: float, loss: float = 1.0, peak: int = 100) -> Timed:
    return Timed([seconds, seconds, 100 * seconds], [loss, loss], peak)


def test_a_row_holds_ratios_goals_and_whether_they_are_reached() -> None:
    flops = flops_per_token(SIZE.model, causal=True) * SIZE.tokens
    found = {OURS: [measured(1.0)], STOCK: [measured(3.0, peak=150)], TUNED: [measured(0.5)]}
    case = summarize(ROW, SIZE, found, [2 * flops / 1e9], [flops / 1e9])
    ratios = {ratio.name: ratio for ratio in case.ratios}
    assert ratios["× stock nanoGPT"].rounds == [3.0]
    assert {name: (ratio.value, ratio.goal, ratio.is_reached) for name, ratio in ratios.items()} == {
        "× stock nanoGPT": (3.0, 2.0, True),
        "× tuned nanoGPT": (0.5, None, True),
        "of the limit": (0.5, 0.5, True),
        "of its shapes' limit": (1.0, None, True),
        "of stock nanoGPT's memory": (0.666667, 0.5, False),
    }
    assert differing(ROW, found) == []


def test_losses_that_differ_are_named() -> None:
    found = {OURS: [measured(1.0)], STOCK: [measured(1.0, loss=1.01)], TUNED: [measured(1.0, loss=float("nan"))]}
    assert [each.split("losses of ")[1].split(" differ")[0] for each in differing(ROW, found)] == [STOCK, TUNED]
    assert len(differing(replace(ROW, dropout=0.1), found)) == 1  # with masks of their own only the NaN
    assert len(differing(replace(ROW, precision="bf16"), found)) == 1
    assert summarize(ROW, SIZE, found, [1.0], [2.0]).losses[TUNED] == [None, None]


def test_all_contenders_compute_the_same() -> None:
    """Each trains in this process a model of one small layer, in both number formats."""
    small = {"num_layers": 1, "hidden_size": 32, "num_heads": 2, "seq_length": 32, "padded_vocab_size": 256}
    for precision in ("fp32", "bf16"):
        size = SIZE.in_precision(precision)
        size = replace(size, model=SIZE.model.model_copy(update=small | {"vocab_size": 256}), warm_up=2)
        row = Row("tiny", precision, 0.0)
        found = {each.name: [time_contender(each, size)] for each in contenders()}
        assert differing(row, found) == []
        apart = {OURS: found[OURS], SEPARATE: [measure_contender(separate(), size)]}
        assert differing_losses(LAYOUTS, apart, 0.0) == []
        assert all(
            one[0].peak_bytes >= 0 and len(one[0].seconds) == size.train.iterations - 2 for one in found.values()
        )
    assert gemm_gflops() > 1
    assert shaped_gflops(size) > 0.1


def test_every_case_of_the_table_has_a_goal() -> None:
    assert len({row.name for row in ROWS}) == len(ROWS)
    assert {read_size(row.size).name for row in ROWS} == {"small", "tiny", "twin"}
    assert all(any((row.to_stock, row.to_tuned, row.to_limit)) for row in ROWS)


def test_layouts_are_held_to_one_process_and_to_its_losses() -> None:
    found = {
        "serial": [Timed([2.0], [3.0, 2.0])],
        "tp2": [Timed([1.0], [3.0, 2.0])],
        "dp2": [Timed([1.6], [3.0, 2.1])],
        "pp2": [Timed([2.0 / pipeline_ideal(SIZE.model, 2)], [3.0, 2.0])],
        SEPARATE: [Timed([2.5], [3.0, 2.0])],
    }
    case, sentences = summarize_layouts(SIZE, found), differing_losses(LAYOUTS, found, TOLERANCE)
    assert [ratio.value for ratio in case.ratios] == [2.0, 1.25, 1.0, 1.6]
    assert [ratio.is_reached for ratio in case.ratios] == [True, False, True, True]
    assert sentences == [f"{case.name}: losses of dp2 differ from those of serial by up to 0.1"]


def test_the_terminal_shows_every_goal_met_or_not(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    found = {OURS: [measured(1.0)], STOCK: [measured(3.0, peak=150)], TUNED: [measured(0.5)]}
    case = summarize(ROW, SIZE, found, [1.0], [2.0])
    show(Benchmark(benchmark="train", title="Training", cases=[case], notes=["how [it] was measured"]))
    printed = capsys.readouterr().out
    lines = [[cell.strip() for cell in line.split("│")[1:-1]] for line in printed.splitlines() if "│" in line]
    assert [case.name, "× stock nanoGPT", "3.00", "—", "at least 2"] in lines
    assert [case.name, "of stock nanoGPT's memory", "0.67", "—", "at most 0.5, missed"] in lines
    assert "- 2 of 3 goals were reached." in printed
    assert "- how [it] was measured" in printed


def test_the_ideal_of_a_pipeline_counts_the_head() -> None:
    assert pipeline_ideal(SIZE.model, 1) == 1.0
    assert 1.0 < pipeline_ideal(SIZE.model, 2) < 1.5
    assert pipeline_ideal(SIZE.model.model_copy(update={"vocab_size": 1}), 2) == pytest.approx(2.0, abs=0.01)


def test_kernels_are_measured_beside_their_references(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_kernels, "SHAPE", {"s": 8, "b": 1, "n": 2, "d": 4, "v": 16})
    monkeypatch.setattr(bench_kernels.shutil, "which", lambda name: None)
    result = bench_kernels.measure(1)
    assert {case.name.split()[0] for case in result.cases} == {
        name for name, places in KERNELS.items() if "cpu" in places
    } - {"dropout_bits"}
    assert all(case.ratios[0].name == "reference ÷ ours" and case.ratios[0].value > 0 for case in result.cases)
    assert "no C++ compiler" in result.notes[1]


def result(path: Path, cpu: str = "", **values: float) -> Path:
    found = [Ratio(name=name, value=value, less_is_better=name == "memory") for name, value in values.items()]
    cases = [Case(name="small", ratios=found), Case(name="x", ratios=[Ratio(name="ratio", value=2)])]
    write_benchmark(path, Benchmark(benchmark="train", title="t", cases=cases, environment=Environment(cpu=cpu)))
    return path


@settings(deadline=None, max_examples=30)
@given(old=st.floats(0.1, 10), factor=st.floats(0.1, 2))
def test_a_ratio_that_lost_more_than_a_tenth_is_flagged(
    old: float, factor: float, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("compare")
    rows = compare(
        result(folder / "old.json", speed=old, memory=old, gone=1.0),
        result(folder / "new.json", speed=old * factor, memory=old * factor, come=1.0),
    )
    fell = dict(zip(zip(rows["case"], rows["name"], strict=True), rows["fell"], strict=True))
    assert fell.keys() == {("small", "speed"), ("small", "memory"), ("x", "ratio")}
    assert not fell["x", "ratio"]
    if abs(factor - 0.9) > 1e-9:
        assert fell["small", "speed"] == (factor < 0.9)
    if abs(factor - 1.1) > 1e-9:
        assert fell["small", "memory"] == (factor > 1.1)


def test_compare_ends_with_its_code(tmp_path: Path, command: Command) -> None:
    old, new = result(tmp_path / "old.json", speed=2.0), result(tmp_path / "new.json", cpu="another", speed=1.0)
    for arguments, code in (((old, new), 3), ((new, old), 0), ((old, tmp_path / "missing.json"), 2), ((old, old), 0)):
        done = command(main, "mlm-bench", "compare", *arguments, ends=code)
        assert ("fell by more than a tenth: small / speed" in done.err) == (code == 3)
        assert ("the machines differ" in done.out) == (set(arguments) == {old, new})


@pytest.mark.parametrize(
    "text",
    ["{", "[]", '{"benchmark": "train"}', '{"benchmark": "data", "title": "t", "cases": [{"name": "small"}]}',
     '{"benchmark": "train", "title": "t", "cases": [{"name": "small"}]}'],
)  # fmt: skip
def test_what_cannot_be_compared_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text(text)
    with pytest.raises(BadInput):
        compare(result(tmp_path / "old.json", speed=2.0), tmp_path / "other.json")


NEW_BENCHMARK = '''
from typing import Annotated
import typer
from lineage.benchmark import Benchmark, Case, Ratio

def measure(size: Annotated[int, typer.Option(min=1, help="How large.")] = 3) -> Benchmark:
    """Something new."""
    case = Case(name=f"size {size}", ratios=[Ratio(name="× theirs", value=size, goal=2)])
    return Benchmark(benchmark="brand-new", title="A new benchmark", cases=[case])
'''


def test_one_file_is_a_benchmark_on_the_command_line_on_the_page_and_in_compare(
    tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    package, records = tmp_path / "more_benchmarks", tmp_path / "records"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "brand_new.py").write_text(NEW_BENCHMARK)
    monkeypatch.syspath_prepend(str(tmp_path))
    with_more = typer.Typer()
    with_more.command()(lambda: None)  # as `compare`
    add_benchmarks(with_more, import_module("more_benchmarks"))
    for size in (3, 1):
        words = ["mlm-bench", "brand-new", f"--size={size}", "--json", str(records / f"{size}.json")]
        describe_environment.cache_clear()
        done = command(lambda: run_command(with_more), *words, ends=0)
    assert "at least 2, missed" in done.out
    assert read_benchmark(records / "1.json").environment.argv == ["mlm-bench", "brand-new", "--size=1"]
    page = load_benchmarks(records)
    assert (page.problems, [exhibit.title for exhibit in page.exhibits]) == ((), ["A new benchmark"] * 2)
    assert page.exhibits[0].tables[0].rows == [("size 1", "× theirs", "1.00", "—", "at least 2, missed")]
    rows = compare(records / "3.json", records / "3.json")
    assert list(rows["fell"]) == [False]
