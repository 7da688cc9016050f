"""Scaling measured on this machine: small workloads on gloo ranks, each beside what the simulator says of it.

Torch is imported only where ranks are started.
"""

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.catalogue import Experiment, Part
from experiments.published import Row, workload_rows, x_of
from experiments.quantities import RATIOS, Simulated, quantity_of
from experiments.sealed import seal_numbers
from experiments.simulator.cluster import Cluster, load_cluster
from experiments.simulator.measurements import workload_of
from experiments.simulator.simulate import Prediction, simulate
from experiments.simulator.workload import Workload
from lineage.environment import available_cores
from lineage.progress import Progress, announce
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
    return seal_numbers(experiment, f"experiment-{experiment.name.replace('/', '-')}-proxy", numbers, {}, runs)


def format_scaling(records: Sequence[Record]) -> str:
    """A line for each point: what was measured, what the simulator says, and the measurement over it."""
    simulated = {(record.series, record.quantity, record.x): record for record in records if record.kind == "simulated"}
    lines = [f"{'series':<24}{'quantity':<18}{'ranks':>6}{'measured':>11}{'simulated':>11}{'ratio':>8}  note"]
    for record in records:
        if record.kind == "scaled":
            said = simulated[record.series, record.quantity, record.x].value
            lines.append(f"{record.series:<24}{record.quantity:<18}{record.x:>6.0f}{record.value:>11.4g}{said:>11.4g}"
                         f"{record.value / said:>8.2f}  {record.note}")  # fmt: skip
    return "\n".join(lines)


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
    from engine.launch.forked import run_forked

    times: list[list[float]] = [[] for _ in workloads]
    announce(f"{ROUNDS} rounds of {len(workloads)} workloads on up to {max(each.gpus for each in workloads)} processes")
    with Progress("proxies", ROUNDS * len(workloads), "measurements") as progress:
        for _ in range(ROUNDS):
            for workload, seconds in zip(workloads, times, strict=True):
                seconds += run_forked(_timed_iterations, workload.gpus, workload)[0]
                progress.advance()
    return [min(seconds) for seconds in times]


def _timed_iterations(workload: Workload) -> list[float]:
    """One rank's part; all ranks begin and end each iteration together."""

    from engine.launch.mesh import build_mesh
    from engine.parallel.layout import Layout
    from experiments.simulator.measure import training_step

    mesh = build_mesh(Layout(tp=workload.tp, pp=workload.pp, dp=workload.dp))
    step = training_step(workload, mesh, "fp32")
    step()
    times = []
    for _ in range(ITERATIONS):
        mesh.barrier()
        start = time.perf_counter()
        step()
        mesh.barrier()
        times.append(time.perf_counter() - start)
    return times


def _numbers(part: Part, rows: Sequence[Row]) -> list[dict[str, Any]]:
    workloads = [workload_of(row) for row in rows]
    predictions = [_predict(row, workload) for row, workload in zip(rows, workloads, strict=True)]
    load = f"load average {os.getloadavg()[0]:.1f}"
    measured = measured_seconds(workloads)
    first = {row["series"]: place for place, row in reversed(list(enumerate(rows)))}
    lines = []
    for place, (row, workload) in enumerate(zip(rows, workloads, strict=True)):
        base = first[row["series"]]
        crowd = f"{workload.gpus} ranks on {available_cores()} cores, " if workload.gpus > available_cores() else ""
        position = {"series": row["series"], "x": x_of(part, row), "x_name": part.x}

        def value(name: str, seconds: float, base_seconds: float, row: Row = row, at: int = place) -> float:
            start = workloads[first[row["series"]]]
            return quantity_of(name, Simulated(workloads[at], row["cluster"], seconds, start, base_seconds))

        said, said_first = predictions[place], predictions[base].seconds
        for name in part.simulated:
            scaled = value(name, measured[place], measured[base])
            lines.append(position | {"quantity": name, "kind": "scaled", "value": scaled, "note": f"{crowd}{load}"})
            line = position | {"quantity": name, "kind": "simulated", "value": value(name, said.seconds, said_first)}
            if place != base or name not in RATIOS:
                ends = [value(name, end, said_first) for end in (said.low_seconds, said.high_seconds)]
                line |= {"low": min(ends), "high": max(ends)}
            lines.append(line | {"note": crowd.removesuffix(", ")})
    return lines


def _predict(row: Row, workload: Workload) -> Prediction:
    return simulate(oversubscribed(load_cluster(row["cluster"]), workload.gpus), [workload])[0]
