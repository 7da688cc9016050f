"""Fits the cost model's constants on measured iterations and says how far off it is on those left out.

Imports no torch. `mlm-experiment calibrate` fits with it what `experiments/clusters/fitted` holds.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares  # type: ignore[import-untyped]

from experiments.simulator import measurements
from experiments.simulator.cluster import Machine
from experiments.simulator.collectives import node_all_reduce_seconds
from experiments.simulator.measurements import AllReduce, Observation
from experiments.simulator.simulate import iteration_parts
from experiments.simulator.workload import Floats
from lineage.config import read_toml
from lineage.progress import Progress


class Fitted(NamedTuple):
    """A constant that is fitted."""

    start: float
    """Where its fit starts, whatever the cluster's file holds."""
    low: float
    """The least and the most that is possible."""
    high: float
    on_a100: bool = True
    """Whether the A100 sets, of a software without fused attention, tell it apart."""
    on_h100: float | None = None
    """What the H100 set, which does not tell it apart, is fitted with. Host times are a layer's as a whole there, and
    overlap with the device's."""


CONSTANTS, NODE_CONSTANTS = (
    {name: Fitted(**values) for name, values in table.items()}
    for table in read_toml(Path(__file__).with_name("fitted.toml")).values()
)
"""Those that are fitted on iterations, and on timed all-reduces inside a node."""
A100_CONSTANTS = {name: constant for name, constant in CONSTANTS.items() if constant.on_a100}
H100_CONSTANTS = {name: constant for name, constant in CONSTANTS.items() if constant.on_h100 is None}
SOFTWARE_OF_2019 = ("memory_efficiency", "host_layer_seconds", "collective_slowdown", "network_share")
"""The constants that are fitted again on the 2019 paper: its kernels were not fused, its host code was slower, and
sixteen GPUs share a node's adapters. All others are those of the A100 fit."""
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
    machine: Machine, names: Iterable[str], observations: Sequence[Observation], weights: Floats, **how: Any
) -> Machine:
    """The machine with the named constants moved as `least` does, `how` it is told, for weighted log errors."""
    values = measurements.published_values(observations)

    def errors(trial: Machine) -> Floats:
        return weights * np.log(measurements.predicted(trial, observations) / values)

    return least(machine, {name: CONSTANTS[name] for name in names}, errors, **how)


def fit_node(machine: Machine, measured: Sequence[AllReduce]) -> Machine:
    """The machine with the latency and bandwidth of all-reduces inside a node fitted on timed ones."""
    ranks, sent_bytes, seconds = np.array([timed[1:] for timed in measured], np.float64).T
    constants = dict(NODE_CONSTANTS)
    if len(set(ranks)) == 1:
        del constants["node_rank_latency_seconds"]

    def errors(trial: Machine) -> Floats:
        return np.log(node_all_reduce_seconds(trial, ranks, sent_bytes) / seconds)

    return least(started(machine, constants), constants, errors)


def started(machine: Machine, constants: Mapping[str, Fitted]) -> Machine:
    """The machine with the constants where their fit starts."""
    return machine.replaced(**{name: constant.start for name, constant in constants.items()})


def least(
    machine: Machine,
    constants: Mapping[str, Fitted],
    errors: Callable[[Machine], Floats],
    scale: float = SOFT,
    loss: str = "soft_l1",
) -> Machine:
    """The machine with the constants moved from its own, within their bounds, to where `errors` are least by `loss`."""
    low, high = (np.array([getattr(each, side) for each in constants.values()]) for side in ("low", "high"))
    start = np.array([getattr(machine, name) for name in constants])
    unit = np.where(start > 0, start, high / 100)

    def moved(point: Floats) -> Machine:
        return machine.replaced(**dict(zip(constants, (point * unit).tolist(), strict=True)))

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
    sets = [
        (measurements.single_node(), ONE_NODE),
        (measurements.multi_node(), SEVERAL_NODES),
        (measurements.ptd_p_others(), FIGURES),
    ]
    rows = [row for rows, _ in sets for row in rows]
    return rows, np.array([weight for rows, weight in sets for _ in rows])


def fit_a100(machine: Machine) -> Machine:
    """All fitted constants of an A100 cluster, from where their fits start."""
    alone = fit_node(machine, [timed for timed in measurements.all_reduces() if timed.gpu == "a100"])
    rows, weights = a100_rows()
    return fit(started(alone, A100_CONSTANTS), A100_CONSTANTS, rows, weights)


def fit_h100(machine: Machine, rows: Sequence[Observation]) -> Machine:
    """All fitted constants of the H100 cluster and nanotron of 2024, from where their fits start."""
    stated = {name: constant.on_h100 for name, constant in CONSTANTS.items() if constant.on_h100 is not None}
    start = started(machine, H100_CONSTANTS).replaced(**stated)
    workloads, logs = [row.workload for row in rows], np.log(measurements.published_values(rows))

    def errors(trial: Machine) -> Floats:
        parts = iteration_parts(trial, workloads)
        both = np.stack([np.log(parts.smooth) - logs, np.log(parts.smooth + parts.stalls) - logs])
        return np.where(np.abs(both[0]) < np.abs(both[1]), both[0], both[1])

    return least(least(start, H100_CONSTANTS, errors, 0.1), H100_CONSTANTS, errors, scale=0.06, loss="cauchy")


def fit_v100(machine: Machine, rows: Sequence[Observation] | None = None) -> Machine:
    """The constants of the 2019 paper's machine and software; the others are as `machine` has them."""
    rows = measurements.v100_rows() if rows is None else rows
    alone = fit_node(
        machine, [timed for timed in measurements.all_reduces() if (timed.gpu, timed.ranks) == ("v100", 8)]
    )
    weights = np.array([0.0] + [1.0] * (len(rows) - 1))
    return fit(alone, SOFTWARE_OF_2019, rows, weights, scale=0.03)


def left_out(
    title: str, keys: NDArray[np.int64], refit: Callable[[NDArray[np.bool_]], Machine]
) -> Iterator[tuple[NDArray[np.bool_], Machine]]:
    """For each key, which rows have it, and the machine refitted on all others; rows of key -1 are in every fit."""
    every = sorted(set(keys.tolist()) - {-1})
    with Progress(title, len(every), "fits") as progress:
        for key in every:
            yield keys == key, refit(keys != key)
            progress.advance()


def random_folds(count: int) -> NDArray[np.int64]:
    """A fold number for each of so many rows: equal shares, shuffled with a fixed seed."""
    return np.random.default_rng(SEED).permutation(np.arange(count) % FOLDS)


def cross_validate(machine: Machine, folds: NDArray[np.int64]) -> dict[str, HeldOut]:
    """Errors of the single-node and the multi-node set, each row predicted by constants fitted without its fold.

    `machine` is where each fit starts; `folds` numbers the single-node rows, then the multi-node rows.
    """
    rows, weights = a100_rows()
    measured, ratios = len(folds), np.empty(len(rows))

    def refit(kept: NDArray[np.bool_]) -> Machine:
        return fit(machine, A100_CONSTANTS, list(compress(rows, kept)), weights[kept])

    keys = np.concatenate([folds, np.full(len(rows) - measured, -1)])
    for left, fitted in left_out("cross-validation", keys, refit):
        out = list(compress(rows, left))
        ratios[left] = measurements.published_values(out) / measurements.predicted(fitted, out)
    split = len(measurements.single_node())
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
    rows, ratios = measurements.v100_rows(), []
    keys = np.arange(len(rows)) - 1  # the first row is what ratios refer to
    for left, fitted in left_out("V100, a row left out", keys, lambda kept: fit_v100(machine, [*compress(rows, kept)])):
        (row,) = compress(rows, left)
        ratio = row.value / measurements.predicted(fitted, [rows[0], row])[1]
        ratios.append(ratio if row.quantity == "days_per_epoch" else 1 / ratio)
    return np.array(ratios)
