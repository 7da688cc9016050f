"""The wheel in an empty environment, away from the clone: everything is inside and works, as README
says it.

`make wheel` runs this.

Dependencies are those of the environment that runs the test: the empty one sees them, and not the
clone.
"""

import json
import os
import shlex
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path, PurePosixPath

import pytest

from tests.architecture.rooms import PACKAGE, ROOMS, ROOT, command_names, source_files
from tests.readme_commands import at_smoke_size, readme_commands

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

CALLS = [
    "mlm-data run twin --dry-run",
    "mlm-data run data_pipeline/recipes/smoke.toml --dry-run",
    "mlm-train 8.3b --twin --dry-run",
    "mlm-train experiments/models/ptd-p/1008b.toml --dry-run --ranks 3072",
    "mlm-train schedule --pp 4 --chunks 2 --microbatches 8",
    "mlm-eval list",
    "mlm-experiment list",
    "mlm-experiment compare 2021/table-1",
    "mlm-experiment plan ptd-p/145.6b --cluster dgx-a100-80g --gpus 1536",
    "mlm-experiment simulate experiments/published/ptd-p-runs.csv --out predictions.csv",
    "mlm-experiment launch experiments/jobs/8.3b.toml --out launch",
    "mlm-experiment run 2021/figure-11",
    "mlm-verify parallel 355m --twin --ranks 1 --iterations 1",
]
CALLS_AFTERWARDS = [
    "mlm-data stats runs/data-smoke",
    "mlm-eval generate --ckpt runs/8.3b-smoke --prompt The --max-new-tokens 4",
    "mlm-verify run runs/reproduce-8.3b-smoke",
]


INSTALL = ("install", "--no-deps", "--no-index", "--disable-pip-version-check")
THEIRS = ("engine", "evaluation", "experiments", "reports")
"""Packages that a user's own project has."""


class Place:
    """An empty environment with the wheel, and an empty folder to work in."""

    def __init__(self, folder: Path, wheel: Path) -> None:
        self.work, self.python = folder / "work", folder / "environment" / "bin" / "python"
        for each in (self.work, folder / "home"):
            each.mkdir()
        ours = ("PYTHON", "VIRTUAL_ENV", "MLM_", "XDG_")
        self.variables = {
            name: value for name, value in os.environ.items() if not name.startswith(ours)
        }
        self.variables |= {
            "HOME": str(folder / "home"),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
        }
        run(sys.executable, "-m", "venv", "--without-pip", self.python.parent.parent)
        self.pip(*INSTALL, wheel)
        self.site = next(self.python.parent.parent.glob("lib/python*/site-packages"))
        others = [path for path in sys.path if path.endswith("-packages")]
        (self.site / "dependencies.pth").write_text("\n".join(others) + "\n", encoding="utf-8")

    def call(
        self, line: str, folder: Path | None = None, **variables: str
    ) -> "subprocess.CompletedProcess[str]":
        """Run a program of the environment in a folder, by default the one to work in."""
        name, *arguments = shlex.split(line)
        command, environment = (
            [str(self.python.with_name(name)), *arguments],
            self.variables | variables,
        )
        return subprocess.run(
            command,
            cwd=folder or self.work,
            env=environment,
            capture_output=True,
            text=True,
            timeout=1500,
            check=False,
        )

    def pip(self, *arguments: object) -> None:
        """Call pip for the environment."""
        run(sys.executable, "-m", "pip", "--python", self.python, "--quiet", *arguments)

    def files(self) -> set[str]:
        """What lies in its site-packages beside the way to the dependencies."""
        return {path.name for path in self.site.iterdir()} - {"dependencies.pth"}


def run(*arguments: object) -> None:
    done = subprocess.run(
        [str(each) for each in arguments], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the distributions, built from a copy of what git would have."""
    folder = tmp_path_factory.mktemp("built")
    for path in source_files():
        copy = folder / "clone" / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)
    run(
        sys.executable,
        "-m",
        "build",
        "--no-isolation",
        "--outdir",
        folder / "dist",
        folder / "clone",
    )
    return folder / "dist"


@pytest.fixture(scope="module")
def place(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("place"), next(built.glob("*.whl")))


def ours() -> set[str]:
    """Every file of the packages that git has, by its place below `mlm_repro`."""
    names = {path.relative_to(ROOT) for path in source_files()}
    return {name.as_posix() for name in names if name.parts[0] in ROOMS}


def placed(names: set[str]) -> set[str]:
    """The same by their place in the wheel."""
    return {
        f"{PACKAGE}/{'__init__.py' if name == 'lineage/package/__init__.py' else name}"
        for name in names
    }


def test_the_wheel_has_every_file_of_the_packages_and_no_other(built: Path) -> None:
    with zipfile.ZipFile(next(built.glob("*.whl"))) as wheel:
        inside = {name for name in wheel.namelist() if ".dist-info/" not in name}
        licences = {
            PurePosixPath(name).name: wheel.read(name).decode()
            for name in wheel.namelist()
            if "/licenses/" in name
        }
    assert inside == placed(ours())
    assert {f"{PACKAGE}/{room}/py.typed" for room in ROOMS} <= inside
    assert licences.keys() == {"LICENSE", "NOTICE"}
    assert "Apache License" in licences["LICENSE"]
    for words in (
        "Copyright (c) VIA Research Group, KAIST",
        "Permission is hereby granted",
        "vtrain-all-reduce.csv",
    ):
        assert words in licences["NOTICE"]


def test_the_source_distribution_has_the_packages_and_no_tests(built: Path) -> None:
    with tarfile.open(next(built.glob("*.tar.gz"))) as archive:
        names = [
            PurePosixPath(member.name).relative_to(PurePosixPath(member.name).parts[0])
            for member in archive.getmembers()
            if member.isfile()
        ]
    assert {name.as_posix() for name in names if name.parts[0] in ROOMS} == ours()
    assert {name.parts[0] for name in names} - {*ROOMS, "mlm_repro.egg-info"} == {
        "LICENSE",
        "MANIFEST.in",
        "NOTICE",
        "PKG-INFO",
        "README.md",
        "pyproject.toml",
        "setup.cfg",
        "setup.py",
    }


def test_the_code_that_runs_is_the_wheels(place: Place) -> None:
    for room in ROOMS:
        code = f"from {PACKAGE} import {room}; print({room}.__file__)"
        found = subprocess.run(
            [place.python, "-c", code],
            cwd=place.work,
            env=place.variables,
            capture_output=True,
            text=True,
            check=True,
        )
        assert Path(found.stdout.strip()).parent == place.site / PACKAGE / room


@pytest.fixture(scope="module")
def project(place: Place) -> Path:
    """A folder whose packages are called as ours were."""
    folder = place.work.with_name("project")
    for name in (*THEIRS, PACKAGE):
        (folder / name).mkdir(parents=True)
    for name in THEIRS:
        (folder / name / "__init__.py").write_text("")
        (folder / name / "cli.py").write_text("raise SystemExit('theirs')\n")
    return folder


@pytest.mark.parametrize(
    "line",
    [
        *(f"{name} --help" for name in command_names()),
        "mlm-eval list",
        "mlm-experiment list",
        "mlm-train run 355m --twin --dry-run",
        "mlm-data run twin --dry-run",
        f"python -m {PACKAGE}.engine.cli --help",
    ],
)
def test_a_project_may_have_packages_of_any_name(place: Place, project: Path, line: str) -> None:
    done = place.call(line, project, PYTHONPATH=".")
    assert (done.returncode, bool(done.stdout)) == (0, True), done.stdout + done.stderr


def test_a_project_imports_its_own_beside_ours(place: Place, project: Path) -> None:
    code = f"import engine, {PACKAGE}.engine as ours; print(engine.__file__); print(ours.__file__)"
    done = place.call(f"python -c '{code}'", project, PYTHONPATH=".")
    theirs, ours = map(Path, done.stdout.split())
    assert (theirs.parent.parent, ours.parent.parent) == (project, place.site / PACKAGE)


def test_another_wheel_with_a_package_called_engine_comes_and_goes(
    place: Place, project: Path
) -> None:
    wheel, about = project / "other-1.0-py3-none-any.whl", "other-1.0.dist-info"
    texts = {
        "engine/__init__.py": "",
        "engine/config.py": "",
        f"{about}/RECORD": "",
        f"{about}/METADATA": "Metadata-Version: 2.1\nName: other\nVersion: 1.0\n",
        f"{about}/WHEEL": (
            "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        ),
    }
    texts[f"{about}/RECORD"] = "".join(f"{name},,\n" for name in texts)
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in texts.items():
            archive.writestr(name, text)
    before = place.files()
    for change in ((*INSTALL, wheel), ("uninstall", "--yes", "other")):
        place.pip(*change)
        done = place.call("mlm-train run 355m --twin --dry-run")
        assert done.returncode == 0, done.stderr
    assert place.files() == before


@pytest.mark.parametrize("line", [*(f"{name} --help" for name in command_names()), *CALLS])
def test_a_command_answers(place: Place, line: str) -> None:
    done = place.call(line)
    assert (done.returncode, bool(done.stdout)) == (0, True), done.stdout + done.stderr


@pytest.fixture(scope="module")
def reproduced(place: Place) -> Path:
    """The folder of `reproduce --smoke`, which began in an empty one."""
    shutil.rmtree(place.work)
    place.work.mkdir()
    done = place.call("mlm-experiment reproduce 8.3b --smoke")
    assert done.returncode == 0, done.stdout + done.stderr
    return place.work / "runs" / "reproduce-8.3b-smoke"


def test_a_reproduction_goes_to_its_report(place: Place, reproduced: Path) -> None:
    source = json.loads((reproduced / "manifest.json").read_text(encoding="utf-8"))["environment"][
        "source"
    ]
    assert source["commit"].startswith("wheel-")
    assert source["dirty"] is None
    page = (reproduced / "report" / "index.html").read_text(encoding="utf-8")
    assert source["commit"][:12] in page
    assert str(ROOT) not in page


@pytest.mark.parametrize("line", CALLS_AFTERWARDS)
def test_a_command_works_on_what_was_made(place: Place, reproduced: Path, line: str) -> None:
    done = place.call(line)
    assert (done.returncode, bool(done.stdout)) == (0, True), done.stdout + done.stderr


@pytest.mark.parametrize("line", readme_commands())
def test_a_command_of_readme_works(
    place: Place, reproduced: Path, line: str, tmp_path: Path
) -> None:
    done = place.call(at_smoke_size(line, tmp_path))
    assert (done.returncode, bool(done.stdout)) == (0, True), done.stdout + done.stderr


def test_an_uninstall_leaves_nothing_that_was_installed_or_written_since(
    place: Place, reproduced: Path
) -> None:
    """The last test of this file: it removes the wheel."""
    place.pip("uninstall", "--yes", "mlm-repro")
    assert place.files() == set()
    assert not list(place.python.parent.glob("mlm-*"))
