"""Runs an experiment: prints its numbers, each with its kind, and seals what was measured. Imports
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
    """Simulate, compute and measure all of each experiment that this machine can, and print its
    numbers; what was measured becomes a sealed run.

    The runs of several become one study, without those that train or that score released weights.
    """
    if len(experiments) == 1:
        for run in _runs_of(experiments[0], runs, limit, several=False):
            print(run.path)
        return
    announce(f"{len(experiments)} experiments one after the other, without those that train models")
    made: list[RunDirectory] = []
    with TemporaryDirectory() as folder:
        try:
            for experiment in experiments:
                made += _runs_of(experiment, Path(folder), limit, several=True)
        finally:
            if made:  # what was finished before an error or a stop is not lost
                print(gather(made, runs).path)


def _runs_of(
    experiment: Experiment, runs: Path, limit: int | None, several: bool
) -> Iterator[RunDirectory]:
    """Carry out an experiment, print its numbers, and give their sealed runs."""
    if several and (why := _left_out(experiment)):
        print(f"{experiment.name}: left out; {why}")
    elif experiment.reproduction:
        carry_out(make_plan(experiment.reproduction, "auto", False, None), runs)
    elif experiment.ablation:
        raise BadInput(f"{experiment.name} is about models trained here: {_left_out(experiment)}")
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
    """The reason for leaving it out of several experiments, with its own command; empty if it is
    run."""
    if experiment.reproduction:
        return f"`mlm-experiment reproduce {experiment.reproduction}` trains its models"
    if experiment.ablation:
        return f"`mlm-experiment ablate {experiment.name} --dataset DIR` trains its arms"
    return ""


def _measured(
    experiment: Experiment, runs: Path, limit: int | None, may_lack: bool
) -> Iterator[RunDirectory]:
    """Make its measurement on this machine. Raises what says that files or a library are missing,
    or prints it."""
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
    lines: list[Line] = make(
        **{name: told[name] for name in told.keys() & signature(make).parameters.keys()}
    )
    return lines


def carry_out(plan: Plan, runs: Path, dry_run: bool = False) -> None:
    """Print the plan of a reproduction, unless quiet, and make it."""
    if dry_run or not is_quiet():
        print_plan(plan)
    if not dry_run:
        reproduce(plan, runs)
