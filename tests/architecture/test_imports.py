"""Which room may import which: the table of docs/architecture.md, held."""

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tests.architecture import rooms
from tests.architecture.rooms import (
    PACKAGE,
    ROOMS,
    imported_names,
    module_name,
    modules,
    names_in_strings,
)

MAY_IMPORT = {
    "lineage": (),
    "data_pipeline": ("lineage",),
    "engine": ("lineage", "data_pipeline.tokens", "data_pipeline.files"),
    "evaluation": (
        "lineage",
        "engine",
        "data_pipeline.files",
        "data_pipeline.tokens.tokenizer",
        "data_pipeline.contamination.testsets",
        "data_pipeline.reading.hub",
    ),
    "experiments": ("lineage", "data_pipeline", "engine", "evaluation"),
    "verify": ("lineage", "data_pipeline", "engine", "evaluation", "experiments", "reports"),
    "reports": (
        "lineage",
        "data_pipeline.files",
        "engine.costs",
        "engine.run",
        "evaluation.schema",
        "experiments.benchmark",
        "experiments.catalogue",
        "experiments.files",
        "experiments.verdicts",
        "experiments.reproduce.files",
        "experiments.scores",
        "experiments.worked_out",
    ),
}


CORE = (
    "engine.config",
    "engine.family",
    "engine.rng",
    "engine.torch_names",
    "engine.compiled",
    "engine.model",
    "engine.parallel",
    "engine.pipeline",
    "engine.optim",
    "engine.data",
    "engine.kernels",
    "engine.batch_schedule",
    "engine.inputs",
    "engine.step",
    "engine.checkpoint",
    "engine.trainer",
)
"""What trains and nothing else. It names no family beside GPT-2, no format and no launcher."""
CORE_MAY_IMPORT = (
    "lineage",
    "data_pipeline.tokens",
    "data_pipeline.files",
    "engine.costs",
    "engine.run",
    *CORE,
)
LOADERS = ("mlm_repro.engine.family",)
"""Modules whose strings are the door to what they load."""
GUARD_LIST = "engine.guard.guards"
"""All that the trainer knows of what watches it."""
CORE_NODES, KERNEL_NODES = 35_000, 22_000


def closed(name: str, doors: Iterable[str]) -> bool:
    """Whether a dotted name of ours is behind none of the doors."""
    inner = name.removeprefix(f"{PACKAGE}.")
    return inner.split(".")[0] in (*ROOMS, "benchmarks", "tests") and not any(
        f"{inner}.".startswith(f"{door}.") for door in doors
    )


def trespasses(room: str) -> list[str]:
    """Imports by the room's files of rooms it has no door to. A room within a room has its own
    doors."""
    inner = [name for name in MAY_IMPORT if name.startswith(f"{room}.")]
    paths = [path for path in modules(room.replace(".", "/")) if closed(module_name(path), inner)]
    return list(imports_of_closed(paths, (room, *MAY_IMPORT[room])))


def imports_of_closed(paths: Iterable[Path], doors: Iterable[str]) -> Iterator[str]:
    """File, line and name of every import behind none of the doors."""
    for path in paths:
        strings = () if module_name(path) in LOADERS else names_in_strings(path)
        for line, name in (*imported_names(path), *strings):
            if closed(name, doors):
                yield f"{path.relative_to(rooms.ROOT)}:{line} imports {name}"


def core_modules() -> list[Path]:
    """The files of the core."""
    return [path for path in modules("engine") if not closed(module_name(path), CORE)]


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_a_room_imports_only_what_its_door_allows(room: str) -> None:
    assert modules(room.replace(".", "/")), f"{room} is empty"
    assert trespasses(room) == []


def test_the_core_knows_nothing_of_what_stands_around_it() -> None:
    trainer = rooms.ROOT / "engine" / "trainer.py"
    assert (
        list(
            imports_of_closed([path for path in core_modules() if path != trainer], CORE_MAY_IMPORT)
        )
        == []
    )
    assert list(imports_of_closed([trainer], (*CORE_MAY_IMPORT, GUARD_LIST))) == []


def nodes(path: Path) -> int:
    """Nodes of a file's syntax tree without docstrings. Air and comments are free."""
    found = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    texts = (statement.value for statement in found if isinstance(statement, ast.Expr))
    return len(found) - 2 * sum(isinstance(text, ast.Constant) for text in texts)


def test_the_core_can_be_read() -> None:
    inside = {"kernels", "compiled.py"}
    kernels = [path for path in core_modules() if inside & {*path.relative_to(rooms.ROOT).parts}]
    assert sum(map(nodes, core_modules())) - sum(map(nodes, kernels)) <= CORE_NODES
    assert sum(map(nodes, kernels)) <= KERNEL_NODES


@pytest.mark.parametrize(
    ("room", "line", "found"),
    [
        ("lineage", "import mlm_repro.engine.config", True),
        ("lineage", "    from mlm_repro.data_pipeline import config", True),
        ("reports", "from mlm_repro.evaluation.schema import Result", False),
        ("reports", "from mlm_repro.experiments.runner import run_named", True),
        ("engine", "from mlm_repro.data_pipeline.contamination import testsets", True),
        ("engine", "from tests.ranks import run_ranks", True),
        ("engine", "from mlm_repro.data_pipeline.tokens import token_file", False),
        ("evaluation", "from . import windows", False),
        ("evaluation", "import engineering", False),
        ("engine", "import_module('mlm_repro.reports.page')", True),
        ("engine", "importlib.import_module(f'mlm_repro.experiments.{name}')", True),
        ("engine", "import_module('mlm_repro.engine.model.gpt2:GPT2')", False),
    ],
)
def test_the_rule_finds_a_trespass(
    room: str, line: str, found: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rooms, "ROOT", tmp_path)
    (tmp_path / room).mkdir()
    (tmp_path / room / "visitor.py").write_text(f"def later():\n    {line.strip()}\n")
    assert bool(trespasses(room)) == found


def doors_in_table(text: str) -> dict[str, set[str]]:
    """The doors of each room that the table in a text names, `all` and `all above` written out."""
    doors: dict[str, set[str]] = {}
    for room, cell in re.findall(r"^\| `(\w+)/` \|[^|]*\| ([^|]*) \|$", text, re.MULTILINE):
        if room not in ROOMS:
            continue
        named = {"nothing of ours": set(), "all above": set(doors), "all": {*ROOMS} - {room}}.get(
            cell
        )
        doors[room] = set(written_out(cell)) if named is None else named
    return doors


def written_out(cell: str) -> Iterator[str]:
    """The names of a list such as `lineage, a.{b,c.d}`."""
    for name in re.findall(r"[\w.]+(?:\{[\w.,]+\})?", cell.replace("`", "")):
        before, _, inner = name.rstrip("}").partition("{")
        yield from (before + each for each in inner.split(","))


def table() -> str:
    return (rooms.ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


def test_the_table_stands_in_the_documentation() -> None:
    assert doors_in_table(table()) == {room: {*doors} for room, doors in MAY_IMPORT.items()}


@pytest.mark.parametrize(
    ("line", "changed"),
    [
        ("`experiments.{", "`experiments.{launch,"),
        ("reproduce.files,", ""),
        ("| all above |", "| lineage |"),
    ],
)
def test_a_door_too_many_or_too_few_in_the_table_is_found(line: str, changed: str) -> None:
    assert line in table()
    assert doors_in_table(table().replace(line, changed)) != {
        room: {*doors} for room, doors in MAY_IMPORT.items()
    }


def test_files_that_the_documentation_names_are_there() -> None:
    text = (rooms.ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`([\w/]+\.py)`", text))
    paths = [*modules(), *(rooms.ROOT / "tests").rglob("*.py"), *rooms.ROOT.glob("*.py")]
    files = [f"/{path.relative_to(rooms.ROOT).as_posix()}" for path in paths]
    assert len(named) > 30
    assert (
        sorted(name for name in named if not any(file.endswith(f"/{name}") for file in files)) == []
    )
