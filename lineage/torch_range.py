"""The supported versions of torch, checked by the metadata of the installed package without importing it."""

import re

from lineage.errors import BadInput

TORCH_RANGE = ">=2.11,<2.16"
"""The range in `pyproject.toml`. A build before a release, such as NVIDIA's 2.12.0a0, counts as that release."""


def check_torch() -> None:
    """Raise BadInput if torch is absent or outside `TORCH_RANGE`."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        installed = version("torch")
    except PackageNotFoundError:
        raise BadInput(f"torch is not installed: pip install 'torch{TORCH_RANGE}'") from None
    first, end = (_release(part) for part in TORCH_RANGE.split(","))
    if not first <= _release(installed) < end:
        raise BadInput(
            f"torch {installed} does not fit, torch{TORCH_RANGE} is needed: pip install 'torch{TORCH_RANGE}'"
        )


def _release(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", text)[:2])
