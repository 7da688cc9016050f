"""What `mlm-bench` writes, as far as the page shows it."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

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


class DataWhole(Document):
    """The whole pipeline beside the sum of the plain stages; without rates on a corpus too small to tell."""

    ratio: Finite | None
    goal: Finite
    megabytes_per_second: Finite | None
    core_hours: Finite | None
    documents: int
    differing: int


class Peer(Document):
    """Another program's equivalent stages, or why they were not measured."""

    status: str
    version: str = ""
    ratio: Finite | None = None
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


class Ratios(Document):
    """Ratios of one case by name: of each round, their medians, goals where they were set, and which were reached."""

    case: str
    ratios: dict[str, Positive]
    each_round: dict[str, list[Positive]]
    goals: dict[str, Positive]
    reached: dict[str, bool]

    @model_validator(mode="after")
    def _has_figures_for_goals(self) -> "Ratios":
        for name in self.goals:
            if not self.each_round.get(name) or name not in self.ratios or name not in self.reached:
                raise ValueError(f"{self.case} has a goal for {name} and no figure")
        return self


class TrainCase(Ratios):
    """Training at one size in one number format, beside nanoGPT."""

    cpu_tokens_per_second: dict[str, Annotated[list[Finite], Field(min_length=1)]]
    limit_tokens_per_second: Finite


class Train(Benchmark):
    """train: one core beside nanoGPT and the core's limit, and two processes beside one."""

    rounds: int
    measures: dict[str, str]
    less_is_better: list[str]
    """Names of ratios whose goal is the most that they may be."""
    cases: list[TrainCase] = Field(min_length=1)
    layouts: Ratios

    @property
    def goals(self) -> list[tuple[Ratios, str]]:
        """Every case with the name of each of its ratios that has a goal."""
        return [(case, name) for case in [*self.cases, self.layouts] for name in case.goals]


class Kernel(Document):
    """A compiled kernel beside what it replaces."""

    kernel: str
    milliseconds: Seconds
    ratios: Seconds


class Kernels(Benchmark):
    """kernels: forward and backward of each."""

    kernels: list[Kernel] = Field(min_length=1)


class GrowthPoint(Document):
    """What one configuration on an axis reached, and what the closed form says."""

    axis: str
    value: Annotated[int, Field(gt=0)]
    tokens_per_second: Annotated[list[Positive], Field(min_length=1)]
    predicted: Positive
    ratio: Positive


class Growth(Benchmark):
    """growth: training against width, depth, sequence length and ranks."""

    points: list[GrowthPoint] = Field(min_length=1)
    load_average: list[Finite] = Field(min_length=1)


class Product(Document):
    """Products of n × n matrices, n so far from a multiple of 8, in each round."""

    precision: str
    size: Annotated[int, Field(gt=0)]
    """The multiple of 8."""
    offset: int
    gflops: Annotated[list[Positive], Field(min_length=1)]


class Gemm(Benchmark):
    """gemm: matrix products around multiples of 8."""

    device: str
    points: list[Product] = Field(min_length=1)
    ratios: dict[str, dict[str, Positive]]


class LearningRate(Benchmark):
    """`mlm-train lr-find`: loss against a rising learning rate."""

    name: str
    optimizer: Literal["adam", "lamb", "lamb-clamped"]
    global_batch_size: int
    seed: int
    rates: list[Positive]
    losses: list[Finite]
    smoothed: list[Finite]
    lowest_rate: Positive | None
    steepest_rate: Positive | None
    suggestion: Positive | None

    @model_validator(mode="after")
    def _has_a_curve(self) -> "LearningRate":
        if not len(self.rates) == len(self.losses) == len(self.smoothed) > 0:
            raise ValueError("rates, losses and smoothed losses are not of one length")
        return self


KINDS: dict[str, type[Benchmark]] = {
    "data": Data, "data-scale": DataScale, "eval": Eval, "gemm": Gemm, "growth": Growth, "kernels": Kernels,
    "learning-rate": LearningRate, "parallel": Parallel, "pipeline": Pipeline, "train": Train,
}  # fmt: skip
