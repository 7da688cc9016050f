"""Calibration: fits the constants, predicts rows that were left out, and writes the files. Imports no torch."""

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import compress
from pathlib import Path
from typing import NamedTuple

import numpy as np

from experiments.benchmark import Benchmark, Case, Series
from experiments.simulator import fits, measurements
from experiments.simulator.cluster import (
    DATASHEET,
    FITTED,
    Constants,
    ErrorInterval,
    Machine,
    SoftwareConstants,
    fitted_toml,
    load_cluster,
    machine_of,
    stated_constants,
)
from experiments.simulator.fits import HeldOut, held_out, interval_of
from experiments.simulator.measurements import RATIOS, MeasuredRun, Observation, time_ratios
from experiments.simulator.simulate import iteration_parts
from experiments.simulator.workload import Floats, llama_memory_bytes
from lineage.atomic import check_place, write_text
from lineage.progress import announce

A100, V100, H100 = "dgx-a100-80g", "dgx-2h-v100", "h100"
TABLE = ("micro-benchmark", "vTrain's NCCL all-reduces inside one {} server")
NOTES = [
    "Every part is predicted by constants fitted on all others: rows, whole figures and tables, model sizes, numbers "
    "of nodes, tensor-parallel sizes. Parts that no constant is ever fitted on are called apart.",
    "Error is predicted over measured time of an iteration, of a ratio in the ratio; memory is the fullest rank's.",
    "Coverage is the share of rows left out that lie in the interval made without them.",
]


class Fit(NamedTuple):
    """A cluster and a software whose constants are fitted together."""

    cluster: str
    software: str
    rows: Sequence[Observation]
    refit: Callable[[Sequence[Observation]], Machine]
    left_out: Mapping[str, Sequence[Hashable]]
    """Folds by name: the key of each row's fold, None for a row that is never left out. Intervals use the first."""
    apart: Sequence[Observation]
    """Rows that no constant is fitted on; of ratios, behind the row that they refer to."""
    sources: Mapping[str, tuple[str, str]]
    """Kind and source of fitted constants."""
    otherwise: tuple[str, str]
    """Kind and source of the other constants."""


def calibrate(out: Path) -> Benchmark:
    """Fit the clusters and their software, write their files below `out`, and give every error.

    The files are what the folders `FITTED` hold. Raises BadInput when `out` cannot be a folder.
    """
    check_place("--out", out / "clusters" / f"{A100}.toml")
    a100 = a100_fit()
    machine, measured = a100.refit(a100.rows), measurements.costed(measurements.ultrascale())
    cases = []
    for fit in (a100, v100_fit(machine), h100_fit(measured)):
        machine = fit.refit(fit.rows)
        held = {way: held_out(f"{fit.cluster}, {way}", fit.rows, keys, fit.refit)
                for way, keys in fit.left_out.items()}  # fmt: skip
        ranges, memory = intervals(fit, held), []
        if fit.cluster == H100:
            machine = with_memory(machine, measured)
            memory = _scored("all rows, in closed form", memory_errors(machine, measured), "memory error")
        cases.append(
            Case(name=f"{fit.cluster} under {fit.software}", series=_errors(fit, machine, held, ranges) + memory)
        )
        for folder, text in files(fit, machine, ranges).items():
            name = f"{fit.cluster if folder == 'clusters' else fit.software}.toml"
            write_text(out / folder / name, text)
            path = FITTED[folder] / name
            shipped = path.read_text(encoding="utf-8") if path.is_file() else ""
            announce(f"{out / folder / name}: the shipped constants are {'these' if text == shipped else 'others'}")
    return Benchmark(
        benchmark="calibration", title="The simulator's errors on rows that its constants were not fitted on",
        cases=cases, notes=NOTES,
    )  # fmt: skip


def a100_fit() -> Fit:
    """Megatron of 2021 on A100s."""
    rows, start = measurements.a100_rows(), machine_of(load_cluster(A100))
    published = [row.experiment if row.quantity != "iteration_seconds" else None for row in rows]
    count = published.count(None)
    folds = [*fits.random_folds(count), *[None] * (len(rows) - count)]
    ways: dict[str, Sequence[Hashable]] = {"rows in 5 folds": folds, "figures and tables": published}
    known = {row.workload for row in rows}  # vTrain measured two of Table 1
    apart = [row for row in measurements.ptd_p_table_1() if row.workload not in known]
    source = ("fit", "vTrain's single-node and multi-node rows; 2021 paper, Table 2 and Figures 11 to 16")
    table = (TABLE[0], TABLE[1].format("A100"))
    return Fit(A100, "megatron-2021", rows, lambda kept: fits.fit_a100(start, kept), ways, apart,
               dict.fromkeys(fits.A100_CONSTANTS, source) | dict.fromkeys(fits.NODE_CONSTANTS, table),
               source)  # fmt: skip


def v100_fit(a100: Machine) -> Fit:
    """Megatron of 2019 on V100s, from the A100 fit's constants."""
    rows = measurements.v100_rows()
    workloads = {row.workload for row in rows[1:]}
    figures = ("2019/figure-1", "2019/figure-5")
    apart = [row for row in measurements.megatron_2019() if row.experiment in figures and row.value != 100]
    shared = {name: getattr(a100, name) for name in fits.A100_CONSTANTS}
    start = machine_of(load_cluster(V100)).replaced(**shared, node_rank_latency_seconds=0.0)
    ways = {"rows": [None, *range(len(workloads))], "tables": [None, *(row.experiment for row in rows[1:])]}
    source = ("fit", "2019 paper, Tables 2, 7 and 8 without the rows of Figures 1 and 5")
    table = (TABLE[0], TABLE[1].format("V100"))
    return Fit(V100, "megatron-2019", rows, lambda kept: fits.fit_v100(start, kept), ways, apart,
               dict.fromkeys(fits.NODE_CONSTANTS, table) | dict.fromkeys(fits.SOFTWARE_OF_2019, source),
               ("transferred", f"the fit of {A100}"))  # fmt: skip


def h100_fit(measured: Sequence[MeasuredRun]) -> Fit:
    """Nanotron of 2024 on H100s, by these of the Ultra-Scale Playbook's rows."""
    rows, start = measurements.h100_rows(measured), machine_of(load_cluster(H100))
    asked = [row.workload for row in rows]
    ways = {"model sizes": [w.hidden for w in asked], "numbers of nodes": [w.gpus for w in asked],
            "tensor-parallel sizes": [w.tp for w in asked]}  # fmt: skip
    beside = (*fits.STALLS, "memory_share", "memory_error")
    stated = ("transferred", "the set does not tell it apart")
    sources = dict.fromkeys(fits.CONSTANTS, stated)
    sources |= dict.fromkeys((*fits.H100_CONSTANTS, *beside), ("fit", "the Ultra-Scale Playbook's rows"))
    return Fit(H100, "nanotron-2024", rows, lambda kept: fits.fit_h100(start, kept), ways, (), sources,
               stated)  # fmt: skip


def with_memory(machine: Machine, measured: Sequence[MeasuredRun]) -> Machine:
    """The machine with what its memory holds: a run can fill as much of it as the fullest that ran. Failures, whose
    cause is not recorded, say nothing."""
    ran = [row for row in measured if row.ran]
    fullest = max(row.memory_gib for row in ran) * 2**30
    spread = 1.4826 * float(np.median(np.abs(np.log1p(memory_errors(machine, measured)))))
    return machine.replaced(memory_share=fullest / machine.memory_bytes, memory_error=spread)


def memory_errors(machine: Machine, measured: Sequence[MeasuredRun]) -> Floats:
    """Relative error of the fullest rank's memory, for the runs that did not fail."""
    ran = [row for row in measured if row.ran]
    ahead = iteration_parts(machine, [row.workload for row in ran]).ahead.tolist()
    return np.array([llama_memory_bytes(row.workload, lead) / 2**30 / row.memory_gib - 1
                     for row, lead in zip(ran, ahead, strict=True)])  # fmt: skip


def intervals(fit: Fit, held: Mapping[str, HeldOut]) -> dict[str, ErrorInterval]:
    """Intervals of runs on one node and on several, and of ratios if there are any."""
    way, fold = next(iter(held.items()))
    rows = _left_out(fit, way)
    node = machine_of(load_cluster(fit.cluster)).gpus_per_node
    several = np.array([row.workload.gpus > node for row in rows])
    ratio = np.array([row.quantity in RATIOS for row in rows])
    source = f"{way} left out, {len({*fold.keys})} fits"
    parts = {"one_node": ~several, "several_nodes": several}
    named = {name: interval_of(fold.of(part) if part.sum() >= fits.FEW else fold, source)
             for name, part in parts.items()}  # fmt: skip
    return named | ({"ratio": interval_of(fold.of(ratio), source)} if ratio.any() else {})


def files(fit: Fit, machine: Machine, found: Mapping[str, ErrorInterval]) -> dict[str, str]:
    """The texts that the cluster's and the software's own files extend, by folder."""
    unknown = {*fits.CONSTANTS, *fits.STALLS, "memory_share", "memory_error"} - {*fits.A100_CONSTANTS, *fit.sources}
    stated = {"node_bus_bytes_per_second"} if fit.cluster == H100 else set()  # by the cluster's own file
    names = [name for name in Constants.model_fields if name not in {*DATASHEET, *unknown, *stated}]
    constants = stated_constants(machine, {name: fit.sources.get(name, fit.otherwise) for name in names})
    software = {name: each for name, each in constants.items() if name in SoftwareConstants.model_fields}
    hardware = {name: each for name, each in constants.items() if name not in software}
    return {"clusters": fitted_toml(hardware, {}), "software": fitted_toml(software, found)}


def _left_out(fit: Fit, way: str) -> list[Observation]:
    return [*compress(fit.rows, [key is not None for key in fit.left_out[way]])]


def _errors(
    fit: Fit, machine: Machine, held: Mapping[str, HeldOut], found: Mapping[str, ErrorInterval]
) -> list[Series]:
    """Errors of each set, table or figure, left out or apart, and the coverage of the intervals."""
    of = defaultdict(list)
    for way, fold in held.items():
        for row, ratio in zip(_left_out(fit, way), fold.ratios.tolist(), strict=True):
            of[f"{row.experiment}, {way} left out"].append(1 / ratio - 1)
    for row, ratio in zip(fit.apart, time_ratios(machine, fit.apart).tolist() if fit.apart else [], strict=True):
        of[f"{row.experiment}, apart"].append(1 / ratio - 1)
    series = [each for name, errors in of.items() for each in _scored(name, np.array(errors), "error")]
    for name, interval in found.items():
        series.append(_series(f"interval of {name.replace('_', ' ')}", "coverage", interval.coverage or 0.0))
    return series


def _scored(name: str, errors: Floats, of: str) -> list[Series]:
    measures = {"mean": np.abs(errors).mean(), "median": np.median(np.abs(errors)), "bias of": errors.mean()}
    return [_series(name, f"{measure} {of}", float(value)) for measure, value in measures.items()]


def _series(name: str, measure: str, share: float) -> Series:
    return Series(contender=name, measure=measure, unit="%", samples=[100 * share], kind="computed")
