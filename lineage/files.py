"""Schemas of files that one room writes and another reads. Both use the class, so neither can rename a key alone.

Training and reproduction stand here; `lineage/data_files.py` has the files of a dataset.
"""

import json
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from lineage.atomic import read_json, write_json
from lineage.errors import IntegrityFailure


class Document(BaseModel):
    """A file or a part of one. Fields are checked, numbers are finite; what a reader does not know is left alone."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False, defer_build=True)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values; a field that was not given is left out."""
        return self.model_dump(mode="json", exclude_unset=True)

    def to_line(self) -> str:
        """A line of a `.jsonl` file. Raises ValueError for a number that is not finite."""
        return json.dumps(self.to_json(), ensure_ascii=False, allow_nan=False) + "\n"


DocumentT = TypeVar("DocumentT", bound=Document)


def write_document(path: Path, document: Document) -> None:
    """Replace `path` with the document as indented JSON."""
    write_json(path, document.to_json())


def read_document(path: Path, model: type[DocumentT]) -> DocumentT:
    """The file as a document. Raises IntegrityFailure where it is not one."""
    return parse_document(read_values(path), model, path.name)


def read_values(path: Path) -> Any:
    """The file's JSON. Raises IntegrityFailure where it has none."""
    try:
        return read_json(path)
    except (ValueError, OSError) as error:
        raise IntegrityFailure(f"{path.name} cannot be read: {one_line(error)}") from error


def read_object(path: Path) -> dict[str, Any]:
    """The file's JSON object. Raises IntegrityFailure, which names the whole path, where it is none."""
    try:
        values = read_values(path)
    except IntegrityFailure as error:
        raise IntegrityFailure(f"{path.parent}/{error}") from error
    if not isinstance(values, dict):
        raise IntegrityFailure(f"{path} cannot be read: it is no JSON object")
    return values


def parse_document(values: Any, model: type[DocumentT], name: str) -> DocumentT:
    """Plain values as a document; `name` says where they stand. Raises IntegrityFailure where they are none."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the whole file"
        raise IntegrityFailure(f"{name} is not what it should be: {where}: {first['msg']}") from error


def one_line(error: Exception) -> str:
    """What the error says, short and without line breaks."""
    return " ".join(str(error).split())[:200]


Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Computation = tuple[Literal["F", "B"], int, int, Finite, Finite]
"""Forward or backward, microbatch, chunk, start, end."""


class Environment(Document):
    """What was started: command, software and machine."""

    mlm_repro: str = ""
    source: dict[str, Any] = Field(default_factory=dict)
    """The commit, and whether files differed from it."""
    python: str = ""
    platform: str = ""
    cpu: str = ""
    cores: int | None = None
    memory_bytes: int | None = None
    gpus: list[str] = Field(default_factory=list)
    packages: dict[str, str] = Field(default_factory=dict)
    variables: dict[str, str] = Field(default_factory=dict)
    numerics: dict[str, str] = Field(default_factory=dict)
    """What the bits of a run with `train.invariant` depend on."""
    argv: list[str] = Field(default_factory=list)

    @property
    def version(self) -> str:
        """Of the software, with its commit where that is known."""
        commit = f", commit {self.source['commit']}" if self.source.get("commit") else ""
        return self.mlm_repro + commit + (" with uncommitted changes" if self.source.get("dirty") else "")

    @property
    def machine(self) -> str:
        """Processor, cores and GPUs."""
        parts = (self.cpu, f"{self.cores} cores" if self.cores else "", *self.gpus)
        return ", ".join(part for part in parts if part) or "hardware not recorded"

    @property
    def system(self) -> str:
        """Operating system and Python."""
        parts = (self.platform, f"Python {self.python}" if self.python else "")
        return ", ".join(part for part in parts if part) or "system not recorded"

    @property
    def sentence(self) -> str:
        """Where it was measured, and with which code."""
        commit = str(self.source.get("commit") or "")[:12]
        return f"Measured on {self.machine}{f'; code {commit}' if commit else ''}."


class Manifest(Document):
    """manifest.json: what a run is, written before anything else."""

    name: str
    kind: str
    identity: str = ""
    created: str
    config: dict[str, Any] = Field(default_factory=dict)
    outside_identity: list[str] = Field(default_factory=list)
    """Sections of the configuration that are no part of the identity."""
    config_digest: str = ""
    parents: dict[str, str] = Field(default_factory=dict)
    environment: Environment = Environment()


class LearningRate(Document):
    """What `mlm-train lr-find` writes."""

    benchmark: Literal["learning-rate"]
    name: str
    optimizer: Literal["adam", "lamb", "lamb-clamped"]
    global_batch_size: int
    seed: int
    ranks: int = 1
    rates: list[Positive]
    losses: list[Finite]
    smoothed: list[Finite]
    lowest_rate: Positive | None
    steepest_rate: Positive | None
    suggestion: Positive | None
    notes: list[str] = Field(default_factory=list)
    environment: Environment = Environment()

    @model_validator(mode="after")
    def _has_a_curve(self) -> "LearningRate":
        if not len(self.rates) == len(self.losses) == len(self.smoothed) > 0:
            raise ValueError("rates, losses and smoothed losses are not of one length")
        return self


class Step(Document, frozen=False):
    """A line of metrics.jsonl: an iteration, or the mean of several that end there. Guards add what they saw of it."""

    kind: Literal["train"]
    iteration: int
    batch_size: int | None = None
    samples: int | None = None
    """Taken so far."""
    loss: Finite
    learning_rate: Finite
    gradient_norm: Finite | None = None
    """None where it is not finite."""
    loss_scale: Finite = 1.0
    seconds: Finite
    tokens_per_second: Finite
    model_tflops: Finite
    skipped: bool = False
    """Whether no update was made."""
    spike: dict[str, float] = Field(default_factory=dict)
    """What leaps, with its limit."""
    warning: str = ""
    gradient_square: Finite | None = None
    gradient_variance: Finite | None = None
    noise_scale: Finite | None = None


class TensorNumbers(Document):
    """What a checkpoint's statistics.json says of a tensor."""

    norm: float
    min: float
    max: float
    nonfinite: float


class Validation(Document):
    """A line of metrics.jsonl: a validation after so many iterations."""

    kind: Literal["validation", "final-validation"]
    iteration: int
    samples: int
    loss: Finite
    perplexity: Finite


class Memory(Document):
    """Bytes of a rank: by the formula, and of each as measured."""

    closed_form_bytes: int
    measured_bytes: list[int]
    measured_by: str


class RankLayout(Document):
    """Ranks of each axis."""

    tp: int = 1
    pp: int = 1
    dp: int = 1

    @property
    def ranks(self) -> int:
        """All of them."""
        return self.tp * self.pp * self.dp

    def __str__(self) -> str:
        return f"tp {self.tp} × pp {self.pp} × dp {self.dp}"


class TrainingSummary(Document):
    """summary.json of a training: what a complete run says of itself."""

    parameters: int
    iterations: int
    tokens: int
    seed: int | None = None
    layout: RankLayout = RankLayout()
    train_seconds: Finite
    tokens_per_second: Finite
    memory: Memory | None = None
    validation_samples: int | None = None
    validation_loss: Finite | None = None
    validation_perplexity: Finite | None = None
    checkpoint: str = ""


class Timeline(Document):
    """timeline.json: what each pipeline rank computed when in one iteration, beside the schedule's plan."""

    iteration: int = 0
    schedule: str
    pp: Annotated[int, Field(ge=1)]
    chunks: Annotated[int, Field(ge=1)]
    microbatches: Annotated[int, Field(ge=1)]
    planned: Annotated[list[Annotated[list[Computation], Field(min_length=1)]], Field(min_length=1)]
    """Of each rank, in forward passes of one chunk."""
    measured: Annotated[list[Annotated[list[Computation], Field(min_length=1)]], Field(min_length=1)]
    """Of each rank, in seconds."""


class ModelShape(Document):
    """A model's shape and size, and how long and fast it is trained."""

    num_layers: int | None = None
    hidden_size: int | None = None
    num_heads: int | None = None
    seq_length: int | None = None
    vocab_size: int | None = None
    iterations: int | None = None
    global_batch_size: int | None = None
    learning_rate: float | None = None
    parameters: int | None = None

    @property
    def tokens_per_parameter(self) -> float | None:
        """What a parameter is trained on; None where the length or the size is not known."""
        if not (self.iterations and self.global_batch_size and self.seq_length and self.parameters):
            return None
        return self.iterations * self.global_batch_size * self.seq_length / self.parameters


class ReproducedModel(Document):
    """A published model and what was trained in its name."""

    name: Annotated[str, Field(pattern=r"^[^./\x00][^/\x00]*$")]
    """Also that of a folder: the published model's, with the seed where it is not the recipe's own."""
    run: str = ""
    published: ModelShape = ModelShape()
    trained: ModelShape = ModelShape()
    seed: int | None = None
    tokens: int | None = None
    train_seconds: float | None = None
    tokens_per_second: float | None = None
    matrix_gflops: float | None = None
    """What matrix products alone reach on as many ranks."""
    checkpoint_digest: str | None = None

    @property
    def series(self) -> str:
        """The published model's name."""
        return self.name.partition("-seed-")[0]


class ReproductionSummary(Document):
    """summary.json of a reproduction: what was run, on what, and why at this size."""

    target: str
    mode: Literal["scaled", "full"]
    reason: str = ""
    source: str = ""
    twin_rule: str = ""
    models: list[ReproducedModel] = Field(default_factory=list)
    hardware: str = ""
    commit: str = ""
    commands: dict[str, str] = Field(default_factory=dict)


class ExampleHead(Document):
    """First line of examples.jsonl: the test and the models that took it."""

    task: str
    models: list[str] = Field(min_length=1)


class Example(Document):
    """A line of examples.jsonl: a passage's end and its last word, with each model's answer; untrusted text."""

    index: int
    context: str
    target: str
    correct: list[bool]
    log_probability: list[Finite]
    """Of the target, in nats."""
