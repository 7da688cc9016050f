"""Runs an experiment: its numbers, each with its kind, in a sealed run directory. Imports no torch."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.config import ModelConfig
from engine.costs import MEGATRON_BYTES, parameter_count
from engine.pipeline.schedule import ideal_bubble
from experiments.catalogue import Experiment, Part, every_claim
from experiments.plan import make_plan, print_plan
from experiments.published import Row, published_rows, published_value, workload_rows, x_of
from experiments.reproduce import reproduce
from experiments.simulator.cluster import Cluster, load_cluster
from experiments.simulator.measurements import COLUMNS, QUANTITIES, workload_of
from experiments.simulator.simulate import Prediction
from experiments.simulator.simulate import simulate as predict
from experiments.simulator.workload import Workload, checked_config, flops_of
from experiments.steps import format_steps
from experiments.verdicts import NOT_RUN, RECORDS
from lineage.atomic import write_json
from lineage.digest import sha256_json
from lineage.errors import BadInput, HardwareMissing
from lineage.progress import announce, is_quiet
from lineage.records import Record, write_records
from lineage.run import RunDirectory

TABLE_2_TOKENS = 300e9
"""2021 paper, Table 2: tokens trained on."""
RATIOS = ("speedup", "scaling_percent")
"""Quantities that are 1 or 100 % of the first row by definition, and then have no interval."""
PEAK_TFLOPS = {"dgx-a100-80g": 312.0, "dgx-2h-v100": 130.0}
"""What the papers take percentages of."""


@dataclass(frozen=True)
class Simulated:
    """One workload's prediction beside that of the row it is held against."""

    workload: Workload
    cluster: str
    seconds: float
    first: Workload
    first_seconds: float


def quantity_of(name: str, one: Simulated) -> float:
    """A published quantity from a predicted time. Raises BadInput for one that time does not decide."""
    if name in QUANTITIES:
        return QUANTITIES[name](one.workload, one.seconds, one.first, one.first_seconds)
    tflops = QUANTITIES["tflops_per_gpu"](one.workload, one.seconds, one.first, one.first_seconds)
    found = {
        "sequences_per_second": one.workload.global_batch / one.seconds,
        "aggregate_petaflops": tflops * one.workload.gpus / 1e3,
        "percent_of_peak": 100 * tflops / PEAK_TFLOPS[one.cluster],
    }
    if name not in found:
        raise BadInput(f"no prediction gives {name!r}; there are {', '.join((*QUANTITIES, *found))}")
    return found[name]


def _training_days(row: Row, first: Row) -> float:
    workload = workload_of(row)
    iterations = TABLE_2_TOKENS / (workload.global_batch * workload.seq)
    return flops_of(workload) * iterations / (workload.gpus * published_value(row, "tflops_per_gpu") * 1e12) / 86400


def _training_days_equation_4(row: Row, first: Row) -> float:
    parameters = parameter_count(checked_config(workload_of(row)).model)
    flops_per_second = int(row["gpus"]) * published_value(row, "tflops_per_gpu") * 1e12
    return 8 * float(row["tokens"]) * parameters / flops_per_second / 86400


def _speedup(row: Row, first: Row) -> float:
    return published_value(row, "examples_per_second") / published_value(first, "examples_per_second")


def _bert(row: Row) -> ModelConfig:
    one = workload_of(row)
    return ModelConfig(
        family="bert", num_layers=one.layers, hidden_size=one.hidden, num_heads=one.heads, seq_length=one.seq,
        vocab_size=one.vocab, padded_vocab_size=one.vocab,
    )  # fmt: skip


def _bubble_fraction(row: Row, first: Row) -> float:
    workload = workload_of(row)
    return ideal_bubble("1f1b", workload.pp, 1, workload.microbatches)


def _bubble_share(row: Row, first: Row) -> float:
    to_ideal = ideal_bubble("gpipe", int(row["pp"]), 1, int(row["microbatches"]))
    return to_ideal / (1 + to_ideal)


def _state_gigabytes(row: Row, first: Row) -> float:
    """Of a parameter, its gradient and its optimizer, of which a stage divides the last ones first."""
    stage, ranks = int(row["stage"]), int(row["gpus"])
    each = MEGATRON_BYTES
    parts = ((each.weight, 3), (each.gradient, 2), (each.moments + each.master, 1))
    return float(row["parameters"]) / 1e9 * sum(size / (ranks if stage >= divides else 1) for size, divides in parts)


def _activation_gigabytes(row: Row, first: Row) -> float:
    shape = [int(row[name]) for name in ("hidden", "global_batch", "seq", "layers")]
    return 2 * 12 * math.prod(shape) / 1e9


def _relative_throughput(row: Row, first: Row) -> float:
    figure_7 = {one.x: float(one.value) for one in every_claim() if one.id.startswith("2021/figure-7/")}

    def seconds(one: Row) -> float:
        workload = workload_of(one)
        return (workload.microbatches + workload.pp - 1) * workload.micro_batch / figure_7[workload.micro_batch]

    return seconds(first) / seconds(row)


FORMULAS: dict[str, Callable[[Row, Row], float]] = {
    "parameters": lambda row, first: parameter_count(checked_config(workload_of(row)).model) / 1e9,
    "bert_parameters": lambda row, first: parameter_count(_bert(row)) / 1e9,
    "percent_of_peak": lambda row, first: 100 * published_value(row, "tflops_per_gpu") / PEAK_TFLOPS[row["cluster"]],
    "aggregate_petaflops": lambda row, first: published_value(row, "tflops_per_gpu") * int(row["gpus"]) / 1e3,
    "training_days": _training_days,  # 2021 paper, Equation 3 over its throughput
    "training_days_equation_4": _training_days_equation_4,
    "bubble_fraction": _bubble_fraction,
    "relative_throughput": _relative_throughput,  # 2021 paper, Equation 1 on Figure 7
    "speedup": _speedup,
    "bubble_share": _bubble_share,  # GPipe, Section 2.3
    "state_gigabytes": _state_gigabytes,  # ZeRO, Section 3.1 and Table 1
    "activation_gigabytes": _activation_gigabytes,  # ZeRO, Section 3.2
}
"""Quantities in closed form, of a row with its published values and of the first such row of its series."""


def run_experiment(experiment: Experiment, runs: Path) -> tuple[RunDirectory, int, int]:
    """Simulate and compute everything the experiment names.

    Returns its sealed run, how many numbers it has and how many rows could not run. The same numbers are found again,
    not written again.
    """
    numbers: list[dict[str, Any]] = []
    refused: list[dict[str, Any]] = []
    clusters: dict[str, Cluster] = {}
    for part in experiment.parts:
        rows = published_rows(experiment, part)
        numbers += _computed(part, rows)
        for line in _simulated(part, rows, clusters):
            (refused if "reason" in line else numbers).append({"experiment": experiment.name} | line)
    numbers = [{"experiment": experiment.name} | line for line in numbers]
    config = {
        "experiment": experiment.model_dump(mode="json"),
        "mode": "simulate",
        "clusters": {name: cluster.model_dump(mode="json") for name, cluster in clusters.items()},
        "numbers": sha256_json([numbers, refused]),
    }
    name = "experiment-" + experiment.name.replace("/", "-")
    run = RunDirectory.begin(runs, name, "experiment", config, {})
    if run.is_complete:
        run.link()
    else:
        digest = sha256_json(config)
        write_records(run.path / RECORDS, (Record(source=run.path.name, digest=digest, **line) for line in numbers))
        write_json(run.path / NOT_RUN, refused)
        run.complete()
    return run, len(numbers), len(refused)


def format_rows(experiment: Experiment) -> str:
    """What would run on the published machines: every workload with its cluster and layout."""
    columns = ("series", "cluster", *COLUMNS)
    lines: list[tuple[str, ...]] = [columns]
    for part in experiment.parts:
        if part.simulated:
            lines += [tuple(row.get(column) or "" for column in columns) for row in workload_rows(part.workloads)]
    widths = [max(len(line[place]) for line in lines) for place in range(len(columns))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
                     for line in lines)  # fmt: skip


def _position(part: Part, row: Row) -> dict[str, Any]:
    return {"series": row["series"], "x": x_of(part, row), "x_name": part.x}


def _computed(part: Part, rows: Sequence[Row]) -> list[dict[str, Any]]:
    first: dict[str, Row] = {}
    for row in rows:
        first.setdefault(row["series"], row)
    return [
        _position(part, row)
        | {"quantity": name, "kind": "computed", "value": FORMULAS[name](row, first[row["series"]])}
        for row in rows
        for name in part.computed
    ]


def _simulated(part: Part, rows: Sequence[Row], clusters: dict[str, Cluster]) -> Iterator[dict[str, Any]]:
    if not part.simulated:
        return
    base = workload_rows(part.baseline)[0] if part.baseline else rows[0]
    predictions = [_predict(row, clusters) for row in (base, *rows)]
    first, first_prediction = predictions[0]
    for row, (workload, prediction) in zip(rows, predictions[1:], strict=True):
        reason = prediction.reason or first_prediction.reason
        if reason:
            yield {key: value for key, value in _position(part, row).items() if key != "x_name"} | {"reason": reason}
            continue
        for name in part.simulated:
            point, *ends = (
                quantity_of(name, Simulated(workload, row["cluster"], seconds, first,
                                            first_prediction.seconds))
                for seconds in (prediction.seconds, prediction.low_seconds, prediction.high_seconds)
            )  # fmt: skip
            values = {"quantity": name, "kind": "simulated", "value": point}
            if workload != first or name not in RATIOS:
                values |= {"low": min(ends), "high": max(ends)}
            yield _position(part, row) | values


def _predict(row: Row, clusters: dict[str, Cluster]) -> tuple[Workload, Prediction]:
    name = row["cluster"]
    if name not in clusters:
        clusters[name] = load_cluster(name)
    workload = workload_of(row)._replace(scatter_gather=row.get("scatter_gather") != "false")
    return workload, predict(clusters[name], [workload])[0]


def run_named(experiments: Sequence[Experiment], mode: str, runs: Path) -> None:
    """Do what `mode` says for each experiment and print what came of it; of several, those that train are left out.

    Raises HardwareMissing where published machines are asked for that this is not.
    """
    several = len(experiments) > 1
    if several and mode != "plan":
        announce(f"{len(experiments)} experiments one after the other, without those that train models")
    for experiment in experiments:
        if experiment.reproduction:
            if several:
                command = f"mlm-experiment reproduce {experiment.reproduction}"
                print(f"{experiment.name}: left out; `{command}` trains its models")
            else:
                _reproduce(experiment, mode, runs)
        elif experiment.ablation:
            sentence = f"`mlm-experiment ablate {experiment.name} --dataset DIR` trains its arms"
            if not several:
                raise BadInput(f"{experiment.name} is about models trained here: {sentence}")
            print(f"{experiment.name}: left out; {sentence}")
        elif mode == "plan":
            print(f"{experiment.name}: {experiment.title}\n{format_rows(experiment)}")
        elif mode == "measure" or (mode == "scaled" and not (experiment.proxies or experiment.measures)):
            raise HardwareMissing(
                f"{experiment.name} is measured on the published machines alone; `--mode plan` prints what runs there, "
                "`--mode simulate` predicts it"
            )
        else:
            if mode != "scaled" and experiment.parts:
                run, numbers, refused = run_experiment(experiment, runs)
                what = "simulated or computed, nothing was measured: the published machines are not here"
                print(f"{experiment.name}: {numbers} numbers {what}; {refused} rows cannot run; {run.path}")
            if mode != "simulate" and experiment.proxies:
                from experiments.scaling import format_scaling, run_proxies

                run, records = run_proxies(experiment, runs)
                print(f"{experiment.name}: scaled to this machine; {run.path}\n{format_scaling(records)}")
            if mode != "simulate" and experiment.measures:
                from experiments.measured.run import format_measured, run_measured

                run, records = run_measured(experiment, runs)
                print(
                    f"{experiment.name}: measured at the size of this machine; {run.path}\n{format_measured(records)}"
                )


def _reproduce(experiment: Experiment, mode: str, runs: Path) -> None:
    if mode == "simulate":
        raise BadInput(f"{experiment.name} is about trained models, which nothing simulates; leave --mode out")
    plan = make_plan(experiment.reproduction, {"measure": "full"}.get(mode, mode), False, None)
    if plan.mode == "plan" or not is_quiet():
        print_plan(plan)
    if plan.mode == "plan":
        print(format_steps(plan, runs))
    else:
        reproduce(plan, runs)
