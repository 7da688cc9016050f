"""What no file does, so that nothing read from outside is run: the rules of SECURITY.md, held on
the source."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.architecture.rooms import ROOMS, ROOT, imported_names, modules, parse

UNSAFE_MODULES = {"pickle", "cPickle", "cloudpickle", "dill", "joblib", "shelve", "marshal"}
UNSAFE_CALLS = {
    "eval",
    "exec",
    "__import__",
    "torch.load",
    "yaml.load",
    "yaml.unsafe_load",
    "os.system",
    "os.popen",
    "tempfile.mktemp",
    "subprocess.getoutput",
    "subprocess.getstatusoutput",
    "pickle.load",
    "pickle.loads",
}
UNSAFE_METHODS = {"extractall", "unpack_archive"}
UNSAFE_FLAGS = {"shell", "allow_pickle", "trust_remote_code"}
STARTERS = {f"subprocess.{name}" for name in ("run", "Popen", "call", "check_call", "check_output")}
UNPICKLER = "torch_files.py"
"""The one file that reads pickles, with `weights_only=True` or an unpickler that builds what it was
told."""
TRUSTED_MARKUP = {
    "reports/page.py": [
        "theme_css() + (folder / 'page.css').read_text(encoding='utf-8')",
        "(folder / 'page.js').read_text(encoding='utf-8')",
    ],
    "reports/render.py": ["f'{opening}<style>{rules}</style>{body}'"],
}
"""Everything that goes into a page unescaped: our own style and scripts, matplotlib's drawing and
its styles."""


def is_true(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is True


def wrong_in(call: ast.Call, path: Path) -> Iterator[str]:
    """What a call does that nothing here may do."""
    called = ast.unparse(call.func)
    flags = {keyword.arg: keyword.value for keyword in call.keywords}
    reads_weights = (
        called == "torch.load"
        and path.name == UNPICKLER
        and is_true(flags.get("weights_only", call))
    )
    if (called in UNSAFE_CALLS and not reads_weights) or called.split(".")[-1] in UNSAFE_METHODS:
        yield f"calls {called}"
    for flag in UNSAFE_FLAGS & flags.keys():
        value = flags[flag]
        if not (isinstance(value, ast.Constant) and not value.value):
            yield f"sets {flag}"
    if (
        called in STARTERS
        and call.args
        and not isinstance(call.args[0], ast.List | ast.ListComp | ast.Name)
    ):
        yield f"gives {called} no list"
    if (
        called.split(".")[-1] == "Environment"
        and "loader" in flags
        and not is_true(flags.get("autoescape", call))
    ):
        yield "renders without escaping"


def unsafe(path: Path) -> list[str]:
    """Imports and calls that run what they read, or read where they should not."""
    imports = [
        f"{path.name}:{line} imports {name}"
        for line, name in imported_names(path)
        if name.split(".")[0] in UNSAFE_MODULES and path.name != UNPICKLER
    ]
    calls = [node for node in ast.walk(parse(path)) if isinstance(node, ast.Call)]
    return imports + [
        f"{path.name}:{call.lineno} {wrong}" for call in calls for wrong in wrong_in(call, path)
    ]


@pytest.mark.parametrize("room", ROOMS)
def test_nothing_runs_what_it_reads(room: str) -> None:
    assert [found for path in modules(room) for found in unsafe(path)] == []


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("import pickle", True),
        ("torch.load(path)", True),
        ("subprocess.run(x, shell=flag)", True),
        ("subprocess.Popen(f'cat {path}')", True),
        ("subprocess.run(['ls', path])", False),
        ("np.load(path, allow_pickle=True)", True),
        ("np.load(path, allow_pickle=False)", False),
        ("Environment(loader=loader)", True),
        ("Environment(loader=loader, autoescape=True)", False),
    ],
)
def test_the_rule_finds_what_is_unsafe(
    line: str, found: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.architecture.rooms.ROOT", tmp_path)
    (tmp_path / "file.py").write_text(line + "\n")
    assert bool(unsafe(tmp_path / "file.py")) == found


@pytest.mark.parametrize(("flag", "found"), [("True", False), ("flag", True), ("False", True)])
def test_pickles_are_read_in_one_file_and_there_restricted(
    flag: str, found: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.architecture.rooms.ROOT", tmp_path)
    (tmp_path / UNPICKLER).write_text(f"torch.load(path, weights_only={flag})\n")
    assert bool(unsafe(tmp_path / UNPICKLER)) == found


def test_what_goes_into_a_page_unescaped_is_listed() -> None:
    found: dict[str, list[str]] = {}
    for path in modules():
        calls = [node for node in ast.walk(parse(path)) if isinstance(node, ast.Call)]
        marked = [call.args[0] for call in calls if ast.unparse(call.func) == "Markup"]
        if trusted := [
            ast.unparse(value) for value in marked if not isinstance(value, ast.Constant)
        ]:
            found[str(path.relative_to(ROOT))] = trusted
    written = {
        path: [ast.unparse(ast.parse(code)) for code in codes]
        for path, codes in TRUSTED_MARKUP.items()
    }
    assert found == written, "quotes are those of this Python's unparse"


def test_no_template_turns_escaping_off() -> None:
    templates = sorted(ROOT.glob("[dr]*/templates/*.html"))
    assert {path.parts[-3] for path in templates} == {"data_pipeline", "reports"}
    for path in templates:
        assert not re.search(r"\|\s*safe\b|autoescape", path.read_text(encoding="utf-8")), path.name
