"""Code version, machine, packages and threads of a run, collected without importing torch."""

import os
import platform
import shutil
import subprocess
import sys
from functools import cache
from itertools import chain
from os import environ
from pathlib import Path

from mlm_repro.lineage import VERSION
from mlm_repro.lineage.atomic import JSON
from mlm_repro.lineage.digest import sha256_file, sha256_json
from mlm_repro.lineage.extras import installed
from mlm_repro.lineage.files import Environment
from mlm_repro.lineage.shipped import HOME, wheel_state

PACKAGES = (
    "torch",
    "numpy",
    "tokenizers",
    "ftfy",
    "langdetect",
    "datasketch",
    "datasets",
    "safetensors",
)
THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "CUBLAS_WORKSPACE_CONFIG",
    "CUDA_VISIBLE_DEVICES",
)
KIND_OF_CPU = ("cpu family", "model", "CPU implementer", "CPU part")
"""Keys of /proc/cpuinfo that identify a processor, on x86 and on ARM."""


@cache
def describe_environment() -> Environment:
    """Return the Environment of this process: versions of this package, Python and libraries, state
    of the source, processor, cores, memory, GPUs, environment variables that decide threads and
    GPUs, and command line. Collected once for each process."""
    return Environment(
        mlm_repro=VERSION,
        source=source_state(),
        python=platform.python_version(),
        platform=f"{platform.system()} {platform.machine()}",
        cpu=cpu_name(),
        cores=available_cores(),
        memory_bytes=memory_bytes(),
        gpus=[gpu["name"] for gpu in list_gpus()],
        packages={name: number for name in PACKAGES if (number := installed(name))},
        variables={name: environ[name] for name in THREAD_VARIABLES if name in environ},
        argv=[Path(sys.argv[0]).name, *sys.argv[1:]],
    )


@cache
def code_digest() -> str:
    """Return the hexadecimal SHA-256 of the source files that a training runs: all Python, C++ and
    CUDA files in engine, data_pipeline and lineage. Computed once for each process.

    Releases whose source files are equal have equal digests.
    """
    rooms = ("data_pipeline", "engine", "lineage")
    paths = chain.from_iterable((HOME / room).rglob("*") for room in rooms)
    files = sorted(path for path in paths if path.suffix in (".py", ".cpp", ".cu", ".h"))
    return sha256_json({path.relative_to(HOME).as_posix(): sha256_file(path) for path in files})


def source_state() -> JSON:
    """Return the state of the code as a dict: the git `commit` of the clone, or the build of the
    wheel, that the code runs from, and `dirty`. `dirty` is True if files of the clone were changed
    or added, None for a wheel; both are None if git fails.

    For a copy of the files that is neither, `MLM_COMMIT` names the commit, and `dirty` is None;
    without it the dict is empty.
    """
    if not (HOME / ".git").exists():
        copied = environ.get("MLM_COMMIT")
        return wheel_state() or ({"commit": copied, "dirty": None} if copied else {})
    commit = _output("git", "-C", str(HOME), "rev-parse", "HEAD")
    # `status` would otherwise write the index, under a lock that stays there if a stop ends it.
    status = _output("git", "--no-optional-locks", "-C", str(HOME), "status", "--porcelain")
    return {"commit": commit or None, "dirty": None if status is None else bool(status)}


def available_cores() -> int:
    """Return the number of processor cores that this process may use: the cores in its affinity
    where the system has one, else all."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def memory_bytes() -> int | None:
    """Return the machine's physical memory in bytes, or None if the system does not report it."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return None


@cache
def list_gpus() -> list[JSON]:
    """Return a list of a dict with `name` and `memory_bytes` for each NVIDIA GPU that this process
    may use, as nvidia-smi reports them: the ones that `CUDA_VISIBLE_DEVICES` names, in its order
    and up to its first unknown name, or all if it is not set. The list is empty if nvidia-smi is
    missing or fails. A GPU whose memory nvidia-smi does not tell is left out. Read once for each
    process."""
    if shutil.which("nvidia-smi") is None:
        return []
    rows = _output(
        "nvidia-smi", "--query-gpu=uuid,name,memory.total", "--format=csv,noheader,nounits"
    )
    gpus = []
    for row in (rows or "").splitlines():
        identity, _, rest = row.partition(",")
        name, _, mebibytes = rest.rpartition(",")
        if mebibytes.strip().isdigit():
            gpus.append(
                (identity.strip(), {"name": name.strip(), "memory_bytes": int(mebibytes) * 2**20})
            )
    return _visible(gpus)


def _visible(gpus: list[tuple[str, JSON]]) -> list[JSON]:
    """Return a list of the descriptions of the GPUs that `CUDA_VISIBLE_DEVICES` names by number or
    by a prefix of the UUID, in that order and up to the first unknown name; of all GPUs if it is
    not set. `gpus` are pairs of UUID and description."""
    chosen = environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return [gpu for _, gpu in gpus]
    visible = []
    for name in map(str.strip, chosen.split(",")):
        known = [
            gpu
            for number, (identity, gpu) in enumerate(gpus)
            if name == str(number) or (name.startswith("GPU-") and identity.startswith(name))
        ]
        if not known:
            break
        visible.append(known[0])
    return visible


def user_cache(name: str) -> Path:
    """Return the path of this user's folder `name` for recomputable files, which may not exist yet:
    `$XDG_CACHE_HOME/mlm-repro/NAME` or, without that variable, the same below `~/.cache`. Raises
    RuntimeError if the latter is needed and the user has no home."""
    return Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mlm-repro" / name


def cpu_name() -> str:
    """Return the processor's name as text, with its family and model in brackets where the system
    gives them. Virtual machines shorten the name, so that it alone does not tell processors
    apart."""
    facts = _cpu_facts()
    name = facts.get("model name") or platform.processor() or platform.machine()
    kind = ", ".join(
        f"{key.removeprefix('cpu ')} {facts[key]}" for key in KIND_OF_CPU if key in facts
    )
    return f"{name} ({kind})" if kind else name


def processor_kind() -> tuple[str, str]:
    """Return a pair of texts: the architecture, such as x86_64, with the processor's vendor, family
    and model (or its name without these), and the flags of its vector instructions, sorted and with
    spaces between; the latter is empty if the system does not tell them."""
    facts = _cpu_facts()
    kind = (
        " ".join(f"{name} {facts[name]}" for name in ("vendor_id", *KIND_OF_CPU) if name in facts)
        or cpu_name()
    )
    flags = (facts.get("flags") or facts.get("Features") or "").split()
    vectors = sorted(
        flag for flag in flags if flag.startswith(("avx", "amx", "fma", "sve", "asimd", "bf16"))
    )
    return f"{platform.machine()} {kind}", " ".join(vectors)


def _cpu_facts() -> dict[str, str]:
    try:
        first = Path("/proc/cpuinfo").read_text(encoding="utf-8").partition("\n\n")[0]
    except OSError:
        return {}
    return {
        name.strip(): value.strip()
        for name, _, value in (line.partition(":") for line in first.splitlines())
    }


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
