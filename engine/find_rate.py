"""Trains a configuration while its learning rate rises, for the learning-rate finder's curve."""

import tempfile
from pathlib import Path

import torch

from engine.config import RunConfig
from engine.estimate import describe_training
from engine.optim.lr_finder import RateCurve
from engine.parallel.layout import layout_of
from engine.parallel.mesh import build_mesh
from engine.parallel.rendezvous import check_agreement, join_ranks, launched_world_size, telling_of_lost_ranks
from engine.step import NotFinite
from engine.trainer import Trainer
from engine.training_run import begin_run
from lineage.errors import BadInput
from lineage.progress import Progress, announce


def find_learning_rate(config: RunConfig, low: float, high: float, iterations: int) -> RateCurve:
    """The losses of so many iterations of a training whose rate rises from `low` to `high`, until they diverge.

    Model, data, order and optimizer are the configuration's, from iteration 0; nothing of the training is kept. Every
    rank calls it and has the result. Raises BadInput for ends or a number of iterations that are no sweep.
    """
    if not 0 < low < high < float("inf") or iterations < 2:
        raise BadInput(f"no sweep: {iterations} iterations from a rate of {low:g} to {high:g}")
    rates = {"min_learning_rate": low, "learning_rate": high, "warmup_iterations": 0, "decay": "exponential"}
    settings = rates | {"iterations": iterations, "skip_spikes": False}
    config = config.model_copy(update={"train": config.train.model_copy(update=settings)})
    curve = RateCurve()
    join_ranks()
    with telling_of_lost_ranks(), tempfile.TemporaryDirectory() as folder:
        check_agreement(config.model_dump(mode="json"))
        config, dataset, run = begin_run(config, Path(folder))
        layout = layout_of(config, launched_world_size())
        if layout.world_size > 1:
            torch.set_num_threads(1)
        mesh = build_mesh(layout, config.parallel.sequence_parallel)
        if mesh.is_first:
            announce(describe_training(config, layout.world_size), "of which only the losses are kept")
        trainer = Trainer(config, run, dataset, mesh)
        with Progress(f"{config.name}, learning rates", iterations, "iterations", quiet=not mesh.is_first) as progress:
            for iteration in range(iterations):
                try:
                    line, _, _ = trainer.iterate(iteration)
                except NotFinite:
                    break
                if line["skipped"]:  # fp16, until its loss scale fits
                    continue
                if curve.add(line["learning_rate"], line["loss"]):
                    break
                progress.advance(1, f"lr {line['learning_rate']:.2e}, loss {line['loss']:.3f}")
    return curve
