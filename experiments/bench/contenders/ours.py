"""This engine as a contender: the trainer's iteration without files and schedules."""

import torch

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


def build_ours(contender: Contender, size: BenchSize) -> Step:
    """A step of this rank's part of the contender's layout."""
    parallel = contender.parallel
    layout = Layout(parallel.tp, parallel.pp, contender.ranks // (parallel.tp * parallel.pp))
    mesh = build_mesh(layout, parallel.sequence_parallel, size.train.invariant)
    return our_step(size, parallel, mesh, contender.microbatches)


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
