"""Strike a small reproduction at its writes; print the faults survived of those tried. Exit code 1
if some were not.

`--out` keeps every trial in chaos.json and the table in chaos.md. Linux only: open files are found
in /proc.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from mlm_repro.lineage.atomic import write_json, write_text
from mlm_repro.lineage.environment import available_cores, describe_environment
from tests.chaos.faults import FAULTS
from tests.chaos.trials import Reference, Trial, every_fault, prepare, run_trials, some_faults

ROWS = ("data", "train", "evaluate", "report")
COLUMNS = (*FAULTS, "NaN")


def main(arguments: Sequence[str]) -> int:
    """Try the faults; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument(
        "--all", action="store_true", help="every kind of fault at every kind of point"
    )
    parser.add_argument(
        "--points", type=int, default=30, help="without --all, the number of faults drawn at random"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the draw")
    parser.add_argument(
        "--kinds", nargs="+", default=COLUMNS, choices=COLUMNS, help="faults to try alone"
    )
    parser.add_argument("--jobs", type=int, default=available_cores(), help="trials at once")
    parser.add_argument("--out", type=Path, help="folder for chaos.json and chaos.md")
    asked = parser.parse_args(arguments)
    out = asked.out and asked.out.resolve()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="mlm-chaos-", ignore_cleanup_errors=True) as folder:
        work = Path(folder).resolve()
        screens = os.dup(1), os.dup(2)
        try:
            reference = prepare(work)
        finally:
            for screen, number in zip(screens, (1, 2), strict=True):
                os.dup2(screen, number)
        if asked.all:
            faults = every_fault(reference, asked.kinds)
        else:
            faults = some_faults(reference, asked.points, asked.seed, asked.kinds)
        trials = list(run_trials(reference, faults, work, asked.jobs))
        print(table(trials), end="")
        if out:
            write_results(out, f"python -m tests.chaos {' '.join(arguments)}", reference, trials)
        os.chdir("/")
    return int(any(trial.failure for trial in trials))


def table(trials: Sequence[Trial]) -> str:
    """Faults survived of those tried, by stage and kind, in Markdown, and what was not survived."""

    def cell(stage: str, name: str) -> str:
        tried = [
            trial
            for trial in trials
            if stage in (trial.stage, "all") and name in (trial.fault.name, "all")
        ]
        return f"{sum(not trial.failure for trial in tried)} of {len(tried)}" if tried else ""

    rows = [
        f"| {stage} | {' | '.join(cell(stage, name) for name in (*COLUMNS, 'all'))} |"
        for stage in (*ROWS, "all")
    ]
    lost = [
        f"- {trial.stage}, rank {trial.fault.rank}, {trial.fault.name} at {trial.fault.what}:"
        f" {trial.failure}"
        for trial in trials
        if trial.failure
    ]
    head = f"| stage | {' | '.join(COLUMNS)} | all |\n|{'---|' * (len(COLUMNS) + 2)}"
    return "\n".join([head, *rows, *([""] if lost else []), *lost]) + "\n"


def write_results(out: Path, command: str, reference: Reference, trials: Sequence[Trial]) -> None:
    """`chaos.json`, every trial with the points of the undisturbed run, and `chaos.md`, the
    table."""
    points = {
        f"{stage}, rank {rank}": len(touches)
        for (stage, rank), touches in reference.touches.items()
    }
    in_order = sorted(
        trials,
        key=lambda trial: (trial.stage, trial.fault.stage, trial.fault.rank, trial.fault.number),
    )
    write_json(
        out / "chaos.json",
        {
            "command": command,
            "environment": describe_environment().to_json(),
            "points": points,
            "undisturbed": reference.result,
            "tried": len(trials),
            "survived": sum(not trial.failure for trial in trials),
            "trials": [asdict(trial) | {"stage": trial.stage} for trial in in_order],
        },
    )
    passed = ", ".join(f"{name}: {count}" for name, count in points.items())
    text = (
        f"# Faults survived of those tried\n\nMade by `{command}`. After each fault the same"
        " command was given again; survived means that it ended with the token files, weights,"
        " losses, scores, records and tables of an undisturbed run, showed no traceback and left"
        f" nothing behind.\n\n{table(trials)}\nPoints at which the undisturbed run changes files"
        f" ({passed}).\n"
    )
    write_text(out / "chaos.md", text)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
