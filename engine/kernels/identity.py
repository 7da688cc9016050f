"""The numerics identity: machine and libraries on which the bits of a computation depend."""

import os
from functools import cache
from itertools import chain
from pathlib import Path

import torch

from mlm_repro.lineage.digest import sha256_file, sha256_json
from mlm_repro.lineage.environment import list_gpus, processor_kind

KERNELS = Path(__file__).parent
LIBRARIES = ("Math Kernel Library", "MKL-DNN", "OpenBLAS", "BLAS_INFO")
LIMITS = ("MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA")
"""Names of environment variables that make a library choose other instructions than the processor's
best."""


@cache
def numerics_identity(on_gpu: bool) -> dict[str, str]:
    """Return the facts that decide the bits of a computation in this process as a dict of texts:
    `processor`, `instructions`, `blas` with the environment variables that limit it, `torch` and
    `kernels`, a digest of this package's kernel files. Runs of one configuration and layout have
    the same bits wherever these are equal.

    With `on_gpu`, the first GPU's name and CUDA's version replace processor and BLAS. Later calls
    return the same dict.
    """
    kind, instructions = processor_kind()
    # torch names its BLAS in a text alone.
    lines = torch.__config__.show().splitlines()
    parts = chain.from_iterable(line.split(",") for line in lines)
    built = [part.rpartition(": ")[2].strip(" -") for part in parts]
    # Part of the identity, because other instructions round otherwise.
    limits = [f"{name}={os.environ[name]}" for name in LIMITS if name in os.environ]
    on_cpu = {
        "processor": kind,
        "instructions": f"{torch.backends.cpu.get_cpu_capability()}: {instructions}",
        "blas": ", ".join(
            [part for part in built if any(name in part for name in LIBRARIES)] + limits
        ),
    }
    gpu = (
        {"processor": list_gpus()[0]["name"], "blas": f"CUDA {torch.version.cuda}"}
        if on_gpu
        else {}
    )
    # Our kernels count like a library, because a changed loop may round otherwise.
    files = {
        str(path.relative_to(KERNELS)): sha256_file(path) for path in sorted(KERNELS.rglob("*.py"))
    }
    return on_cpu | gpu | {"torch": torch.__version__, "kernels": sha256_json(files)}
