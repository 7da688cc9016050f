"""The files of a training run: metrics, summary, timeline. Imports no torch."""

from pathlib import Path
from typing import Any

from engine.run.files import METRICS, SUMMARY, Memory, RankLayout, Step, TrainingSummary, Validation
from engine.run.resolved import ResolvedRun
from lineage.atomic import parse_json
from lineage.files import parse_document, read_document, write_document


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics, oldest first, up to the first that is none; a crash may cut the last short."""
    path = run / METRICS
    if not path.is_file():
        return []
    lines = []
    for text in path.read_bytes().splitlines():
        try:
            line = parse_json(text)
        except ValueError:
            break
        if not isinstance(line, dict) or "kind" not in line or not _is_count(line.get("iteration")):
            break
        lines.append(line)
    return lines


def read_steps(run: Path) -> list[Step]:
    """The iterations in a run's metrics. Raises IntegrityFailure where one is damaged."""
    lines = [line for line in read_metrics(run) if line["kind"] == "train"]
    return [parse_document(line, Step, f"iteration {line['iteration']} in {METRICS}") for line in lines]


def read_validations(run: Path) -> list[Validation]:
    """The validations in a run's metrics, the final one included. Raises IntegrityFailure where one is damaged."""
    lines = [line for line in read_metrics(run) if line["kind"] != "train"]
    return [parse_document(line, Validation, f"a validation in {METRICS}") for line in lines]


def read_summary(run: Path) -> TrainingSummary:
    """What a complete run says of itself."""
    return read_document(run / SUMMARY, TrainingSummary)


def write_summary(
    directory: Path, run: ResolvedRun, seconds: float, peaks: list[int], measured_by: str, final: Validation,
    checkpoint: str,
) -> None:  # fmt: skip
    """Write the summary of a run that has ended; `peaks` is memory by rank, `final` the last validation."""
    layout = run.layout
    summary = TrainingSummary(
        parameters=run.parameters,
        iterations=run.config.train.iterations,
        tokens=run.tokens,
        seed=run.config.train.seed,
        layout=RankLayout(tp=layout.tp, pp=layout.pp, dp=layout.dp),
        train_seconds=round(seconds, 2),
        tokens_per_second=round(run.tokens / seconds, 1),
        memory=Memory(closed_form_bytes=run.memory.total, measured_bytes=peaks, measured_by=measured_by),
        validation_samples=final.samples,
        validation_loss=final.loss,
        validation_perplexity=final.perplexity,
        checkpoint=checkpoint,
    )
    write_document(directory / SUMMARY, summary)


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0
