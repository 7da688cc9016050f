"""Which room may import which: the table of docs/architecture.md, held."""

from pathlib import Path

import pytest

from tests.architecture import rooms
from tests.architecture.rooms import ROOMS, imported_names, modules

MAY_IMPORT = {
    "lineage": (),
    "data_pipeline": ("lineage",),
    "engine": ("lineage", "data_pipeline.tokens"),
    "evaluation": (
        "lineage",
        "engine",
        "data_pipeline.tokens.tokenizer",
        "data_pipeline.contamination.testsets",
        "data_pipeline.reading.hub",
    ),
    "experiments": ("lineage", "data_pipeline", "engine", "evaluation"),
    "reports": ("lineage", "experiments.catalogue", "experiments.verdicts"),
}


def trespasses(room: str) -> list[str]:
    """Imports by the room's files of rooms it has no door to."""
    allowed = (room, *MAY_IMPORT[room])
    return [
        f"{path.relative_to(rooms.ROOT)}:{line} imports {name}"
        for path in modules(room)
        for line, name in imported_names(path)
        if name.split(".")[0] in (*ROOMS, "tests")
        and not any(name == door or name.startswith(f"{door}.") for door in allowed)
    ]


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_what_its_door_allows(room: str) -> None:
    assert modules(room), f"{room} is empty"
    assert trespasses(room) == []


@pytest.mark.parametrize(
    ("room", "line", "found"),
    [
        ("lineage", "import engine.config", True),
        ("lineage", "    from data_pipeline import config", True),
        ("reports", "from evaluation.protocol import Result", True),
        ("reports", "from experiments.runner import run_experiment", True),
        ("reports", "from experiments.verdicts import judge", False),
        ("engine", "from data_pipeline.contamination.testsets import find_test_set", True),
        ("engine", "from data_pipeline.contamination import testsets", True),
        ("engine", "from tests.ranks import run_ranks", True),
        ("engine", "from data_pipeline.tokens.token_file import TokenFile", False),
        ("engine", "from data_pipeline.tokens import token_file", False),
        ("data_pipeline", "from lineage.errors import BadInput", False),
        ("evaluation", "from . import windows", False),
        ("evaluation", "import engineering", False),
    ],
)
def test_the_rule_finds_a_trespass(
    room: str, line: str, found: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rooms, "ROOT", tmp_path)
    (tmp_path / room).mkdir()
    (tmp_path / room / "visitor.py").write_text(f"def later():\n    {line.strip()}\n")
    assert bool(trespasses(room)) == found


def test_the_table_stands_in_the_documentation() -> None:
    path = rooms.ROOT / "docs" / "architecture.md"
    text = path.read_text(encoding="utf-8")
    rows = {line.split("|")[1].strip(" `/"): line.split("|")[3] for line in text.splitlines() if line.startswith("| `")}
    assert set(ROOMS) <= rows.keys()
    for room, doors in MAY_IMPORT.items():
        if "all above" not in rows[room]:
            assert all(part in rows[room] for door in doors for part in door.split("."))
