"""`mlm-bench`: how fast this machine runs what is here, beside what else runs on it."""

import inspect
import pkgutil
from collections.abc import Callable
from functools import partial, wraps
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import typer

from experiments.bench import benchmarks
from experiments.bench.timing import load_average
from lineage.atomic import check_place
from lineage.benchmark import Benchmark, write_benchmark
from lineage.command import CommandLine, run_command
from lineage.errors import BadInput, Diverged

Json = Annotated[Path | None, typer.Option("--json", help="Also write the result to this file.")]
Measure = Callable[..., Benchmark]

app = CommandLine(help="Measure speed beside other programs, in one run on this machine.", no_args_is_help=True)


def add_benchmarks(to: typer.Typer, package: ModuleType) -> None:
    """A verb for each module of a package: the options and the help of its `measure`, and `--json`."""
    for module in pkgutil.iter_modules(package.__path__):
        measure = import_module(f"{package.__name__}.{module.name}").measure
        to.command(module.name.replace("_", "-"))(_verb(measure))


def _verb(measure: Measure) -> Callable[..., None]:
    @wraps(measure)
    def run(json: Path | None, **options: Any) -> None:
        carry_out(partial(measure, **options), json)

    own = inspect.signature(measure)
    option = inspect.Parameter("json", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Json)
    vars(run)["__signature__"] = own.replace(
        parameters=[*own.parameters.values(), option], return_annotation=inspect.Signature.empty
    )
    run.__annotations__ = {**measure.__annotations__, "json": Json}
    return run


def carry_out(measure: Measure, json: Path | None) -> None:
    """Measure, print the result with the machine and its load, and write it where that is asked."""
    from experiments.bench.show import show
    from experiments.bench.where import measured_here

    check_place("--json", json)
    before = load_average()
    result = measure()
    load = [before, *result.load_average, load_average()]
    result = result.model_copy(update={"load_average": load, "environment": measured_here()})
    show(result)
    if json is not None:
        _write(json, result)
    if result.disagreements:
        raise Diverged("; ".join(result.disagreements))


@app.command()
def compare(
    old: Annotated[Path, typer.Argument(help="A result written by --json.")],
    new: Annotated[Path, typer.Argument(help="A later result of the same benchmark.")],
) -> None:
    """Ratios of two results side by side. Ends with code 3 if one fell by more than a tenth."""
    from experiments.bench.show import compare as compare_results
    from experiments.bench.show import comparison_table, differing_machines, say, show_rows

    rows = compare_results(old, new)
    show_rows(comparison_table(rows))
    if sentence := differing_machines(old, new):
        say([sentence])
    fallen = rows[rows["fell"]]
    if len(fallen):
        raise Diverged(f"fell by more than a tenth: {'; '.join(fallen['case'] + ' / ' + fallen['name'])}")


def _write(path: Path, result: Benchmark) -> None:
    try:
        write_benchmark(path, result)
    except OSError as error:
        raise BadInput(f"{path} cannot be written: {error.strerror}") from error
    print(f"written: {path}")


add_benchmarks(app, benchmarks)


def main() -> None:
    """Entry point."""
    run_command(app)


if __name__ == "__main__":
    main()
