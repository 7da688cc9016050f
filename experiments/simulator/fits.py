"""Fits the cost model's constants on measured iterations and says how far off it is on those left out.

Imports no torch. `mlm-experiment calibrate` fits with it what `experiments/clusters/fitted` holds.
"""

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import compress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares, minimize  # type: ignore[import-untyped]
from scipy.special import stdtrit  # type: ignore[import-untyped]

from experiments.simulator import measurements
from experiments.simulator.cluster import ErrorInterval, Machine, rounded
from experiments.simulator.collectives import node_all_reduce_seconds, stall_probability
from experiments.simulator.measurements import AllReduce, Observation
from experiments.simulator.simulate import iteration_parts, time_interval
from experiments.simulator.workload import Floats, Workload, Workloads
from lineage.config import read_toml
from lineage.progress import Progress


class Fitted(NamedTuple):
    """A constant that is fitted."""

    start: float
    """Start of its fit, independent of the cluster's file."""
    low: float
    """The least and the most that is possible."""
    high: float
    on_a100: bool = True
    """True if the A100 sets, measured without fused attention, determine it."""
    on_h100: float | None = None
    """Fixed value in the H100 fit, if that set does not determine it. Host times there are those of a whole layer and
    overlap with the device's."""


CONSTANTS, NODE_CONSTANTS = (
    {name: Fitted(**values) for name, values in table.items()}
    for table in read_toml(Path(__file__).with_name("fitted.toml")).values()
)
"""Constants that are fitted on iterations, and on timed all-reduces inside a node."""
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
STALLS = {"stall_rate": 0.1, "stall_nodes": 40.0, "stall_ranks": 100.0}
"""Start of the H100 fit, by which some runs on 32 nodes stall and nearly all on 64."""
FOLDS = 5
SEED = 1234
FEW = 20
"""Ratios from which an interval is between their quantiles; of fewer it is Student's, of another like them."""
Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class HeldOut:
    """Rows predicted by constants that they were not fitted with, in order."""

    keys: Sequence[Hashable]
    """Fold of each row."""
    ratios: Floats
    """Measured over predicted time."""
    total: Floats
    """Seconds predicted."""
    smooth: Floats
    """Time without stalls."""
    stalls: Floats
    """Seconds that stalls would add."""
    chance: Floats
    """Probability of a stall."""

    @property
    def seconds(self) -> Floats:
        """Measured, of a ratio by the first row's prediction."""
        return self.ratios * self.total

    def of(self, chosen: Mask) -> "HeldOut":
        """The chosen rows."""
        columns = (getattr(self, each.name) for each in fields(self)[1:])
        return HeldOut([*compress(self.keys, chosen)], *(column[chosen] for column in columns))


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


def weights_of(rows: Sequence[Observation]) -> Floats:
    """How much each row of the A100s counts."""
    return np.array([FIGURES if row.quantity != "iteration_seconds" else
                     ONE_NODE if row.workload.gpus <= 8 else SEVERAL_NODES for row in rows])  # fmt: skip


def fit_a100(machine: Machine, rows: Sequence[Observation]) -> Machine:
    """All fitted constants of an A100 cluster, from where their fits start."""
    alone = fit_node(machine, [timed for timed in measurements.all_reduces() if timed.gpu == "a100"])
    return fit(started(alone, A100_CONSTANTS), A100_CONSTANTS, rows, weights_of(rows))


def fit_v100(machine: Machine, rows: Sequence[Observation]) -> Machine:
    """The constants of the 2019 paper's machine and software; the others are as `machine` has them. The first row is
    what ratios refer to and has no weight."""
    alone = fit_node(
        machine, [timed for timed in measurements.all_reduces() if (timed.gpu, timed.ranks) == ("v100", 8)]
    )
    weights = np.array([0.0] + [1.0] * (len(rows) - 1))
    return fit(alone, SOFTWARE_OF_2019, rows, weights, scale=0.03)


def fit_h100(machine: Machine, rows: Sequence[Observation]) -> Machine:
    """All fitted constants of the H100 cluster and nanotron of 2024, from where their fits start, but memory's."""
    stated = {name: constant.on_h100 for name, constant in CONSTANTS.items() if constant.on_h100 is not None}
    start = started(machine, H100_CONSTANTS).replaced(**stated, **STALLS)
    workloads, seconds = [row.workload for row in rows], measurements.published_values(rows)

    def errors(trial: Machine) -> Floats:
        parts = iteration_parts(trial, workloads)
        both = np.log(np.stack([parts.smooth, parts.smooth + parts.stalls]) / seconds)
        return np.where(np.abs(both[0]) < np.abs(both[1]), both[0], both[1])

    fitted = least(least(start, H100_CONSTANTS, errors, 0.1), H100_CONSTANTS, errors, scale=0.06, loss="cauchy")
    parts = iteration_parts(fitted, workloads)
    did, known = stalled(parts.smooth, parts.stalls, seconds)
    return fitted.replaced(**_stall_constants(fitted, did[known], [*compress(workloads, known)]))


def stalled(smooth: Floats, stalls: Floats, seconds: Floats) -> tuple[Mask, Mask]:
    """Masks of iterations nearer to predictions with stalls, and of those whose time a stall would more than double.

    Only the latter tell whether they stalled.
    """
    return np.abs(np.log(seconds / (smooth + stalls))) < np.abs(np.log(seconds / smooth)), stalls > smooth


def _stall_constants(machine: Machine, did: Mask, workloads: Sequence[Workload]) -> dict[str, float]:
    """The constants by which the rows that stalled are most likely (`stall_probability`)."""
    columns = Workloads.of(workloads)

    def unlikely(point: Floats) -> float:
        chance = stall_probability(machine.replaced(**dict(zip(STALLS, np.exp(point).tolist(), strict=True))), columns)
        return -float(np.log(np.where(did, chance, 1 - chance) + 1e-9).sum())

    fitted = np.exp(minimize(unlikely, np.log([*STALLS.values()]), method="Nelder-Mead").x)
    return dict(zip(STALLS, fitted.tolist(), strict=True))


def held_out(
    title: str, rows: Sequence[Observation], keys: Sequence[Hashable], refit: Callable[[Sequence[Observation]], Machine]
) -> HeldOut:
    """The rows that have a key, each predicted by a machine fitted on those with another and those with none."""
    columns = np.full((5, len(rows)), np.nan)
    every = dict.fromkeys(key for key in keys if key is not None)
    with Progress(title, len(every), "fits") as progress:
        for key in every:
            left = np.array([each == key for each in keys])
            machine = refit([*compress(rows, ~left)])
            parts = iteration_parts(machine, [row.workload for row in rows])
            its = (measurements.time_ratios(machine, rows), parts.total, parts.smooth, parts.stalls, parts.chance)
            columns[:, left] = np.stack(its)[:, left]
            progress.advance()
    return HeldOut(keys, *columns).of(np.array([key is not None for key in keys]))


def random_folds(count: int) -> list[int]:
    """A fold number for each of so many rows: equal shares, shuffled with a fixed seed."""
    return np.random.default_rng(SEED).permutation(np.arange(count) % FOLDS).tolist()


def interval_of(held: HeldOut, source: str) -> ErrorInterval:
    """The range of 90 % of measurements without stalls, and the coverage of the intervals that the other folds give."""
    did, _ = stalled(held.smooth, held.stalls, held.seconds)
    ratios = held.seconds / held.smooth
    inside = []
    for key in dict.fromkeys(held.keys):
        left = np.array([each == key for each in held.keys])
        ends = _ends(ratios[~did & ~left] if (~did & ~left).any() else ratios[~did])
        fold = held.of(left)
        for seconds, *parts in np.stack([fold.seconds, fold.smooth, fold.stalls, fold.chance], 1).tolist():
            low, high = time_interval(*ends, *parts)
            inside.append(low <= seconds <= high)
    low, high = map(rounded, _ends(ratios[~did]))
    return ErrorInterval(low=low, high=high, source=source, coverage=round(float(np.mean(inside)), 3))


def _ends(ratios: Floats) -> tuple[float, float]:
    if len(ratios) >= FEW:
        return (float(np.quantile(ratios, 0.05, method="lower")), float(np.quantile(ratios, 0.95, method="higher")))
    logs, count = np.log(ratios), len(ratios)
    half = stdtrit(max(count - 1, 1), 0.95) * logs.std(ddof=1 if count > 1 else 0) * math.sqrt(1 + 1 / count)
    return (math.exp(logs.mean() - half), math.exp(logs.mean() + half))
