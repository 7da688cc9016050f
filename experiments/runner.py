"""Runs an experiment: its numbers, each with its kind, in a sealed run directory. Imports no torch."""

from collections.abc import Iterator, Sequence
from importlib import import_module
from inspect import signature
from pathlib import Path
from tempfile import TemporaryDirectory

from mlm_repro.experiments.catalogue import MEASUREMENTS, TAKES_LONG, Experiment, Part
from mlm_repro.experiments.files import FITTED, HELD_OUT
from mlm_repro.experiments.forecast.published import extrapolated
from mlm_repro.experiments.published import Row, position, published_rows, workload_rows
from mlm_repro.experiments.quantities import FORMULAS, simulated_values
from mlm_repro.experiments.reproduce.plan import Plan, make_plan, print_plan
from mlm_repro.experiments.reproduce.reproduction import reproduce
from mlm_repro.experiments.reproduce.steps import format_steps
from mlm_repro.experiments.sealed import Line, format_records, gather, lines, seal_numbers
from mlm_repro.experiments.simulator.cluster import Cluster, load_cluster
from mlm_repro.experiments.simulator.measurements import fitted_workloads, workload_of
from mlm_repro.experiments.simulator.simulate import Prediction
from mlm_repro.experiments.simulator.simulate import simulate as predict
from mlm_repro.experiments.simulator.workload import Workload
from mlm_repro.lineage.errors import BadInput, DataMissing, HardwareMissing
from mlm_repro.lineage.extras import ExtraMissing
from mlm_repro.lineage.progress import announce, is_quiet
from mlm_repro.lineage.run import RunDirectory


def run_experiment(experiment: Experiment, runs: Path) -> tuple[RunDirectory, int, int]:
    """Simulate and compute everything the experiment names.

    Returns its sealed run and the counts of its numbers and of the rows that could not run. An existing run with the
    same numbers is returned as it is.
    """
    produced: list[Line] = []
    clusters: dict[str, Cluster] = {}
    for part in experiment.parts:
        rows = published_rows(experiment, part)
        first = {row["series"]: row for row in reversed(rows)}
        produced += [
            position(part, row)
            | {"quantity": name, "kind": "computed", "value": FORMULAS[name](row, first[row["series"]])}
            for row in rows
            for name in part.computed
        ]
        produced += _simulated(part, rows, clusters)
    by_id = {claim.id: claim for claim in experiment.claims}
    for each in experiment.arithmetic:
        claim = by_id[each.claim]
        produced += lines(claim.series, {claim.quantity: each.value}, "computed", x=claim.x)
    if experiment.extrapolates:
        produced += extrapolated(experiment.claims, experiment.extrapolates)
    produced = [{"experiment": experiment.name} | line for line in produced]
    numbers, refused = ([line for line in produced if ("reason" in line) == is_refused] for is_refused in (False, True))
    simulated = {"clusters": {name: cluster.model_dump(mode="json") for name, cluster in clusters.items()}}
    run, _ = seal_numbers(experiment, "", numbers, runs, simulated=simulated, refused=refused)
    return run, len(numbers), len(refused)


def _simulated(part: Part, rows: Sequence[Row], clusters: dict[str, Cluster]) -> Iterator[Line]:
    if not part.simulated:
        return
    base = workload_rows(part.baseline)[0] if part.baseline else rows[0]
    predictions = [_predict(row, clusters) for row in (base, *rows)]
    first, first_prediction = predictions[0]
    for row, (workload, prediction) in zip(rows, predictions[1:], strict=True):
        reason = prediction.reason or first_prediction.reason
        if reason:
            yield {key: value for key, value in position(part, row).items() if key != "x_name"} | {"reason": reason}
            continue
        cluster = clusters[row["cluster"]]
        note = FITTED if workload in fitted_workloads(cluster.software) else HELD_OUT
        for name in part.simulated:
            values = simulated_values(name, row["cluster"], workload, prediction, first, first_prediction.seconds,
                                      cluster.intervals.ratio)  # fmt: skip
            yield position(part, row) | values | {"note": note}


def _predict(row: Row, clusters: dict[str, Cluster]) -> tuple[Workload, Prediction]:
    name = row["cluster"]
    if name not in clusters:
        clusters[name] = load_cluster(name)
    workload = workload_of(row)._replace(scatter_gather=row.get("scatter_gather") != "false")
    return workload, predict(clusters[name], [workload])[0]


def run_named(experiments: Sequence[Experiment], mode: str, runs: Path, limit: int | None = None) -> None:
    """Do what `mode` says for each experiment and print its numbers; the runs of several become one study.

    Of several, those that train or that score released weights are left out. Raises HardwareMissing if one is to be
    measured here of which this machine can measure nothing.
    """
    if len(experiments) == 1:
        for run in _runs_of(experiments[0], mode, runs, limit, several=False):
            print(run.path)
        return
    announce(f"{len(experiments)} experiments one after the other, without those that train models")
    made: list[RunDirectory] = []
    with TemporaryDirectory() as folder:
        try:
            for experiment in experiments:
                made += _runs_of(experiment, mode, Path(folder), limit, several=True)
        finally:
            if made:  # what was finished before an error or a stop is not lost
                print(gather(made, runs).path)


def _runs_of(experiment: Experiment, mode: str, runs: Path, limit: int | None, several: bool) -> Iterator[RunDirectory]:
    """Carry out an experiment, print its numbers, and give their sealed runs."""
    is_predicted = mode == "simulate" and bool(experiment.extrapolates)
    if several and not is_predicted and (why := _left_out(experiment)):
        print(f"{experiment.name}: left out; {why}")
    elif experiment.reproduction and not is_predicted:
        if mode == "simulate":
            raise BadInput(f"{experiment.name} is about trained models, which nothing simulates; leave --mode out")
        carry_out(make_plan(experiment.reproduction, {"here": "scaled"}.get(mode, mode), False, None), runs)
    elif experiment.ablation:
        raise BadInput(f"{experiment.name} is about models trained here: {_left_out(experiment)}")
    elif mode == "here" and not (experiment.measures or several):
        raise HardwareMissing(
            f"{experiment.name} is measured on the published machines alone; `--mode simulate` predicts it"
        )
    else:
        if mode != "here" and (experiment.parts or experiment.extrapolates or experiment.arithmetic):
            run, numbers, refused = run_experiment(experiment, runs)
            what = "simulated or computed, not measured"
            print(f"{experiment.name}: {numbers} numbers {what}; {refused} rows cannot run")
            yield run
        if mode != "simulate" and experiment.measures:
            yield from _measured(experiment, runs, limit, several)


def _left_out(experiment: Experiment) -> str:
    """The reason for leaving it out of several experiments, with its own command; empty if it is run."""
    if experiment.reproduction:
        return f"`mlm-experiment reproduce {experiment.reproduction}` trains its models"
    if experiment.ablation:
        return f"`mlm-experiment ablate {experiment.name} --dataset DIR` trains its arms"
    return ""


def _measured(experiment: Experiment, runs: Path, limit: int | None, may_lack: bool) -> Iterator[RunDirectory]:
    """Make its measurement on this machine. Raises what says that files or a library are missing, or prints it."""
    if may_lack and (long := TAKES_LONG.get(experiment.measures)):
        print(f"{experiment.name}: left out; `mlm-experiment run {experiment.name}` {long}")
        return
    try:
        run, records = seal_numbers(experiment, "-measured", measure(experiment, limit), runs)
    except (DataMissing, ExtraMissing) as missing:
        if not may_lack:
            raise
        print(f"{experiment.name}: left out; {missing}")
    else:
        print(f"{experiment.name}: measured on this machine\n{format_records(records)}")
        yield run


def measure(experiment: Experiment, limit: int | None = None) -> list[Line]:
    """The lines of its measurement, called with the parameters that it has."""
    module, function = MEASUREMENTS[experiment.measures].split(":")
    make = getattr(import_module(f"mlm_repro.experiments.measured.{module}"), function)
    told = {"experiment": experiment, "limit": limit}
    lines: list[Line] = make(**{name: told[name] for name in told.keys() & signature(make).parameters.keys()})
    return lines


def carry_out(plan: Plan, runs: Path, dry_run: bool = False) -> None:
    """Print the plan of a reproduction, unless quiet, and make it; of one that is only planned print the steps."""
    if dry_run or plan.mode == "plan" or not is_quiet():
        print_plan(plan)
    if plan.mode == "plan":
        print(format_steps(plan, runs))
    elif not dry_run:
        reproduce(plan, runs)
