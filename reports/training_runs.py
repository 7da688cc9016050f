"""A training run's own files, read while it trains or afterwards: metrics, summary, timeline of one iteration."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter

from engine.run.files import METRICS, SUMMARY, TIMELINE, Step, Timeline, TrainingSummary, Validation
from lineage.atomic import parse_json
from reports.files import Problem, Problems

LINE: TypeAdapter[Step | Validation] = TypeAdapter(Annotated[Step | Validation, Field(discriminator="kind")])
CURVES = {
    "loss": "training loss",
    "perplexity": "validation perplexity",
    "learning_rate": "learning rate",
    "gradient_norm": "gradient norm",
    "tokens_per_second": "tokens per second",
    "model_tflops": "TFLOP/s of the model",
}
"""What is drawn of a run, by field."""

Points = tuple[tuple[float, ...], tuple[float, ...]]
"""x and y of a curve."""


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

    def points(self, field: str) -> Points:
        """Iterations and values of a field of the steps, where it is known, or of the validations' `perplexity`."""
        lines = self.validations if field == "perplexity" else self.steps
        pairs = [(float(line.iteration), value) for line in lines if (value := getattr(line, field)) is not None]
        return tuple(x for x, _ in pairs), tuple(y for _, y in pairs)


def read_training(directory: Path, part: str) -> Training:
    """The files of a run, or of what was kept of one; `part` names it in the problems.

    A last line that is not whole is one that is being written, and is left out.
    """
    problems = Problems()
    lines: list[Step | Validation] = []
    if (path := directory / METRICS).is_file():
        content = path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1].splitlines()
        lines = problems.lines(
            part, f"the metrics of {part}", whole, lambda line: LINE.validate_python(parse_json(line))
        )
        if not whole:
            problems.add(part, f"The metrics of {part} are empty: its first iteration has not ended.", damaged=False)
    else:
        problems.add(part, f"{part} has written no metrics yet ({METRICS}).", damaged=False)
    validations = [line for line in lines if isinstance(line, Validation)]
    finals = [line for line in validations if line.kind == "final-validation"]
    return Training(
        tuple(line for line in lines if isinstance(line, Step)),
        tuple(line for line in validations if line.kind == "validation"),
        finals[-1] if finals else None,
        problems.document(directory / SUMMARY, TrainingSummary, part, f"The summary of {part}"),
        problems.document(directory / TIMELINE, Timeline, part, f"The timeline of {part}"),
        tuple(problems),
    )
