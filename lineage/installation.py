"""Where this package lies, which build it is, whether all of its files are there, and which torch it works with.

Nothing here imports torch: the installed package's metadata says its version.
"""

import base64
import csv
import hashlib
import sys
from collections.abc import Sequence
from functools import cache
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path
from types import ModuleType
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from lineage.digest import sha256_json
from lineage.errors import BadInput, IntegrityFailure

HOME = Path(__file__).resolve().parent.parent
"""The folder that holds `lineage` and the packages beside it: the root of a clone, or where a wheel was installed."""
DATA = (".css", ".csv", ".html", ".js", ".json", ".sh", ".toml")
"""Suffixes of the files that commands read."""
TORCH_RANGE = ">=2.11,<2.16"
"""As `pyproject.toml` has it. A build ahead of a release, such as NVIDIA's 2.12.0a0, counts as that release."""


def installed_version(name: str) -> str | None:
    """Of a package, from its metadata; None where it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


@cache
def recorded_files() -> dict[str, str]:
    """What a wheel wrote below `HOME`: path and `sha256=…` of each file of our packages. Empty in a clone."""
    try:
        installed = distribution("mlm-repro")
    except PackageNotFoundError:
        return {}
    if Path(str(installed.locate_file(""))).resolve() != HOME:
        return {}
    rows = csv.reader((installed.read_text("RECORD") or "").splitlines())
    return {
        row[0]: row[1]
        for row in rows
        if row and row[1] and "/" in row[0] and not row[0].startswith("..") and ".dist-info/" not in row[0]
    }


def check_installation() -> None:
    """Raises IntegrityFailure where a file that a wheel brought for commands to read is no longer there."""
    missing = [name for name in recorded_files() if name.endswith(DATA) and not (HOME / name).is_file()]
    if missing:
        more = f" and {len(missing) - 1} more are" if len(missing) > 1 else " is"
        raise IntegrityFailure(
            f"{HOME / missing[0]}{more} missing from this installation: install mlm-repro again with pip's "
            "--force-reinstall"
        )


def wheel_state() -> dict[str, Any]:
    """What stands for a commit where a wheel was installed, and whether a file was changed since; empty in a clone."""
    recorded = recorded_files()
    if not recorded:
        return {}
    is_changed = any(_hash(HOME / name) != expected for name, expected in recorded.items())
    return {"commit": f"wheel-{sha256_json(recorded)[:34]}", "dirty": is_changed}


def _hash(path: Path) -> str | None:
    try:
        digest = hashlib.sha256(path.read_bytes()).digest()
    except OSError:
        return None
    return f"sha256={base64.urlsafe_b64encode(digest).decode('ascii').rstrip('=')}"


class UnfitTorch(BadInput, ImportError):
    """torch is not installed, or is a version outside `TORCH_RANGE`; to other libraries it cannot be imported."""


def check_torch() -> None:
    """Raises UnfitTorch."""
    installed, install = installed_version("torch"), f"pip install 'torch{TORCH_RANGE}'"
    if installed is None:
        raise UnfitTorch(f"torch is not installed: {install}")
    if Version(installed).base_version not in SpecifierSet(TORCH_RANGE):
        raise UnfitTorch(f"torch {installed} does not fit, torch{TORCH_RANGE} is needed: {install}")


def refuse_unfit_torch() -> None:
    """Let this process' first import of torch raise UnfitTorch where it does not fit; without an import nothing is."""
    try:
        check_torch()
    except UnfitTorch as error:
        sys.meta_path.insert(0, _Refusal(error))


class _Refusal(MetaPathFinder, Loader):
    """Finds torch before the installed one is found, and raises `error` when it is imported."""

    def __init__(self, error: UnfitTorch) -> None:
        self.error = error

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: object = None) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name == "torch" else None

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        raise self.error
