"""Runs tests with other Pythons and with other versions of torch.

`python -m tests.interpreters 3.12 3.13` gives each of these Pythons that is here an environment
without torch, below `build/`, and runs tests that need none. `python -m tests.interpreters
VENV/bin/python --tests tests/engine` runs tests in an environment that is ready. Exit code 1 if a
test failed.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from tests.architecture.rooms import ROOT

WITHOUT = ["tests/lineage", "tests/architecture/test_pure.py"]
"""Tests of what imports no torch."""
WITHOUT_TORCH = [
    "-p",
    "tests.without_torch",
    "-o",
    "truncation_limit_lines=0",
    "-o",
    "truncation_limit_chars=0",
]
"""Nothing is cut out of what a failure says: the plugin reads it."""
VERSIONS = """
import json, platform
from importlib.metadata import PackageNotFoundError, version
try:
    torch = version("torch")
except PackageNotFoundError:
    torch = None
print(json.dumps({"python": platform.python_version(), "torch": torch}))
"""


def requirements() -> list[str]:
    """What the package needs but torch, and what runs its tests."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    runners = [
        text
        for text in project["optional-dependencies"]["test"]
        if text.startswith(("pytest", "hypothesis"))
    ]
    return [text for text in (*project["dependencies"], *runners) if not re.match(r"torch\b", text)]


def make_environment(version: str) -> Path | None:
    """The Python of an environment without torch; None where there is no Python of that version."""
    venv = ROOT / "build" / f"python{version}"
    create = [f"python{version}", "-m", "venv", str(venv)]
    # Pyenv's programs are there for versions that are not.
    variables = os.environ | {"PYENV_VERSION": version}
    if (
        not shutil.which(create[0])
        or subprocess.run(create, env=variables, capture_output=True).returncode
    ):
        return None
    install = [str(venv / "bin" / "python"), "-m", "pip", "install", "--quiet", "--no-compile"]
    # Pip takes digests for all packages of a call or for none.
    versions = ROOT / "build" / "versions.txt"
    versions.write_text(
        re.sub(r" \\\n +--hash=\S+", "", (ROOT / "constraints.txt").read_text(encoding="utf-8"))
    )
    subprocess.run([*install, "--constraint", str(versions), *requirements()], cwd=ROOT, check=True)
    subprocess.run([*install, "--no-deps", "--editable", "."], cwd=ROOT, check=True)
    return venv / "bin" / "python"


def run_tests(python: Path, tests: list[str]) -> dict[str, Any]:
    """Versions, and how many of the tests passed, failed and were skipped."""
    versions = json.loads(
        subprocess.run([python, "-c", VERSIONS], check=True, capture_output=True, text=True).stdout
    )
    options = [] if versions["torch"] else WITHOUT_TORCH
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        subprocess.run(
            [python, "-m", "pytest", f"--junit-xml={report}", *options, *tests],
            cwd=ROOT,
            check=False,
        )
        counts = {
            name: int(n)
            for name, n in ElementTree.parse(report).getroot()[0].attrib.items()
            if n.isdigit()
        }
    failed = counts["failures"] + counts["errors"]
    return versions | {
        "tests": tests,
        "passed": counts["tests"] - failed - counts["skipped"],
        "failed": failed,
        "skipped": counts["skipped"],
        "seconds": round(time.monotonic() - start),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.interpreters", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument(
        "interpreters", nargs="+", metavar="PYTHON", help="a version, or an environment's program"
    )
    parser.add_argument("--tests", nargs="+", default=WITHOUT, help="what pytest is given")
    given = parser.parse_args()
    records = []
    for name in given.interpreters:
        python = Path(name) if "/" in name else make_environment(name)
        if python is None:
            print(f"Python {name} is not here: no test was run with it")
            continue
        records.append(run_tests(python.absolute(), given.tests))
        print(json.dumps(records[-1]))
    sys.exit(any(record["failed"] for record in records))


if __name__ == "__main__":
    main()
