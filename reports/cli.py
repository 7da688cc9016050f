"""`mlm-report`: pages from result files, of a reproduction or of trainings."""

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from mlm_repro.lineage.command import CommandLine, run_command
from mlm_repro.lineage.errors import BadInput
from mlm_repro.lineage.progress import announce
from mlm_repro.lineage.shipped import HOME

if TYPE_CHECKING:
    from mlm_repro.reports.report import Report

KEPT = tuple(HOME / "results" / name for name in ("reproduce-8.3b", "ablations", "against"))
"""Paths of the results that are kept with the code, which every page shows."""

app = CommandLine(help="Make a page, figures and tables from result files.", no_args_is_help=True)

Runs = Annotated[
    list[Path] | None,
    Argument(
        help="A reproduction, runs of experiments, folders of runs; `runs` by default.",
        metavar="[RUN]",
    ),
]


@app.command()
def build(
    runs: Runs = None,
    kept: Annotated[
        bool, Option("--kept", help="Show the results that are kept with the code.")
    ] = False,
    out: Annotated[
        Path | None, Option(help="Folder to write in place of REPRODUCTION/report/.")
    ] = None,
) -> None:
    """Write REPRODUCTION/report/: index.html, and every figure and table as files.

    A folder of runs gives the newest run of each experiment, and the newest reproduction unless one
    is named. Results that are kept with the code stand beside. A run of an experiment that was
    never finished is left out and named. If a file is damaged or a number has no origin, no page is
    written, and the command exits with code 6.
    """
    from mlm_repro.reports.page import build_report
    from mlm_repro.reports.report import SOURCES

    start = time.monotonic()
    if kept and runs:
        raise BadInput(
            "--kept shows the results that are kept with the code: name no RUN beside it"
        )
    if out and out.exists() and not (out / SOURCES).is_file():
        raise BadInput(
            f"{out} exists and is not a report, so that it is not replaced: name a new folder with"
            " --out"
        )
    report = _assemble([KEPT[0]] if kept else runs)
    if out is None and report.reproduction.directory.is_relative_to(HOME / "results"):
        raise BadInput(
            f"{report.reproduction.directory} is kept with the code, where no page is written: name"
            " a folder for the page with --out"
        )
    exhibits = report.all_exhibits
    figures = [exhibit for exhibit in exhibits if exhibit.panels]
    announce(f"draws {len(figures)} figures, writes {len(exhibits)} exhibits")
    page = build_report(report, out)
    for sentence in report.left_out:
        print(f"warning: {sentence}", file=sys.stderr)
    print(f"{page} ({time.monotonic() - start:.1f} s)")


@app.command("run")
def training(
    runs: Annotated[
        list[Path],
        Argument(help="A training run, finished or not, or several.", metavar="RUN…"),
    ],
    out: Annotated[Path, Option(help="Folder to write to.")] = Path(),
) -> None:
    """Write the page of one training as NAME.html: one file, to open in a browser or to send.

    It has the curves, the numbers behind them, the data card, and the results and generated text of
    its checkpoints that `mlm-eval --json` wrote beside the run. Several runs lie over each other in
    one page, NAME-and-2-more.html, with a table of the settings in which they differ; runs that
    differ in the seed alone are one line, their mean. If a file is damaged, no page is written, and
    the command exits with code 6.
    """
    from mlm_repro.lineage.atomic import write_bytes
    from mlm_repro.reports.training import Trainings, render_trainings

    loaded = Trainings(runs)
    others = f"-and-{len(runs) - 1}-more" * (len(runs) > 1)
    page = out / f"{loaded.runs[0].path.name}{others}.html"
    write_bytes(page, render_trainings(loaded).encode("utf-8", "replace"))
    print(page)


def _assemble(runs: list[Path] | None) -> "Report":
    from mlm_repro.reports.experiment_runs import sort_runs
    from mlm_repro.reports.report import Inputs, assemble

    beside = [path for path in KEPT if path.is_dir()]
    return assemble(Inputs(*sort_runs(runs or [Path("runs")], beside)))


def main() -> None:
    """Run the command line of `mlm-report` and exit the process with its code."""
    run_command(app)
