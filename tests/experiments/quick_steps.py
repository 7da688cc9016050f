"""A reproduction whose steps are forked and whose page has no drawings, for tests of neither."""

import multiprocessing
import shlex
import sys

from mlm_repro.experiments.reproduce import steps


def take_quick_steps() -> None:
    """Make it so in this process."""
    from tests.chaos.job import leave_figures_blank
    from tests.imported import COMMANDS

    leave_figures_blank()

    def run_step(program: str, *arguments: str) -> None:
        shown = shlex.join([program, *arguments])
        print(f"\n$ {shown}", flush=True)
        sys.argv = [program, *arguments]
        process = multiprocessing.get_context("fork").Process(target=COMMANDS[program])
        process.start()
        process.join()
        if process.exitcode:
            raise steps.StepFailed(shown, process.exitcode)

    steps.run_step = run_step
