"""Two results of `mlm-bench` side by side: which ratios fell."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from experiments.bench.timing import LESS_IS_BETTER
from lineage.errors import BadInput

ALLOWED_FALL = 0.10
"""Part of a ratio that may be lost before it is flagged."""
RATIOS = {"ratio", "ratios", "times_faster"}
NAMES = ("case", "kernel", "stage", "name")


def compare(old: Path, new: Path) -> list[dict[str, Any]]:
    """Every ratio that both files have: where it stands, both values, the part lost, and whether it fell too far.

    Raises BadInput where a file is not a result, where they are of different benchmarks, or have no ratio in common.
    """
    before, after = _read(old), _read(new)
    if before.get("benchmark") != after.get("benchmark"):
        raise BadInput(f"{old} is of {before.get('benchmark')!r}, {new} of {after.get('benchmark')!r}")
    known = dict(_ratios(before))
    rows = []
    for place, value in _ratios(after):
        if not known.get(place):
            continue
        lost = value / known[place] - 1 if place[-1] in LESS_IS_BETTER else 1 - value / known[place]
        rows.append(
            {"ratio": " / ".join(place), "old": known[place], "new": value, "lost": lost, "fell": lost > ALLOWED_FALL}
        )
    if not rows:
        raise BadInput(f"{old} and {new} have no ratio in common")
    return rows


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadInput(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise BadInput(f"{path} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise BadInput(f"{path} is not a result of mlm-bench")
    return found


def _ratios(value: Any, place: tuple[str, ...] = (), is_ratio: bool = False) -> Iterator[tuple[tuple[str, ...], float]]:
    if isinstance(value, dict):
        for key, part in value.items():
            yield from _ratios(part, (*place, key), is_ratio or key in RATIOS)
    elif isinstance(value, list):
        for number, part in enumerate(value):
            names = [str(part[key]) for key in NAMES if isinstance(part, dict) and key in part]
            yield from _ratios(part, (*place, names[0] if names else str(number)), is_ratio)
    elif is_ratio and isinstance(value, int | float) and not isinstance(value, bool):
        yield place, float(value)
