"""Iteration time, TFLOP/s and memory of workloads on a cluster. Imports no torch.

A pipeline is walked as the engine lists its schedule: a computation starts when its rank is free
and its input has been computed; a message's time belongs to the computation that sends it. For
equal stages the makespan is (m + (p − 1)/v)(t_f + t_b), as in the 2021 paper, Section 2.2.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from itertools import starmap
from math import log
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mlm_repro.engine.config import RunConfig
from mlm_repro.engine.costs import PARAMETER_BYTES, fullest_rank, parameter_count
from mlm_repro.engine.parallel.layout import split_layers
from mlm_repro.engine.pipeline.schedule import Op, pass_orders, passes
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
    """Seconds of the parts of an iteration, each an array [n] with one element per workload:
    `pipeline`, all passes with their messages and waits, `gradients`, the reduction that the passes
    do not hide, `optimizer`, and `host`, the host's time outside microbatches; `total` is their
    sum."""

    pipeline: Floats
    """Seconds from the first forward to the last backward pass."""
    gradients: Floats
    """Seconds of gradient reduction that computation does not hide."""
    optimizer: Floats
    host: Floats
    """Seconds of host time outside microbatches."""

    @property
    def total(self) -> Floats:
        """The seconds of the whole iteration, an array with one element per workload: the sum of
        the attributes `pipeline`, `gradients`, `optimizer` and `host`."""
        return self.pipeline + self.gradients + self.optimizer + self.host


@dataclass(frozen=True)
class Prediction:
    """Prediction for one iteration of a workload: its seconds with an interval, the rate per GPU,
    the bytes of memory of its fullest rank and the probability that these bytes fit; `extrapolated`
    says how the workload lies outside the fitted rows. `reason` is empty if the workload runs. For
    a refused workload there are a reason and zeros; for a workload that only lacks memory, a reason
    beside the numbers; with `only_fitting`, `simulate` then gives only the two about memory."""

    reason: str = ""
    """Empty if it runs. If only memory is short, the numbers are given too; with `only_fitting`,
    `simulate` then gives the memory and no times."""
    seconds: float = 0.0
    low_seconds: float = 0.0
    high_seconds: float = 0.0
    """`seconds` is the iteration's time; 90 % of measurements are expected between `low_seconds`
    and `high_seconds`."""
    tflops_per_gpu: float = 0.0
    """Rate by the papers' count (2021 paper, Equation 3), which counts attention without its causal
    mask."""
    memory_bytes: int = 0
    """Bytes that this engine's fullest rank needs (`mlm_repro.engine.costs`)."""
    probability_fits: float = 0.0
    """Probability that the layout fits into a GPU's memory."""
    extrapolated: str = ""
    """How the workload lies outside the rows that the constants are fitted on; empty if it lies
    inside."""


class Walk(NamedTuple):
    """Group of workloads with equal numbers of stages, chunks, microbatches and layers, whose
    pipelines are walked together. It has the indices of the workloads, and what they share: the
    order of their passes, and the number of layers of each stage."""

    places: NDArray[np.int64]
    """Indices of the workloads among all workloads, [n]."""
    order: "Order"
    layers: NDArray[np.int64]
    """Number of layers of every stage, [stages]."""


def iteration_parts(machine: Machine, workloads: Sequence[Workload]) -> Parts:
    """Return one Parts for all `workloads`: each of its arrays has the seconds of a part of an
    iteration on `machine` for each workload, in their order. The workloads must have been checked
    (`checked_config`); their memory is not looked at."""
    w, walks = _prepared(tuple(workloads))
    layer = layer_passes(machine, w)
    head = head_passes(machine, w)
    message = collectives.stage_message_seconds(machine, w)
    sharded, exposed = _sharded(machine, w, layer)
    pipeline = _pipeline_seconds(walks, sharded, head, message)
    most = np.ceil(w.layers / w.p)
    parameters = (layer_weights(w) * most + (w.v + w.s * (1 - w.xl)) * w.h) / w.t
    gradient_bytes = machine.gradient_bytes or machine.element_bytes
    reduction = collectives.data_all_reduce_seconds(machine, w, parameters * gradient_bytes)
    # Reduced, and gathered.
    times = np.where(w.zero == 1, (1 + machine.element_bytes / gradient_bytes) / 2, 1.0)
    hidden = machine.gradient_overlap * (most * layer.backward + head.backward)
    gradients = np.maximum(times * reduction - hidden, times * reduction / (most + 1))
    gradients = np.where(w.zero == 3, exposed, gradients)
    optimizer = optimizer_seconds(machine, parameters / np.where(w.zero > 0, w.d, 1.0))
    return Parts(
        pipeline, gradients, optimizer, np.full(len(workloads), machine.host_iteration_seconds)
    )


def _sharded(machine: Machine, w: Workloads, layer: Passes) -> tuple[Passes, Floats]:
    """Return a pair: a layer's Passes with ZeRO 3's communication, and for each workload the
    seconds that this communication adds to an iteration beside these Passes. Workloads without
    ZeRO 3 keep their passes of `layer`, and their seconds mean nothing.

    While a layer computes, the next layer's parameters are gathered and, in backward, the previous
    layer's gradients are sent (arXiv:2304.11277, Section 3.3), as far as the software hides
    gradients. A pass over n layers takes n times the longer of computation and communication, and
    the part of the shorter that is not hidden. One layer's hidden part is added once for each pass,
    as nothing hides it at the ends. The embedding is gathered once and has nothing to hide behind.
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
    ends = sum(starmap(np.minimum, pairs))
    return passes, w.m * (hidden * ends + half(embedding, element) + half(embedding, gradient))


def simulate(
    cluster: Cluster,
    workloads: Sequence[Workload],
    run: RunConfig | None = None,
    only_fitting: bool = False,
) -> list[Prediction]:
    """Return a list with the Prediction of every workload on the `cluster`, in order. A workload
    that the engine refuses or the cost model does not cost gets a reason alone; one that lacks
    memory gets a reason beside its numbers.

    The workloads are layouts of `run`, or without it of a model with default settings; memory is
    computed for that run. A BERT is timed as a GPT-2. With `only_fitting`, a workload that lacks
    memory gets no time. Shows progress.
    """
    predictions = [Prediction()] * len(workloads)
    runnable = []
    machine = machine_of(cluster)
    with Progress("workloads checked", len(workloads), "workloads") as progress:
        for index, workload in enumerate(workloads):
            try:
                config = checked_config(workload, cluster.precision, run)
                predictions[index] = _memory(machine, workload, config)
                if not (only_fitting and predictions[index].reason):
                    runnable.append((index, workload, parameter_count(config.model)))
            except BadInput as error:
                predictions[index] = Prediction(reason=str(error))
            progress.advance()
    parts = iteration_parts(machine, [workload for _, workload, _ in runnable])
    for (index, workload, parameters), total in zip(runnable, parts.total.tolist(), strict=True):
        beyond = cluster.beyond(workload.gpus, workload.seq, parameters)
        interval = cluster.interval(workload.gpus, beyond)
        predictions[index] = replace(
            predictions[index],
            seconds=total,
            low_seconds=total * interval.low,
            high_seconds=total * interval.high,
            tflops_per_gpu=flops_of(workload) / (total * workload.gpus * 1e12),
            extrapolated=beyond,
        )
    return predictions


def _memory(machine: Machine, workload: Workload, config: RunConfig) -> Prediction:
    """Return a Prediction of memory alone, without times, for a workload whose configuration is
    `config`: the bytes that the fullest pipeline rank needs, the probability that a GPU of
    `machine` has as many, and as `reason` a text if it has fewer, else an empty one. The number of
    data-parallel ranks and ZeRO 3 are taken from `workload`. A GPT-2 stores no scores if `machine`
    has fused attention; under ZeRO 3 the parameters and gradients that are whole at one time count
    too."""
    model = config.model
    available = machine.memory_bytes
    if machine.fused_attention and workload.family == "gpt2":
        # Fused attention holds no scores, neither for backward nor when a layer is recomputed.
        model = model.model_copy(update={"num_heads": 0})
    parallel = config.parallel.model_copy(update={"shard_parameters": workload.zero == 3})
    fullest = fullest_rank(model, config.train, parallel, workload.dp)
    # ZeRO 3 holds in full the parameters of the layer that computes and of the next one, and the
    # gradients of the previous one
    elements = (
        max(machine.gathered_squares * workload.hidden, workload.padded_vocab) * workload.hidden
    )
    element = PARAMETER_BYTES[config.train.precision]
    gathered = (
        round(elements * (2 * element.weight + element.gradient)) if workload.zero == 3 else 0
    )
    needed = fullest.total + gathered
    short = (
        f"pipeline rank {fullest.rank} needs {needed / 2**30:.1f} GiB of memory; a GPU has"
        f" {available / 2**30:.1f}"
    )
    return Prediction(
        reason=short if needed > available else "",
        memory_bytes=needed,
        probability_fits=NormalDist().cdf(log(available / needed) / machine.memory_error),
    )


@lru_cache(maxsize=8)  # a fit asks for the same rows thousands of times
def _prepared(rows: tuple[Workload, ...]) -> tuple[Workloads, list[Walk]]:
    """Return a pair: the workloads as columns, and a list of Walks, groups with equal stages,
    chunks, microbatches and layers, whose pipelines are walked together. Cached, so callers must
    not change the result."""
    # Walking workloads of one schedule together made calibration three times as fast.
    alike = defaultdict(list)
    for index, row in enumerate(rows):
        alike[row.pp, row.chunks, row.microbatches, row.layers].append(index)
    walks = []
    for (pp, chunks, microbatches, layers), indices in alike.items():
        counts = np.array([len(stage.layers) for stage in split_layers(layers, pp, chunks)])
        walks.append(Walk(np.array(indices), order_of(pp, chunks, microbatches), counts))
    return Workloads.of(rows), walks


def _pipeline_seconds(
    walks: Sequence[Walk], layer: Passes, head: Passes, message_seconds: Floats
) -> Floats:
    """Return an array [n] with the seconds, for each workload, from the first forward to the last
    backward pass. `layer` and `head`, pairs of arrays [n], are the seconds that one layer and the
    output head take on a microbatch, forward and backward, `message_seconds` [n] the seconds of one
    message between stages. A stage's pass includes its message to the stage that comes after it in
    that pass, forward or backward; both passes of the last stage include the output head. Each Walk
    in `walks` has the indices of its workloads, the order of their passes and the number of layers
    of each stage; every workload is in exactly one Walk."""
    seconds = np.empty(len(message_seconds))
    for indices, order, layers in walks:
        forward, backward = (np.multiply.outer(times[indices], layers) for times in layer)
        forward[:, :-1] += message_seconds[indices, None]
        backward[:, 1:] += message_seconds[indices, None]
        forward[:, -1] += head.forward[indices]
        backward[:, -1] += head.backward[indices]
        seconds[indices] = makespan()(order, forward, backward)
    return seconds


Order = NDArray[np.int32]
"""Computations of every rank in order, [p, 3, 2·m·v]: forward or backward (0, 1), microbatch,
chunk."""


@lru_cache(maxsize=1024)
def order_of(pp: int, chunks: int, microbatches: int) -> Order:
    """Return the engine's order of computation for each rank of a pipeline, an int32 array [p, 3,
    2·m·v]. A rank's three rows are the direction (0 forward, 1 backward), the microbatch and the
    chunk, among its own, of each of its passes. The order is 1F1B, or interleaved if there are
    several chunks; then it raises BadInput unless the microbatches are a multiple of p. Cached, so
    callers must not change it."""
    every = [(c.op is Op.BACKWARD, c.microbatch, c.chunk) for c in passes(pp, chunks, microbatches)]
    codes = np.array(every, np.int32).T
    orders = pass_orders("interleaved" if chunks > 1 else "1f1b", pp, chunks, microbatches)
    return np.array([codes[:, order] for order in orders])


@cache
def makespan() -> Callable[[Order, Floats, Floats], Floats]:
    """Return the compiled function that walks a pipeline; it is compiled at its first call.

    It takes an order, as `order_of` gives it, and the durations of each stage's forward and of its
    backward passes, both float64 [n, stages], for n workloads; a stage is one chunk of one rank. It
    returns a float64 array [n], in the same unit: their times from the start of the first forward
    to the end of the last backward pass.
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
        finished = 0
        before = -1
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
