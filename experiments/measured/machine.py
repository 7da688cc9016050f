"""Measures this machine's constants as a cluster, and small workloads beside their predictions."""

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from engine.config import ModelConfig, ParallelConfig, Precision, TrainConfig
from engine.launch.local import launch
from engine.launch.mesh import build_mesh
from engine.parallel.layout import Layout
from engine.parallel.mesh import serial_mesh
from experiments.catalogue import Experiment, Part
from experiments.iterations import OurLayout, TrainingSize, in_turn, measure_contender, our_step
from experiments.published import Row, position, workload_rows
from experiments.quantities import simulated_values
from experiments.sealed import Line, seal_numbers
from experiments.simulator.calibrate import CONSTANTS, Fitted, HeldOut, fit, fit_node, interval_of, least, started
from experiments.simulator.cluster import Cluster, Intervals, Machine, load_cluster, machine_of, stated_constants
from experiments.simulator.compute import matmul_seconds
from experiments.simulator.measurements import QUANTITIES, AllReduce, Observation, Simulated, predicted, workload_of
from experiments.simulator.simulate import simulate
from experiments.simulator.workload import Floats, Workload
from lineage.atomic import read_json, write_json
from lineage.environment import available_cores, cpu_name, list_gpus, memory_bytes
from lineage.errors import HardwareMissing
from lineage.progress import announce
from lineage.records import Record
from lineage.run import RunDirectory

MATMUL_WIDTHS = (32, 64, 128, 256, 512, 1024, 2048)
ALL_REDUCE_BYTES = (2**12, 2**16, 2**20, 2**24, 2**26)
COPIED_BYTES = 2**28
SMALL_OPERATIONS = 30
"""Operations of one layer's forward pass in `engine/model/transformer.py`, rounded."""
SECONDS_PER_MEASUREMENT = 0.2
EFFICIENCIES = ("matmul_efficiency", "memory_efficiency")
SHAPES = tuple(
    Workload(gpus=1, global_batch=batch, micro_batch=micro_batch, hidden=hidden, heads=heads, layers=layers, seq=seq,
             tp=1, dp=1, pp=1, vocab=vocab, recompute="none")
    for layers, hidden, heads, seq, vocab, batch, micro_batch in (
        (12, 128, 2, 128, 2048, 4, 4), (6, 256, 4, 128, 4096, 4, 2), (4, 256, 4, 256, 4096, 2, 1),
        (4, 512, 8, 256, 8192, 1, 1), (2, 768, 12, 256, 8192, 1, 1), (2, 512, 8, 512, 4096, 1, 1))
)  # fmt: skip
"""Iterations of the engine itself, on each rank alone, that say how much of the benchmarks' rates it reaches."""
ROUNDS = 3
"""Times that all workloads are gone through, so that what else the machine does falls on each alike."""
ITERATIONS = 3
"""Timed in each round, after one that is not."""
RATES = ("matmul_flops_per_second", "memory_bytes_per_second", "link_bytes_per_second", "node_bus_bytes_per_second",
         "memory_bytes")  # fmt: skip
HOST_TIMES = ("host_layer_seconds", "host_microbatch_seconds", "node_latency_seconds")


class Measured(NamedTuple):
    """Measurements of rank 0 while all ranks do the same."""

    matmul: list[tuple[int, float]]
    """Width and seconds of square products."""
    copy_bytes_per_second: float
    """Read and written."""
    small_operation: float
    """Seconds."""
    all_reduce: list[tuple[int, float]]
    """Bytes and seconds; empty with one rank."""
    iterations: list[float]
    """Seconds of one iteration of each of `SHAPES`."""


def measure_machine() -> Cluster:
    """A cluster of this one machine, measured in less than a minute.

    Ranks are GPUs, or cores where there is none. Raises HardwareMissing when the ranks cannot run.
    """
    gpus = list_gpus()
    ranks = len(gpus) or available_cores()
    count = len(MATMUL_WIDTHS) + 2 + len(ALL_REDUCE_BYTES) + len(SHAPES)
    announce(f"{count} measurements of about {SECONDS_PER_MEASUREMENT} s or three runs each on {ranks} processes")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "measured.json"
        if launch(partial(_rank, path), ranks) or not path.is_file():
            raise HardwareMissing(f"{ranks} ranks could not be measured on this machine; what they said is above")
        measured = Measured(**read_json(path))
    memory = min(gpu["memory_bytes"] for gpu in gpus) if gpus else (memory_bytes() or 0) / ranks
    what = gpus[0]["name"] if gpus else f"core of {cpu_name()}"
    like = load_cluster("h100" if gpus else "cpu")
    return as_cluster(like, measured, ranks, float(memory), f"one node of {ranks} × {what}")


def as_cluster(like: Cluster, measured: Measured, ranks: int, memory: float, title: str) -> Cluster:
    """`like` with the constants that were measured."""
    reduced = [AllReduce("this machine", ranks, sent, seconds) for sent, seconds in measured.all_reduce]
    rows = [Observation("this machine", shape, "iteration_seconds", seconds)
            for shape, seconds in zip(SHAPES, measured.iterations, strict=True)]  # fmt: skip
    host = measured.small_operation * SMALL_OPERATIONS
    stated = machine_of(like).replaced(
        gpus_per_node=float(ranks),
        memory_bytes=memory,
        memory_bytes_per_second=measured.copy_bytes_per_second,
        host_layer_seconds=host,
        host_microbatch_seconds=host,
    )
    machine, ratios = fit_local(stated, measured.matmul, reduced, rows)
    machine = machine.replaced(link_bytes_per_second=machine.node_bus_bytes_per_second)
    benchmarked = ("gpus_per_node", "memory_bytes", "memory_bytes_per_second", "host_layer_seconds",
                   "host_microbatch_seconds", "matmul_flops_per_second", "matmul_half_size", "node_latency_seconds",
                   "node_bus_bytes_per_second", "link_bytes_per_second")  # fmt: skip
    sources = dict.fromkeys(benchmarked, ("micro-benchmark", "mlm-experiment plan --mine"))
    fitted = ("fit", f"{len(SHAPES)} small iterations of the engine, mlm-experiment plan --mine")
    constants = stated_constants(machine, sources | dict.fromkeys(EFFICIENCIES, fitted))
    held = HeldOut(range(len(ratios)), ratios, *np.ones((2, len(ratios))), *np.zeros((2, len(ratios))))
    interval = interval_of(held, f"{len(SHAPES)} small iterations on one rank, each left out")
    return like.model_copy(
        update={
            "title": title,
            "software": "",
            "max_gpus": ranks,
            "constants": like.constants.model_copy(update=constants),
            "intervals": Intervals(one_node=interval, several_nodes=interval),
        }
    )


def fit_local(
    machine: Machine,
    matmul: Sequence[tuple[int, float]],
    all_reduces: Sequence[AllReduce],
    iterations: Sequence[Observation],
) -> tuple[Machine, Floats]:
    """The machine with its rates fitted on benchmarks and its efficiencies on whole iterations; and of each iteration
    measured over predicted time, predicted without it."""
    machine = _fit_matmul(machine, *np.array(matmul).T)
    if all_reduces:
        machine = fit_node(machine, all_reduces)
    ratios = []
    for place, row in enumerate(iterations):
        others = [*iterations[:place], *iterations[place + 1 :]]
        ratios.append(row.value / predicted(_fit_efficiencies(machine, others), [row])[0])
    return _fit_efficiencies(machine, iterations), np.array(ratios)


def _fit_matmul(machine: Machine, widths: Floats, seconds: Floats) -> Machine:
    """Rate and half size of matrix products, from square ones."""

    def errors(trial: Machine) -> Floats:
        return np.log(matmul_seconds(trial, widths, widths, widths) / seconds)

    fastest = float((2 * widths**3 / seconds).max())
    constants = {
        "matmul_flops_per_second": Fitted(fastest, 1e6, 1e17),
        "matmul_half_size": CONSTANTS["matmul_half_size"]._replace(start=30.0),
    }
    return least(started(machine.replaced(matmul_efficiency=1.0), constants), constants, errors)


def _fit_efficiencies(machine: Machine, rows: Sequence[Observation]) -> Machine:
    return fit(machine.replaced(matmul_efficiency=0.8, memory_efficiency=0.5), EFFICIENCIES, rows, np.ones(len(rows)))


def _rank(path: Path) -> None:
    """One rank's part; rank 0 writes what it measured."""
    on_gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if on_gpu else "gloo")
    device = torch.device("cuda", dist.get_rank()) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    torch.set_num_threads(1)
    dtype = torch.bfloat16 if on_gpu else torch.float32

    def seconds(operation: Callable[[], object]) -> float:
        return _median_seconds(operation, time.perf_counter if on_gpu else time.process_time)

    matmul = []
    for width in MATMUL_WIDTHS:
        a, b, out = (torch.ones(width, width, dtype=dtype, device=device) for _ in range(3))
        matmul.append((width, seconds(partial(torch.mm, a, b, out=out))))
    source, target = (torch.ones(COPIED_BYTES // 4, device=device) for _ in range(2))
    copy = seconds(lambda: target.copy_(source))
    small = torch.ones(8, 8, device=device)
    many = seconds(lambda: [small.add(1.0) for _ in range(100)])
    axis = build_mesh(Layout(tp=dist.get_world_size())).tp
    reduced = []
    for sent in ALL_REDUCE_BYTES if axis.size > 1 else ():
        tensor = torch.ones(sent // 4, device=device)
        reduced.append((sent, _median_seconds(partial(axis.all_reduce, tensor), time.perf_counter)))
    mesh = serial_mesh(device.type)
    iterations = []
    for shape in SHAPES:
        size = size_of(shape, "bf16" if on_gpu else "fp32")
        step = our_step(size, ParallelConfig(), mesh, shape.microbatches)
        iterations.append(seconds(partial(step, 0, size.model.dropout)))
    if dist.get_rank() == 0:
        rate = 2 * COPIED_BYTES / copy
        write_json(path, Measured(matmul, rate, many / 100, reduced, iterations)._asdict())
    dist.barrier()
    dist.destroy_process_group()


def size_of(w: Workload, precision: Precision, iterations: int = 1, warm_up: int = 0) -> TrainingSize:
    """The recipe that times a workload in the engine."""
    model = ModelConfig(num_layers=w.layers, hidden_size=w.hidden, num_heads=w.heads, seq_length=w.seq,
                        vocab_size=w.vocab, padded_vocab_size=w.vocab)  # fmt: skip
    train = TrainConfig(iterations=iterations, warmup_iterations=0, global_batch_size=w.global_batch,
                        microbatch_size=w.micro_batch, precision=precision)  # fmt: skip
    return TrainingSize(model, train, warm_up)


def _median_seconds(operation: Callable[[], object], clock: Callable[[], float]) -> float:
    """Median of repeated runs that start together on all ranks; their number is the same on all.

    Computation on cores is timed by the process's own clock, so that other work on the machine does not count.
    """

    def once() -> float:
        dist.barrier()
        begin = clock()
        operation()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return clock() - begin

    once()
    first = once()
    repeats = [int(np.clip(SECONDS_PER_MEASUREMENT / max(first, 1e-6), 3, 50))]
    dist.broadcast_object_list(repeats)
    return float(np.median([first, *(once() for _ in range(repeats[0] - 1))]))


def run_proxies(experiment: Experiment, runs: Path) -> tuple[RunDirectory, list[Record]]:
    """Measure and predict the experiment's proxies in a sealed run of mode scaled, and return it with its records."""
    numbers = [line for part in experiment.proxies for line in _numbers(part, workload_rows(part.workloads))]
    return seal_numbers(experiment, "-proxy", numbers, runs)


def oversubscribed(cluster: Cluster, ranks: int) -> Cluster:
    """The machine with `ranks` ranks on fewer cores, each of which has its share of a core's rates and memory."""
    if cluster.max_gpus is None or ranks <= cluster.max_gpus:
        return cluster
    share = cluster.max_gpus / ranks
    factors = dict.fromkeys(RATES, share) | dict.fromkeys(HOST_TIMES, 1 / share) | {"gpus_per_node": 1 / share}
    changed = {
        name: (constant := getattr(cluster.constants, name)).model_copy(update={"value": constant.value * factor})
        for name, factor in factors.items()
    }
    return cluster.model_copy(
        update={"max_gpus": ranks, "constants": cluster.constants.model_copy(update=changed)}
    )  # fmt: skip


def measured_seconds(workloads: Sequence[Workload]) -> list[float]:
    """Wall time of an iteration of each workload on gloo ranks here: the fastest, which other work disturbed least."""
    announce(f"{ROUNDS} rounds of {len(workloads)} workloads on up to {max(each.gpus for each in workloads)} processes")
    measurements = {}
    for place, w in enumerate(workloads):
        size = size_of(w, "fp32", 1 + ITERATIONS, warm_up=1)
        parallel = ParallelConfig(tp=w.tp, pp=w.pp)
        contender = OurLayout("proxy", w.gpus, parallel, w.microbatches)
        measurements[place] = partial(measure_contender, contender, size, size.model.dropout)
    taken = in_turn("proxies", ROUNDS, measurements)
    return [min(second for timed in rounds for second in timed.seconds) for rounds in taken.values()]


def _numbers(part: Part, rows: Sequence[Row]) -> Iterator[Line]:
    workloads = [workload_of(row) for row in rows]
    predictions = [
        simulate(oversubscribed(load_cluster(row["cluster"]), workload.gpus), [workload])[0]
        for row, workload in zip(rows, workloads, strict=True)
    ]
    load = f"load average {os.getloadavg()[0]:.1f}"
    measured = measured_seconds(workloads)
    first = {row["series"]: place for place, row in reversed(list(enumerate(rows)))}
    for place, (row, workload) in enumerate(zip(rows, workloads, strict=True)):
        base, cluster = first[row["series"]], row["cluster"]
        crowd = f"{workload.gpus} ranks on {available_cores()} cores" if workload.gpus > available_cores() else ""
        for name in part.simulated:
            scaled = Simulated(workload, measured[place], workloads[base], measured[base], cluster)
            yield position(part, row) | {
                "quantity": name, "kind": "scaled", "value": QUANTITIES[name](scaled),
                "note": f"{crowd}, {load}" if crowd else load,
            }  # fmt: skip
            values = simulated_values(
                name, cluster, workload, predictions[place], workloads[base], predictions[base].seconds,
                load_cluster(cluster).intervals.ratio,
            )  # fmt: skip
            yield position(part, row) | values | {"note": crowd}
