"""The supported versions of torch, checked by the metadata of the installed package without importing it."""

import re
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from lineage.errors import BadInput

TORCH_RANGE = ">=2.11,<2.16"
"""The range in `pyproject.toml`. A build before a release, such as NVIDIA's 2.12.0a0, counts as that release."""


class UnfitTorch(BadInput, ImportError):
    """torch is not installed or outside `TORCH_RANGE`. An ImportError, so that libraries treat torch as absent."""


def check_torch() -> None:
    """Raise UnfitTorch if torch is absent or outside `TORCH_RANGE`."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        installed = version("torch")
    except PackageNotFoundError:
        raise UnfitTorch(f"torch is not installed: pip install 'torch{TORCH_RANGE}'") from None
    first, end = (_release(part) for part in TORCH_RANGE.split(","))
    if not first <= _release(installed) < end:
        raise UnfitTorch(
            f"torch {installed} does not fit, torch{TORCH_RANGE} is needed: pip install 'torch{TORCH_RANGE}'"
        )


def refuse_unfit_torch() -> None:
    """Make the first import of an unfit torch in this process raise UnfitTorch."""
    sys.meta_path.insert(0, _Refusal())


class _Refusal(MetaPathFinder, Loader):
    """An import hook that answers for torch if the installed one does not fit."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: object = None) -> ModuleSpec | None:
        if name == "torch":
            try:
                check_torch()
            except UnfitTorch:
                return ModuleSpec(name, self)
        return None

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        check_torch()


def _release(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", text)[:2])
