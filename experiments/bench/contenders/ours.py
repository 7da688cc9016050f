"""This engine as a contender: the trainer's iteration without files and schedules."""

import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from engine.config import ParallelConfig
from engine.launch.mesh import build_mesh, local_device
from engine.model.microbatch import PipelineInput
from engine.optim.precision import DTYPES
from engine.parallel.layout import Layout
from engine.parallel.mesh import ParallelMesh, serial_mesh
from engine.pipeline.lowering import Interval
from engine.pipeline.partition import PartitionedModel
from engine.rng import Dropout
from engine.step import build_step
from experiments.bench.contender import BenchSize, Contender, Step
from experiments.bench.timing import rounded, series
from lineage.benchmark import Case, Ratio

SHOWN_KERNELS = 25
TEXT_BYTES = 1 << 26


def build_ours(contender: Contender, size: BenchSize) -> Step:
    """A step of this rank's part of the contender's layout."""
    parallel = contender.parallel
    layout = Layout(parallel.tp, parallel.pp, contender.ranks // (parallel.tp * parallel.pp))
    mesh = build_mesh(layout, parallel.sequence_parallel, size.train.invariant)
    return our_step(size, parallel, mesh, contender.microbatches)


def build_separate(contender: Contender, size: BenchSize) -> Step:
    """A step of the whole model on every rank, which share nothing."""
    return our_step(size, ParallelConfig(), serial_mesh(local_device()), 1)


def our_step(size: BenchSize, parallel: ParallelConfig, mesh: ParallelMesh, microbatches: int) -> Step:
    """A step of this rank's part of a mesh, in so many microbatches."""
    train = size.train
    _, training = build_step(size.model, train, parallel, mesh)
    share = train.global_batch_size // mesh.dp.size
    rows = range(mesh.dp.rank * share, (mesh.dp.rank + 1) * share)
    each = share // microbatches

    def step(iteration: int, dropout: float, timeline: list[Interval] | None = None) -> float:
        batch = torch.from_numpy(size.batch(iteration)).to(mesh.device)
        inputs = []
        for start in range(rows.start, rows.stop, each):
            places = tuple(range(start, start + each))
            tokens = batch[start : start + each]
            masks = Dropout(dropout, train.seed, iteration, places) if dropout else None
            inputs.append(PipelineInput(tokens[:, :-1], tokens[:, 1:], masks))
        training.timeline = timeline
        return training.run(inputs, train.learning_rate).loss

    return step


def build_without_optimizer(contender: Contender, size: BenchSize) -> Step:
    """A step that is forward and backward of our model alone, on one rank."""
    mesh, train = serial_mesh(local_device()), size.train
    chunk = PartitionedModel(size.model, contender.parallel, mesh, DTYPES[train.precision], train.seed).chunks[0]

    def step(iteration: int, dropout: float) -> float:
        tokens = torch.from_numpy(size.batch(iteration)).to(mesh.device)
        masks = Dropout(dropout, train.seed, iteration, tuple(range(len(tokens))))
        batch = PipelineInput(tokens[:, :-1], tokens[:, 1:], masks)
        loss = chunk.batch_loss(chunk.run_stage(batch.tokens, batch), batch)
        loss.backward()
        chunk.zero_grad()
        return loss.item()

    return step


def losses_on(device: str, size: BenchSize, dropout: float) -> list[float]:
    """Of every iteration, trained on a device with dropout; the masks are the same on each."""
    step = our_step(size, ParallelConfig(), serial_mesh(device), 1)
    return [step(iteration, dropout) for iteration in range(size.train.iterations)]


def profile(size: BenchSize, dropout: float) -> Case:
    """Milliseconds of the kernels that take the longest in an iteration, by torch's profiler."""
    step = our_step(size, ParallelConfig(), serial_mesh(local_device()), 1)
    for iteration in range(size.warm_up):
        step(iteration, dropout)
    with torch.profiler.profile() as trace:
        step(size.warm_up, dropout)
    kernels = sorted(trace.key_averages(), key=lambda event: -event.self_device_time_total)[:SHOWN_KERNELS]
    return Case(
        name=f"kernels of an iteration, {size.name}",
        series=[
            series(kernel.key[:80], "time of an iteration", "ms", kernel.self_device_time_total / 1000)
            for kernel in kernels
            if kernel.self_device_time_total
        ],
    )


@dataclass(frozen=True)
class TextSize(BenchSize):
    """Trained on the sources of this machine's Python packages, a token for each byte."""

    def batch(self, iteration: int) -> NDArray[np.int64]:
        """Token ids of an iteration's global batch, [B, s + 1], from places drawn at random."""
        text, generator = _text(), np.random.default_rng([self.train.seed, iteration])
        starts = generator.integers(len(text) - self.model.seq_length - 1, size=self.train.global_batch_size)
        return np.stack([text[start : start + self.model.seq_length + 1] for start in starts]).astype(np.int64)


@cache
def _text() -> NDArray[np.uint8]:
    held, folder = bytearray(), Path(np.__file__).parents[1]
    for path in sorted(folder.rglob("*.py")):
        held += path.read_bytes()
        if len(held) > TEXT_BYTES:
            break
    return np.frombuffer(bytes(held), dtype=np.uint8)


def train_on_text(size: BenchSize, dropout: float, seconds: float) -> Case:
    """Loss and speed of as many iterations as fit the seconds."""
    train = size.train.model_copy(update={"learning_rate": 3e-4})
    step = our_step(TextSize(size.name, size.model, train, 0), ParallelConfig(), serial_mesh(local_device()), 1)
    losses: list[float | None] = []
    first, begun = 0.0, time.monotonic()
    while time.monotonic() - begun < seconds or len(losses) < 2:
        losses.append(loss := step(len(losses), dropout))
        first = first or loss
    rate = len(losses) * size.tokens / (time.monotonic() - begun)
    return Case(
        name=f"{size.name} on text",
        series=[
            series("ours", "rate", "tokens/s", rate),
            series("ours", "iterations", "", len(losses)),
            series("ours", "last loss of a byte", "nats", loss),
        ],
        ratios=[Ratio(name="last loss ÷ first", value=rounded(loss / first), goal=0.5, less_is_better=True)],
        losses={"ours": losses[:: max(1, len(losses) // 200)]},
    )
