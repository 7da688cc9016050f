"""Place and build of this installation."""

import base64
import csv
import hashlib
from functools import cache
from pathlib import Path
from typing import Any

from lineage.digest import sha256_json

HOME = Path(__file__).resolve().parent.parent
"""The folder that holds `lineage` and the packages beside it: the root of a clone, or where a wheel was installed."""


@cache
def recorded_files() -> dict[str, str]:
    """Path and `sha256=…` of each file that a wheel installed below `HOME`. Empty in a clone."""
    record = next(HOME.glob("mlm_repro-*.dist-info/RECORD"), None)
    rows = csv.reader(record.read_text(encoding="utf-8").splitlines()) if record else ()
    return {
        row[0]: row[1]
        for row in rows
        if row and row[1] and "/" in row[0] and not row[0].startswith("..") and ".dist-info/" not in row[0]
    }


def wheel_state() -> dict[str, Any]:
    """Build of an installed wheel in the place of a commit; `dirty` is True if a file changed. Empty in a clone."""
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
