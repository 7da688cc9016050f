"""Calibration: fits the cost model's constants on measured iterations, predicts rows that were left
out, and writes the files of constants. Imports no torch.
"""

import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import cache
from itertools import compress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares  # type: ignore[import-untyped]
from scipy.special import stdtrit  # type: ignore[import-untyped]

from mlm_repro.engine.costs import parameter_count
from mlm_repro.experiments.benchmark import Benchmark, Case, Series
from mlm_repro.experiments.catalogue import read_rows
from mlm_repro.experiments.published import HERE
from mlm_repro.experiments.simulator.cluster import (
    FITTED,
    ErrorInterval,
    Hardware,
    Machine,
    SoftwareConstants,
    load_cluster,
    machine_of,
)
from mlm_repro.experiments.simulator.collectives import node_all_reduce_seconds
from mlm_repro.experiments.simulator.measurements import (
    QUANTITIES,
    RATIOS,
    Observation,
    Simulated,
    a100_rows,
    deepspeed_rows,
    h100_rows,
    megatron_2019,
    observed,
    timed,
    v100_rows,
)
from mlm_repro.experiments.simulator.simulate import iteration_parts
from mlm_repro.experiments.simulator.workload import Floats, Workload, checked_config, flops_of
from mlm_repro.lineage.atomic import write_text
from mlm_repro.lineage.config import Config, read_toml
from mlm_repro.lineage.lock import check_place
from mlm_repro.lineage.progress import Progress, announce

CONSTANTS, NODE_CONSTANTS, MODERN = read_toml(Path(__file__).with_name("fitted.toml")).values()
"""Constants that are fitted on iterations, on timed all-reduces inside a node, and on H100s, as
that file describes them."""
SOFTWARE_OF_2019 = (
    "memory_efficiency",
    "host_layer_seconds",
    "collective_slowdown",
    "network_share",
)
"""The constants that are fitted again on the 2019 paper: its kernels were not fused, its host code
was slower, and sixteen GPUs share a node's adapters. All others come from the A100 fit."""
ONE_NODE, SEVERAL_NODES, FIGURES = 1.0, 5.0, 2.5
"""Weights of a row on one node, on several nodes, and of a published figure.

The 61 rows of several nodes are to count beside 724 of one node. Published rows, rounded to a
TFLOP/s, count half as much as rows of several nodes.
"""
SOFT = 0.02
"""Relative error from which a row's pull stops growing (soft L1): some measured rows take twice the
time of rows like them."""
FOLDS = 5
SEED = 1234
FEW = 20
"""Number of ratios from which an interval lies between their quantiles; with fewer it is Student's
interval for one more ratio."""
HELD_OUT = [("fold", np.float64), ("ratio", np.float64), ("constant", np.float64)]
"""Fields of a row that is predicted by constants fitted without it: the number of its fold,
measured over predicted time, and measured over the time at the other rows' median share of the
peak."""
MISSED = 20.0
"""Cost of a miss in the score of a 90 % interval, times the distance by which it is missed: 2 over
its 10 %."""
HeldOut = NDArray[np.void]
"""Structured array with the fields of `HELD_OUT`, a record for each row that was left out."""
Rule = Callable[[Machine, Sequence[Workload]], Floats]
"""(machine, workloads) → seconds of an iteration of each workload, [n]."""


def fit(
    machine: Machine,
    constants: Mapping[str, Any],
    observations: Sequence[Observation],
    weights: Floats,
    **how: Any,
) -> Machine:
    """Return a copy of the machine with the constants named in `constants` fitted to the weighted
    log errors of its predictions of the observations; `weights` has a weight for each, [n].
    `constants` has a dict with `low` and `high` by name; the fit starts from the machine's own
    values. `how` goes to `least`, such as the `scale` of its loss."""
    values = published_values(observations)

    def errors(trial: Machine) -> Floats:
        return weights * np.log(predicted(trial, observations) / values)

    return least(machine, constants, errors, **how)


def fit_node(machine: Machine, measured: Floats) -> Machine:
    """Return a copy of the machine with the latency and bandwidth of all-reduces inside a node
    fitted on timed all-reduces: `measured` has their ranks, bytes and seconds as rows, [3, n]. If
    all are of one number of ranks, the latency per rank stays as it is. The fit starts from the
    values of fitted.toml."""
    ranks, sent_bytes, seconds = measured
    constants = dict(NODE_CONSTANTS)
    if len({*ranks}) == 1:
        del constants["node_rank_latency_seconds"]

    def errors(trial: Machine) -> Floats:
        return np.log(node_all_reduce_seconds(trial, ranks, sent_bytes) / seconds)

    return least(started(machine, constants), constants, errors)


def started(machine: Machine, constants: Mapping[str, Any]) -> Machine:
    """Return a copy of the machine with each constant that is a key of `constants` at the value
    from which a fit starts: the value under the key `start` in the constant's dict in
    `constants`."""
    return machine.replaced(**{name: constant["start"] for name, constant in constants.items()})


def least(
    machine: Machine,
    constants: Mapping[str, Any],
    errors: Callable[[Machine], Floats],
    scale: float = SOFT,
) -> Machine:
    """Return a copy of `machine` in which each constant that is a key of `constants` has the value
    that, together with the others, minimizes `errors(machine)`, a function that returns a vector,
    under a soft L1 loss. The values of `constants` are mappings, in which `low` and `high` are the
    constant's bounds; `scale` is the error from which the loss grows linearly. The search starts
    from the machine's own values and ends after 100 trials, even if it has not converged."""
    low, high = (
        np.array([constant[side] for constant in constants.values()]) for side in ("low", "high")
    )
    start = np.array([getattr(machine, name) for name in constants])
    # The constants differ by many orders of magnitude; the solver sees each in a unit of its own.
    unit = np.where(start > 0, start, high / 100)

    def moved(point: Floats) -> Machine:
        return machine.replaced(**dict(zip(constants, (point * unit).tolist(), strict=True)))

    margin = 1e-9 * (high - low)
    solution = least_squares(
        lambda point: errors(moved(point)),
        np.clip(start, low + margin, high - margin) / unit,
        bounds=(low / unit, high / unit),
        loss="soft_l1",
        f_scale=scale,
        ftol=1e-7,
        max_nfev=100,
    )
    return moved(solution.x)


def zero_3() -> list[Observation]:
    """Return a list of the shipped Observations of ZeRO-3 in the 2021 paper's Table 2, with
    "ZeRO-3" added to the name of their experiment."""
    return [
        row._replace(experiment="2021/table-2, ZeRO-3")
        for row in observed("2021/table-2")
        if row.workload.zero
    ]


def all_reduces(gpu: str, ranks: int | None = None) -> Floats:
    """Return the ranks, bytes and seconds, as rows of an array [3, n], of the shipped all-reduces
    that vTrain timed by NCCL inside one server of the GPUs `gpu`, `a100` or `v100`; of those on
    `ranks` ranks, by default of all. Without such a row the array is empty, of shape [0]."""
    timed = [
        (int(row["ranks"]), int(row["bytes"]), float(row["nanoseconds"]) * 1e-9)
        for row in read_rows(HERE / "vtrain-all-reduce.csv")
        if row["gpu"] == gpu and ranks in (None, int(row["ranks"]))
    ]
    return np.array(timed, np.float64).T


@cache
def datasheet(cluster: str) -> dict[str, float]:
    """Return a dict name → value of the constants of a shipped cluster, called `cluster`, that come
    from a datasheet; its other constants are left out. The dict is kept for further calls, so it
    must not be changed. Raises BadInput for an unknown name."""
    return {
        name: constant.value
        for name, constant in load_cluster(cluster).constants
        if constant.kind == "datasheet"
    }


def simulated_seconds(machine: Machine, workloads: Sequence[Workload]) -> Floats:
    """Return the seconds of an iteration of each of `workloads` on `machine`, an array [n], as the
    simulator predicts them. The workloads must be ones that the engine accepts, which is not
    checked; their memory is not looked at."""
    return iteration_parts(machine, workloads).total


def ideal_seconds(machine: Machine, workloads: Sequence[Workload]) -> Floats:
    """Return the seconds of an iteration of each workload, [n], if every GPU of the machine
    multiplied at its peak all the time."""
    return (
        np.array([flops_of(workload) / workload.gpus for workload in workloads])
        / machine.matmul_flops_per_second
    )


def predicted(
    machine: Machine, observations: Sequence[Observation], rule: Rule = simulated_seconds
) -> Floats:
    """Return an array [n] with the value that a rule predicts for each observation, in order and in
    the observation's own quantity. The rule, by default `simulated_seconds`, is given a machine and
    workloads and returns each workload's seconds of an iteration, from which the quantity follows.
    If an observation names a cluster, constants of that cluster's datasheet replace the machine's.
    A quantity that is relative refers to the first observation."""
    workloads = [observation.workload for observation in observations]
    seconds = np.empty(len(observations))
    clusters = np.array([observation.cluster for observation in observations])
    for name in dict.fromkeys(clusters.tolist()):
        here = clusters == name
        own = machine.replaced(**datasheet(name)) if name else machine
        seconds[here] = rule(own, [*compress(workloads, here)])
    return np.array(
        [
            QUANTITIES[row.quantity](Simulated(row.workload, time, workloads[0], seconds[0]))
            for row, time in zip(observations, seconds, strict=True)
        ]
    )


def time_ratios(
    machine: Machine, observations: Sequence[Observation], rule: Rule = simulated_seconds
) -> Floats:
    """Return an array [n] with the measured over the predicted value of each observation of seconds
    of an iteration, or of days or minutes of an epoch, and with the predicted over the measured
    value of any other quantity, such as a speed; both are above 1 if it was slower than predicted.
    A relative quantity is predicted relative to the first observation's workload; its measured
    value is taken as it is.

    `rule` is given a machine and workloads and returns each workload's predicted seconds of an
    iteration. The machine is `machine`; if an observation names a cluster, constants of that
    cluster's datasheet replace the machine's.
    """
    ratios = published_values(observations) / predicted(machine, observations, rule)
    falls = [
        row.quantity not in ("iteration_seconds", "days_per_epoch", "epoch_minutes")
        for row in observations
    ]
    return np.where(falls, 1 / ratios, ratios)


def published_values(observations: Sequence[Observation]) -> Floats:
    """Return an array [n] of the measured or published value of each observation."""
    return np.array([observation.value for observation in observations])


def weights_of(rows: Sequence[Observation]) -> Floats:
    """Return an array [n] of the weight of each row in the A100 fit: `ONE_NODE` for an iteration's
    seconds on up to 8 GPUs, `SEVERAL_NODES` for those on more, `FIGURES` for any other quantity."""
    return np.array(
        [
            (
                FIGURES
                if row.quantity != "iteration_seconds"
                else ONE_NODE
                if row.workload.gpus <= 8
                else SEVERAL_NODES
            )
            for row in rows
        ]
    )


def held_out(
    title: str,
    rows: Sequence[Observation],
    keys: Sequence[Hashable],
    refit: Callable[[Sequence[Observation]], Machine],
) -> HeldOut:
    """Predict the Observations in `rows` that have a key, each by the machine that `refit` returns
    for all rows with another key or none. Return a structured array with a record of each row that
    has a key, in the rows' order. `keys` has the key of each row, which other rows may have too, or
    None; `title` is shown with the progress.

    The fields of a record are `fold`, the number of the key, from 0 in the order of `keys`;
    `ratio`, measured over predicted time; and `constant`, measured time over the time at the other
    rows' median share of the peak. For a quantity in RATIOS `constant` refers to the time at the
    peak itself, and such rows do not count in the median.
    """
    held = np.zeros(len(rows), HELD_OUT)
    ratio = np.array([row.quantity in RATIOS for row in rows])
    every = dict.fromkeys(key for key in keys if key is not None)
    with Progress(title, len(every), "fits") as progress:
        for number, key in enumerate(every):
            left = np.array([fold == key for fold in keys])
            machine = refit([*compress(rows, ~left)])
            ideal = time_ratios(machine, rows, ideal_seconds)
            known = np.median(ideal[~left & ~ratio]) if (~left & ~ratio).any() else 1.0
            held["fold"][left] = number
            held["ratio"][left] = time_ratios(machine, rows)[left]
            held["constant"][left] = (ideal / np.where(ratio, 1.0, known))[left]
            progress.advance()
    return held[[key is not None for key in keys]]


def interval_of(held: HeldOut, source: str) -> ErrorInterval:
    """Return the ErrorInterval of the ratios of measured to predicted time in `held`, the
    structured array that `held_out` returns, whose rows were predicted by fits without them. From
    FEW (20) ratios on, at least 90 % of the field `ratio` lie in it; for fewer it is Student's 90 %
    interval for one more ratio. Its coverage and score are the means over the rows, each judged by
    the interval of the other folds, or of its own if there is one `fold`; the baseline is the score
    of the field `constant`, as if every row had the same share of the peak. `source` is the
    interval's description."""
    (coverage, score), (_, baseline) = (
        _tried(held["fold"], held[rule]) for rule in ("ratio", "constant")
    )
    low, high = map(rounded, _ends(held["ratio"]))
    return ErrorInterval(
        low=low,
        high=high,
        source=source,
        coverage=round(coverage, 3),
        score=rounded(score),
        baseline=rounded(baseline),
    )


def _tried(folds: Floats, ratios: Floats) -> tuple[float, float]:
    """Return two numbers on `ratios`, [n]: the share of them that lie in the interval that judges
    them, and the mean interval score of their logarithms. Each ratio is judged by the interval of
    the ratios of the other folds, or of all if there is one fold; `folds`, [n], has the number of
    each ratio's fold."""
    inside = np.empty(len(ratios))
    scores = np.empty(len(ratios))
    for number in np.unique(folds):
        left = folds == number
        low, high = np.log(_ends(ratios[~left] if (~left).any() else ratios))
        logs = np.log(ratios[left])
        missed = np.maximum(low - logs, 0) + np.maximum(logs - high, 0)
        inside[left] = missed == 0
        scores[left] = high - low + MISSED * missed
    return float(inside.mean()), float(scores.mean())


def _ends(ratios: Floats) -> tuple[float, float]:
    if len(ratios) >= FEW:
        return (
            float(np.quantile(ratios, 0.05, method="lower")),
            float(np.quantile(ratios, 0.95, method="higher")),
        )
    logs = np.log(ratios)
    count = len(ratios)
    half = (
        stdtrit(max(count - 1, 1), 0.95)
        * logs.std(ddof=1 if count > 1 else 0)
        * math.sqrt(1 + 1 / count)
    )
    return math.exp(logs.mean() - half), math.exp(logs.mean() + half)


A100 = "dgx-a100-80g"
H100 = "h100"
V100 = "dgx-2h-v100"
CORE = "megatron-core"
"""Name of the software that trained in the H100 rows."""
STATED = (
    "host_layer_seconds",
    "host_softmax_seconds",
    "host_microbatch_seconds",
    "gradient_overlap",
)
"""Constants that no fit gives the software `CORE`. The software's own file states them, but for
softmax, which is a part of its attention."""
TRANSFERRED = ("transferred", f"the fit of {A100}")
NOTES = [
    (
        "Every part is predicted by constants fitted on all others: rows, or whole sources. Parts"
        " that no constant is ever fitted on are called apart."
    ),
    "Error is predicted over measured time of an iteration, of a ratio in the ratio.",
    (
        "Coverage is the share of rows left out that lie in the interval made without them; score"
        " is the mean interval score of logarithms, baseline that of one share of the peak for all."
    ),
]


class Fit(NamedTuple):
    """A cluster and a software whose constants are fitted together: their names, the measured
    `rows`, and the function `refit`, which fits a Machine to some of the rows. `left_out` has ways
    to divide the rows into folds, `apart` rows that no constant is fitted on, and `sources` the
    kind and source of each constant."""

    cluster: str
    software: str
    rows: Sequence[Observation]
    refit: Callable[[Sequence[Observation]], Machine]
    left_out: Mapping[str, Sequence[Hashable]]
    """Keys of the rows by the name of a way to divide them: the key of each row's fold, None for a
    row that is never left out. Intervals use the first way."""
    apart: Sequence[Observation]
    """Rows that no constant is fitted on; rows of ratios follow the row that they refer to."""
    sources: Mapping[str, tuple[str, str]]
    """Kind and source, as texts, of each constant that the fit's files state, by the constant's
    name."""


def calibrate(out: Path) -> Benchmark:
    """Fit the constants of the clusters and their software, write the files of the fitted constants
    below the folder `out`, say on standard error of each file whether the shipped one is the same,
    and return the Benchmark, a record of the errors of the simulator's predictions.

    The files have the names of the shipped ones, below `clusters/fitted` and `software/fitted`.
    Raises BadInput if nothing can be written below `out`, or if a file of other origin has the name
    of the first.
    """
    check_place("--out", out / "clusters/fitted" / f"{A100}.toml", "python -m benchmarks calibrate")
    a100 = a100_fit()
    machine = a100.refit(a100.rows)
    fits = (a100, h100_fit(machine), v100_fit(machine), deepspeed_fit(machine))
    cases = []
    every = [
        {
            way: held_out(f"{fit.cluster}, {way}", fit.rows, keys, fit.refit)
            for way, keys in fit.left_out.items()
        }
        for fit in fits
    ]
    for fit, held in zip(fits, every, strict=True):
        machine = fit.refit(fit.rows)
        ranges = intervals(fit, held)
        ranges["extrapolated"] = widest(
            every[0]["sources"], every[1]["sources"], every[2]["rows"], ranges.values()
        )
        errors = _errors(fit, machine, held, ranges)
        cases.append(Case(name=f"{fit.cluster} under {fit.software}", series=errors))
        for name, text in files(fit, machine, ranges).items():
            write_text(out / name, text)
            path = FITTED / name
            shipped = path.read_text(encoding="utf-8") if path.is_file() else ""
            announce(
                f"{out / name}: the shipped constants are"
                f" {'these' if text == shipped else 'others'}"
            )
    return Benchmark(
        benchmark="calibration",
        title="The simulator's errors on rows that its constants were not fitted on",
        cases=cases,
        notes=NOTES,
    )


def a100_fit() -> Fit:
    """Return the Fit of Megatron of 2021 on A100s: its rows, folds and the function that fits.
    Nothing is fitted here but the constants of all-reduces inside a node."""
    rows = a100_rows()
    alone = fit_node(machine_of(load_cluster(A100)), all_reduces("a100"))
    start = started(alone, CONSTANTS)
    count = sum(row.quantity == "iteration_seconds" for row in rows)
    shuffled = np.random.default_rng(SEED).permutation(np.arange(count) % FOLDS).tolist()
    folds = [*shuffled, *[None] * (len(rows) - count)]
    known = {row.workload for row in rows}  # vTrain measured two of Table 1
    source = (
        "fit",
        "vTrain's single-node and multi-node rows; 2021 paper, Table 2 and Figures 11 to 16",
    )
    table = ("micro-benchmark", "vTrain's NCCL all-reduces inside one A100 server")
    return Fit(
        A100,
        "megatron-2021",
        rows,
        lambda some: fit(start, CONSTANTS, some, weights_of(some)),
        {"rows in 5 folds": folds, "sources": [row.source for row in rows]},
        [
            *(row for row in observed("2021/table-1") if row.workload not in known),
            *zero_3(),
            *timed("megatron-2020", "nemo-a100"),
        ],
        dict.fromkeys(CONSTANTS, source) | dict.fromkeys(NODE_CONSTANTS, table),
    )


def h100_fit(a100: Machine) -> Fit:
    """Return the Fit of Megatron-Core and FSDP on H100s, not yet carried out; in it each source of
    rows has the same weight. `a100` is the fitted A100 machine, which gives the constants that are
    neither fitted nor stated."""
    names = [name for name in (*CONSTANTS, *NODE_CONSTANTS) if name not in STATED]
    moved = {name: getattr(a100, name) for name in names} | {"network_share": 1.0}
    start = started(machine_of(load_cluster(H100, CORE)).replaced(**moved), MODERN)
    sources = dict.fromkeys(names, TRANSFERRED) | dict.fromkeys(
        MODERN, ("fit", "experiments/published/h100.csv")
    )

    def refit(some: Sequence[Observation]) -> Machine:
        counts = Counter(row.source for row in some)
        weights = np.array([3 / math.sqrt(counts[row.source]) for row in some])
        return fit(start, MODERN, some, weights, scale=0.1)

    rows = h100_rows()
    sources["network_share"] = ("counted", "an adapter for each GPU")
    return Fit(H100, CORE, rows, refit, {"sources": [row.source for row in rows]}, (), sources)


def v100_fit(a100: Machine) -> Fit:
    """Return the Fit of Megatron of 2019 on V100s, not yet carried out; it fits the constants of
    SOFTWARE_OF_2019. The only constants that this call itself fits are latency and bandwidth of
    all-reduces inside a node. All others come from `a100`, the fitted A100 machine, but two are 0:
    softmax on the host and the latency per rank inside a node. Rows of ratios refer to the first
    row, which has no weight."""
    rows = v100_rows()
    apart = [row for row in megatron_2019() if "figure" in row.experiment and row.value != 100]
    shared = {name: getattr(a100, name) for name in CONSTANTS}
    shared |= dict.fromkeys(("host_softmax_seconds", "node_rank_latency_seconds"), 0.0)
    alone = machine_of(load_cluster(V100)).replaced(**shared)
    start = fit_node(alone, all_reduces("v100", 8))

    def refit(some: Sequence[Observation]) -> Machine:
        chosen = {name: CONSTANTS[name] for name in SOFTWARE_OF_2019}
        return fit(start, chosen, some, np.array([0.0] + [1.0] * (len(some) - 1)), scale=0.03)

    source = ("fit", "2019 paper, Tables 2, 7 and 8 without the rows of Figures 1 and 5")
    table = ("micro-benchmark", "vTrain's NCCL all-reduces inside one V100 server")
    return Fit(
        V100,
        "megatron-2019",
        rows,
        refit,
        {"rows": [None, *range(len(rows) - 1)]},
        apart,
        dict.fromkeys(CONSTANTS, TRANSFERRED)
        | dict.fromkeys(NODE_CONSTANTS, table)
        | dict.fromkeys(SOFTWARE_OF_2019, source)
        | {"host_softmax_seconds": ("counted", "softmax is never fused")},
    )


def deepspeed_fit(a100: Machine) -> Fit:
    """Return the Fit of Megatron-DeepSpeed on A100s, not yet carried out: `a100`, the fitted A100
    machine, gives all constants but the one that is fitted, the host time that the pipeline adds to
    each microbatch."""
    rows = deepspeed_rows()
    fitted = "host_microbatch_seconds"
    sources = {name: TRANSFERRED for name in CONSTANTS if name in SoftwareConstants.model_fields}
    sources[fitted] = (
        "fit",
        "arXiv:2201.11990, Section 2.4: 530 billion parameters on 280, 350 and 420 nodes",
    )
    return Fit(
        "selene",
        "megatron-deepspeed",
        rows,
        lambda some: fit(a100, {fitted: CONSTANTS[fitted]}, some, np.ones(len(some))),
        {"rows": range(len(rows))},
        timed("bigscience"),
        sources,
    )


def intervals(fit: Fit, held: Mapping[str, HeldOut]) -> dict[str, ErrorInterval]:
    """Return a dict of ErrorIntervals by name: `one_node` is over the rows of runs on no more GPUs
    than one node of the fit's cluster has, `several_nodes` over all other rows, and `ratio` over
    rows with a quantity in RATIOS, which count in the first two as well; without such rows `ratio`
    is left out. `held` is a dict from a way of leaving rows out, a key of `fit.left_out`, to the
    HeldOut of these rows, from fits without them; the intervals are made from its first entry
    alone. If `one_node` or `several_nodes` would have fewer than FEW (20) rows, or none in some
    fold, both are over all rows."""
    way, fold = next(iter(held.items()))
    rows = _left_out(fit, way)
    node = machine_of(load_cluster(fit.cluster)).gpus_per_node
    several = np.array([row.workload.gpus > node for row in rows])
    ratio = np.array([row.quantity in RATIOS for row in rows])
    every = np.unique(fold["fold"])
    sources = ", ".join(dict.fromkeys(row.source for row in fit.rows))
    source = f"{way} left out, {len(every)} fits; of {sources}"
    parts = {"one_node": ~several, "several_nodes": several}
    is_enough = all(
        part.sum() >= FEW and len(np.unique(fold["fold"][part])) == len(every)
        for part in parts.values()
    )
    named = {
        name: interval_of(fold[part] if is_enough else fold, source) for name, part in parts.items()
    }
    return named | ({"ratio": interval_of(fold[ratio], source)} if ratio.any() else {})


def widest(
    a100: HeldOut, h100: HeldOut, v100: HeldOut, within: Iterable[ErrorInterval]
) -> ErrorInterval:
    """Return the ErrorInterval, as factors on the prediction, that spans the 90 % interval of each
    source's measurements and every interval in `within`. `a100`, `h100` and `v100` are arrays as
    `held_out` returns them: their field `ratio` has each row's measured over its predicted time.

    In `a100` and `h100` each `fold` is a source, predicted by a fit on the other sources of its
    cluster; `v100` counts as one source, each row of which was predicted by a fit of the software's
    constants on the other rows, with the A100 fit's constants for the rest. The returned interval's
    coverage is the mean share of a source's rows that lie inside the range of the other sources.
    """
    ratios = [
        held["ratio"][held["fold"] == fold]
        for held in (a100, h100)
        for fold in np.unique(held["fold"])
    ]
    ratios.append(v100["ratio"])
    ends = np.array([_ends(each) for each in ratios])
    inside = []
    for index, each in enumerate(ratios):
        low, high = _union(np.delete(ends, index, axis=0))
        inside.append(((low <= each) & (each <= high)).mean())
    low, high = map(rounded, _union(np.array([*ends, *((each.low, each.high) for each in within)])))
    return ErrorInterval(
        low=low,
        high=high,
        source=f"{len(ratios)} sources left out, the widest",
        coverage=round(float(np.mean(inside)), 3),
    )


def _union(ends: Floats) -> tuple[float, float]:
    return float(ends[:, 0].min()), float(ends[:, 1].max())


def files(fit: Fit, machine: Machine, intervals: Mapping[str, ErrorInterval]) -> dict[str, str]:
    """Return a dict of the texts of the fitted TOML files by their path below `FITTED`: the
    software's constants, intervals and reach, and the cluster's constants if any was fitted.
    `machine` has the fitted constants. Each of `intervals` becomes a section `intervals.NAME`: the
    ones that the function `intervals` of this module returns, and `extrapolated`. The cluster's and
    the software's own files extend them. Nothing is written.

    The H100 fit also gives the constants that are transferred to clusters without measurements.
    """
    software = _constants(fit.sources, machine, SoftwareConstants)
    sections = {
        f"intervals.{name}": interval.model_dump(exclude_none=True)
        for name, interval in intervals.items()
    }
    for name, values in (sections | {"reach": reach(fit)}).items():
        software += ["", f"[{name}]"]
        software += [f"{key} = {json.dumps(value)}" for key, value in values.items()]
    lines = {f"software/fitted/{fit.software}.toml": software}
    if {*fit.sources} & {*Hardware.model_fields}:
        lines[f"clusters/fitted/{fit.cluster}.toml"] = _constants(fit.sources, machine, Hardware)
    if fit.cluster == H100:
        moved = dict.fromkeys(fit.sources, ("transferred", f"the fit of {H100}"))
        lines["clusters/fitted/transferred.toml"] = _constants(moved, machine, Hardware)
    return {path: "\n".join(text_lines) + "\n" for path, text_lines in lines.items()}


def reach(fit: Fit) -> dict[str, list[Any]]:
    """Return a dict of the ranges of a fit's rows: `processors`, a list of the one processor, and
    `nodes`, `seq` (positions) and `parameters`, each a list of the minimum and the maximum."""
    cluster = load_cluster(fit.cluster)
    workloads = [row.workload for row in fit.rows]
    node = cluster.constants.gpus_per_node.value
    sizes: dict[str, list[float]] = {
        "nodes": [max(each.gpus / node, 1.0) for each in workloads],
        "seq": [each.seq for each in workloads],
        "parameters": [parameter_count(checked_config(each).model) for each in workloads],
    }
    return {"processors": [cluster.processor]} | {
        name: [min(values), max(values)] for name, values in sizes.items()
    }


def _constants(
    sources: Mapping[str, tuple[str, str]], machine: Machine, of: type[Config]
) -> list[str]:
    """Return a list of the lines of a TOML file with the machine's values, rounded, of those
    constants named in `sources` that the model class `of` has as fields, each with its kind and
    source, the pair that `sources` has."""
    lines = ["# Written by `python -m benchmarks calibrate`.", "[constants]"]
    for name in of.model_fields:
        if name in sources:
            kind, source = sources[name]
            lines.append(
                f'{name} = {{ value = {rounded(getattr(machine, name))!r}, kind = "{kind}", '
                f'source = "{source}" }}'
            )
    return lines


def rounded(value: float) -> float:
    """Return `value` rounded to four significant digits, as a float, as the files of constants and
    intervals have it."""
    return float(f"{value:.4g}")


def _left_out(fit: Fit, way: str) -> list[Observation]:
    return [*compress(fit.rows, [key is not None for key in fit.left_out[way]])]


def _errors(
    fit: Fit, machine: Machine, held: Mapping[str, HeldOut], span: Mapping[str, ErrorInterval]
) -> list[Series]:
    """Return a list of Series of one number each, in percent. Relative errors (predicted over
    measured time, less 1) come first: their mean size, median size and bias, which is their mean.
    These are given for each experiment's rows that were left out, by each way of leaving rows out,
    and for each experiment's rows apart, which `machine` predicts. Then comes, for each
    experiment's rows apart, the coverage: the share of the rows whose measured over predicted time
    lies in the row's interval. The last Series are the coverage, score and baseline of each
    interval in `span`, where the interval has them.

    `held` has, by the way of leaving rows out, the HeldOut of these rows, from fits without them.
    `span` has, by name, the intervals that the function `intervals` returns, and `extrapolated`.
    The interval of a row apart is `ratio` if its quantity is in RATIOS, else `one_node` if its run
    has at most as many GPUs as a node of `machine`, else `several_nodes`. Raises KeyError if `span`
    lacks the interval of a row apart.
    """
    errors_of = defaultdict(list)
    inside = defaultdict(list)
    for way, fold in held.items():
        for row, ratio in zip(_left_out(fit, way), fold["ratio"].tolist(), strict=True):
            errors_of[f"{row.experiment}, {way} left out"].append(1 / ratio - 1)
    for row, ratio in zip(
        fit.apart, time_ratios(machine, fit.apart).tolist() if fit.apart else [], strict=True
    ):
        errors_of[f"{row.experiment}, apart"].append(1 / ratio - 1)
        where = "one_node" if row.workload.gpus <= machine.gpus_per_node else "several_nodes"
        interval = span["ratio" if row.quantity in RATIOS else where]
        inside[f"{row.experiment}, apart"].append(interval.low <= ratio <= interval.high)
    series = []
    for name, errors in errors_of.items():
        series += _scored(name, np.array(errors))
    series += [_series(name, "coverage", float(np.mean(each))) for name, each in inside.items()]
    for name, interval in span.items():
        for measure in ("coverage", "score", "baseline"):
            if (share := getattr(interval, measure)) is not None:
                series.append(_series(f"interval of {name.replace('_', ' ')}", measure, share))
    return series


def _scored(name: str, errors: Floats) -> list[Series]:
    return [
        _series(name, "mean error", float(np.abs(errors).mean())),
        _series(name, "median error", float(np.median(np.abs(errors)))),
        _series(name, "bias of error", float(errors.mean())),
    ]


def _series(name: str, measure: str, share: float) -> Series:
    return Series(contender=name, measure=measure, unit="%", samples=[100 * share], kind="computed")
