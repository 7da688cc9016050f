"""Runs an experiment: its numbers, each with its kind, in a sealed run directory. Imports no torch."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from experiments.catalogue import Experiment, Part
from experiments.published import Row, published_rows, workload_rows, x_of
from experiments.quantities import FORMULAS, RATIOS, Simulated, quantity_of
from experiments.reproduce.plan import make_plan, print_plan
from experiments.reproduce.reproduction import reproduce
from experiments.reproduce.steps import format_steps
from experiments.scaling_law import extrapolated
from experiments.simulator.cluster import Cluster, load_cluster
from experiments.simulator.measurements import COLUMNS, fitted_workloads, workload_of
from experiments.simulator.simulate import Prediction
from experiments.simulator.simulate import simulate as predict
from experiments.simulator.workload import Workload
from experiments.verdicts import FITTED, HELD_OUT, NOT_RUN, RECORDS
from lineage.atomic import write_json
from lineage.digest import sha256_json
from lineage.errors import BadInput, DataMissing, HardwareMissing
from lineage.progress import announce, is_quiet
from lineage.records import Record, write_records
from lineage.run import RunDirectory


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
    if experiment.extrapolates:
        numbers += extrapolated(experiment.claims, experiment.extrapolates)
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
            note = FITTED if workload in fitted_workloads() else HELD_OUT
            values = {"quantity": name, "kind": "simulated", "value": point, "note": note}
            if workload != first or name not in RATIOS:
                values |= {"low": min(ends), "high": max(ends)}
            yield _position(part, row) | values


def _predict(row: Row, clusters: dict[str, Cluster]) -> tuple[Workload, Prediction]:
    name = row["cluster"]
    if name not in clusters:
        clusters[name] = load_cluster(name)
    workload = workload_of(row)._replace(scatter_gather=row.get("scatter_gather") != "false")
    return workload, predict(clusters[name], [workload])[0]


def run_named(experiments: Sequence[Experiment], mode: str, runs: Path, limit: int | None = None) -> None:
    """Do what `mode` says for each experiment and print what came of it; of several, those that train or that score
    released weights are left out.

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
        elif several and experiment.measures == "released":
            print(f"{experiment.name}: left out; `mlm-experiment run {experiment.name}` scores released weights")
        elif mode == "plan":
            print(f"{experiment.name}: {experiment.title}\n{format_rows(experiment)}")
        elif mode == "here" and not (experiment.proxies or experiment.measures):
            if not several:
                raise HardwareMissing(f"nothing of {experiment.name} can be measured on this machine")
        elif mode == "measure" or (mode == "scaled" and not (experiment.proxies or experiment.measures)):
            raise HardwareMissing(
                f"{experiment.name} is measured on the published machines alone; `--mode plan` prints what runs there, "
                "`--mode simulate` predicts it"
            )
        else:
            if mode not in ("scaled", "here") and (experiment.parts or experiment.extrapolates):
                run, numbers, refused = run_experiment(experiment, runs)
                what = "simulated or computed, not measured"
                print(f"{experiment.name}: {numbers} numbers {what}; {refused} rows cannot run; {run.path}")
            if mode != "simulate" and experiment.proxies:
                from experiments.scaling import format_scaling, run_proxies

                run, records = run_proxies(experiment, runs)
                print(f"{experiment.name}: scaled to this machine; {run.path}\n{format_scaling(records)}")
            if mode != "simulate" and experiment.measures:
                from experiments.measured.run import format_measured, run_measured

                try:
                    run, records = run_measured(experiment, runs, limit)
                except DataMissing as missing:
                    if not several:
                        raise
                    print(f"{experiment.name}: left out; {missing}")
                else:
                    print(f"{experiment.name}: measured on this machine; {run.path}\n{format_measured(records)}")


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
