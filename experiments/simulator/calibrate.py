"""Calibration in one command: fit, cross-validate, hold against the papers, and write. Imports no torch."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from experiments.simulator.calibrate import (
    A100_CONSTANTS,
    FOLDS,
    NODE_BOUNDS,
    SOFTWARE_OF_2019,
    HeldOut,
    cross_validate,
    fit_a100,
    fit_v100,
    interval,
    model_folds,
    random_folds,
    v100_left_out,
)
from experiments.simulator.cluster import Interval, Machine, load_cluster, machine_of
from experiments.simulator.cluster_file import FITTED, fitted_constants, fitted_toml, rounded
from experiments.simulator.h100 import H100, calibrate_h100
from experiments.simulator.measurements import (
    Observation,
    megatron_2019,
    multi_node,
    predicted,
    ptd_p_others,
    ptd_p_table_1,
    published_values,
    single_node,
    v100_rows,
)
from experiments.simulator.workload import Floats
from lineage.atomic import write_text
from lineage.errors import BadInput
from lineage.progress import announce

A100, V100 = "dgx-a100-80g", "dgx-2h-v100"
A100_FIT = ("fit", "vTrain's single-node and multi-node rows; 2021 paper, Table 2 and Figures 11 to 16")
V100_FIT = ("fit", "2019 paper, Tables 2, 7 and 8 without the rows of Figures 1 and 5")
TABLE = ("micro-benchmark", "vTrain's NCCL all-reduces inside one {} server")


def calibrate(out: Path) -> None:
    """Fit the clusters, write their files below `out`, and print every error.

    The files are what `experiments/clusters/fitted` holds. Raises BadInput when `out` cannot be a folder.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(f"{out} cannot be written: {error}") from error
    announce(f"{1 + 2 * FOLDS + len(v100_rows())} fits of the simulator's constants to measured iterations")
    machine = fit_a100(machine_of(load_cluster(A100)))
    rows = [*single_node(), *multi_node()]
    by_row = cross_validate(machine, random_folds(len(rows)))
    by_model = cross_validate(machine, model_folds(rows))
    start = v100_start(machine)
    machine_2019, left_out = fit_v100(start), v100_left_out(start)
    h100_text, h100_line = calibrate_h100()
    files = {A100: a100_file(machine, by_row), V100: v100_file(machine_2019, left_out), H100: h100_text}
    for name, text in files.items():
        write_text(out / f"{name}.toml", text)
    _print_errors(machine, machine_2019, by_row, by_model)
    print(h100_line)
    for name, text in files.items():
        path = FITTED / f"{name}.toml"
        shipped = path.read_text(encoding="utf-8") if path.is_file() else ""
        print(f"{name}: the shipped constants are {'these' if text == shipped else 'others'}")
    print(f"constants: {out}")


def v100_start(machine: Machine) -> Machine:
    """The DGX-2H with the A100 fit's constants."""
    shared = {name: getattr(machine, name) for name in A100_CONSTANTS}
    return machine_of(load_cluster(V100)).replaced(**shared, node_rank_latency_seconds=0.0)


def a100_file(machine: Machine, held_out: Mapping[str, HeldOut]) -> str:
    """The text of the A100 cluster's fitted file."""
    table = (TABLE[0], TABLE[1].format("A100"))
    intervals = {
        key: _interval(held_out[name].ratios, f"5-fold cross-validation on vTrain's rows of {name}")
        for key, name in (("one_node", "single node"), ("several_nodes", "several nodes"))
    }
    return fitted_toml(fitted_constants(machine, dict.fromkeys(NODE_BOUNDS, table), A100_FIT), intervals)


def v100_file(machine: Machine, left_out: Floats) -> str:
    """The text of the V100 cluster's fitted file."""
    table = (TABLE[0], TABLE[1].format("V100"))
    sources = {**dict.fromkeys(NODE_BOUNDS, table), **dict.fromkeys(SOFTWARE_OF_2019, V100_FIT)}
    transferred = ("transferred", f"the fit of {A100}")
    interval = _interval(left_out, "each row of the fit predicted without it: the extremes of eight")
    return fitted_toml(
        fitted_constants(machine, sources, transferred), {"one_node": interval, "several_nodes": interval}
    )


def _interval(ratios: Floats, source: str) -> Interval:
    low, high = interval(ratios)
    return Interval(low=rounded(low), high=rounded(high), source=source)


def _of(name: str) -> list[Observation]:
    return [row for row in megatron_2019() if row.experiment == f"2019/{name}"]


def _print_errors(
    machine: Machine, machine_2019: Machine, by_row: Mapping[str, HeldOut], by_model: Mapping[str, HeldOut]
) -> None:
    print(_heading("held out in 5 folds") + "  90 % interval covers")
    for title, folds in (("rows", by_row), ("models", by_model)):
        for name, held in folds.items():
            print(f"{_line(f'{name}, {title} left out', 1 / held.ratios - 1)}{held.covered:>22.1%}")
    print("\n" + _heading("not fitted on"))
    for title, fitted, part in (
        ("2021 Table 1", machine, ptd_p_table_1()),
        ("2019 Figure 1", machine_2019, _of("figure-1")),
        ("2019 Figure 5", machine_2019, _of("figure-5")),
    ):
        print(_line(title, _errors(fitted, part)))
    print("\n" + _heading("fitted on, among others"))
    for experiment in sorted({row.experiment for row in ptd_p_others()}):
        print(_line(experiment, _errors(machine, [row for row in ptd_p_others() if row.experiment == experiment])))
    for name in ("table-2", "table-7", "table-8"):
        print(_line(f"2019/{name}", _errors(machine_2019, [megatron_2019()[0], *_of(name)])[1:]))


def _errors(machine: Machine, observations: Sequence[Observation]) -> Floats:
    return predicted(machine, observations) / published_values(observations) - 1


def _heading(title: str) -> str:
    return f"{title:<32}{'rows':>6}{'mean |error|':>14}{'median':>9}{'bias':>9}"


def _line(title: str, errors: Floats) -> str:
    size = np.abs(errors)
    return f"{title:<32}{len(errors):>6}{size.mean():>14.1%}{np.median(size):>9.1%}{errors.mean():>+9.1%}"
