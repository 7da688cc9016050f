"""A reproduction whose steps are forked and whose page has no drawings, for tests of neither."""

import multiprocessing
import shlex
import sys

from markupsafe import Markup

from experiments.reproduce import processes
from reports import page, render


def take_quick_steps() -> None:
    """Make it so in this process."""
    from tests.imported import COMMANDS

    blank = render.Drawing((Markup("<svg></svg>"),), b"<svg/>", b"blank")
    page.render_all = lambda exhibits, title: ({exhibit.name: blank for exhibit in exhibits if exhibit.draw}, b"blank")

    def run_step(program: str, *arguments: str) -> None:
        shown = shlex.join([program, *arguments])
        print(f"\n$ {shown}", flush=True)
        sys.argv = [program, *arguments]
        process = multiprocessing.get_context("fork").Process(target=COMMANDS[program])
        process.start()
        process.join()
        if process.exitcode:
            raise processes.StepFailed(shown, process.exitcode)

    processes.run_step = run_step
