"""What any layout must have in common with the serial run."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from mlm_repro.engine.compare.recorder import whole_gradients
from mlm_repro.engine.config import TrainConfig
from mlm_repro.engine.model.microbatch import PipelineInput
from mlm_repro.engine.optim.schedule import learning_rate
from mlm_repro.engine.parallel.sharding import ShardedParameter
from mlm_repro.engine.pipeline.executor import PartitionedModel
from mlm_repro.engine.step import TrainingStep

Result = dict[str, Any]


def whole(p: ShardedParameter, part: torch.Tensor) -> Any:
    """The whole of a parameter's tensor from the parts on every rank; a collective."""
    return (part if p.dim is None else p.axis.all_gather(part, p.dim)).numpy()


def trained(
    model: PartitionedModel,
    step: TrainingStep,
    train: TrainConfig,
    batch: Callable[[int], list[PipelineInput]],
) -> Result:
    """Train on this rank's microbatches of each iteration: losses, norms, whole gradients and
    weights of its stages."""
    losses, norms = [], []
    for iteration in range(train.iterations):
        gradient = step.gradient(batch(iteration))
        losses.append(gradient.loss)
        norms.append(gradient.norm)
        gradients = {p.name: whole(p, each.clone()) for p, each in whole_gradients(step.optimizer)}
        step.update(gradient, learning_rate(train, iteration + 1))
    weights = {p.name: whole(p, p.local.data) for p in model.parameters}
    return {"losses": losses, "norms": norms, "gradients": gradients, "weights": weights}


def assert_like_serial(ranks: Sequence[Result], serial: Result) -> None:
    """Every rank's numbers are the serial run's, and the ranks together have every parameter."""
    tensors = ("gradients", "weights")
    for what in tensors:
        assert {name for rank in ranks for name in rank[what]} == serial[what].keys()
    for rank in ranks:
        for what in rank.keys() - set(tensors):
            np.testing.assert_allclose(rank[what], serial[what], rtol=0, atol=1e-10, err_msg=what)
        for what in tensors:
            for name, value in rank[what].items():
                np.testing.assert_allclose(
                    value, serial[what][name], rtol=0, atol=1e-10, err_msg=f"{what} {name}"
                )
