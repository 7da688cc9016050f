"""What must start fast, or run where torch is not: none of it imports torch."""

import ast
import subprocess
import sys

import pytest

from tests.architecture.rooms import ROOT, command_names, module_name, modules, parse


def says_so(*rooms: str) -> list[str]:
    """Modules whose docstring says that they import no torch."""
    return [
        module_name(path) for path in modules(*rooms) if "mports no torch" in (ast.get_docstring(parse(path)) or "")
    ]


PURE = [
    *(module_name(path) for path in modules("lineage", "data_pipeline")),
    *says_so("engine"), "engine.cli",
    *says_so("evaluation"), "evaluation.tasks", "evaluation.tables", "evaluation.cli",
    *(
        module_name(path)
        for path in modules("experiments")
        if path.parent.name not in ("contenders", "forecast", "measured")
        and path.stem not in ("iterations", "preflight")
    ),
    *says_so("experiments/forecast"),
    *says_so("verify"), "verify.cli",
    *(module_name(path) for path in modules("reports")),
]  # fmt: skip

IMPORT_EACH = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
    if "torch" in sys.modules:
        sys.exit(f"{name} imports torch")
"""

CALL_AND_LOOK = """
import importlib, sys
module, function = sys.argv.pop(1).split(":")
unwanted = set(sys.argv.pop(1).split(","))
main = getattr(importlib.import_module(module), function)
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
found = unwanted & sys.modules.keys()
sys.exit(f"{sorted(found)} was imported" if found else 0)
"""

START_WITHOUT = {
    "mlm-train": [["run", "experiments/models/355m.toml", "--twin", "--dry-run"], ["run", "--help"]],
    "mlm-data": [["run", "data_pipeline/recipes/smoke.toml", "--dry-run"]],
    "mlm-eval": [["lambada", "--help"]],
    "mlm-experiment": [["reproduce", "355m", "--smoke", "--dry-run"], ["list"]],
    "mlm-report": [["build", "--help"]],
    "mlm-verify": [["run", "--help"], ["parallel", "--help"], ["against", "--help"]],
}


def test_importing_leaves_torch_out() -> None:
    command = [sys.executable, "-c", IMPORT_EACH, *PURE]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_check_sees_torch() -> None:
    command = [sys.executable, "-c", IMPORT_EACH, "lineage.run", "engine.model.gpt2"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.stderr == "engine.model.gpt2 imports torch\n"
    assert done.returncode == 1


@pytest.mark.parametrize(
    ("command", "arguments"),
    [(name, arguments) for name in command_names() for arguments in [["--help"], *START_WITHOUT.get(name, [])]],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_a_command_answers_without_torch(command: str, arguments: list[str]) -> None:
    code = [sys.executable, "-c", CALL_AND_LOOK, command_names()[command], "torch,pandas", *arguments]
    done = subprocess.run(code, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert done.stdout


HEAVY = ("matplotlib", "multiprocessing.pool", "numba", "numpy", "pandas", "pyarrow", "scipy", "tokenizers", "torch")
CONFIGURATIONS = (
    "data_pipeline.config",
    "engine.config",
    "experiments.benchmark",
    "lineage.files",
    "data_pipeline.files",
)
"""Modules of many pydantic models."""


@pytest.mark.parametrize(
    ("command", "unwanted"),
    [
        (["mlm-data", "--help"], CONFIGURATIONS),
        (["mlm-train", "--help"], ("pydantic", *CONFIGURATIONS)),
        (["mlm-eval", "list"], ("rich", *CONFIGURATIONS)),
        (["mlm-experiment", "list", "--results", "docs"], ("rich", "engine.config", "data_pipeline.config")),
        (["mlm-report", "--help"], ("pydantic", *CONFIGURATIONS)),
        (["mlm-verify", "--help"], ("pydantic", *CONFIGURATIONS)),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_command_imports_nothing_that_it_does_not_use(command: list[str], unwanted: tuple[str, ...]) -> None:
    names = ",".join((*HEAVY, *unwanted))
    code = [sys.executable, "-c", CALL_AND_LOOK, command_names()[command[0]], names, *command[1:]]
    done = subprocess.run(code, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert done.stdout
