"""The record of a benchmark: its ratios and goals, its file, its tables on the terminal; and what
is refused."""

import re
import sys
from pathlib import Path

import pytest

from benchmarks.__main__ import main
from benchmarks.contenders import Timed
from benchmarks.timing import child_seconds, differing_losses, ratio, series
from mlm_repro.experiments.benchmark import Benchmark, Case, read_benchmark
from mlm_repro.lineage.environment import describe_environment
from mlm_repro.lineage.errors import UserError
from tests.commands import Command


def benchmark(value: float = 3.0, **changes: object) -> Benchmark:
    memory = ratio("of its memory", [2.0], [3.0], 0.5, less_is_better=True)
    ratios = [ratio("× stock", [value, 2.0, 4.0], [1.0, 1.0, 1.0], 2.0), memory]
    case = Case(
        name="small",
        series=[series("ours", "rate", "tokens/s", 10, 12)],
        ratios=ratios,
        missing={"x": "why"},
    )
    values = {
        "benchmark": "train",
        "title": "Training",
        "cases": [case],
        "notes": ["how [it] was measured"],
    }
    return Benchmark.model_validate(values | changes)


def test_losses_that_differ_are_named() -> None:
    losses = {
        "ours": [1.0, 2.0],
        "equal": [1.0, 2.0],
        "late": [1.0, 2.5],
        "nan": [float("nan"), 2.0],
    }
    measured = {name: [Timed([1.0], many)] for name, many in losses.items()}
    sentences = differing_losses("small", measured, 0.1)
    assert sentences[0] == "small: losses of late differ from those of ours by up to 0.5"
    assert [each.split("losses of ")[1].split()[0] for each in sentences] == ["late", "nan"]
    assert len(differing_losses("small", measured, 0.1, compared=1)) == 1


def test_the_record_has_the_machine_and_the_command_without_its_folders(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setattr("benchmarks.train.measure", lambda rounds, names: benchmark())
    describe_environment.cache_clear()
    done = command(
        main, "benchmarks", "train", "--rounds=2", "--json", tmp_path / "train.json", ends=0
    )
    record = read_benchmark(tmp_path / "train.json")
    assert record.environment.argv == ["python", "-m", "benchmarks", "train", "--rounds=2"]
    assert str(tmp_path) not in (tmp_path / "train.json").read_text()
    lines = [re.split(" {2,}", line) for line in done.out.splitlines()]
    assert ["small", "× stock", "3.00", "2.00 to 4.00", "at least 2"] in lines
    assert ["small", "of its memory", "0.67", "—", "at most 0.5, missed"] in lines
    assert "- 1 of 2 goals were reached." in done.out
    assert done.out.splitlines()[-1] == f"written: {tmp_path / 'train.json'}"


def test_a_wrong_answer_ends_with_code_3_and_a_mistake_with_2(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(
        "benchmarks.eval.measure", lambda rounds: benchmark(disagreements=["they differ"])
    )
    done = command(main, "benchmarks", "eval", "--json", tmp_path / "eval.json", ends=3)
    assert done.error == "error: they differ"
    assert read_benchmark(tmp_path / "eval.json").disagreements == ["they differ"]
    for words in (["train", "--case", "none"], ["gpu", "--items", "none"]):
        assert "'none'; there are: " in command(main, "benchmarks", *words, ends=2).error
    assert "is a directory" in command(main, "benchmarks", "eval", "--json", ".", ends=2).error
    assert "--rounds" in command(main, "benchmarks", "eval", "--rounds", "0", ends=2).err


SPEND = "import time\nwhile time.process_time() < {}: pass"


def test_seconds_are_those_of_a_program_and_its_children(tmp_path: Path) -> None:
    (tmp_path / "spend.py").write_text(SPEND.format(0.5))
    both = (
        f"import subprocess, sys; subprocess.run([sys.executable, {str(tmp_path / 'spend.py')!r}]);"
    )
    assert 0.9 < child_seconds(sys.executable, "-c", both + SPEND.format(0.5)) < 3
    assert child_seconds(sys.executable, "-c", "import time; time.sleep(0.6)") < 0.5
    with pytest.raises(UserError, match="failed: why"):
        child_seconds(sys.executable, "-c", "import sys; sys.exit('why')")
