"""What a reproduction keeps of its runs: means of blocks that lose nothing."""

import json
from pathlib import Path
from typing import Any

import pytest

from mlm_repro.experiments.reproduce.reproduction import CURVE_POINTS, keep_training
from mlm_repro.lineage.atomic import write_json
from mlm_repro.lineage.run import RunDirectory


def write_metrics(run: Path, iterations: int) -> list[dict[str, Any]]:
    """An iteration takes as many seconds as its number."""
    lines: list[dict[str, Any]] = [
        {"kind": "validation", "iteration": 0, "samples": 8, "loss": 9.0, "perplexity": 8103.0}
    ]
    for number in range(1, iterations + 1):
        step: dict[str, Any] = {
            "kind": "train",
            "iteration": number,
            "loss": float(number),
            "learning_rate": 0.5,
        }
        step |= {
            "gradient_norm": None if number % 2 else 2.0,
            "loss_scale": 1.0,
            "seconds": float(number),
        }
        lines.append(step | {"tokens_per_second": 600 / number, "model_tflops": 60 / number})
    final = {"kind": "final-validation", "iteration": iterations, "samples": 16}
    lines.append(final | {"loss": 1.0, "perplexity": 2.7})
    run.mkdir()
    write_json(
        run / "manifest.json", {"name": "355m-twin-seed-1235", "kind": "training", "created": ""}
    )
    (run / "metrics.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8"
    )
    (run / "summary.json").write_text("{}", encoding="utf-8")
    return lines


def test_a_short_run_is_kept_as_it_is(tmp_path: Path) -> None:
    lines = write_metrics(tmp_path / "run", CURVE_POINTS)
    kept = keep_training(RunDirectory(tmp_path / "run"))
    assert (kept.name, kept.summary, kept.seal) == ("355m-seed-1235", {}, None)
    assert kept.manifest
    found = kept.metrics
    assert [line["kind"] for line in found] == [line["kind"] for line in lines]
    for line, expected in zip(found, lines, strict=True):
        assert line == pytest.approx(expected)


def test_a_long_run_is_kept_in_blocks(tmp_path: Path) -> None:
    write_metrics(tmp_path / "run", 3 * CURVE_POINTS + 2)
    first, *steps, rest, final = keep_training(RunDirectory(tmp_path / "run")).metrics
    assert (first["kind"], final["kind"]) == ("validation", "final-validation")
    assert [step["iteration"] for step in steps] == list(range(3, 3 * CURVE_POINTS + 1, 3))
    assert steps[1]["loss"] == pytest.approx(5.0)
    assert steps[1]["gradient_norm"] == pytest.approx(2.0)
    # Tokens of the block in its time.
    assert steps[1]["tokens_per_second"] == pytest.approx(3 * 600 / (4 + 5 + 6))
    assert (rest["iteration"], rest["loss"]) == (
        3 * CURVE_POINTS + 2,
        pytest.approx(3 * CURVE_POINTS + 1.5),
    )
