"""What a reproduction keeps of its runs beside records: curves, timelines and examples, small enough for a page."""

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, harmonic_mean
from typing import Any

from engine.run.directory import SUMMARY, TIMELINE, read_metrics
from evaluation.cloze import split_last_word
from experiments.reproduce.steps import samples_file
from lineage.atomic import write_text
from lineage.environment import list_gpus
from lineage.run import RunDirectory

EXAMPLES = "examples.jsonl"
CURVE_POINTS = 200
"""Blocks of iterations that a run's metrics are averaged over."""
CONTEXT_CHARACTERS = 60
"""Of a passage's end, before its last word."""


def keep_training(training: RunDirectory, folder: Path) -> None:
    """Put a run's summary, timeline and metrics into `folder`, the metrics as means of blocks of iterations.

    Losses, rates and norms are means over the block that ends at `iteration`; tokens/s and TFLOP/s are those of the
    whole block's work in the whole block's time.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name in (SUMMARY, TIMELINE):
        if (training.path / name).is_file():
            shutil.copyfile(training.path / name, folder / name)
    metrics = read_metrics(training.path)
    steps = [line for line in metrics if line["kind"] == "train"]
    block = max(len(steps) // CURVE_POINTS, 1)
    lines = [_mean(steps[start : start + block]) for start in range(0, len(steps), block)]
    lines += [line for line in metrics if line["kind"] != "train"]
    lines.sort(key=lambda line: line["iteration"])
    write_text(folder / "metrics.jsonl", "".join(json.dumps(line) + "\n" for line in lines))


def keep_examples(directory: Path, evaluations: Mapping[str, Path]) -> None:
    """Write examples.jsonl of a reproduction's `directory` from the samples behind each model's last-word result.

    The samples are then removed, also those that an earlier call left when it was killed. A first line has the task
    and the models, then one line an example: `index`, the `context`'s end, the `target`, and for each model whether it
    was `correct` and the target's `log_probability` in nats. Only examples that every model was asked for.
    """
    if not (directory / EXAMPLES).is_file():
        write_text(directory / EXAMPLES, _examples(evaluations))
    for folder in {samples_file(path).parent for path in evaluations.values()}:
        if folder.is_dir():
            shutil.rmtree(folder)


def _examples(evaluations: Mapping[str, Path]) -> str:
    found = {model: _read_samples(samples_file(path)) for model, path in evaluations.items()}
    common = set.intersection(*(set(examples) for examples in found.values()))
    lines = []
    for index in sorted(common):
        answers = [examples[index] for examples in found.values()]
        context, target = split_last_word(answers[0]["text"])
        end = " ".join(context[-CONTEXT_CHARACTERS:].split())
        line = {
            "index": index,
            "context": f"…{end}" if len(context) > CONTEXT_CHARACTERS else end,
            "target": target,
            "correct": [answer["correct"] for answer in answers],
            "log_probability": [round(sum(answer["log_probabilities"]), 2) for answer in answers],
        }
        lines.append(json.dumps(line, ensure_ascii=False) + "\n")
    head = {"task": next(iter(next(iter(found.values())).values()))["task"] if common else "", "models": list(found)}
    return json.dumps(head) + "\n" + "".join(lines)


def matrix_gflops(ranks: int) -> float | None:
    """What fp32 matrix products alone reach on so many ranks of this machine, 10⁹ operations a second; None on GPUs."""
    if list_gpus():
        return None
    from engine.launch.forked import run_forked
    from experiments.bench.timing import gemm_gflops

    return round(float(run_forked(gemm_gflops, ranks, ranks)[0]), 2)


def _mean(steps: Sequence[dict[str, Any]]) -> dict[str, Any]:
    norms = [step["gradient_norm"] for step in steps if step["gradient_norm"] is not None]
    line = {"kind": "train", "iteration": steps[-1]["iteration"], "gradient_norm": fmean(norms) if norms else None}
    line |= {name: fmean(step[name] for step in steps) for name in ("loss", "learning_rate", "loss_scale", "seconds")}
    rates = ("tokens_per_second", "model_tflops")
    return line | {name: harmonic_mean([step[name] for step in steps]) for name in rates}


def _read_samples(path: Path) -> dict[int, dict[str, Any]]:
    lines = path.read_text(encoding="utf-8").splitlines()
    return {sample["index"]: sample for sample in map(json.loads, lines)}
