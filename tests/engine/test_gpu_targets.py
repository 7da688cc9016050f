"""The attention kernels compiled for GPUs that are not here."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SHARED_LIMIT = 232_448
"""Bytes of shared memory that a program of an sm_90 may have (CUDA C++ Programming Guide, compute capabilities)."""


@pytest.mark.parametrize(("dtype", "head_dim"), [("bfloat16", 64), ("float16", 96), ("bfloat16", 160), ("float32", 96)])
def test_attention_fits_an_h100_and_uses_its_tensor_cores(tmp_path: Path, dtype: str, head_dim: int) -> None:
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.engine.gpu_targets", "90", dtype, str(head_dim)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=240)
    assert done.returncode == 0, done.stderr
    kernels = {each["kernel"]: each for each in map(json.loads, done.stdout.splitlines())}
    for drawn_or_summed in ("_draw", "_inner"):
        assert kernels.pop(drawn_or_summed)["stack"] == 0
    assert set(kernels) == {"_forward", "_to_query", "_to_key_value"}
    for name, kernel in kernels.items():
        assert kernel["shared"] <= SHARED_LIMIT, name
        if dtype != "float32":
            assert kernel["wgmma"], name
            assert kernel["stack"] == 0 or head_dim > 128, name
