"""What a GPU is given in a layer and in an update is what docs/gpu.md says, and nothing of it comes
from the host."""

import json
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STREAM = 1024 * 8 * 1920 * 2 / 1e6
"""Megabytes of [s, b, h] in bf16."""
WEIGHTS = 1920 * (12 * 1920 + 13 + 512 + 1024 + 2)
"""Of a model of one layer with 512 words."""
LEAST = {
    "bias_dropout_add.bias_dropout_add": 9 * STREAM,
    "bias_dropout_add.gradient": 11 * STREAM,
    "bias_gelu.bias_gelu": 8 * STREAM,
    "bias_gelu.bias_gelu_gradient": 12 * STREAM,
    "adamw.adamw": 30 * WEIGHTS / 1e6,
}


@cache
def counted() -> dict[str, dict[str, tuple[int, int]]]:
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "tests.engine.launches"]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, timeout=600, check=True
    )
    found: dict[str, dict[str, tuple[int, int]]] = json.loads(done.stdout)
    return found


def rows(part: str) -> dict[str, tuple[str, str]]:
    """Launches and megabytes now, by name, of a part of the page's table."""
    page = (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")
    found = re.findall(
        rf"^\| {part}: ([^|]+) \| [^|]+ \| ([^|]+) \| [^|]+ \| ([^|]+) \|$", page, re.MULTILINE
    )
    return {name: (number, size) for name, number, size in found}


@pytest.mark.parametrize("part", ["layer", "update"])
def test_the_page_has_the_launches_and_their_bytes(part: str) -> None:
    now = counted()[part]
    shown = {name: (str(number), f"{size / 1e6:,.1f}") for name, (number, size) in now.items()}
    shown["all"] = (
        str(sum(n for n, _ in now.values())),
        f"{sum(size for _, size in now.values()) / 1e6:,.1f}",
    )
    assert {name: each for name, each in rows(part).items() if each[0] != "—"} == shown


def test_no_key_is_copied_in_a_layer_and_kernels_move_little_more_than_they_must() -> None:
    """In the update weights and moments are read and written, the gradient is read, and a copy in
    16 bits written."""
    layer, update = counted()["layer"], counted()["update"]
    assert not any("host" in name for name in layer | update)
    for name, least in LEAST.items():
        assert least <= (layer | update)[name][1] / 1e6 < 1.1 * least
