"""`mlm-verify chaos` from beginning to end."""

import os
import sys
import tempfile
from pathlib import Path

import torch

from experiments.verify.chaos.report import table, write_results
from experiments.verify.chaos.trials import every_fault, prepare, run_trials, some_faults
from lineage.environment import available_cores
from lineage.errors import BadInput, Diverged
from lineage.progress import announce


def run_chaos(every: bool, points: int, seed: int, out: Path | None, jobs: int | None) -> None:
    """Try the faults, print the table and write it to `out`. Raises Diverged if one was not survived.

    Raises BadInput where there is no /proc: only Linux names open files there.
    """
    if sys.platform != "linux":
        raise BadInput("chaos needs Linux: it finds open files in /proc")
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
        faults = every_fault(reference) if every else some_faults(reference, points, seed)
        trials = list(run_trials(reference, faults, work, jobs))
        print(table(trials), end="")
        if out:
            which = "--all" if every else f"--points {points} --seed {seed}"
            write_results(out, f"mlm-verify chaos --recipe tiny {which}", reference, trials)
            print(f"written: {out}")
        os.chdir("/")
    if lost := [trial for trial in trials if trial.failure]:
        raise Diverged(f"{len(lost)} of {len(trials)} faults were not survived")
