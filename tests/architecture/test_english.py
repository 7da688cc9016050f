"""Docstrings are sentences of their own, and local names say what they hold."""

import ast
from collections.abc import Iterator

import pytest

from tests.architecture.rooms import ROOT, modules

FRAGMENTS = (
    "And As At Besides But By For From If In Into It Its Meanwhile Nor Of On Or Over So Such Than"
    " That Their Them Then These They Those To Under Up What When Where Whether Which While Who"
    " Whom Whose Why With"
)
"""First words that leave the subject out, or point at a name that the reader may not see."""
EMPTY_NAMES = {"found", "one", "kept"}
READ = (
    "lineage",
    "reports",
    "evaluation",
    "engine/finetune",
    "experiments",
    "verify",
    "benchmarks",
    "data_pipeline",
    "engine/kernels",
    "engine/compiled.py",
    "engine/formats",
    "engine/families",
    "engine/family.py",
    "engine/parallel",
    "engine/pipeline",
    "engine/optim",
    "engine/model",
    "engine/launch",
    "engine/step.py",
    "engine/trainer.py",
    "engine/train.py",
    "engine/rng.py",
    "engine/inputs.py",
    "engine/compare",
    "engine/twin.py",
    "engine/costs.py",
    "engine/guard",
    "engine/run",
    "engine/data",
    "engine/checkpoint",
    "engine/config.py",
    "engine/cli.py",
    "engine/torch_names.py",
)
"""Folders and files that are held to the rule."""


def faults(source: str) -> Iterator[str]:
    """Line and kind of each docstring that begins with a fragment and each local whose name says
    nothing."""
    for node in ast.walk(tree := ast.parse(source)):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            first = node.value.value.split(maxsplit=1)[0].rstrip(",:;")
            if first in FRAGMENTS.split():
                yield f"{node.lineno}: a docstring begins with {first!r}"
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    for name in {
        node for function in functions for node in ast.walk(function) if isinstance(node, ast.Name)
    }:
        if isinstance(name.ctx, ast.Store) and name.id in EMPTY_NAMES:
            yield f"{name.lineno}: a local is called {name.id!r}"


@pytest.mark.parametrize("room", READ)
def test_docstrings_and_names_can_be_read_alone(room: str) -> None:
    assert [
        f"{path.relative_to(ROOT)}:{fault}"
        for path in modules(room)
        for fault in faults(path.read_text())
    ] == []


@pytest.mark.parametrize(
    "planted",
    [
        'def owned() -> None:\n    """Of a reduced gradient."""',
        'class Row:\n    stalls: float\n    """That they do."""',
        "def f():\n    found = 1",
        "def f():\n    def g():\n        for kept in ():\n            pass",
    ],
)
def test_a_planted_fault_is_seen(planted: str) -> None:
    assert list(faults(planted))
