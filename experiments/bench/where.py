"""What a benchmark ran on: machine, packages, command, and what a GPU's driver says of it."""

import re
import shutil
import subprocess
from importlib.metadata import version
from importlib.util import find_spec

from lineage.environment import describe_environment
from lineage.files import Environment

BESIDE = ("accelerate", "datatrove", "lm_eval", "transformers", "triton")
"""Packages that contenders are made of."""
GPU_FACTS = (
    "driver_version",
    "clocks.sm",
    "clocks.max.sm",
    "clocks.mem",
    "power.draw",
    "power.limit",
    "temperature.gpu",
)
"""What `nvidia-smi` is asked for."""


def measured_here() -> Environment:
    """Machine, software and command of this process."""
    described = describe_environment()
    beside = {name: version(name) for name in BESIDE if find_spec(name)}
    changes = {"packages": described["packages"] | beside, "argv": _to_repeat(described["argv"])}
    return Environment.model_validate(described | changes)


def gpu_facts() -> dict[str, str]:
    """Driver, clocks, power and temperature of the first GPU, and torch's CUDA and cuDNN; without a GPU nothing."""
    if shutil.which("nvidia-smi") is None:
        return {}
    import torch

    command = ["nvidia-smi", f"--query-gpu={','.join(GPU_FACTS)}", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    values = done.stdout.partition("\n")[0].split(", ")
    facts = dict(zip(GPU_FACTS, values, strict=False))
    return facts | {"cuda": str(torch.version.cuda), "cudnn": str(torch.backends.cudnn.version())}


def _to_repeat(argv: list[str]) -> list[str]:
    """The command as anybody may give it: without its record, and of every other path only the file's name."""
    pairs = zip(["", *argv], argv, strict=False)
    kept = [word for before, word in pairs if before != "--json" and not word.startswith("--json")]
    return [re.sub(r"^(--[a-z-]+=)?.*/", r"\1", word, flags=re.DOTALL) for word in kept]
