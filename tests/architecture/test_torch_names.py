"""Every name of torch that the product uses is there and not deprecated; `engine.torch_names` knows
what changed."""

import ast
import importlib
from collections.abc import Iterator

import pytest
import torch

from tests.architecture.rooms import ROOT, modules, parse

CHANGED = ROOT / "engine" / "torch_names.py"


def is_torch(name: str | None) -> bool:
    return (name or "").partition(".")[0] == "torch"


def what_names_stand_for(tree: ast.Module) -> dict[str, str]:
    """The names that a file, anywhere in it, gives to parts of torch, and the full name of each."""
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {
                one.asname or "torch": one.name if one.asname else "torch"
                for one in node.names
                if is_torch(one.name)
            }
        elif isinstance(node, ast.ImportFrom) and is_torch(node.module):
            names |= {one.asname or one.name: f"{node.module}.{one.name}" for one in node.names}
    return names


def full_name(node: ast.expr, names: dict[str, str]) -> str | None:
    """The full name of a chain of attributes that begins with a part of torch."""
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if isinstance(node, ast.Attribute) and (start := full_name(node.value, names)):
        return f"{start}.{node.attr}"
    return None


def used_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and full name of everything of torch that a file imports or reaches."""
    names = what_names_stand_for(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, one.name) for one in node.names if is_torch(one.name))
        elif isinstance(node, ast.ImportFrom) and is_torch(node.module):
            yield from ((node.lineno, f"{node.module}.{one.name}") for one in node.names)
        elif isinstance(node, ast.Attribute) and (name := full_name(node, names)):
            yield node.lineno, name


def is_good(name: str) -> bool:
    """Whether the installed torch has the name, as a module or as an attribute, and does not
    deprecate it."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        for part in parts[count:]:
            if not hasattr(found, part):
                return False
            found = getattr(found, part)
        return not hasattr(found, "__deprecated__")
    return False


def wrong(tree: ast.Module) -> list[str]:
    """Line and name of everything of torch that a file uses and torch lacks or deprecates."""
    return [f"{line} {name}" for line, name in used_names(tree) if not is_good(name)]


def questions(tree: ast.Module) -> list[int]:
    """Lines that ask whether a part of torch has a name."""
    names = what_names_stand_for(tree)
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("hasattr", "getattr")
        if full_name(node.args[0], names)
    ]


def test_torch_has_every_name_that_is_used_and_deprecates_none() -> None:
    trees = {path: parse(path) for path in modules() if path != CHANGED}
    used = {name for tree in trees.values() for _, name in used_names(tree)}
    assert len(used) > 100
    found = [
        f"{path.relative_to(ROOT)}:{name}" for path, tree in trees.items() for name in wrong(tree)
    ]
    assert found == [], f"torch {torch.__version__} lacks or deprecates them"


def test_a_name_that_changed_is_there_under_one_of_its_names() -> None:
    """`engine.torch_names` is all alternatives, so that it can be imported says that one of each is
    there."""
    names = vars(importlib.import_module("engine.torch_names"))
    assert all(callable(names[name]) for name in ("reduce_scatter_single",))


def test_no_other_file_asks_what_torch_has() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{n}"
        for path in modules()
        if path != CHANGED
        for n in questions(parse(path))
    ]
    assert found == []
    assert questions(parse(CHANGED))


@pytest.mark.parametrize(
    ("source", "found"),
    [
        (
            "import torch.distributed as dist\ndist.reduce_everything(1)",
            ["2 torch.distributed.reduce_everything"],
        ),
        ("import torch\ntorch.distributed.all_reduce(1)\ntorch.floaty32", ["3 torch.floaty32"]),
        ("import torch.nowhere as there\nthere.name", ["1 torch.nowhere", "2 torch.nowhere.name"]),
        ("import torch.nn.functional as F\nF.gelu(x).floaty32\ntorchvision.nothing\nx.nothing", []),
    ],
)
def test_a_wrong_name_is_found(source: str, found: list[str]) -> None:
    assert wrong(ast.parse(source)) == found
