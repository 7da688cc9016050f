"""What must start fast, or run where torch is not: none of it imports torch."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from mlm_repro.lineage.atomic import MARKER
from mlm_repro.lineage.chain import INDEX
from tests.architecture.rooms import ROOT, command_names, module_name, modules, parse


def says_so(*rooms: str) -> list[str]:
    """Modules whose docstring says that they import no torch."""
    return [
        module_name(path)
        for path in modules(*rooms)
        if "mports no torch" in " ".join((ast.get_docstring(parse(path)) or "").split())
    ]


PURE = [
    *(module_name(path) for path in modules("lineage", "data_pipeline")),
    *says_so("engine"),
    "mlm_repro.engine.cli",
    *says_so("evaluation"),
    *(f"mlm_repro.evaluation.{name}" for name in ("tasks.names", "tables", "cli")),
    *(
        module_name(path)
        for path in modules("experiments")
        if path.parent.name not in ("contenders", "forecast", "measured")
        and path.stem != "iterations"
    ),
    *says_so("experiments/forecast"),
    *says_so("verify"),
    "mlm_repro.verify.cli",
    *(module_name(path) for path in modules("reports")),
]

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
    "mlm-train": [
        ["run", "experiments/models/355m.toml", "--twin", "--dry-run"],
        ["run", "--help"],
    ],
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
    command = [
        sys.executable,
        "-c",
        IMPORT_EACH,
        "mlm_repro.lineage.run",
        "mlm_repro.engine.model.gpt2",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.stderr == "mlm_repro.engine.model.gpt2 imports torch\n"
    assert done.returncode == 1


HEAVY = (
    "matplotlib",
    "multiprocessing.pool",
    "numba",
    "numpy",
    "pandas",
    "pyarrow",
    "scipy",
    "tokenizers",
    "torch",
)
CONFIGURATIONS = tuple(
    f"mlm_repro.{name}"
    for name in (
        "data_pipeline.config",
        "engine.config",
        "experiments.benchmark",
        "lineage.files",
        "data_pipeline.files",
    )
)
"""Modules of many pydantic models."""


LEAN = {
    "mlm-data --help": ("pydantic", *CONFIGURATIONS),
    "mlm-train --help": ("pydantic", *CONFIGURATIONS),
    "mlm-eval list": ("rich", *CONFIGURATIONS),
    "mlm-experiment list": ("rich", "mlm_repro.engine.config", "mlm_repro.data_pipeline.config"),
    "mlm-report --help": ("pydantic", *CONFIGURATIONS),
    "mlm-verify --help": ("pydantic", *CONFIGURATIONS),
}
"""Commands that import none of HEAVY, nor these."""
WITHOUT_TORCH = [
    f"{name} {' '.join(each)}"
    for name in command_names()
    for each in [["--help"], *START_WITHOUT[name]]
]


@pytest.mark.parametrize("command", sorted({*WITHOUT_TORCH, *LEAN}))
def test_a_command_answers_without_what_it_does_not_use(command: str) -> None:
    name, *arguments = command.split()
    unwanted = ",".join((*HEAVY, *LEAN[command]) if command in LEAN else ("torch", "pandas"))
    code = [sys.executable, "-c", CALL_AND_LOOK, command_names()[name], unwanted, *arguments]
    done = subprocess.run(code, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert done.stdout


MISTAKES = Path(__file__).with_name("mistakes.txt").read_text(encoding="utf-8").splitlines()
"""Commands that end with a user's error, of every verb; harness, whose arguments another program
reads, has none."""

MAKE_MISTAKES = """
import importlib, sys
module, function = sys.argv[1].split(":")
main = getattr(importlib.import_module(module), function)
for line in sys.stdin.read().splitlines():
    sys.argv[1:] = line.split()
    try:
        main()
    except SystemExit as end:
        assert 0 < end.code < 64, (line, end.code)
    found = {"torch", "numba", "pandas"} & sys.modules.keys()
    assert not found, f"{line}: {sorted(found)} was imported"
"""


@pytest.mark.parametrize("command", command_names())
def test_a_mistake_is_named_before_anything_heavy_is_imported(command: str, tmp_path: Path) -> None:
    (tmp_path / "RECIPE").write_text('name = "a"\n[sources]\nnames = ["jsonl:texts.jsonl"]\n')
    (tmp_path / "BROKEN").write_text("name = 3\n")
    (tmp_path / "empty").mkdir()
    (tmp_path / "sealed").mkdir()
    for name in (MARKER, INDEX):
        (tmp_path / "sealed" / name).touch()
    (tmp_path / "empty.txt").touch()
    (tmp_path / "texts.jsonl").write_text('{"text": "a text"}\n')
    module = importlib.import_module(command_names()[command].partition(":")[0])
    verbs = {verb.name or verb.callback.__name__ for verb in module.app.registered_commands} - {
        "harness"
    }
    lines = [
        line.removeprefix(f"{command} ") for line in MISTAKES if line.startswith(f"{command} ")
    ]
    assert {line.split()[0] for line in lines} == verbs
    code = [sys.executable, "-c", MAKE_MISTAKES, command_names()[command]]
    done = subprocess.run(
        code, cwd=tmp_path, input="\n".join(lines), capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
