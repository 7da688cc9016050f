"""Calibration: fits the cost model's constants on measured iterations, predicts rows that were left out, and writes the
files of constants. Imports no torch.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import compress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares, minimize  # type: ignore[import-untyped]
from scipy.special import stdtrit  # type: ignore[import-untyped]

from experiments.benchmark import Benchmark, Case, Series
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
    rounded,
    stated_constants,
)
from experiments.simulator.collectives import node_all_reduce_seconds, stall_probability
from experiments.simulator.measurements import (
    RATIOS,
    AllReduce,
    MeasuredRun,
    Observation,
    a100_rows,
    all_reduces,
    costed,
    h100_rows,
    megatron_2019,
    predicted,
    ptd_p_table_1,
    published_values,
    time_ratios,
    ultrascale,
    v100_rows,
)
from experiments.simulator.simulate import iteration_parts, time_interval
from experiments.simulator.workload import Floats, Workload, Workloads, llama_memory_bytes
from lineage.atomic import check_place, write_text
from lineage.config import read_toml
from lineage.progress import Progress, announce


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
    """The machine with the named constants fitted to weighted log errors; `how` goes to `least`."""
    values = published_values(observations)

    def errors(trial: Machine) -> Floats:
        return weights * np.log(predicted(trial, observations) / values)

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
    """The machine with the constants that, within their bounds, minimize `errors` under `loss`."""
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
    """Weight of each row of the A100 fit."""
    return np.array([FIGURES if row.quantity != "iteration_seconds" else
                     ONE_NODE if row.workload.gpus <= 8 else SEVERAL_NODES for row in rows])  # fmt: skip


def fit_a100(machine: Machine, rows: Sequence[Observation]) -> Machine:
    """The machine with every constant of the A100 fit."""
    alone = fit_node(machine, [timed for timed in all_reduces() if timed.gpu == "a100"])
    return fit(started(alone, A100_CONSTANTS), A100_CONSTANTS, rows, weights_of(rows))


def fit_v100(machine: Machine, rows: Sequence[Observation]) -> Machine:
    """The machine with the constants that are fitted on the 2019 paper. Ratios refer to the first row, which has no
    weight."""
    alone = fit_node(machine, [timed for timed in all_reduces() if (timed.gpu, timed.ranks) == ("v100", 8)])
    weights = np.array([0.0] + [1.0] * (len(rows) - 1))
    return fit(alone, SOFTWARE_OF_2019, rows, weights, scale=0.03)


def fit_h100(machine: Machine, rows: Sequence[Observation]) -> Machine:
    """The machine with every constant of the H100 fit except memory's."""
    stated = {name: constant.on_h100 for name, constant in CONSTANTS.items() if constant.on_h100 is not None}
    start = started(machine, H100_CONSTANTS).replaced(**stated, **STALLS)
    workloads, seconds = [row.workload for row in rows], published_values(rows)

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
    """Maximum-likelihood constants of `stall_probability`."""
    columns = Workloads.of(workloads)

    def unlikely(point: Floats) -> float:
        chance = stall_probability(machine.replaced(**dict(zip(STALLS, np.exp(point).tolist(), strict=True))), columns)
        return -float(np.log(np.where(did, chance, 1 - chance) + 1e-9).sum())

    fitted = np.exp(minimize(unlikely, np.log([*STALLS.values()]), method="Nelder-Mead").x)
    return dict(zip(STALLS, fitted.tolist(), strict=True))


def held_out(
    title: str, rows: Sequence[Observation], keys: Sequence[Hashable], refit: Callable[[Sequence[Observation]], Machine]
) -> HeldOut:
    """Predict the rows of each key by a machine that is fitted on all other rows, those without a key included."""
    columns = np.full((5, len(rows)), np.nan)
    every = dict.fromkeys(key for key in keys if key is not None)
    with Progress(title, len(every), "fits") as progress:
        for key in every:
            left = np.array([each == key for each in keys])
            machine = refit([*compress(rows, ~left)])
            parts = iteration_parts(machine, [row.workload for row in rows])
            its = (time_ratios(machine, rows), parts.total, parts.smooth, parts.stalls, parts.chance)
            columns[:, left] = np.stack(its)[:, left]
            progress.advance()
    return HeldOut(keys, *columns).of(np.array([key is not None for key in keys]))


def random_folds(count: int) -> list[int]:
    """Numbers of equally large folds, shuffled with a fixed seed."""
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
    machine, measured = a100.refit(a100.rows), costed(ultrascale())
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
    rows, start = a100_rows(), machine_of(load_cluster(A100))
    published = [row.experiment if row.quantity != "iteration_seconds" else None for row in rows]
    count = published.count(None)
    folds = [*random_folds(count), *[None] * (len(rows) - count)]
    ways: dict[str, Sequence[Hashable]] = {"rows in 5 folds": folds, "figures and tables": published}
    known = {row.workload for row in rows}  # vTrain measured two of Table 1
    apart = [row for row in ptd_p_table_1() if row.workload not in known]
    source = ("fit", "vTrain's single-node and multi-node rows; 2021 paper, Table 2 and Figures 11 to 16")
    table = (TABLE[0], TABLE[1].format("A100"))
    return Fit(A100, "megatron-2021", rows, lambda chosen: fit_a100(start, chosen), ways, apart,
               dict.fromkeys(A100_CONSTANTS, source) | dict.fromkeys(NODE_CONSTANTS, table),
               source)  # fmt: skip


def v100_fit(a100: Machine) -> Fit:
    """Megatron of 2019 on V100s, from the A100 fit's constants."""
    rows = v100_rows()
    workloads = {row.workload for row in rows[1:]}
    figures = ("2019/figure-1", "2019/figure-5")
    apart = [row for row in megatron_2019() if row.experiment in figures and row.value != 100]
    shared = {name: getattr(a100, name) for name in A100_CONSTANTS}
    start = machine_of(load_cluster(V100)).replaced(**shared, node_rank_latency_seconds=0.0)
    ways = {"rows": [None, *range(len(workloads))], "tables": [None, *(row.experiment for row in rows[1:])]}
    source = ("fit", "2019 paper, Tables 2, 7 and 8 without the rows of Figures 1 and 5")
    table = (TABLE[0], TABLE[1].format("V100"))
    return Fit(V100, "megatron-2019", rows, lambda chosen: fit_v100(start, chosen), ways, apart,
               dict.fromkeys(NODE_CONSTANTS, table) | dict.fromkeys(SOFTWARE_OF_2019, source),
               ("transferred", f"the fit of {A100}"))  # fmt: skip


def h100_fit(measured: Sequence[MeasuredRun]) -> Fit:
    """Nanotron of 2024 on H100s, fitted on these rows of the Ultra-Scale Playbook."""
    rows, start = h100_rows(measured), machine_of(load_cluster(H100))
    asked = [row.workload for row in rows]
    ways = {"model sizes": [w.hidden for w in asked], "numbers of nodes": [w.gpus for w in asked],
            "tensor-parallel sizes": [w.tp for w in asked]}  # fmt: skip
    beside = (*STALLS, "memory_share", "memory_error")
    stated = ("transferred", "the set does not tell it apart")
    sources = dict.fromkeys(CONSTANTS, stated)
    sources |= dict.fromkeys((*H100_CONSTANTS, *beside), ("fit", "the Ultra-Scale Playbook's rows"))
    return Fit(H100, "nanotron-2024", rows, lambda chosen: fit_h100(start, chosen), ways, (), sources,
               stated)  # fmt: skip


def with_memory(machine: Machine, measured: Sequence[MeasuredRun]) -> Machine:
    """The machine with the share of memory that the fullest run filled, and the spread of the memory's errors.

    Failed runs are left out because their cause is not recorded."""
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
    named = {name: interval_of(fold.of(part) if part.sum() >= FEW else fold, source)
             for name, part in parts.items()}  # fmt: skip
    return named | ({"ratio": interval_of(fold.of(ratio), source)} if ratio.any() else {})


def files(fit: Fit, machine: Machine, found: Mapping[str, ErrorInterval]) -> dict[str, str]:
    """The texts that the cluster's and the software's own files extend, by folder."""
    unknown = {*CONSTANTS, *STALLS, "memory_share", "memory_error"} - {*A100_CONSTANTS, *fit.sources}
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
