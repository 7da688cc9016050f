"""Place and build of this installation."""

from pathlib import Path
from typing import Any

HOME = Path(__file__).resolve().parent.parent
"""The folder that holds `lineage` and the packages beside it: the root of a clone, or where a wheel was installed."""


def wheel_state() -> dict[str, Any]:
    """Build of an installed wheel in the place of a commit, by the list of its files. Empty in a clone."""
    from lineage.digest import sha256_file

    record = next(HOME.glob("mlm_repro-*.dist-info/RECORD"), None)
    return {"commit": f"wheel-{sha256_file(record)[:34]}", "dirty": None} if record else {}
