"""The files that a training run writes: names, schemas and readers. Imports no torch."""

from collections.abc import Iterable
from operator import attrgetter
from pathlib import Path
from typing import Literal

from pydantic import Field

from mlm_repro.engine.parallel.layout import Layout
from mlm_repro.lineage.atomic import JSON, parse_json
from mlm_repro.lineage.files import FileSchema, Finite, parse_document, read_document

METRICS = "metrics.jsonl"
SUMMARY = "summary.json"
STATISTICS = "statistics.json"


class Step(FileSchema, frozen=False, strict=True):
    """Line of metrics.jsonl for an iteration, or for the mean of several up to it. Guards add their
    measurements."""

    kind: Literal["train"]
    iteration: int
    batch_size: int | None = None
    samples: int | None = None
    """Number of samples up to and including this iteration."""
    loss: Finite
    learning_rate: Finite
    gradient_norm: Finite | None = None
    """Norm of the gradient; None if it is not finite."""
    loss_scale: Finite = 1.0
    seconds: Finite
    tokens_per_second: Finite
    model_tflops: Finite
    skipped: bool = False
    """True if the update was skipped."""
    spike: dict[str, float] = Field(default_factory=dict)
    """Quantity → the limit that it exceeded; empty if the iteration is no spike."""
    warning: str = ""


class TensorNumbers(FileSchema):
    """Entry of a checkpoint's statistics.json for one tensor: its norm, extremes, number of
    non-finite values and checksum."""

    norm: float
    min: float
    max: float
    nonfinite: float
    checksum: int | None = None
    """Sum of (2·position + 1) × bits over the whole tensor, modulo 2^64, which is equal at every
    layout."""


class Validation(FileSchema, extra="forbid", strict=True):
    """Line of metrics.jsonl for a validation after `iteration` iterations: its kind, number of
    sequences, mean loss and perplexity."""

    kind: Literal["validation", "final-validation"]
    iteration: int
    samples: int
    loss: Finite
    perplexity: Finite


class Memory(FileSchema):
    """Memory of a training in bytes: of the fullest rank by the closed form, and of each rank as
    measured up to the end of the last session's first iteration."""

    closed_form_bytes: int
    measured_bytes: list[int]
    measured_by: str


class TrainingSummary(FileSchema):
    """summary.json of a complete training: sizes, seed, layout, speed, memory and final
    validation."""

    parameters: int
    iterations: int
    tokens: int
    seed: int | None = None
    layout: Layout = Layout()
    train_seconds: Finite
    tokens_per_second: Finite
    memory: Memory | None = None
    validation_samples: int | None = None
    validation_loss: Finite | None = None
    validation_perplexity: Finite | None = None
    checkpoint: str = ""


def read_metrics(run: Path) -> list[JSON]:
    """Return the lines of metrics.jsonl in a run's directory as JSON objects, oldest first, up to
    the first damaged line; a crash may cut the last line short. Empty if there is no file."""
    path = run / METRICS
    if not path.is_file():
        return []
    lines = []
    for text in path.read_bytes().splitlines():
        try:
            line = parse_json(text)
        except ValueError:
            break
        number = line.get("iteration") if isinstance(line, dict) and "kind" in line else None
        if type(number) is not int or number < 0:
            break
        lines.append(line)
    return lines


def read_steps(run: Path) -> list[Step]:
    """Return the iterations in metrics.jsonl of a run, oldest first, up to the first damaged line;
    empty without the file. Raises IntegrityFailure if a line that can be read does not fit the
    schema."""
    return steps_in(read_metrics(run))


def read_validations(run: Path) -> list[Validation]:
    """Return the validations in metrics.jsonl of a run, oldest first and with the final one, up to
    the first damaged line; empty without the file. Raises IntegrityFailure if a line that can be
    read does not fit the schema."""
    return validations_in(read_metrics(run))


def steps_in(metrics: Iterable[JSON]) -> list[Step]:
    """Return the iterations among lines of metrics.jsonl, given as JSON objects, in their order.
    Raises IntegrityFailure if one does not fit the schema."""
    return [
        parse_document(line, Step, f"iteration {line['iteration']} in {METRICS}")
        for line in metrics
        if line["kind"] == "train"
    ]


def validations_in(metrics: Iterable[JSON]) -> list[Validation]:
    """Return the validations, with a final one, among lines of metrics.jsonl, given as JSON
    objects, in their order. Raises IntegrityFailure if one does not fit the schema."""
    return [
        parse_document(line, Validation, f"a validation in {METRICS}")
        for line in metrics
        if line["kind"] != "train"
    ]


def describe_end(run: Path) -> str:
    """Return a text of three lines for the console about a complete training: its losses and speed,
    its checkpoint, and commands to type next. Raises IntegrityFailure if the summary or the metrics
    do not fit their schema."""
    summary = read_summary(run)
    metrics = read_metrics(run)
    trained = [line for line in metrics if line["kind"] == "train"]
    validations = validations_in(metrics)
    count = max(len(trained) // 20, 1)
    last = steps_in(trained[-count:])
    best = min(validations, key=attrgetter("loss"))
    over = f"mean of the last {count} iterations" if count > 1 else "last iteration"
    return "\n".join(
        [
            (
                f"trained: loss {sum(step.loss for step in last) / count:.4f} ({over}); validation"
                f" loss {validations[-1].loss:.4f}, perplexity {validations[-1].perplexity:.5g},"
                f" over {validations[-1].samples:,} sequences; lowest {best.loss:.4f} after"
                f" {best.iteration:,}; {summary.tokens_per_second:,.0f} tokens/s"
            ),
            f"checkpoint: {run / 'checkpoints' / summary.checkpoint}",
            (
                f"next: `mlm-report run {run}` draws the curves; `mlm-eval perplexity TEXT --ckpt"
                f" {run}` scores a text"
            ),
        ]
    )


def read_summary(run: Path) -> TrainingSummary:
    """Return the summary.json in the directory of a complete training. Raises IntegrityFailure if
    it cannot be read or does not fit the schema."""
    return read_document(run / SUMMARY, TrainingSummary)
