"""A machine whose GPUs a test decides."""

import os
from pathlib import Path


def with_gpus(folder: Path, count: int, gibibytes: int) -> dict[str, str]:
    """Environment variables of a machine with so many GPUs: its `nvidia-smi` is the only program
    found."""
    folder.mkdir(parents=True, exist_ok=True)
    if count:
        script = folder / "nvidia-smi"
        script.write_text("#!/bin/sh\n" + f"echo 'GPU-1, A GPU, {gibibytes * 1024}'\n" * count)
        script.chmod(0o755)
    return {**os.environ, "PATH": str(folder), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
