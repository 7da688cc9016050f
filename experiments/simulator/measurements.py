"""Measured and published iteration times, as observations to fit the simulator on or to compare it
with.

Workloads and others' measurements lie in `experiments/published`, published values in
`experiments/claims`. Imports no torch.
"""

import math
from collections.abc import Callable
from functools import cache, lru_cache
from typing import NamedTuple

from mlm_repro.engine.costs import parameter_count
from mlm_repro.experiments.catalogue import every_claim, find_experiment, read_rows
from mlm_repro.experiments.published import HERE, published_rows, published_value
from mlm_repro.experiments.simulator.workload import Workload, checked_config, flops_of
from mlm_repro.lineage.atomic import JSON
from mlm_repro.lineage.errors import BadInput

COLUMNS = (
    "gpus",
    "global_batch",
    "micro_batch",
    "hidden",
    "heads",
    "layers",
    "seq",
    "vocab",
    "tp",
    "dp",
    "pp",
    "chunks",
    "recompute",
    "family",
    "ffn_hidden",
    "zero",
    "memory",
    "head_dim",
    "sequence_parallel",
)
"""Names of the columns that describe a workload in a CSV file."""
LARGEST_CELL = 1e9
PEAK_TFLOPS = {"selene": 312.0, "dgx-a100-80g": 312.0, "dgx-2h-v100": 130.0, "p3dn-v100": 125.0}
"""Peak TFLOP/s of a GPU, by cluster, to which the papers' percentages refer."""
PRINTED = {claim.id: float(claim.value) for claim in every_claim()}
ITERATIONS_PER_EPOCH = int(PRINTED["2019/text/iterations-per-epoch"])
"""Number of iterations in an epoch (2019 paper, Section 4.2)."""

WIKITEXT_TOKENS = 103_227_021 * (1 + PRINTED["transformer-xl/post/bpe-length"] / 100)
"""Number of byte-pair tokens of WikiText-103's training text: its words (Merity et al. 2016, Table
1), lengthened by the percentage that the post states."""


class Observation(NamedTuple):
    """A published or measured number that follows from an iteration's time, with the Workload that
    it belongs to: `value`, in the unit of `quantity`, and `experiment`, the name of the experiment
    or of the set of measurements that has it."""

    experiment: str
    workload: Workload
    quantity: str
    """A key of `QUANTITIES`; `RATIOS` refer to the first row of the observations that are fitted or
    compared together."""
    value: float
    """Published or measured number, in the quantity's unit."""
    cluster: str = ""
    """Name of the cluster that it was measured on; empty if it was not named."""

    @property
    def source(self) -> str:
        """The name of the observation's source: a paper, or a set of measurements."""
        return self.experiment.partition("/")[0]

    @property
    def is_published(self) -> bool:
        """True if this observation comes from a paper's table or figure, not from a set of
        measurements."""
        return "/" in self.experiment


def megatron_2019() -> list[Observation]:
    """Return a list with an Observation for each workload of the 2019 paper's Figures 1 and 5 and
    Tables 2, 7 and 8: the published value of the first quantity that is simulated for its figure or
    table. The first Observation is of a single GPU."""
    return observed(
        "2019/figure-1", "2019/figure-5", "2019/table-2", "2019/table-7", "2019/table-8"
    )


def v100_rows() -> list[Observation]:
    """Return a list of the Observations for the fit of the V100 constants. The first is of Figure 1
    of the 2019 paper, on one GPU: ratios refer to it, and it has no weight in the fit. The others,
    on which the constants are fitted, are of that paper's Tables 2, 7 and 8, without the workloads
    on one GPU or with 32 heads, which stand in Figures 1 and 5 too."""
    first, *rest = megatron_2019()
    return [
        first,
        *(
            row
            for row in rest
            if "table" in row.experiment and row.workload.gpus > 1 and row.workload.heads != 32
        ),
    ]


@cache
def fitted_rows(software: str) -> tuple[Observation, ...]:
    """Return a tuple of the Observations that the constants of a software, such as `megatron-2021`,
    are fitted on; empty for a software that is not fitted. For `megatron-2019` the first one is the
    run on one GPU that ratios refer to, which has no weight in the fit."""
    rows = {
        "megatron-2019": v100_rows,
        "megatron-2021": a100_rows,
        "megatron-deepspeed": deepspeed_rows,
        "megatron-core": h100_rows,
    }
    return tuple(rows.get(software, list)())


@cache
def fitted_workloads(software: str) -> frozenset[Workload]:
    """Return a set of the Workloads of the rows that the constants of a software, such as
    `megatron-2021`, are fitted on; for `megatron-2019` also the Workload of the run on one GPU that
    ratios refer to; empty for a software that is not fitted."""
    return frozenset(row.workload for row in fitted_rows(software))


def a100_rows() -> list[Observation]:
    """Return a list of the Observations that the A100 constants are fitted on: 724 iterations on 2
    to 8 A100s, 61 on 64 to 512, and PTD-P's rows of the 2021 paper's Table 2 and Figures 11 to 16,
    without the workloads of its Table 1."""
    times = timed("vtrain-single-node", "vtrain-multi-node")
    rows = observed("2021/table-2", *(f"2021/figure-{number}" for number in range(11, 17)))
    # The text's trillion parameters are a row of that table.
    known = {row.workload for row in observed("2021/table-1")}
    return [*times, *(row for row in rows if row.workload.zero == 0 and row.workload not in known)]


def deepspeed_rows() -> list[Observation]:
    """Return a list of the Observations that Megatron-DeepSpeed's constant is fitted on: 530
    billion parameters on 280, 350 and 420 nodes."""
    return timed("mt-nlg")


def h100_rows() -> list[Observation]:
    """Return a list of the Observations that the H100 constants are fitted on: four public sources
    of GPT models, on 8 to 10,752 GPUs."""
    return timed("h100")


def timed(*names: str) -> list[Observation]:
    """Return a list with an Observation of the seconds per iteration for each row of the CSV files
    called `names`, without `.csv`, in `experiments/published`. An Observation's experiment is the
    row's `source`, or the file's name if the row has none. Raises BadInput if a file cannot be read
    or describes no workload."""
    observations = []
    for name in names:
        for row in read_rows(HERE / f"{name}.csv"):
            observations.append(
                Observation(
                    row.get("source") or name,
                    workload_of(row),
                    "iteration_seconds",
                    float(row["iteration_ms"]) / 1e3,
                    row["cluster"],
                )
            )
    return observations


def workload_of(row: dict[str, str]) -> Workload:
    """Return the Workload in the cells of `row`, a dict by column. Only `COLUMNS` are read, so
    `scatter_gather` always has its default; absent or empty cells take their defaults. The cells of
    `recompute` and `family` are words, put in lower case; all others must be whole numbers. It is
    not checked whether the words are known and such a workload can run.

    Raises BadInput naming a column that has no default and is empty, or a column of numbers whose
    cell is not a whole number from minus a billion to a billion.
    """
    values = JSON()
    for name in COLUMNS:
        cell = (row.get(name) or "").strip()
        if name in ("recompute", "family") and cell:
            values[name] = cell.lower()
        elif cell:
            values[name] = _whole(name, cell)
        elif name not in Workload._field_defaults:
            raise BadInput(f"the column {name} is missing or empty, and has no default")
    return Workload(**values)


def _whole(name: str, cell: str) -> int:
    try:
        number = float(cell)
    except ValueError:
        number = math.nan
    if not number.is_integer() or abs(number) > LARGEST_CELL:
        raise BadInput(
            f"{name} = {cell!r} is not a whole number of at most a billion: write one"
            " into that cell of the table"
        )
    return int(number)


class Simulated(NamedTuple):
    """The simulated seconds of an iteration of a workload, and the workload `first` with its own
    seconds, to which ratios refer."""

    workload: Workload
    seconds: float
    first: Workload
    first_seconds: float
    cluster: str = ""
    """Name of the cluster, a key of `PEAK_TFLOPS`; only the quantity `percent_of_peak` needs it."""


def _tflops(row: Simulated) -> float:
    return flops_of(row.workload) / (row.seconds * row.workload.gpus * 1e12)


@lru_cache(maxsize=4096)
def _parameters(workload: Workload) -> int:
    return parameter_count(checked_config(workload).model)


def _scaling_percent(row: Simulated) -> float:
    """Return the throughput per GPU of `workload` as a percentage of the throughput per GPU of
    `first`, both workloads of the Simulated `row`. Throughput is parameters × sequences of the
    global batch over the simulated seconds of an iteration: the normalisation that fits the 2019
    paper's Figure 5."""
    work, first_work = (
        workload.global_batch / workload.gpus * _parameters(workload)
        for workload in (row.workload, row.first)
    )
    return 100 * (work / row.seconds) / (first_work / row.first_seconds)


QUANTITIES: dict[str, Callable[[Simulated], float]] = {
    "iteration_seconds": lambda row: row.seconds,
    "tflops_per_gpu": _tflops,
    "days_per_epoch": lambda row: row.seconds * ITERATIONS_PER_EPOCH / 86400,
    "speedup": lambda row: (
        row.first_seconds / row.seconds * row.workload.global_batch / row.first.global_batch
    ),
    "epoch_minutes": lambda row: (
        WIKITEXT_TOKENS / (row.workload.global_batch * row.workload.seq) * row.seconds / 60
    ),
    "scaling_percent": _scaling_percent,
    "sequences_per_second": lambda row: row.workload.global_batch / row.seconds,
    "aggregate_petaflops": lambda row: _tflops(row) * row.workload.gpus / 1e3,
    "percent_of_peak": lambda row: 100 * _tflops(row) / PEAK_TFLOPS[row.cluster],
}
"""Functions that take a Simulated and return a published quantity that follows from its iteration
time, by the quantity's name."""
RATIOS = ("speedup", "scaling_percent")
"""Quantities relative to the first row, for which they are 1 or 100 % by definition."""


def observed(*names: str) -> list[Observation]:
    """Return a list with an Observation for each workload of every simulated part of the
    experiments called `names`: the published value of the first quantity that the workload's part
    simulates. Raises BadInput if no claim states a value, or if there is no such experiment."""
    rows = []
    for experiment in map(find_experiment, names):
        for part in experiment.parts:
            for quantity in part.simulated[:1]:
                for row in published_rows(experiment, part):
                    value = published_value(row, quantity).value
                    rows.append(
                        Observation(
                            experiment.name, workload_of(row), quantity, value, row["cluster"]
                        )
                    )
    return rows
