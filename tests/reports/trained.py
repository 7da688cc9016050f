"""Files of a training run as the engine writes them."""

import json
from pathlib import Path
from typing import Any

from lineage.atomic import write_json, write_text

ITERATIONS = 40


def metrics(iterations: int = ITERATIONS) -> list[dict[str, Any]]:
    """A falling loss, validated every ten iterations."""
    lines = [_validation(0)]
    for iteration in range(1, iterations + 1):
        lines.append(
            {
                "kind": "train",
                "iteration": iteration,
                "loss": 7 - iteration / 20,
                "learning_rate": 1e-3 * (1 - iteration / (2 * ITERATIONS)),
                "gradient_norm": None if iteration == 3 else 1 + 1 / iteration,
                "loss_scale": 1.0,
                "seconds": 0.5,
                "tokens_per_second": 2048.0,
                "model_tflops": 0.0125,
            }
        )
        if iteration % 10 == 0:
            lines.append(_validation(iteration))
    return lines


def _validation(iteration: int, kind: str = "validation") -> dict[str, Any]:
    perplexity = 1000.0 / (1 + iteration)
    return {"kind": kind, "iteration": iteration, "samples": 8, "loss": 5.0, "perplexity": perplexity}


def timeline() -> dict[str, Any]:
    """1F1B of two microbatches on two ranks, each measured computation a tenth longer than planned."""
    planned = [
        [["F", 0, 0, 0.0, 1.0], ["F", 1, 0, 1.0, 2.0], ["B", 0, 0, 4.0, 6.0], ["B", 1, 0, 7.0, 9.0]],
        [["F", 0, 0, 1.0, 2.0], ["B", 0, 0, 2.0, 4.0], ["F", 1, 0, 4.0, 5.0], ["B", 1, 0, 5.0, 7.0]],
    ]
    measured = [[[*row[:3], row[3] / 100, row[4] / 100] for row in rank] for rank in planned]
    shape = {"iteration": ITERATIONS, "schedule": "1f1b", "pp": 2, "chunks": 1, "microbatches": 2}
    return shape | {"planned": planned, "measured": measured}


def write_training(folder: Path, iterations: int = ITERATIONS, summary: bool = True, pipeline: bool = True) -> Path:
    """metrics.jsonl, of a run that has ended summary.json, of one with a pipeline timeline.json."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = metrics(iterations) + ([_validation(iterations, "final-validation")] if summary else [])
    write_text(folder / "metrics.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
    if summary:
        memory = {"closed_form_bytes": 10_000_000, "measured_bytes": [14_000_000, 12_000_000], "measured_by": "a test"}
        values = {"parameters": 81_000, "iterations": iterations, "tokens": 40_960, "train_seconds": 20.5}
        layout = {"tp": 1, "pp": 2, "dp": 1}
        values |= {"tokens_per_second": 2000.0, "layout": layout, "memory": memory, "validation_perplexity": 24.4}
        write_json(folder / "summary.json", values)
    if pipeline:
        write_json(folder / "timeline.json", timeline())
    return folder
