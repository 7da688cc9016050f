"""No circle among the files or folders of a room; data_pipeline keeps to the order that its
docstring states."""

import ast
import re
from pathlib import Path

import pytest

from tests.architecture import rooms
from tests.architecture.circles import circles, folder_graphs, import_graph
from tests.architecture.test_imports import LOADERS

IN_ORDER = ("data_pipeline",)


@pytest.mark.parametrize("package", rooms.ROOMS)
def test_no_circle(package: str) -> None:
    assert len(rooms.modules(package)) > 10
    assert circles(package, doors=LOADERS) == []


@pytest.mark.parametrize("package", IN_ORDER)
def test_each_part_imports_only_those_above_it_in_the_docstring(package: str) -> None:
    graph = import_graph(package)
    docstring = ast.get_docstring(rooms.parse(rooms.ROOT / package / "__init__.py")) or ""
    package = f"{rooms.PACKAGE}.{package}"
    order = [
        f"{package}.{name}" for name in re.findall(r"^(\w+)(?:/|\.py) ", docstring, re.MULTILINE)
    ]
    assert sorted(order) == sorted({".".join(name.split(".")[:3]) for name in graph} - {package})
    level = folder_graphs(graph)[package]
    assert [
        f"{a} imports {b}" for a in level for b in level[a] if order.index(b) > order.index(a)
    ] == []


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"a": "import p.b", "b": "import p.c"}, []),
        ({"a": "import p.b", "b": "def later():\n    from p import a"}, [["p.a", "p.b"]] * 2),
        (
            {"a": "import p.b", "b": "T = {1: 'p.a:run'}\nimportlib.import_module(T[1])"},
            [["p.a", "p.b"]] * 2,
        ),
        ({"a": "import p.b", "b": "import_module(f'p.{name}')"}, [["p.a", "p.b"]] * 2),
        ({"a": "import p.b", "b": "name = 'p.a'"}, []),
        ({"x.a": "import p.y.a", "y.b": "import p.x.b", "x.b": "", "y.a": ""}, [["p.x", "p.y"]]),
        ({"x.a": "from . import b", "x.b": "from p.y import a", "y.a": ""}, []),
        ({"x.__init__": "import p.x.a", "x.a": "from p.x import thing"}, [["p.x", "p.x.a"]] * 2),
        ({"x.__init__": "import p.x.a", "x.a": "from p.x.b import thing", "x.b": ""}, []),
    ],
)
def test_planted_circles_are_found(
    files: dict[str, str],
    expected: list[list[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rooms, "ROOT", tmp_path)
    for name, text in files.items():
        path = (tmp_path / "p" / name.replace(".", "/")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    assert [sorted(set(found)) for found in circles("p")] == expected
