"""The table "Where is what" of docs/architecture.md: its files are there, and the names in them."""

import ast
import re

import pytest

from tests.architecture.rooms import ROOT

PLACE = re.compile(r"`([\w./-]+\.(?:py|md|toml|csv))(?::([\w.]+))?`")


def answers() -> dict[str, list[tuple[str, str]]]:
    """Each question of the table with its places: file, and name in it or an empty string."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    section = text.partition("## Where is what")[2].partition("\n## ")[0]
    rows = [
        line.strip("| ").split(" | ", 1) for line in section.splitlines() if line.startswith("| ")
    ]
    return {question: PLACE.findall(answer) for question, answer in rows[1:]}


def names_in(source: str) -> set[str]:
    """Functions, classes, methods and variables that a file defines; methods and fields as
    `Class.name`."""
    names: set[str] = set()

    def visit(body: list[ast.stmt], within: str) -> None:
        for node in body:
            targets = (
                node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            )
            names.update(within + target.id for target in targets if isinstance(target, ast.Name))
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                names.add(within + node.name)
                visit(node.body if isinstance(node, ast.ClassDef) else [], f"{within}{node.name}.")

    visit(ast.parse(source).body, "")
    return names


def test_ten_questions_are_answered_in_at_most_three_files() -> None:
    assert len(answers()) >= 10
    assert all(0 < len({file for file, _ in places}) <= 3 for places in answers().values())


@pytest.mark.parametrize("question", answers())
def test_a_place_is_where_the_table_says(question: str) -> None:
    for file, name in answers()[question]:
        path = ROOT / file
        assert path.is_file(), file
        if name:
            assert name in (
                names_in(path.read_text()) if path.suffix == ".py" else path.read_text()
            ), f"{file}: {name}"
