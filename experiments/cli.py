"""`mlm-experiment`: run what the papers ran, at the size this machine allows."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from lineage.command import run_command

app = typer.Typer(help="Reproduce the papers' runs at the size this machine allows.", no_args_is_help=True)


class Target(StrEnum):
    """Models of the 2019 paper that were trained to convergence."""

    SMALL = "355m"
    MEDIUM = "2.5b"
    LARGE = "8.3b"


class Mode(StrEnum):
    """Published size, twins, or whichever the hardware allows."""

    AUTO = "auto"
    FULL = "full"
    SCALED = "scaled"


@app.callback()
def _experiment() -> None:
    pass


@app.command()
def reproduce(
    target: Annotated[Target, typer.Argument(help="Largest model; the smaller ones are run for comparison.")],
    mode: Annotated[Mode, typer.Option(help="full: published size; scaled: twins; auto: what fits.")] = Mode.AUTO,
    smoke: Annotated[bool, typer.Option("--smoke", help="Twins at the smallest size: does everything work?")] = False,
    data: Annotated[Path | None, typer.Option(help="Another data recipe, a TOML file.")] = None,
    runs: Annotated[Path, typer.Option(help="Folder of run directories.")] = Path("runs"),
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print mode and cost, and stop.")] = False,
) -> None:
    """From raw text to report: data, training, evaluation, page. What is finished is reused."""
    from experiments.plan import make_plan, print_plan
    from experiments.reproduce import reproduce as run

    plan = make_plan(target.value, mode.value, smoke, data)
    print_plan(plan)
    if not dry_run:
        run(plan, runs)


def main() -> None:
    """Entry point."""
    run_command(app)
