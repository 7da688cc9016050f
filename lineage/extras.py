"""Libraries that may be missing or have an unfit version: those that an extra installs, and torch,
which is checked by its metadata without an import."""

import re
from importlib import import_module
from types import ModuleType

from mlm_repro.lineage.errors import BadInput

TORCH_RANGE = ">=2.11,<2.16"
"""Versions of torch that fit, in pip's form: the lowest, and the first that is too high, as in
`pyproject.toml`. A build before a release, such as NVIDIA's 2.12.0a0, counts as that release."""


class ExtraMissing(BadInput):
    """Raised if a library that an extra installs is missing: exit code 2."""


def install_command(extra: str) -> str:
    """Return the pip command that installs this package with the optional libraries of its extra
    `extra`."""
    return f"pip install 'mlm-repro[{extra}]'"


def import_extra(module: str, extra: str) -> ModuleType:
    """Import and return the module named `module`, which the extra named `extra`, a group of
    optional libraries, provides.

    Raises ExtraMissing, with the command that installs the extra, if the module or something that
    it imports is missing: any ImportError counts.
    """
    try:
        return import_module(module)
    except ImportError as error:
        library = module.partition(".")[0]
        raise ExtraMissing(
            f"this command needs {library}: {install_command(extra)} ({error})"
        ) from error


def check_torch() -> None:
    """Raise BadInput if torch is not installed, or if its release is outside of `TORCH_RANGE`.
    Torch is not imported."""
    if not (number := installed("torch")):
        raise BadInput(f"torch is not installed: pip install 'torch{TORCH_RANGE}'")
    first, end = (_release(bound) for bound in TORCH_RANGE.split(","))
    if not first <= _release(number) < end:
        wanted = f"torch{TORCH_RANGE}"
        raise BadInput(f"torch {number} does not fit, {wanted} is needed: pip install '{wanted}'")


def installed(package: str) -> str | None:
    """Return, as text, the version of the installed package that pip calls `package`, or None if it
    is not installed. The package is not imported."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _release(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", text)[:2])
