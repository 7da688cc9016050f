"""Scaling measured on this machine: small workloads on gloo ranks, each beside what the simulator says of it."""

import os
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from engine.config import ParallelConfig
from experiments.bench.contender import Contender
from experiments.bench.contenders.ours import build_ours
from experiments.bench.timing import in_turn, measure_contender
from experiments.catalogue import Experiment, Part
from experiments.measured.machine import size_of
from experiments.published import Row, position, workload_rows
from experiments.quantities import simulated_values
from experiments.sealed import Line, seal_numbers
from experiments.simulator.cluster import Cluster, load_cluster
from experiments.simulator.measurements import QUANTITIES, Simulated, workload_of
from experiments.simulator.simulate import simulate
from experiments.simulator.workload import Workload
from lineage.environment import available_cores
from lineage.progress import announce
from lineage.records import Record
from lineage.run import RunDirectory

ROUNDS = 3
"""Times that all workloads are gone through, so that what else the machine does falls on each alike."""
ITERATIONS = 3
"""Timed in each round, after one that is not."""
RATES = ("matmul_flops_per_second", "memory_bytes_per_second", "link_bytes_per_second", "node_bus_bytes_per_second",
         "memory_bytes")  # fmt: skip
HOST_TIMES = ("host_layer_seconds", "host_microbatch_seconds", "node_latency_seconds")


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
        contender = Contender("proxy", w.gpus, build_ours, parallel=parallel, microbatches=w.microbatches)
        measurements[place] = partial(measure_contender, contender, size, size.model.dropout)
    taken, _ = in_turn("proxies", ROUNDS, measurements)
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
                name, workload, cluster, predictions[place], workloads[base], predictions[base].seconds
            )
            yield position(part, row) | values | {"note": crowd}
