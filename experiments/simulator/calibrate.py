"""Calibration in one command: fit, cross-validate, hold against the papers, and write. Imports no torch."""

from collections.abc import Mapping, Sequence
from itertools import compress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize  # type: ignore[import-untyped]

from experiments.simulator import fits, measurements
from experiments.simulator.cluster import Interval, Machine, load_cluster, machine_of
from experiments.simulator.cluster_file import FITTED, fitted_constants, fitted_toml, rounded
from experiments.simulator.collectives import stall_probability
from experiments.simulator.llama import memory_bytes
from experiments.simulator.measurements import Measured, Observation, predicted, published_values
from experiments.simulator.simulate import iteration_parts
from experiments.simulator.workload import Floats, Workload, Workloads
from lineage.atomic import check_place, write_text
from lineage.progress import announce

A100, V100, H100 = "dgx-a100-80g", "dgx-2h-v100", "h100"
A100_FIT = ("fit", "vTrain's single-node and multi-node rows; 2021 paper, Table 2 and Figures 11 to 16")
V100_FIT = ("fit", "2019 paper, Tables 2, 7 and 8 without the rows of Figures 1 and 5")
H100_FIT = ("fit", "the Ultra-Scale Playbook's rows")
TABLE = ("micro-benchmark", "vTrain's NCCL all-reduces inside one {} server")
H100_FITTED_BESIDE = ("stall_rate", "stall_nodes", "stall_ranks", "memory_share", "memory_error")
STALLS = {"stall_rate": 0.1, "stall_nodes": 40.0, "stall_ranks": 50.0}
"""Where the H100 fit starts: that some runs on 32 nodes stall and nearly all on 64 is seen before any fit."""


def calibrate(out: Path) -> None:
    """Fit the clusters, write their files below `out`, and print every error.

    The files are what `experiments/clusters/fitted` holds. Raises BadInput when `out` cannot be a folder.
    """
    check_place("--out", out / f"{A100}.toml")
    count = 1 + fits.FOLDS + len(measurements.v100_rows())
    announce(f"{count} fits of the simulator's constants to measured iterations")
    machine = fits.fit_a100(machine_of(load_cluster(A100)))
    rows = [*measurements.single_node(), *measurements.multi_node()]
    by_row = fits.cross_validate(machine, fits.random_folds(len(rows)))
    start = v100_start(machine)
    machine_2019, each_left_out = fits.fit_v100(start), fits.v100_left_out(start)
    h100_text, h100_line = calibrate_h100()
    files = {A100: a100_file(machine, by_row), V100: v100_file(machine_2019, each_left_out), H100: h100_text}
    for name, text in files.items():
        write_text(out / f"{name}.toml", text)
    _print_errors(machine, machine_2019, by_row)
    print(h100_line)
    for name, text in files.items():
        path = FITTED / f"{name}.toml"
        shipped = path.read_text(encoding="utf-8") if path.is_file() else ""
        print(f"{name}: the shipped constants are {'these' if text == shipped else 'others'}")
    print(f"constants: {out}")


def v100_start(machine: Machine) -> Machine:
    """The DGX-2H with the A100 fit's constants."""
    shared = {name: getattr(machine, name) for name in fits.A100_CONSTANTS}
    return machine_of(load_cluster(V100)).replaced(**shared, node_rank_latency_seconds=0.0)


def a100_file(machine: Machine, held_out: Mapping[str, fits.HeldOut]) -> str:
    """The text of the A100 cluster's fitted file."""
    table = (TABLE[0], TABLE[1].format("A100"))
    intervals = {
        key: _interval(held_out[name].ratios, f"5-fold cross-validation on vTrain's rows of {name}")
        for key, name in (("one_node", "single node"), ("several_nodes", "several nodes"))
    }
    return fitted_toml(fitted_constants(machine, dict.fromkeys(fits.NODE_CONSTANTS, table), A100_FIT), intervals)


def v100_file(machine: Machine, ratios: Floats) -> str:
    """The text of the V100 cluster's fitted file."""
    table = (TABLE[0], TABLE[1].format("V100"))
    sources = {**dict.fromkeys(fits.NODE_CONSTANTS, table), **dict.fromkeys(fits.SOFTWARE_OF_2019, V100_FIT)}
    constants = fitted_constants(machine, sources, ("transferred", f"the fit of {A100}"))
    interval = _interval(ratios, "each row of the fit predicted without it: the extremes of eight")
    return fitted_toml(constants, {"one_node": interval, "several_nodes": interval})


def stalled(smooth: Floats, stalls: Floats, seconds: Floats) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Which iterations are nearer to predictions with stalls, and of which that says that they did: it would more than
    double their time.
    """
    return np.abs(np.log(seconds / (smooth + stalls))) < np.abs(np.log(seconds / smooth)), stalls > smooth


def rows_that_ran(measured: Sequence[Measured]) -> tuple[list[Observation], Floats]:
    """The iterations of those that ran, and GiB of each."""
    ran = [one for one in measured if one.ran]
    rows = [Observation("ultrascale-h100", one.workload, "iteration_seconds", one.seconds) for one in ran]
    return rows, np.array([one.memory_gib for one in ran])


def computed_memory(machine: Machine, workloads: Sequence[Workload]) -> Floats:
    """Bytes of the fullest rank of each."""
    ahead = iteration_parts(machine, workloads).ahead.tolist()
    return np.array([memory_bytes(w, lead) for w, lead in zip(workloads, ahead, strict=True)])


def calibrate_h100() -> tuple[str, str]:
    """The text of the fitted file, and a line that says how far off rows of a model size left out are."""
    measured = measurements.costed(measurements.ultrascale())
    machine, intervals, errors = fitted_h100(measured)
    sources = dict.fromkeys((*fits.H100_CONSTANTS, *H100_FITTED_BESIDE), H100_FIT)
    constants = fitted_constants(machine, sources, ("transferred", "the set does not tell it apart"))
    del constants["node_bus_bytes_per_second"]  # the cluster's own file states it
    rows, memory = rows_that_ran(measured)
    off = computed_memory(machine, [row.workload for row in rows]) / 2**30 / memory - 1
    line = f"{_line('H100, model sizes left out', errors)}; memory {np.abs(off).mean():.1%}"
    return fitted_toml(constants, intervals), line


def fitted_h100(measured: Sequence[Measured]) -> tuple[Machine, dict[str, Interval], Floats]:
    """The H100s by these rows of several model sizes, their intervals, and errors of each size by the others.

    A run can fill as much of the memory as the fullest that ran; failures, whose cause is not recorded, say nothing.
    """
    rows, memory = rows_that_ran(measured)
    workloads, seconds = [row.workload for row in rows], published_values(rows)
    several = np.array([w.gpus > 8 for w in workloads])
    start, held = machine_of(load_cluster(H100)).replaced(**STALLS), np.empty((3, len(rows)))
    sizes = np.array([w.hidden for w in workloads])
    refits = fits.left_out("H100, left out", sizes, lambda kept: fits.fit_h100(start, [*compress(rows, kept)]))
    for left, machine in refits:
        parts = iteration_parts(machine, workloads)
        held[:, left] = np.stack([parts.smooth, parts.stalls, parts.total])[:, left]
    smooth, stalls, total = held
    did, known = stalled(smooth, stalls, seconds)
    machine = fits.fit_h100(start.replaced(**_stall_constants(did[known], [*compress(workloads, known)])), rows)
    spread = 1.4826 * float(np.median(np.abs(np.log(memory * 2**30 / computed_memory(machine, workloads)))))
    machine = machine.replaced(memory_share=memory.max() * 2**30 / machine.memory_bytes, memory_error=spread)
    intervals = {}
    for name, part in (("one_node", ~several), ("several_nodes", several)):
        chosen = ~did & part if (~did & part).sum() >= 10 else ~did
        source = "each model size predicted without it; stalls apart"
        intervals[name] = _interval(seconds[chosen] / smooth[chosen], source)
    return machine, intervals, total / seconds - 1


def _stall_constants(did: NDArray[np.bool_], workloads: Sequence[Workload]) -> dict[str, float]:
    """The constants by which the rows that stalled are most likely (`stall_probability`)."""
    columns, start = Workloads.of(workloads), machine_of(load_cluster(H100))

    def unlikely(point: Floats) -> float:
        chance = stall_probability(start.replaced(**dict(zip(STALLS, np.exp(point).tolist(), strict=True))), columns)
        return -float(np.log(np.where(did, chance, 1 - chance) + 1e-9).sum())

    fitted = np.exp(minimize(unlikely, np.log([*STALLS.values()]), method="Nelder-Mead").x)
    return dict(zip(STALLS, fitted.tolist(), strict=True))


def _interval(ratios: Floats, source: str) -> Interval:
    low, high = fits.interval(ratios)
    return Interval(low=rounded(low), high=rounded(high), source=source)


def _of(name: str) -> list[Observation]:
    return [row for row in measurements.megatron_2019() if row.experiment == f"2019/{name}"]


def _print_errors(machine: Machine, machine_2019: Machine, by_row: Mapping[str, fits.HeldOut]) -> None:
    print(_heading("held out in 5 folds") + "  90 % interval covers")
    for name, held in by_row.items():
        print(f"{_line(f'{name}, rows left out', 1 / held.ratios - 1)}{held.covered:>22.1%}")
    print("\n" + _heading("not fitted on"))
    for title, fitted, part in (
        ("2021 Table 1", machine, measurements.ptd_p_table_1()),
        ("2019 Figure 1", machine_2019, _of("figure-1")),
        ("2019 Figure 5", machine_2019, _of("figure-5")),
    ):
        print(_line(title, _errors(fitted, part)))


def _errors(machine: Machine, observations: Sequence[Observation]) -> Floats:
    return predicted(machine, observations) / published_values(observations) - 1


def _heading(title: str) -> str:
    return f"{title:<32}{'rows':>6}{'mean |error|':>14}{'median':>9}{'bias':>9}"


def _line(title: str, errors: Floats) -> str:
    size = np.abs(errors)
    return f"{title:<32}{len(errors):>6}{size.mean():>14.1%}{np.median(size):>9.1%}{errors.mean():>+9.1%}"
