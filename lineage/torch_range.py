"""Which torch the package works with. Nothing here imports torch: the installed package's metadata says its version."""

import re
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from lineage.errors import BadInput

TORCH_RANGE = ">=2.11,<2.16"
"""As `pyproject.toml` has it. A build ahead of a release, such as NVIDIA's 2.12.0a0, counts as that release."""


class UnfitTorch(BadInput, ImportError):
    """torch is not installed, or is a version outside `TORCH_RANGE`; to other libraries it cannot be imported."""


def check_torch() -> None:
    """Raises UnfitTorch."""
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
    """Let this process' first import of torch raise UnfitTorch where it does not fit; without an import nothing is."""
    sys.meta_path.insert(0, _Refusal())


class _Refusal(MetaPathFinder, Loader):
    """Where torch does not fit, it is found here before the installed one is, and its import raises UnfitTorch."""

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
