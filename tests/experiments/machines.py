"""Commands on a machine whose GPUs a test decides."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent


def with_gpus(folder: Path, count: int, gibibytes: int) -> dict[str, str]:
    """Environment variables of a machine with so many GPUs: its `nvidia-smi` is the only program found."""
    folder.mkdir(parents=True, exist_ok=True)
    if count:
        script = folder / "nvidia-smi"
        script.write_text("#!/bin/sh\n" + f"echo 'A GPU, {gibibytes * 1024}'\n" * count)
        script.chmod(0o755)
    return {**os.environ, "PATH": str(folder), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def program(name: str, *arguments: object) -> list[str]:
    """The command line of one of this package's commands."""
    return [str(Path(sys.executable).with_name(name)), *map(str, arguments)]


def call(
    environment: dict[str, str], name: str, *arguments: object, timeout_seconds: float = 600
) -> "subprocess.CompletedProcess[str]":
    """Run one of this package's commands from the checkout."""
    return subprocess.run(
        program(name, *arguments), env=environment, cwd=ROOT, capture_output=True, text=True, timeout=timeout_seconds
    )
