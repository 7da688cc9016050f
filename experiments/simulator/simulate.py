"""Iteration time, TFLOP/s and memory of workloads on a cluster. Imports no torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from engine.config import RunConfig
from engine.costs import fullest_rank
from engine.model.stages import split_layers
from experiments.simulator.cluster import Cluster, Machine, machine_of
from experiments.simulator.collectives import gradient_all_reduce_seconds, stage_message_seconds
from experiments.simulator.compute import Passes, head_passes, layer_passes, optimizer_seconds
from experiments.simulator.timeline import makespan_seconds, order_of
from experiments.simulator.workload import Floats, Workload, Workloads, checked_config, flops_of
from lineage.errors import BadInput
from lineage.progress import Progress


@dataclass(frozen=True)
class Parts:
    """Seconds of an iteration's parts, one element per workload."""

    pipeline: Floats
    """From the first forward to the last backward."""
    gradients: Floats
    """Of their reduction, what computation does not hide."""
    optimizer: Floats
    total: Floats


@dataclass(frozen=True)
class Prediction:
    """What a workload takes, or why it cannot run."""

    reason: str = ""
    """Empty where it runs."""
    seconds: float = 0.0
    low_seconds: float = 0.0
    high_seconds: float = 0.0
    tflops_per_gpu: float = 0.0
    """By the papers' count (2021 paper, Equation 3), which has the whole of attention, over time and GPUs."""
    memory_bytes: int = 0
    """Of the fullest rank of this engine (`engine.costs`)."""


def iteration_parts(machine: Machine, workloads: Sequence[Workload]) -> Parts:
    """Time of every workload. They must have been checked (`checked_config`)."""
    w = Workloads.of(workloads)
    layer, head = layer_passes(machine, w), head_passes(machine, w)
    message = stage_message_seconds(machine, w)
    pipeline = _pipeline_seconds(workloads, layer, head, message)
    parameters = (12 * w.h * w.h * np.ceil(w.layers / w.p) + (w.v + w.s) * w.h) / w.t
    reduction = gradient_all_reduce_seconds(machine, w, parameters * machine.element_bytes)
    last_backward = w.layers * layer.backward + head.backward
    hidden = np.where(w.p == 1, machine.gradient_overlap * last_backward, 0.0)
    gradients = np.maximum(reduction - hidden, 0.0)
    optimizer = optimizer_seconds(machine, parameters)
    total = pipeline + gradients + optimizer + machine.host_iteration_seconds
    return Parts(pipeline, gradients, optimizer, total)


def stage_passes(like: Workload, layer: Passes, head: Passes, message_seconds: Floats) -> Passes:
    """Forward and backward time of every stage, each with the message it sends to the next, [n, stages].

    All times are of the same `n` workloads, which have the layers and the pipeline of `like`.
    """
    counts = _layer_counts(like.layers, like.pp, like.chunks)
    forward, backward = np.multiply.outer(layer.forward, counts), np.multiply.outer(layer.backward, counts)
    forward[:, :-1] += message_seconds[:, None]
    backward[:, 1:] += message_seconds[:, None]
    forward[:, -1] += head.forward
    backward[:, -1] += head.backward
    return Passes(forward, backward)


@cache
def _layer_counts(layers: int, pp: int, chunks: int) -> NDArray[np.int64]:
    """Layers of every stage; not to be changed."""
    return np.array([len(stage.layers) for stage in split_layers(layers, pp, chunks)])


def simulate(cluster: Cluster, workloads: Sequence[Workload], run: RunConfig | None = None) -> list[Prediction]:
    """A prediction per workload, in order; one that cannot run gets the reason and no numbers.

    `run` is what the workloads are layouts of, if not of a GPT-2 that shards nothing: memory is its own. Times are a
    GPT-2's in any case.
    """
    predictions, runnable = [Prediction()] * len(workloads), []
    with Progress("workloads checked", len(workloads), "workloads") as progress:
        for place, workload in enumerate(workloads):
            try:
                config = checked_config(workload, cluster.precision, run)
                runnable.append((place, workload, _fitting_bytes(cluster, workload, config)))
            except BadInput as error:
                predictions[place] = Prediction(reason=str(error))
            progress.advance()
    seconds = iteration_parts(machine_of(cluster), [workload for _, workload, _ in runnable]).total
    for (place, workload, memory), total in zip(runnable, seconds.tolist(), strict=True):
        one_node = workload.gpus <= cluster.constants.gpus_per_node.value
        interval = cluster.intervals.one_node if one_node else cluster.intervals.several_nodes
        predictions[place] = Prediction(
            seconds=total,
            low_seconds=total * interval.low,
            high_seconds=total * interval.high,
            tflops_per_gpu=flops_of(workload) / (total * workload.gpus * 1e12),
            memory_bytes=memory,
        )
    return predictions


def _pipeline_seconds(workloads: Sequence[Workload], layer: Passes, head: Passes, message_seconds: Floats) -> Floats:
    """From the first forward to the last backward; workloads of one depth and schedule are walked together."""
    seconds = np.empty(len(workloads))
    alike: dict[tuple[int, ...], list[int]] = {}
    for place, workload in enumerate(workloads):
        alike.setdefault((workload.layers, workload.pp, workload.chunks, workload.microbatches), []).append(place)
    for (_, *schedule), places in alike.items():
        of_layer, of_head = (Passes(*(times[places] for times in passes)) for passes in (layer, head))
        stages = stage_passes(workloads[places[0]], of_layer, of_head, message_seconds[places])
        seconds[places] = makespan_seconds(order_of(*schedule), *stages)
    return seconds


def _fitting_bytes(cluster: Cluster, workload: Workload, config: RunConfig) -> int:
    if cluster.max_gpus and workload.gpus > cluster.max_gpus:
        raise BadInput(f"{workload.gpus} GPUs are more than the cluster's {cluster.max_gpus}")
    needed, has = fullest_rank(config.model, config.train, config.parallel, workload.dp), cluster.constants.memory_bytes
    if needed.total > has.value:
        sizes = f"{needed.total / 2**30:.1f} GiB of memory; a GPU has {has.value / 2**30:.1f}"
        raise BadInput(f"pipeline rank {needed.rank} needs {sizes}")
    return needed.total
