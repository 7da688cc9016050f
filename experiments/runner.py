"""Runs an experiment: prints its numbers, each with its kind, and seals the measured ones. Imports
no torch."""

from collections.abc import Iterator, Sequence
from importlib import import_module
from inspect import signature
from pathlib import Path
from tempfile import TemporaryDirectory

from mlm_repro.experiments.catalogue import MEASUREMENTS, TAKES_LONG, Experiment
from mlm_repro.experiments.reproduce.plan import Plan, make_plan, print_plan
from mlm_repro.experiments.reproduce.reproduction import reproduce
from mlm_repro.experiments.sealed import Line, format_records, gather, seal_numbers
from mlm_repro.experiments.worked_out import work_out
from mlm_repro.lineage.errors import BadInput, DataMissing
from mlm_repro.lineage.extras import ExtraMissing
from mlm_repro.lineage.progress import announce, is_quiet
from mlm_repro.lineage.run import RunDirectory


def run_named(experiments: Sequence[Experiment], runs: Path, limit: int | None = None) -> None:
    """Simulate, compute and measure everything in the experiments that this machine can, print the
    numbers, and seal measured ones as a run below the folder `runs`, whose path is printed. A
    single experiment on a reproduction makes the reproduction, with the errors of `carry_out`; a
    single ablation raises BadInput, a single one that lacks files or a library DataMissing or
    ExtraMissing. `limit` is the most windows of a test for released weights, None for all.

    The measurements of several experiments become one study below `runs`, of the finished ones
    even after an error. An experiment that trains models, takes long, or lacks files or a library
    is then skipped with a message; of simulated and computed numbers only the count is printed.
    """
    if len(experiments) == 1:
        for run in _runs_of(experiments[0], runs, limit, several=False):
            print(run.path)
        return
    announce(f"{len(experiments)} experiments one after the other, without those that train models")
    made: list[RunDirectory] = []
    # The study copies the manifest, seal and records of each run, so the runs need not stay.
    with TemporaryDirectory() as folder:
        try:
            for experiment in experiments:
                made += _runs_of(experiment, Path(folder), limit, several=True)
        finally:
            if made:  # keep the runs that finished before an error or a stop
                print(gather(made, runs).path)


def _runs_of(
    experiment: Experiment, runs: Path, limit: int | None, several: bool
) -> Iterator[RunDirectory]:
    """Run an experiment, print its numbers and yield the RunDirectory of its sealed run, below the
    folder `runs`, if it measures something. An experiment on a reproduction makes the reproduction
    below `runs` and yields nothing.

    `limit` is the most windows of a test for released weights, None for all. With `several`, an
    experiment that trains models, takes long, or lacks files or a library is skipped with a
    message, and of computed numbers only the count is printed; without it DataMissing or
    ExtraMissing is raised. Raises BadInput for a single ablation, which has a command of its own.
    """
    if several and (why := _left_out(experiment)):
        print(f"{experiment.name}: left out; {why}")
    elif experiment.reproduction:
        carry_out(make_plan(experiment.reproduction, "auto", False, None), runs)
    elif experiment.ablation:
        raise BadInput(
            f"{experiment.name} is not made by `mlm-experiment run`: {_left_out(experiment)}"
        )
    else:
        if experiment.parts or experiment.arithmetic:
            worked = work_out(experiment)
            print(
                f"{experiment.name}: {len(worked.numbers)} numbers simulated or computed, not"
                f" measured; {len(worked.refused)} rows cannot run"
            )
            if not several:
                print(format_records(each.record for each in worked.numbers))
        if experiment.measures:
            yield from _measured(experiment, runs, limit, several)


def _left_out(experiment: Experiment) -> str:
    """Return why an experiment that trains models is skipped when several are run: a clause with
    the command that runs it; empty for other experiments."""
    if experiment.reproduction:
        return f"`mlm-experiment reproduce {experiment.reproduction}` trains its models"
    if experiment.ablation:
        return f"`mlm-experiment ablate {experiment.name} --dataset DIR` trains its arms"
    return ""


def _measured(
    experiment: Experiment, runs: Path, limit: int | None, may_lack: bool
) -> Iterator[RunDirectory]:
    """Make the experiment's measurement on this machine, print its numbers and yield the
    RunDirectory of their sealed run, below the folder `runs`. `limit` is the most windows of each
    test for released weights, None for all; other measurements ignore it.

    With `may_lack`, a measurement that takes long, or lacks files or a library, is skipped with a
    message. Otherwise raises DataMissing or ExtraMissing if files or a library are missing.
    """
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
    """Call the measurement function that the experiment names, in a module of
    `experiments/measured`, with `experiment` and `limit` as far as it has these parameters. `limit`
    is the most windows of each test for released weights, None for all. Return the list of its
    lines, each a dict with fields of a record. Raises DataMissing or ExtraMissing if the
    measurement lacks files or a library."""
    module, function = MEASUREMENTS[experiment.measures].split(":")
    make = getattr(import_module(f"mlm_repro.experiments.measured.{module}"), function)
    available = {"experiment": experiment, "limit": limit}
    lines: list[Line] = make(
        **{name: available[name] for name in available.keys() & signature(make).parameters.keys()}
    )
    return lines


def carry_out(plan: Plan, runs: Path, dry_run: bool = False) -> None:
    """Print the plan of a reproduction, then make the reproduction below the folder `runs`, where
    complete parts are found and not repeated. A dry run only prints the plan; in quiet mode only a
    dry run prints it. Raises BadInput for an unfit torch, or if another process works on the
    reproduction, StepFailed if a command fails, and Interrupted if the reproduction is stopped."""
    if dry_run or not is_quiet():
        print_plan(plan)
    if not dry_run:
        reproduce(plan, runs)
