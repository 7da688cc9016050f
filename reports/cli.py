"""`mlm-report`: one page from one reproduction."""

import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from lineage.command import run_command
from lineage.errors import IntegrityFailure

app = typer.Typer(help="Make a page from the result files of a reproduction.", no_args_is_help=True)


@app.callback()
def _report() -> None:
    pass


@app.command()
def build(
    directory: Annotated[
        Path | None, typer.Argument(help="Reproduction directory; the newest complete one by default.")
    ] = None,
    runs: Annotated[Path, typer.Option(help="Where to look for the newest reproduction.")] = Path("runs"),
    bench: Annotated[Path | None, typer.Option(help="Folder of mlm-bench results to show too.")] = None,
) -> None:
    """Write DIRECTORY/report/index.html and the figures beside it.

    What is missing is named on the page in its place. If a file is damaged or a record is refused, the page is
    written, says so, and the command exits with code 6.
    """
    from reports.benchmarks import load_benchmarks
    from reports.load import load_reproduction, newest_reproduction
    from reports.page import build_report

    start = time.monotonic()
    reproduction = load_reproduction(directory or newest_reproduction(runs))
    benchmarks = load_benchmarks(bench) if bench else None
    page = build_report(reproduction, benchmarks)
    problems = (*reproduction.problems, *(benchmarks.problems if benchmarks else ()))
    for problem in problems:
        print(f"warning: {problem.sentence}", file=sys.stderr)
    print(f"{page} ({time.monotonic() - start:.1f} s)")
    damaged = sum(problem.damaged for problem in problems)
    if damaged:
        raise IntegrityFailure(f"{damaged} damaged or refused parts were left out of {page}; the page names them")


def main() -> None:
    """Entry point."""
    run_command(app)
