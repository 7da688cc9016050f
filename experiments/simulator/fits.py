"""Fits the cost model's constants on measured iterations and says how far off it is on those left out.

Imports no torch. `mlm-experiment calibrate` writes what `experiments/clusters/fitted` holds.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares  # type: ignore[import-untyped]

from experiments.simulator.cluster import Machine
from experiments.simulator.collectives import node_all_reduce_seconds
from experiments.simulator.measurements import (
    AllReduce,
    Observation,
    all_reduces,
    multi_node,
    predicted,
    ptd_p_others,
    published_values,
    single_node,
    v100_rows,
)
from experiments.simulator.workload import Floats
from lineage.progress import Progress

BOUNDS = {
    "matmul_efficiency": (0.4, 1.0),
    "matmul_half_size": (0.0, 1000.0),
    "memory_efficiency": (0.1, 0.95),
    "host_layer_seconds": (0.0, 1e-2),
    "host_collective_seconds": (0.0, 1e-3),
    "host_microbatch_seconds": (0.0, 3e-2),
    "host_iteration_seconds": (0.0, 0.1),
    "host_exponent": (1.0, 10.0),
    "collective_slowdown": (1.0, 3.0),
    "network_efficiency": (0.2, 1.0),
    "network_latency_seconds": (0.0, 1e-3),
    "network_share": (0.125, 1.0),
    "gradient_overlap": (0.0, 1.0),
    "flash_efficiency": (0.05, 1.0),
    "tensor_network_share": (0.05, 1.0),
    "tensor_step_seconds": (0.0, 1e-2),
    "pipeline_step_seconds": (0.0, 1e-2),
    "stall_seconds": (0.0, 1.0),
}
"""The constants that are fitted, with what is possible for each."""
H100_ONLY = (
    "flash_efficiency",
    "tensor_network_share",
    "tensor_step_seconds",
    "pipeline_step_seconds",
    "stall_seconds",
)
A100_CONSTANTS = tuple(name for name in BOUNDS if name not in H100_ONLY)
"""Those that the A100 sets, of a software without fused attention, are fitted with."""
H100_STATED = {"host_collective_seconds": 0.0, "host_microbatch_seconds": 0.0, "host_exponent": 10.0,
               "matmul_half_size": 178.0, "collective_slowdown": 1.0}  # fmt: skip
"""Host times are a layer's as a whole, and overlap with the device's; the set does not tell the others apart."""
H100_CONSTANTS = tuple(name for name in BOUNDS if name not in H100_STATED)
"""Those that the H100 set is fitted with."""
SOFTWARE_OF_2019 = ("memory_efficiency", "host_layer_seconds", "collective_slowdown", "network_share")
"""The constants that are fitted again on the 2019 paper: its kernels were not fused, its host code was slower, and
sixteen GPUs share a node's adapters. All others are those of the A100 fit."""
START = {"matmul_efficiency": 0.85, "matmul_half_size": 100.0, "memory_efficiency": 0.8, "host_layer_seconds": 1e-3,
         "host_collective_seconds": 3e-5, "host_microbatch_seconds": 3e-3, "host_iteration_seconds": 1e-3,
         "host_exponent": 3.0, "collective_slowdown": 1.3, "network_efficiency": 0.8, "network_latency_seconds": 1e-5,
         "network_share": 0.3, "gradient_overlap": 0.5, "flash_efficiency": 0.3, "pipeline_step_seconds": 1e-3,
         "tensor_network_share": 0.5, "tensor_step_seconds": 1e-4, "stall_seconds": 0.3}  # fmt: skip
"""Where the fit starts, whatever the cluster's file holds."""
NODE_START = {"node_latency_seconds": 5e-5, "node_rank_latency_seconds": 5e-6, "node_bus_bytes_per_second": 2e11}
NODE_BOUNDS = {
    "node_latency_seconds": (0.0, 1e-3),
    "node_rank_latency_seconds": (0.0, 1e-4),
    "node_bus_bytes_per_second": (1e6, 1e13),
}
ONE_NODE, SEVERAL_NODES, FIGURES = 1.0, 5.0, 1.5
"""Weights of a row: the 61 of several nodes are to count beside 724 of one node, and published rows, rounded to a
TFLOP/s and from another machine of the same kind, less than either."""
SOFT = 0.02
"""Relative error from which a row's pull stops growing (soft L1): some measured rows are twice what their like take."""
FOLDS = 5
SEED = 1234


@dataclass(frozen=True)
class HeldOut:
    """Errors on rows that the constants were not fitted on."""

    ratios: Floats
    """Measured over predicted, in the rows' order."""
    covered: float
    """Share of rows inside intervals made from the other folds' rows."""


def fit(
    machine: Machine,
    names: Iterable[str],
    observations: Sequence[Observation],
    weights: Floats,
    scale: float = SOFT,
    loss: str = "soft_l1",
) -> Machine:
    """The machine with the named constants moved, within their bounds, to where weighted log errors are least."""
    values = published_values(observations)

    def errors(trial: Machine) -> Floats:
        return weights * np.log(predicted(trial, observations) / values)

    return least(machine, tuple(names), BOUNDS, errors, scale, loss)


def fit_node(machine: Machine, measured: Sequence[AllReduce]) -> Machine:
    """The machine with the latency and bandwidth of all-reduces inside a node fitted on timed ones."""
    ranks = np.array([float(timed.ranks) for timed in measured])
    sent_bytes = np.array([float(timed.sent_bytes) for timed in measured])
    seconds = np.array([timed.seconds for timed in measured])
    names = tuple(NODE_BOUNDS) if len(set(ranks)) > 1 else ("node_latency_seconds", "node_bus_bytes_per_second")

    def errors(trial: Machine) -> Floats:
        return np.log(node_all_reduce_seconds(trial, ranks, sent_bytes) / seconds)

    return least(machine.replaced(**{name: NODE_START[name] for name in names}), names, NODE_BOUNDS, errors)


def least(
    machine: Machine,
    names: tuple[str, ...],
    bounds: dict[str, tuple[float, float]],
    errors: Callable[[Machine], Floats],
    scale: float = SOFT,
    loss: str = "soft_l1",
) -> Machine:
    """The machine with the named constants moved, within `bounds`, to where `errors` are least by `loss`."""
    low, high = (np.array([bounds[name][side] for name in names]) for side in (0, 1))
    start = np.array([getattr(machine, name) for name in names])
    unit = np.where(start > 0, start, high / 100)

    def moved(point: Floats) -> Machine:
        return machine.replaced(**dict(zip(names, (point * unit).tolist(), strict=True)))

    margin = 1e-9 * (high - low)
    solution = least_squares(
        lambda point: errors(moved(point)),
        np.clip(start, low + margin, high - margin) / unit,
        bounds=(low / unit, high / unit),
        loss=loss,
        f_scale=scale,
        ftol=1e-7,
        max_nfev=100,
    )
    return moved(solution.x)


def a100_rows() -> tuple[list[Observation], Floats]:
    """What the A100 constants are fitted on, with weights: single-node rows, multi-node rows, published rows that are
    not in the 2021 paper's Table 1."""
    sets = [(single_node(), ONE_NODE), (multi_node(), SEVERAL_NODES), (ptd_p_others(), FIGURES)]
    rows = [row for rows, _ in sets for row in rows]
    return rows, np.array([weight for rows, weight in sets for _ in rows])


def fit_a100(machine: Machine) -> Machine:
    """All fitted constants of an A100 cluster, from `START`."""
    alone = fit_node(machine, [timed for timed in all_reduces() if timed.gpu == "a100"])
    rows, weights = a100_rows()
    return fit(alone.replaced(**_start(A100_CONSTANTS)), A100_CONSTANTS, rows, weights)


def fit_h100(machine: Machine, rows: Sequence[Observation]) -> Machine:
    """All fitted constants of the H100 cluster and nanotron of 2024, from `START`."""
    start = machine.replaced(**_start(H100_CONSTANTS), **H100_STATED)
    return fit(start, H100_CONSTANTS, rows, np.ones(len(rows)), 0.06, "cauchy")


def _start(names: Iterable[str]) -> dict[str, float]:
    return {name: START[name] for name in names}


def fit_v100(machine: Machine, rows: Sequence[Observation] | None = None) -> Machine:
    """The constants of the 2019 paper's machine and software; the others are as `machine` has them."""
    rows = v100_rows() if rows is None else rows
    alone = fit_node(machine, [timed for timed in all_reduces() if (timed.gpu, timed.ranks) == ("v100", 8)])
    weights = np.array([0.0] + [1.0] * (len(rows) - 1))
    return fit(alone, SOFTWARE_OF_2019, rows, weights, scale=0.03)


def random_folds(count: int) -> NDArray[np.int64]:
    """A fold number for each of so many rows: equal shares, shuffled with a fixed seed."""
    return np.random.default_rng(SEED).permutation(np.arange(count) % FOLDS)


def model_folds(rows: Sequence[Observation]) -> NDArray[np.int64]:
    """A fold number for each row such that all rows of one model are left out together."""
    shapes = [(row.workload.hidden, row.workload.layers, row.workload.seq) for row in rows]
    order = {shape: number for number, shape in enumerate(sorted(set(shapes)))}
    return np.array([order[shape] % FOLDS for shape in shapes])


def cross_validate(machine: Machine, folds: NDArray[np.int64]) -> dict[str, HeldOut]:
    """Errors of the single-node and the multi-node set, each row predicted by constants fitted without its fold.

    `machine` is where each fit starts; `folds` numbers the single-node rows, then the multi-node rows.
    """
    rows, weights = a100_rows()
    measured = len(folds)
    held = np.full(len(rows), -1)
    held[:measured] = folds
    ratios = np.empty(measured)
    with Progress("cross-validation", FOLDS, "fits") as progress:
        for fold in range(FOLDS):
            kept, left = np.flatnonzero(held != fold), np.flatnonzero(held == fold)
            fitted = fit(machine, A100_CONSTANTS, [rows[i] for i in kept], weights[kept])
            out = [rows[i] for i in left]
            ratios[left] = published_values(out) / predicted(fitted, out)
            progress.advance()
    split = len(single_node())
    parts = {"single node": slice(0, split), "several nodes": slice(split, measured)}
    return {name: HeldOut(ratios[part], covered(ratios[part], folds[part])) for name, part in parts.items()}


def interval(ratios: Floats) -> tuple[float, float]:
    """Factors between which nine in ten held-out measurements lie."""
    return (float(np.quantile(ratios, 0.05, method="lower")), float(np.quantile(ratios, 0.95, method="higher")))


def covered(ratios: Floats, folds: NDArray[np.int64]) -> float:
    """Share of rows that lie in the interval made from the rows of the other folds."""
    inside = 0
    for fold in set(folds.tolist()):
        low, high = interval(ratios[folds != fold])
        inside += int(((ratios[folds == fold] >= low) & (ratios[folds == fold] <= high)).sum())
    return inside / len(ratios)


def v100_left_out(machine: Machine) -> Floats:
    """Published over predicted time of each row the V100 constants are fitted on, fitted without it."""
    first, *rows = v100_rows()
    ratios = []
    with Progress("V100, a row left out", len(rows), "fits") as progress:
        for place, row in enumerate(rows):
            fitted = fit_v100(machine, [first, *rows[:place], *rows[place + 1 :]])
            ratio = row.value / predicted(fitted, [first, row])[1]
            ratios.append(ratio if row.quantity == "days_per_epoch" else 1 / ratio)
            progress.advance()
    return np.array(ratios)
