"""Iterations of the engine on made-up tokens, and the rate of matrix products."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from engine.config import ModelConfig, ParallelConfig, Precision, TrainConfig
from engine.model.microbatch import PipelineInput
from engine.optim.precision import DTYPES
from engine.parallel.mesh import ParallelMesh
from engine.rng import Dropout
from engine.step import build_step

GEMM_WIDTH, GEMM_REPEATS, GEMM_TRIES = 1024, 8, 4

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
