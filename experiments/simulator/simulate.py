"""Iteration time, TFLOP/s and memory of workloads on a cluster. Imports no torch.

A pipeline is walked as the engine lists its schedule: a computation starts when its rank is free
and its input has been computed; a message's time belongs to the computation that sends it. For
equal stages the makespan is (m + (p − 1)/v)(t_f + t_b), as in the 2021 paper, Section 2.2.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from math import log
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mlm_repro.engine.config import RunConfig
from mlm_repro.engine.costs import PARAMETER_BYTES, fullest_rank, parameter_count
from mlm_repro.engine.parallel.layout import split_layers
from mlm_repro.engine.pipeline.schedule import Op, compute_orders
from mlm_repro.experiments.simulator import collectives
from mlm_repro.experiments.simulator.cluster import Cluster, Machine, machine_of
from mlm_repro.experiments.simulator.compute import (
    Passes,
    head_passes,
    layer_passes,
    layer_weights,
    optimizer_seconds,
)
from mlm_repro.experiments.simulator.workload import (
    Floats,
    Workload,
    Workloads,
    checked_config,
    flops_of,
)
from mlm_repro.lineage.errors import BadInput
from mlm_repro.lineage.progress import Progress


@dataclass(frozen=True)
class Parts:
    """Seconds of an iteration's parts, one element per workload."""

    pipeline: Floats
    """Time from the first forward to the last backward pass."""
    gradients: Floats
    """Time of their reduction that computation does not hide."""
    optimizer: Floats
    host: Floats
    """Host time outside microbatches."""

    @property
    def total(self) -> Floats:
        """Time of the iteration."""
        return self.pipeline + self.gradients + self.optimizer + self.host


@dataclass(frozen=True)
class Prediction:
    """A workload's time and memory, or the reason for which it cannot run."""

    reason: str = ""
    """Empty if it runs. If only memory is short, the numbers are given too."""
    seconds: float = 0.0
    low_seconds: float = 0.0
    high_seconds: float = 0.0
    tflops_per_gpu: float = 0.0
    """Rate by the papers' count (2021 paper, Equation 3), which has the whole of attention."""
    memory_bytes: int = 0
    """Memory of this engine's fullest rank (`mlm_repro.engine.costs`)."""
    probability_fits: float = 0.0
    """Probability that the layout fits."""
    extrapolated: str = ""
    """Everything in which the workload lies beyond the rows that the constants are fitted on."""


class Walk(NamedTuple):
    """Workloads of equal depth and schedule, whose pipelines are walked together."""

    places: NDArray[np.int64]
    order: "Order"
    layers: NDArray[np.int64]
    """Layers of every stage."""


def iteration_parts(machine: Machine, workloads: Sequence[Workload]) -> Parts:
    """Time of every workload. They must have been checked (`checked_config`)."""
    w, walks = _prepared(tuple(workloads))
    layer, head = layer_passes(machine, w), head_passes(machine, w)
    message = collectives.stage_message_seconds(machine, w)
    computed, layer, exposed = layer, *_sharded(machine, w, layer)
    pipeline = _pipeline_seconds(walks, layer, head, message)
    most = np.ceil(w.layers / w.p)
    parameters = (layer_weights(w) * most + (w.v + w.s * (1 - w.xl)) * w.h) / w.t
    gradient_bytes = machine.gradient_bytes or machine.element_bytes
    reduction = collectives.data_all_reduce_seconds(machine, w, parameters * gradient_bytes)
    # Reduced, and gathered.
    times = np.where(w.zero == 1, (1 + machine.element_bytes / gradient_bytes) / 2, 1.0)
    hidden = machine.gradient_overlap * (most * computed.backward + head.backward)
    gradients = np.maximum(times * reduction - hidden, times * reduction / (most + 1))
    gradients = np.where(w.zero == 3, exposed, gradients)
    optimizer = optimizer_seconds(machine, parameters / np.where(w.zero > 0, w.d, 1.0))
    return Parts(
        pipeline, gradients, optimizer, np.full(len(workloads), machine.host_iteration_seconds)
    )


def _sharded(machine: Machine, w: Workloads, layer: Passes) -> tuple[Passes, Floats]:
    """A layer's passes under ZeRO 3, those of others as they are, and its communication that
    nothing hides.

    While a layer computes, the next one's parameters are gathered and in backward the former one's
    gradients sent (arXiv:2304.11277, Section 3.3), as far as the software hides gradients: of n
    layers a pass takes n times the longer of both and what is not hidden of the shorter, whose rest
    comes once, at its ends. The embedding, gathered once, has nothing to hide behind.
    """
    hidden = machine.gradient_overlap
    own = layer_weights(w)
    embedding = (w.v + w.s) * w.h
    element = machine.element_bytes
    gradient = machine.gradient_bytes or machine.element_bytes

    def half(elements: Floats, size: float) -> Floats:
        return collectives.data_all_reduce_seconds(machine, w, elements * size) / 2

    gather = half(own, element)
    scatter = half(own, gradient)
    sent = Passes(gather, gather + scatter)
    pairs = list(zip(layer, sent, strict=True))
    taken = (np.maximum(*both) + (1 - hidden) * np.minimum(*both) for both in pairs)
    passes = Passes(
        *(np.where(w.zero == 3, time, alone) for time, alone in zip(taken, layer, strict=True))
    )
    ends = sum(np.minimum(*both) for both in pairs)
    return passes, w.m * (hidden * ends + half(embedding, element) + half(embedding, gradient))


def simulate(
    cluster: Cluster,
    workloads: Sequence[Workload],
    run: RunConfig | None = None,
    only_fitting: bool = False,
) -> list[Prediction]:
    """A prediction per workload, in order; one that cannot run gets the reason and no numbers.

    `run` is what the workloads are layouts of, if not of a GPT-2 that shards nothing: memory is its
    own. Times of a BERT are a GPT-2's. With `only_fitting`, one that lacks memory gets no time.
    """
    predictions, runnable = [Prediction()] * len(workloads), []
    machine = machine_of(cluster)
    with Progress("workloads checked", len(workloads), "workloads") as progress:
        for place, workload in enumerate(workloads):
            try:
                config = checked_config(workload, cluster.precision, run)
                predictions[place] = _memory(machine, workload, config)
                if not (only_fitting and predictions[place].reason):
                    runnable.append((place, workload, parameter_count(config.model)))
            except BadInput as error:
                predictions[place] = Prediction(reason=str(error))
            progress.advance()
    parts = iteration_parts(machine, [workload for _, workload, _ in runnable])
    for (place, workload, parameters), total in zip(runnable, parts.total.tolist(), strict=True):
        beyond = cluster.beyond(workload.gpus, workload.seq, parameters)
        interval = cluster.interval(workload.gpus, beyond)
        predictions[place] = replace(
            predictions[place],
            seconds=total,
            low_seconds=total * interval.low,
            high_seconds=total * interval.high,
            tflops_per_gpu=flops_of(workload) / (total * workload.gpus * 1e12),
            extrapolated=beyond,
        )
    return predictions


def _memory(machine: Machine, workload: Workload, config: RunConfig) -> Prediction:
    """The bytes of the fullest pipeline rank, and whether a GPU has them."""
    model, has = config.model, machine.memory_bytes
    if machine.fused_attention and workload.family == "gpt2":
        # It neither stores scores nor makes them again for backward.
        model = model.model_copy(update={"num_heads": 0})
    parallel = config.parallel.model_copy(update={"shard_parameters": workload.zero == 3})
    fullest = fullest_rank(model, config.train, parallel, workload.dp)
    # under ZeRO 3 parameters are whole that compute, those that are next, and gradients of the
    # former
    whole = max(machine.gathered_squares * workload.hidden, workload.padded_vocab) * workload.hidden
    each = PARAMETER_BYTES[config.train.precision]
    more = round(whole * (2 * each.weight + each.gradient)) if workload.zero == 3 else 0
    needed = fullest.total + more
    short = (
        f"pipeline rank {fullest.rank} needs {needed / 2**30:.1f} GiB of memory; a GPU has"
        f" {has / 2**30:.1f}"
    )
    return Prediction(
        reason=short if needed > has else "",
        memory_bytes=needed,
        probability_fits=NormalDist().cdf(log(has / needed) / machine.memory_error),
    )


@lru_cache(maxsize=8)  # a fit asks for the same rows thousands of times
def _prepared(rows: tuple[Workload, ...]) -> tuple[Workloads, list[Walk]]:
    """The columns of workloads, and how they are walked."""
    alike: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for place, row in enumerate(rows):
        alike[row.pp, row.chunks, row.microbatches, row.layers].append(place)
    walks = []
    for (pp, chunks, microbatches, layers), places in alike.items():
        counts = np.array([len(stage.layers) for stage in split_layers(layers, pp, chunks)])
        walks.append(Walk(np.array(places), order_of(pp, chunks, microbatches), counts))
    return Workloads.of(rows), walks


def _pipeline_seconds(
    walks: Sequence[Walk], layer: Passes, head: Passes, message_seconds: Floats
) -> Floats:
    """Time from the first forward to the last backward pass; every stage sends a message to the
    next."""
    seconds = np.empty(len(message_seconds))
    for places, order, layers in walks:
        forward, backward = (np.multiply.outer(times[places], layers) for times in layer)
        forward[:, :-1] += message_seconds[places, None]
        backward[:, 1:] += message_seconds[places, None]
        forward[:, -1] += head.forward[places]
        backward[:, -1] += head.backward[places]
        seconds[places] = makespan()(order, forward, backward)
    return seconds


Order = NDArray[np.int32]
"""Computations of every rank in order, [p, 3, 2·m·v]: forward or backward (0, 1), microbatch,
chunk."""


@lru_cache(maxsize=1024)
def order_of(pp: int, chunks: int, microbatches: int) -> Order:
    """The engine's order of computation, not to be changed: 1F1B, interleaved where there are
    several chunks."""
    orders = compute_orders("interleaved" if chunks > 1 else "1f1b", pp, chunks, microbatches)
    return np.array(
        [
            [
                [c.op is Op.BACKWARD for c in order],
                [c.microbatch for c in order],
                [c.chunk for c in order],
            ]
            for order in orders
        ],
        np.int32,
    )


@cache
def makespan() -> Callable[[Order, Floats, Floats], Floats]:
    """The compiled walk: time from the first forward to the end of the last backward pass, [n].

    Durations are per stage, [n, stages].
    """
    from mlm_repro.lineage.loops import compiled

    return compiled(_makespan)


def _makespan(codes: Order, forward: Floats, backward: Floats) -> Floats:  # pragma: no cover
    ranks, _, count = codes.shape
    stages = forward.shape[1]
    spans = np.empty(len(forward))
    for number in range(len(forward)):
        done = np.full((2, stages, count * ranks // (2 * stages)), -1.0)
        position = np.zeros(ranks, np.int64)
        free = np.zeros(ranks)
        finished, before = 0, -1
        while finished != before:
            before = finished
            for rank in range(ranks):
                while position[rank] < count:
                    kind, microbatch, chunk = codes[rank, :, position[rank]]
                    stage = chunk * ranks + rank
                    ready = 0.0
                    if kind == 0 and stage > 0:
                        ready = done[0, stage - 1, microbatch]
                    elif kind == 1:
                        ready = (
                            done[1, stage + 1, microbatch]
                            if stage + 1 < stages
                            else done[0, stage, microbatch]
                        )
                    if ready < 0.0:
                        break
                    taken = forward[number, stage] if kind == 0 else backward[number, stage]
                    free[rank] = max(free[rank], ready) + taken
                    done[kind, stage, microbatch] = free[rank]
                    position[rank] += 1
                    finished += 1
        spans[number] = free.max()
    return spans
