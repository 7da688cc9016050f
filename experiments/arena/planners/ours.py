"""The simulator, calibrated on what is known and on nothing else; as shipped where nothing is. Imports no torch."""

from collections.abc import Sequence

from experiments.arena.terms import Guess
from experiments.simulator import fits
from experiments.simulator.calibrate import H100, fitted_h100
from experiments.simulator.cluster import Cluster, Constants, Machine, load_cluster, machine_of
from experiments.simulator.measurements import Measured, Observation
from experiments.simulator.simulate import simulate
from experiments.simulator.workload import Workload

NAME = "this simulator"


def guesses(cluster: str, known: Sequence[Measured], asked: Sequence[Workload]) -> list[Guess]:
    """Order by the throughput to be expected. The A100's intervals are as shipped, of rows left out at random."""
    used = load_cluster(cluster)
    if known and cluster == H100:
        machine, intervals = fitted_h100(known)
        used = _with(used, machine, {name: each.model_dump() for name, each in intervals.items()})
    elif known:
        start = fits.started(machine_of(used), fits.A100_CONSTANTS)
        rows = [Observation("", one.workload, "iteration_seconds", one.seconds) for one in known]
        used = _with(used, fits.fit(start, fits.A100_CONSTANTS, rows, fits.weights_of(rows)), {})
    return [
        Guess((p.expected_rate,), p.seconds, p.low_seconds, p.high_seconds, not p.reason, p.memory_bytes / 2**30)
        for p in simulate(used, asked)
    ]


def _with(cluster: Cluster, machine: Machine, intervals: dict[str, object]) -> Cluster:
    values = cluster.model_dump()
    for name in Constants.model_fields:
        values["constants"][name]["value"] = getattr(machine, name)
    values["intervals"] |= intervals
    return Cluster.model_validate(values)
