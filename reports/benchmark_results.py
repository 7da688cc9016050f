"""What `mlm-bench` writes, as far as the page shows it."""

from typing import Annotated, Any

from pydantic import Field

from reports.files import Document
from reports.training_runs import Timeline

TOLERANCE = 0.2
"""Of linear growth, as `mlm-bench data-scale` judges it."""
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Seconds = dict[str, Finite]


class Environment(Document):
    """Where and by what command a benchmark was measured."""

    cpu: str = ""
    cores: int | None = None
    source: dict[str, Any] = Field(default_factory=dict)
    argv: list[str] = Field(default_factory=list)


class Benchmark(Document):
    """What every result has."""

    notes: list[str] = Field(default_factory=list)
    environment: Environment = Field(default_factory=Environment)


class AgainstGoal(Document):
    """A ratio, and the one that was aimed at where there is one."""

    ratio: Finite
    goal: Finite | None = None


class DataStage(AgainstGoal):
    """A stage of the data pipeline beside the plain use of the same library."""

    stage: str
    library: str
    megabytes_per_second: Finite
    core_hours: Finite
    compared: int
    differing: int


class DataWhole(AgainstGoal):
    """The whole pipeline beside the sum of the plain stages."""

    megabytes_per_second: Finite
    core_hours: Finite
    documents: int
    differing: int


class Peer(Document):
    """Another program's equivalent stages, or why they were not measured."""

    status: str
    version: str = ""
    ratio: Finite = 0.0
    goal: Finite | None = None


class Data(Benchmark):
    """data: stage by stage and the whole."""

    stages: list[DataStage] = Field(min_length=1)
    whole: DataWhole
    datatrove: Peer


class Comparison(Document):
    """An evaluation beside a rival's; without numbers where the rival is not installed."""

    name: str
    rival: str
    size: str
    goal: Finite
    status: str
    times_faster: Finite | None = None
    median_seconds: Seconds = Field(default_factory=dict)


class Memory(Document):
    """Peak memory of an evaluation beside the plain loop's."""

    size: str
    plain_batch_size: int
    peak_bytes: dict[str, int]
    share: Finite
    goal: Finite


class Eval(Benchmark):
    """eval: comparisons of speed and memory."""

    comparisons: list[Comparison] = Field(min_length=1)
    memory: list[Memory] = Field(default_factory=list)


class Contender(Document):
    """A layout of ours or a peer, training; without numbers where it is not installed."""

    name: str
    ranks: int
    dropout: Finite
    status: str
    is_ours: bool
    tokens_per_second: list[Finite] = Field(default_factory=list)
    median: Finite | None = None
    gemm_share: Finite | None = None


class Parallel(Benchmark):
    """parallel: throughput of training."""

    size: str
    contenders: list[Contender] = Field(min_length=1)
    ratios: dict[str, dict[str, dict[str, Any]]]


class ScaleRow(Document):
    """One size of input."""

    megabytes: Positive
    documents: int
    cpu_seconds: Finite
    megabytes_per_second: Positive
    peak_bytes: Annotated[int, Field(gt=0)]
    bound_bytes: Annotated[int, Field(gt=0)] | None = None


class DataScale(Benchmark):
    """data-scale: throughput and memory against the size of the input."""

    workers: int
    bound_bytes: Annotated[int, Field(gt=0)]
    rows: list[ScaleRow] = Field(min_length=1)

    def bound_of(self, row: ScaleRow) -> int:
        """The bound stated for a row's input, or for all."""
        return row.bound_bytes or self.bound_bytes


class Pipeline(Benchmark):
    """pipeline: an iteration under each schedule, planned and measured."""

    timelines: list[Timeline] = Field(min_length=1)
    load_average: list[Finite] = Field(min_length=1)
    """Of the machine, before the first schedule and after each."""


KINDS: dict[str, type[Benchmark]] = {
    "data": Data, "data-scale": DataScale, "eval": Eval, "parallel": Parallel, "pipeline": Pipeline,
}  # fmt: skip
