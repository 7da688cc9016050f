"""A published number stands once, among the claims: no figure, fit or table has its own."""

import ast
import csv
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlm_repro.experiments.catalogue import CLAIMS, every_claim
from mlm_repro.experiments.published import HERE
from mlm_repro.experiments.simulator.measurements import COLUMNS
from tests.architecture.rooms import ROOMS, ROOT

NUMBER = re.compile(r"(?<![\w.])\d*\.?\d+(?![\w.])")
ENOUGH = 3
"""So many values of one quantity in one table or figure are that table or figure; fewer may be
there by chance."""
RUN = {
    "experiment",
    "series",
    "cluster",
    *COLUMNS,
    "scatter_gather",
    "sequence_parallel",
    "tokens",
    "machines",
    "microbatches",
    "parameters",
    "stage",
}
"""Columns that say what was run."""
BY_CHANCE = (
    "vtrain-",
    "mt-nlg",
    "bigscience",
    "h100",
    "megatron-2020",
    "nemo-a100",
    "vocab.json",
    "tokenizer.json",
)
"""Files of so many numbers that some are those of a table by chance: measured values of others,
ids."""


def printed() -> dict[tuple[str, str], set[float]]:
    """The values of each table and figure by quantity, but those of one digit, which all files are
    full of."""
    values: dict[tuple[str, str], set[float]] = defaultdict(set)
    for claim in every_claim():
        if len(claim.value.normalize().as_tuple().digits) > 1:
            values[claim.citation, claim.quantity].add(abs(float(claim.value)))
    return values


def groups(path: Path) -> Iterator[tuple[str, set[float]]]:
    """The numbers that stand together in a file: in a column of a CSV file, in a list or a string
    of a module, and in any other file all."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".csv":
        for name, *cells in zip(*csv.reader(text.splitlines()), strict=True):
            yield name, {float(cell) for cell in cells if NUMBER.fullmatch(cell)}
    elif path.suffix == ".py":
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.List | ast.Tuple | ast.Set | ast.Dict | ast.Constant):
                constants = [
                    str(part.value) for part in ast.walk(node) if isinstance(part, ast.Constant)
                ]
                yield (
                    f"line {node.lineno}",
                    {float(number) for one in constants for number in NUMBER.findall(one)},
                )
    else:
        yield "the file", set(map(float, NUMBER.findall(text)))


def own_numbers(folder: Path) -> list[str]:
    """A sentence for each place below a folder that repeats claims."""
    known = printed()
    files = (
        path
        for path in sorted(folder.rglob("*"))
        if path.suffix in (".py", ".csv", ".toml", ".json")
    )
    return [
        f"{path.relative_to(folder)}, {where}: has {sorted(found & values)} of {citation},"
        f" {quantity}"
        for path in files
        if path.parent != CLAIMS and not path.name.startswith(BY_CHANCE)
        for where, found in groups(path)
        for (citation, quantity), values in known.items()
        if len(found & values) >= ENOUGH
    ]


@pytest.mark.parametrize("room", ROOMS)
def test_no_file_repeats_a_published_table_or_figure(room: str) -> None:
    assert own_numbers(ROOT / room) == []


def measured_columns(folder: Path) -> dict[str, set[str]]:
    """Columns that do not say what was run, of the folder's files but others' measurements."""
    found = {}
    for path in folder.glob("*.csv"):
        with path.open(encoding="utf-8", newline="") as file:
            found[path.name] = set(next(csv.reader(file))) - RUN
    return {
        name: columns
        for name, columns in found.items()
        if columns and not name.startswith(BY_CHANCE)
    }


def test_the_files_of_workloads_say_what_was_run_alone(tmp_path: Path) -> None:
    assert measured_columns(HERE) == {}
    (tmp_path / "planted-runs.csv").write_text(
        "experiment,series,gpus,tflops_per_gpu\na,b,1,39\n", encoding="utf-8"
    )
    assert measured_columns(tmp_path) == {"planted-runs.csv": {"tflops_per_gpu"}}
