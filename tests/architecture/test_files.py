"""What every file in the house keeps to: names, docstrings, bytes."""

import ast
import re
from collections.abc import Iterator

import pytest

from tests.architecture.rooms import ROOMS, ROOT, command_names, modules, parse, source_files

README = ROOT / "README.md"
LARGEST_FILE_BYTES = 1_000_000
NAMES_THAT_SAY_NOTHING = {"utils", "util", "helpers", "helper", "common", "misc", "manager"}

Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def test_a_name_says_what_is_inside() -> None:
    parts = {
        part for path in source_files() for part in (path.stem, *path.relative_to(ROOT).parts[:-1])
    }
    assert parts & NAMES_THAT_SAY_NOTHING == set()


def test_no_large_file_is_tracked() -> None:
    sizes = {str(path.relative_to(ROOT)): path.stat().st_size for path in source_files()}
    assert {name: size for name, size in sizes.items() if size > LARGEST_FILE_BYTES} == {}


def promised(trees: list[ast.Module]) -> set[str]:
    """Names of the members of a room's protocols and documented members of its base classes;
    `forward` is torch's."""
    classes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    bases = {ast.unparse(base) for node in classes for base in node.bases}
    return {"forward"} | {
        member.name
        for node in classes
        for member in node.body
        if isinstance(member, Definition)
        if any(ast.unparse(base) == "Protocol" for base in node.bases)
        or (node.name in bases and ast.get_docstring(member))
    }


def undocumented(
    body: list[ast.stmt], known: set[str], owner: str = ""
) -> Iterator[tuple[int, str]]:
    """Line and name of public classes, functions and methods that say nothing of themselves.

    A method need not repeat what a protocol or a base class of its room, `known`, says.
    """
    for node in body:
        if not isinstance(node, Definition) or node.name.startswith("_"):
            continue
        if not ast.get_docstring(node) and not (owner and node.name in known):
            yield node.lineno, f"{owner}{node.name}"
        if isinstance(node, ast.ClassDef):
            yield from undocumented(node.body, known, f"{node.name}.")


@pytest.mark.parametrize("room", ROOMS)
def test_what_is_public_says_what_is_true_of_it(room: str) -> None:
    trees = {path: parse(path) for path in modules(room)}
    known = promised(list(trees.values()))
    missing = [
        f"{path.relative_to(ROOT)}:{line} {name}"
        for path, tree in trees.items()
        for line, name in [
            *([] if not tree.body or ast.get_docstring(tree) else [(1, "the module")]),
            *undocumented(tree.body, known),
        ]
    ]
    assert missing == []


def readme_words() -> Iterator[list[str]]:
    """Words of every command in README's blocks."""
    for language, block in re.findall(
        r"```(sh|console)\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL
    ):
        for line in block.splitlines():
            if language == "sh" or line.startswith("$ "):
                yield line.removeprefix("$ ").split()


def test_readme_names_only_commands_that_exist() -> None:
    targets = set(
        re.findall(
            r"^([a-z0-9.-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE
        )
    )
    targets |= {"reproduce-355m", "reproduce-2.5b", "reproduce-8.3b"}
    count = 0
    for words in readme_words():
        program = words[0].removeprefix(".venv/bin/")
        if program == "make":
            assert words[1] in targets, words
        else:
            assert program in command_names() or program == "torchrun", words
        count += 1
    assert count > 5


def test_the_makefile_names_only_tests_that_exist() -> None:
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    named = [
        (folder, name)
        for folder, names in re.findall(r"patsubst %,(tests/\w+)/test_%.py,([\w\s]+)\)", text)
        for name in names.split()
    ]
    assert len(named) > 10
    assert [
        f"{folder}/{name}"
        for folder, name in named
        if not (ROOT / folder / f"test_{name}.py").is_file()
    ] == []


def test_readme_mentions_every_command() -> None:
    mentioned = set(re.findall(r"\bmlm-(?!repro\b)[a-z]+\b", README.read_text(encoding="utf-8")))
    assert mentioned == set(command_names())


def test_readme_links_to_files_that_exist() -> None:
    links = re.findall(r"\]\((?!https?://|#)([^)#]+)", README.read_text(encoding="utf-8"))
    missing = [link for link in links if not (ROOT / link).exists()]
    assert missing == []


def test_a_kept_record_names_no_place_of_the_machine_it_was_made_on() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {place}"
        for path in source_files()
        if path.is_relative_to(ROOT / "results")
        and path.suffix in (".json", ".jsonl", ".toml", ".csv")
        for place in re.findall(
            r'(?<!"excerpt": )"(/[a-z]+/[^"]*)"', path.read_text(encoding="utf-8")
        )
    ]
    assert found == []
