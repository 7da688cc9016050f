"""A training run's own files, read while it trains or afterwards: metrics, summary, timeline of one iteration."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from lineage.errors import UserError
from lineage.files import Step, Timeline, TrainingSummary, Validation, one_line, read_document
from reports.files import Problem

METRICS, SUMMARY, TIMELINE = "metrics.jsonl", "summary.json", "timeline.json"


@dataclass(frozen=True)
class Training:
    """What the files of a run say so far."""

    steps: tuple[Step, ...]
    validations: tuple[Validation, ...]
    final: Validation | None
    """Over the whole validation split, when training has ended."""
    summary: TrainingSummary | None
    timeline: Timeline | None
    problems: tuple[Problem, ...]


def read_training(directory: Path, part: str) -> Training:
    """The files of a run, or of what was kept of one; `part` names it in the problems.

    A last line that is not whole is one that is being written, and is left out.
    """
    lines: dict[str, list[Any]] = {"train": [], "validation": [], "final-validation": []}
    problems = list(_read_metrics(directory / METRICS, part, lines))
    summary = timeline = None
    try:
        if (directory / SUMMARY).is_file():
            summary = read_document(directory / SUMMARY, TrainingSummary)
    except UserError as error:
        problems.append(Problem(part, f"The summary of {part} cannot be shown: {error}.", damaged=True))
    try:
        if (directory / TIMELINE).is_file():
            timeline = read_document(directory / TIMELINE, Timeline)
    except UserError as error:
        problems.append(Problem(part, f"The timeline of {part} cannot be shown: {error}.", damaged=True))
    final = lines["final-validation"]
    steps, validations = tuple(lines["train"]), tuple(lines["validation"])
    return Training(steps, validations, final[-1] if final else None, summary, timeline, tuple(problems))


def _read_metrics(path: Path, part: str, by_kind: dict[str, list[Any]]) -> Iterator[Problem]:
    """Add each line to those of its kind; a sentence for each that is none."""
    if not path.is_file():
        yield Problem(part, f"{part} has written no metrics yet ({METRICS}).", damaged=False)
        return
    text = path.read_text(encoding="utf-8", errors="replace")
    lines = text[: text.rfind("\n") + 1].splitlines()
    for number, line in enumerate(lines, 1):
        try:
            values: Any = json.loads(line)
            model = Step if values["kind"] == "train" else Validation
            by_kind[values["kind"]].append(model.model_validate(values))
        except (ValueError, TypeError, KeyError, ValidationError, RecursionError) as error:
            reason = error.errors()[0]["msg"] if isinstance(error, ValidationError) else one_line(error)
            yield Problem(part, f"Line {number} of the metrics of {part} is left out: {reason}.", damaged=True)
    if not lines:
        yield Problem(part, f"The metrics of {part} are empty: its first iteration has not ended.", damaged=False)
