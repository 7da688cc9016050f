"""`mlm-verify chaos` from beginning to end, and its trials as a table and as a record."""

import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from lineage.atomic import check_place, write_json, write_text
from lineage.environment import available_cores, describe_environment
from lineage.errors import BadInput, Diverged
from lineage.progress import announce
from verify.chaos.faults import FAULTS
from verify.chaos.trials import Reference, Trial, every_fault, prepare, run_trials, some_faults


def run_chaos(every: bool, points: int, seed: int, kinds: str, out: Path | None, jobs: int | None) -> None:
    """Try the faults, print the table and write it to `out`. Raises Diverged if one was not survived.

    Raises BadInput where there is no /proc: only Linux names open files there.
    """
    if sys.platform != "linux":
        raise BadInput("chaos needs Linux: it finds open files in /proc")
    if out:
        check_place("--out", out / "chaos.json")
    asked = kinds.split(",") if kinds else COLUMNS
    if unknown := sorted({*asked} - {*COLUMNS}):
        raise BadInput(f"there is no fault {unknown[0]!r}: {', '.join(COLUMNS)}")
    torch.set_num_threads(1)
    which = "every kind of fault at every kind of point" if every else f"{points} faults"
    announce(f"a small reproduction twice, then {which}, {jobs or available_cores()} at once in folders of their own")
    with tempfile.TemporaryDirectory(prefix="mlm-chaos-", ignore_cleanup_errors=True) as folder:
        work = Path(folder).resolve()
        screens = os.dup(1), os.dup(2)
        try:
            reference = prepare(work)
        finally:
            for screen, number in zip(screens, (1, 2), strict=True):
                os.dup2(screen, number)
        faults = every_fault(reference, asked) if every else some_faults(reference, points, seed, asked)
        trials = list(run_trials(reference, faults, work, jobs))
        print(table(trials), end="")
        if out:
            which = ("--all" if every else f"--points {points} --seed {seed}") + f" --kinds {kinds}" * bool(kinds)
            write_results(out, f"mlm-verify chaos --recipe tiny {which}", reference, trials)
            print(f"written: {out}")
        os.chdir("/")
    if lost := [trial for trial in trials if trial.failure]:
        raise Diverged(f"{len(lost)} of {len(trials)} faults were not survived")


ROWS = ("data", "train", "evaluate", "report")
COLUMNS = (*FAULTS, "NaN")


def table(trials: Sequence[Trial]) -> str:
    """Faults survived of those tried, by stage and kind, in Markdown, and what was not survived."""

    def cell(stage: str, name: str) -> str:
        tried = [trial for trial in trials if stage in (trial.stage, "all") and name in (trial.fault.name, "all")]
        return f"{sum(not trial.failure for trial in tried)} of {len(tried)}" if tried else ""

    rows = [f"| {stage} | {' | '.join(cell(stage, name) for name in (*COLUMNS, 'all'))} |" for stage in (*ROWS, "all")]
    lost = [
        f"- {trial.stage}, rank {trial.fault.rank}, {trial.fault.name} at {trial.fault.what}: {trial.failure}"
        for trial in trials
        if trial.failure
    ]
    head = f"| stage | {' | '.join(COLUMNS)} | all |\n|{'---|' * (len(COLUMNS) + 2)}"
    return "\n".join([head, *rows, *([""] if lost else []), *lost]) + "\n"


def write_results(out: Path, command: str, reference: Reference, trials: Sequence[Trial]) -> None:
    """`chaos.json`, every trial with the points of the undisturbed run, and `chaos.md`, the table."""
    points = {f"{stage}, rank {rank}": len(touches) for (stage, rank), touches in reference.touches.items()}
    in_order = sorted(trials, key=lambda trial: (trial.stage, trial.fault.stage, trial.fault.rank, trial.fault.number))
    write_json(
        out / "chaos.json",
        {
            "command": command,
            "environment": describe_environment(),
            "points": points,
            "undisturbed": reference.result,
            "tried": len(trials),
            "survived": sum(not trial.failure for trial in trials),
            "trials": [asdict(trial) | {"stage": trial.stage} for trial in in_order],
        },
    )
    passed = ", ".join(f"{name}: {count}" for name, count in points.items())
    text = (
        f"# Faults survived of those tried\n\nMade by `{command}`. After each fault the same command was given again; "
        "survived means that it ended with the token files, weights, losses, scores, records and tables of an "
        "undisturbed run, showed no traceback and left nothing behind.\n\n"
        f"{table(trials)}\nPoints at which the undisturbed run changes files ({passed}).\n"
    )
    write_text(out / "chaos.md", text)
