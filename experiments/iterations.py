"""Iterations of the engine on made-up tokens, timed in processes of their own."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from engine.config import ModelConfig, ParallelConfig, Precision, TrainConfig
from engine.guard.memory import PeakMemory
from engine.launch.allocator import keep_large_buffers
from engine.launch.forked import run_forked
from engine.launch.mesh import build_mesh, local_device
from engine.launch.threads import RanksFailed
from engine.model.microbatch import PipelineInput
from engine.optim.precision import DTYPES
from engine.parallel.layout import Layout
from engine.parallel.mesh import ParallelMesh
from engine.rng import Dropout
from engine.step import build_step
from lineage.errors import UserError
from lineage.progress import Progress

TIMEOUT_SECONDS = 600.0
GEMM_WIDTH, GEMM_REPEATS, GEMM_TRIES = 1024, 8, 4
K = TypeVar("K")

Step = Callable[[int, float], float]
"""(iteration, dropout probability) → mean loss of the global batch before the update, on every rank."""


@dataclass(frozen=True)
class TrainingSize:
    """The model and recipe of a timed training."""

    model: ModelConfig
    train: TrainConfig
    warm_up: int = 0
    """Iterations of a round that are not timed."""

    @property
    def tokens(self) -> int:
        """Tokens of one iteration over all ranks."""
        return self.train.global_batch_size * self.model.seq_length

    def batch(self, iteration: int) -> NDArray[np.int64]:
        """Token ids of an iteration's global batch, [B, s + 1]: few words are frequent, as in text."""
        generator = np.random.default_rng([self.train.seed, iteration])
        uniform = generator.random((self.train.global_batch_size, self.model.seq_length + 1))
        return (self.model.vocab_size**uniform - 1).astype(np.int64)


@dataclass(frozen=True)
class Timed:
    """Timed iterations of one round, in processes of their own."""

    seconds: list[float]
    """Time of every iteration after the warm-up."""
    losses: list[float]
    """Losses of every iteration."""
    peak_bytes: int = 0
    """Memory of the first rank."""


class Contender(Protocol):
    """A program that trains a model on some ranks."""

    @property
    def name(self) -> str:
        """The contender's name in a record."""

    @property
    def ranks(self) -> int:
        """The number of its processes."""

    @property
    def is_tuned(self) -> bool:
        """True if it has this engine's allocator setting, and the fused AdamW."""

    def build(self, size: TrainingSize) -> Step:
        """Return the step; called on every rank, within its process group."""


@dataclass(frozen=True)
class OurLayout:
    """This engine in one layout."""

    name: str
    ranks: int = 1
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    microbatches: int = 1
    """Microbatches of each rank in an iteration."""
    is_tuned: bool = True

    def build(self, size: TrainingSize) -> Step:
        """Return a step of this rank's part of the layout."""
        parallel = self.parallel
        layout = Layout(parallel.tp, parallel.pp, self.ranks // (parallel.tp * parallel.pp))
        mesh = build_mesh(layout, parallel.sequence_parallel)
        return our_step(size, parallel, mesh, self.microbatches)


def our_step(size: TrainingSize, parallel: ParallelConfig, mesh: ParallelMesh, microbatches: int) -> Step:
    """Return a step of this rank's part of a mesh, in so many microbatches."""
    train = size.train
    _, training = build_step(size.model, train, parallel, mesh)
    share = train.global_batch_size // mesh.dp.size
    each = share // microbatches
    first = mesh.dp.rank * share

    def step(iteration: int, dropout: float) -> float:
        batch = torch.from_numpy(size.batch(iteration)).to(mesh.device)
        inputs = []
        for start in range(first, first + share, each):
            masks = Dropout(dropout, train.seed, iteration, tuple(range(start, start + each))) if dropout else None
            tokens = batch[start : start + each]
            inputs.append(PipelineInput(tokens[:, :-1], tokens[:, 1:], masks))
        return training.run(inputs, train.learning_rate).loss

    return step


def measure_contender(contender: Contender, size: TrainingSize, *how: Any) -> Timed:
    """Run `time_contender` on new ranks and return what the first one gives."""
    timed: Timed = on_ranks(contender.name, contender.ranks, time_contender, contender, size, *how)[0]
    return timed


def time_contender(
    contender: Contender, size: TrainingSize, dropout: float = 0.0, clock: Callable[[], float] = time.perf_counter
) -> Timed:
    """Run the iterations of one round; called on each rank."""
    if contender.is_tuned:
        keep_large_buffers()
    memory = PeakMemory(local_device())
    step = contender.build(size)
    barrier: Callable[[], object] = dist.barrier if contender.ranks > 1 else lambda: None
    seconds, losses = [], []
    for iteration in range(size.train.iterations):
        barrier()
        start = clock()
        losses.append(step(iteration, dropout))
        barrier()
        seconds.append(clock() - start)
    return Timed(seconds[size.warm_up :], losses, memory.bytes())


def in_turn(name: str, rounds: int, measurements: Mapping[K, Callable[[], Any]]) -> dict[K, list[Any]]:
    """Take every measurement in each round, so that other work on the machine falls on each alike."""
    taken: dict[K, list[Any]] = {key: [] for key in measurements}
    with Progress(name, rounds * len(measurements), "measurements") as progress:
        for _ in range(rounds):
            for key, measure in measurements.items():
                taken[key].append(measure())
                progress.advance(1, ", ".join(map(str, key)) if isinstance(key, tuple) else str(key))
    return taken


def gemm_gflops(ranks: int = 1, precision: Precision = "fp32", clock: Callable[[], float] = time.perf_counter) -> float:
    """Return the GFLOP/s that `ranks` ranks together reach in matrix products, the best of several tries.

    Called on each of the ranks at once.
    """
    a, b, out = (torch.ones(GEMM_WIDTH, GEMM_WIDTH, dtype=DTYPES[precision]) for _ in range(3))
    tries = []
    for _ in range(GEMM_TRIES):
        if ranks > 1:
            dist.barrier()
        start = clock()
        for _ in range(GEMM_REPEATS):
            torch.mm(a, b, out=out)
        seconds = torch.tensor(clock() - start, dtype=torch.float64)
        if ranks > 1:
            dist.all_reduce(seconds, dist.ReduceOp.MAX)
        tries.append(seconds.item())
    return 2 * GEMM_WIDTH**3 * GEMM_REPEATS * ranks / min(tries) / 1e9


def on_ranks(name: str, ranks: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Return a function's results on new processes. Raises UserError with the measurement's name if one fails."""
    try:
        return run_forked(function, ranks, *arguments, timeout_seconds=TIMEOUT_SECONDS)
    except RanksFailed as error:
        raise UserError(f"{name}: {error.sentence}") from error
