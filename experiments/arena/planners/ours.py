"""The simulator, calibrated on what is known and on nothing else; as shipped where nothing is. Imports no torch."""

from collections.abc import Sequence

from experiments.arena.terms import Guess
from experiments.simulator import fits
from experiments.simulator.calibrate import H100, fitted_h100
from experiments.simulator.cluster import Cluster, Constants, Machine, load_cluster, machine_of
from experiments.simulator.measurements import Measured, Observation
from experiments.simulator.simulate import Prediction, simulate
from experiments.simulator.workload import Workload

NAME = "this simulator"
ALWAYS = {"stall_rate": 1e9, "stall_ranks": 1e-9}
"""Constants by which every run that can stall does."""


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
    said = [_guess(each, each.seconds) for each in simulate(used, asked)]
    if not used.constants.stall_nodes.value:
        return said
    never, always = (
        simulate(_with(used, machine_of(used).replaced(**stalls), {}), asked)
        for stalls in ({"stall_nodes": 0.0}, ALWAYS)
    )
    return [
        guess._replace(
            otherwise=_guess(other, other.stalled_seconds)
            if guess.seconds == smooth.seconds
            else _guess(smooth, smooth.seconds)
        )
        for guess, smooth, other in zip(said, never, always, strict=True)
    ]


def _guess(p: Prediction, seconds: float) -> Guess:
    return Guess((p.expected_rate,), seconds, p.low_seconds, p.high_seconds, not p.reason, p.memory_bytes / 2**30)


def _with(cluster: Cluster, machine: Machine, intervals: dict[str, object]) -> Cluster:
    values = cluster.model_dump()
    for name in Constants.model_fields:
        values["constants"][name]["value"] = getattr(machine, name)
    values["intervals"] |= intervals
    return Cluster.model_validate(values)
