"""A public class name has one owner in the whole product, and the name of a file is stated in one
place."""

import ast
from collections import defaultdict

from tests.architecture.rooms import ROOT, modules, parse

FILES = frozenset(
    {"COMPLETE", "manifest.json", "lineage.json", "ledger.json", "dataset.json", "records.jsonl"}
)


def owners() -> dict[str, list[str]]:
    """Files of each public class at the top of a module, by its name."""
    places = defaultdict(list)
    for path in modules():
        for node in parse(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(path.relative_to(ROOT).as_posix())
    return places


def test_a_class_name_has_one_owner() -> None:
    several = {name: places for name, places in owners().items() if len(places) > 1}
    assert several == {}


def test_the_name_of_a_file_is_stated_once() -> None:
    places = defaultdict(list)
    for path in modules():
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.Constant) and node.value in FILES:
                places[node.value].append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert {name: where for name, where in places.items() if len(where) > 1} == {}
