"""There is one training step: nothing else runs a batch forward and backward, or has an optimizer
update weights."""

import ast
from collections.abc import Iterator

import pytest

from tests.architecture.rooms import ROOMS, ROOT

HOME = ROOT / "engine" / "step.py"
OPTIMIZERS = ROOT / "engine" / "optim"
PEERS = tuple(ROOT / place for place in ("verify/megatron_core.py", "verify/programs.py"))
"""Other libraries' loops, which run beside ours."""


def training_calls(source: str) -> Iterator[str]:
    """Every call of `forward_backward`, of a reducer's `finish` and of an optimizer's `step`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner = ast.unparse(node.func.value)
            name = node.func.attr
            is_update = name == "step" and owner.rpartition(".")[2].endswith("optimizer")
            if (
                name == "forward_backward"
                or is_update
                or (name == "finish" and owner.endswith("reducer"))
            ):
                yield f"line {node.lineno}: {ast.unparse(node.func)}"


@pytest.mark.parametrize("room", ROOMS)
def test_nothing_else_trains(room: str) -> None:
    others = {
        path.relative_to(ROOT).as_posix(): calls
        for path in (ROOT / room).rglob("*.py")
        if path not in (HOME, *PEERS) and not path.is_relative_to(OPTIMIZERS)
        if (calls := list(training_calls(path.read_text(encoding="utf-8"))))
    }
    assert others == {}


def test_a_second_loop_would_be_seen() -> None:
    loop = (
        "def go(model, reducer, optimizer):\n model.forward_backward([], reducer)\n"
        " reducer.finish(1)\n"
    )
    assert (
        len(list(training_calls(loop + " optimizer.step(1e-3, 1.0)\n self.optimizer.step(1, 2)")))
        == 4
    )
    assert list(training_calls(HOME.read_text(encoding="utf-8")))
