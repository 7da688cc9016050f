"""The H100 cluster under nanotron of 2024: fitted, held out by what a function names, and written. Imports no torch."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize  # type: ignore[import-untyped]

from experiments.simulator.calibrate import H100_CONSTANTS, fit_h100, interval
from experiments.simulator.cluster import Interval, Machine, load_cluster, machine_of
from experiments.simulator.cluster_file import fitted_constants, fitted_toml, rounded
from experiments.simulator.collectives import stalls_seconds
from experiments.simulator.llama import memory_bytes
from experiments.simulator.measurements import costed, h100_rows, published_values, ultrascale
from experiments.simulator.simulate import iteration_parts
from experiments.simulator.workload import Floats, Workload, Workloads
from lineage.progress import Progress

H100 = "h100"
FIT = ("fit", "the Ultra-Scale Playbook's rows")
NOT_TOLD_APART = ("transferred", "the set does not tell it apart")
FITTED_BESIDE = ("stall_rate", "stall_nodes", "memory_share", "memory_error")
STALLS = {"stall_rate": 0.1, "stall_nodes": 40.0}
"""Where the fit starts: that some runs on 32 nodes stall and nearly all on 64 is seen before any fit."""


class Held(NamedTuple):
    """Seconds predicted for rows that the constants were not fitted on."""

    smooth: Floats
    """Without stalls."""
    stalls: Floats
    """What these would add."""
    total: Floats

    def stalled(self, seconds: Floats) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Which rows did, and of which that can be said: it would more than double their time."""
        known = self.stalls > self.smooth
        nearer = np.abs(np.log(seconds / (self.smooth + self.stalls))) < np.abs(np.log(seconds / self.smooth))
        return known & nearer, known


def rows_that_ran() -> tuple[list[Workload], Floats, Floats]:
    """Workloads, seconds and GiB."""
    ran = [(row, w) for row, w in costed(ultrascale()) if row["status"] == "ran"]
    memory = np.array([float(row["memory_gb"]) for row, _ in ran])
    return [w for _, w in ran], published_values(h100_rows(ran)), memory


def held_out(key: Callable[[Workload], int]) -> Held:
    """Every row that ran, predicted by constants fitted on the rows of other keys."""
    start, observations = start_machine(), h100_rows(costed(ultrascale()))
    workloads = [one.workload for one in observations]
    keys, held = np.array([key(w) for w in workloads]), np.zeros((3, len(workloads)))
    left_out = sorted(set(keys.tolist()))
    with Progress("H100, left out", len(left_out), "fits") as progress:
        for left in left_out:
            machine = fit_h100(start, [one for one, own in zip(observations, keys, strict=True) if own != left])
            parts = iteration_parts(machine, workloads)
            new = parts.total - parts.stalls, stalls_seconds(machine, Workloads.of(workloads)), parts.total
            held[:, keys == left] = np.stack(new)[:, keys == left]
            progress.advance()
    return Held(*held)


def start_machine() -> Machine:
    """The H100's datasheet, and where its fits start."""
    return machine_of(load_cluster(H100)).replaced(**STALLS)


def computed_memory(machine: Machine, workloads: list[Workload]) -> Floats:
    """Bytes of the fullest rank of each."""
    ahead = iteration_parts(machine, workloads).ahead.tolist()
    return np.array([memory_bytes(w, lead) for w, lead in zip(workloads, ahead, strict=True)])


def calibrate_h100() -> tuple[str, str]:
    """The text of the fitted file, and a line that says how far off rows of a model size left out are."""
    workloads, seconds, memory = rows_that_ran()
    nodes = np.array([w.gpus / 8 for w in workloads])
    held = held_out(lambda w: w.hidden)
    rate, pairs = _stall_constants(held, seconds, nodes)
    machine = fit_h100(start_machine().replaced(stall_rate=rate, stall_nodes=pairs), h100_rows(costed(ultrascale())))
    ratios = memory * 2**30 / computed_memory(machine, workloads)
    spread = 1.4826 * float(np.median(np.abs(np.log(ratios))))
    machine = machine.replaced(memory_share=_usable_share(machine), memory_error=spread)
    off = np.abs(held.total / seconds - 1)
    line = (f"{'H100, model sizes left out':<32}{len(off):>6}{off.mean():>14.1%}{np.median(off):>9.1%}"
            f"{np.median(held.total / seconds) - 1:>+9.1%}; memory {np.abs(1 / ratios - 1).mean():.1%}")  # fmt: skip
    constants = fitted_constants(machine, dict.fromkeys((*H100_CONSTANTS, *FITTED_BESIDE), FIT), NOT_TOLD_APART)
    del constants["node_bus_bytes_per_second"]  # the cluster's own file states it
    return fitted_toml(constants, intervals(held, seconds, nodes > 1)), line


def intervals(held: Held, seconds: Floats, several: NDArray[np.bool_]) -> dict[str, Interval]:
    """Of rows on one node and on several, those that stalled left out."""
    free, made = ~held.stalled(seconds)[0], {}
    for name, part in (("one_node", ~several), ("several_nodes", several)):
        chosen = free & part if (free & part).sum() >= 10 else free
        low, high = map(rounded, interval(seconds[chosen] / held.smooth[chosen]))
        made[name] = Interval(low=low, high=high, source="each model size predicted without it; stalls apart")
    return made


def _stall_constants(held: Held, seconds: Floats, nodes: Floats) -> tuple[float, float]:
    """Rate and nodes by which the rows that stalled are most likely (`stall_probability`)."""
    found, known = held.stalled(seconds)

    def unlikely(point: Floats) -> float:
        chance = 1 - np.exp(-np.exp(point[0]) - (nodes[known] / np.exp(point[1])) ** 2)
        return -float(np.log(np.where(found[known], chance, 1 - chance)).sum())

    rate, pairs = np.exp(minimize(unlikely, [-3.0, 3.5], method="Nelder-Mead").x)
    return float(rate), float(pairs)


def _usable_share(machine: Machine) -> float:
    """Share of the memory by which rows that ran and failed are told apart best."""
    rows = costed(ultrascale())
    ran = np.array([row["status"] == "ran" for row, _ in rows])
    needed = np.array([memory_bytes(w, 0.0) for _, w in rows]) / machine.memory_bytes
    shares = np.linspace(0.5, 1.1, 121)
    return float(max(shares, key=lambda share: (needed[ran] <= share).mean() + (needed[~ran] > share).mean()))
