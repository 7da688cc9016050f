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
    """Line of metrics.jsonl for one training iteration, or for the mean of several up to it: loss,
    learning rate, gradient norm, loss scale, seconds, the speed of all ranks together, and if the
    update was skipped. Guards fill `spike` and `warning`; the first line of a run that continues
    another has a warning that names that run."""

    kind: Literal["train"]
    iteration: int
    batch_size: int | None = None
    samples: int | None = None
    """Number of samples that the training has read up to and including this iteration; None if the
    line does not state it."""
    loss: Finite
    learning_rate: Finite
    gradient_norm: Finite | None = None
    """Norm of the gradient; None if it is not finite."""
    loss_scale: Finite = 1.0
    seconds: Finite
    tokens_per_second: Finite
    model_tflops: Finite
    skipped: bool = False
    """True if the update of this iteration was skipped, so that the weights stayed."""
    spike: dict[str, float] = Field(default_factory=dict)
    """Dict `loss` or `gradient_norm` → the limit that this value exceeded; empty if the iteration
    is no spike."""
    warning: str = ""


class TensorNumbers(FileSchema):
    """Entry of a checkpoint's statistics.json for one tensor: the norm and the extremes of its
    finite values, its number of non-finite values and its checksum."""

    norm: float
    min: float
    max: float
    nonfinite: float
    checksum: int | None = None
    """Sum of (2·position + 1) × (the element's bits as an integer) over the whole tensor, modulo
    2^64, which is equal at every layout; None in an entry of an earlier version that computed
    none."""


class Validation(FileSchema, extra="forbid", strict=True):
    """Line of metrics.jsonl for a validation after `iteration` iterations: its kind, the number of
    sequences in `samples`, their mean loss in nats and its perplexity, which is cut off at e²⁰."""

    kind: Literal["validation", "final-validation"]
    iteration: int
    samples: int
    loss: Finite
    perplexity: Finite


class Memory(FileSchema):
    """Memory of a training in bytes: `closed_form_bytes` of the fullest rank by the closed form,
    and `measured_bytes` of each rank as measured, in the way that `measured_by` names, up to the
    end of the last session's first iteration."""

    closed_form_bytes: int
    measured_bytes: list[int]
    measured_by: str


class TrainingSummary(FileSchema):
    """Content of summary.json of a complete training: number of parameters, iterations and tokens,
    seed, layout, speed, memory, final validation and the name of the last checkpoint."""

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
    """Return the lines of metrics.jsonl in a run's directory as a list of dicts, oldest first, up
    to the first damaged line; a crash may cut the last line short. Empty if there is no file. Each
    has at least `kind` and `iteration`."""
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
    """Return the iterations in metrics.jsonl in a run's directory as a list of Steps, oldest first,
    up to the first damaged line; empty without the file. Raises IntegrityFailure if a line that can
    be read does not fit the schema."""
    return steps_in(read_metrics(run))


def read_validations(run: Path) -> list[Validation]:
    """Return the validations in metrics.jsonl in a run's directory as a list of Validations, oldest
    first and with the final one, up to the first damaged line; empty without the file. Raises
    IntegrityFailure if a line that can be read does not fit the schema."""
    return validations_in(read_metrics(run))


def steps_in(metrics: Iterable[JSON]) -> list[Step]:
    """Return as a list of Steps the iterations among lines of metrics.jsonl, given as dicts, in
    their order; other kinds of lines are left out. Raises IntegrityFailure if one does not fit the
    schema."""
    return [
        parse_document(line, Step, f"iteration {line['iteration']} in {METRICS}")
        for line in metrics
        if line["kind"] == "train"
    ]


def validations_in(metrics: Iterable[JSON]) -> list[Validation]:
    """Return as a list of Validations all lines of metrics.jsonl, given as dicts, that are not
    iterations, in their order, the final validation too. Raises IntegrityFailure if one does not
    fit the schema."""
    return [
        parse_document(line, Validation, f"a validation in {METRICS}")
        for line in metrics
        if line["kind"] != "train"
    ]


def describe_end(run: Path) -> str:
    """Return a text of three lines for the console about a complete training in the directory
    `run`: its losses and speed, its checkpoint, and commands to type next. Raises IntegrityFailure
    if the summary or the metrics do not fit their schema."""
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
    """Return the summary.json in the directory of a complete training as a TrainingSummary. Raises
    IntegrityFailure if it cannot be read or does not fit the schema."""
    return read_document(run / SUMMARY, TrainingSummary)
