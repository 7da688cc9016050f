"""Memory of a rank: its measured peak, its closed form, and remedies where it does not suffice."""

import math
import re
import resource
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pydantic import ValidationError

from mlm_repro.engine.config import RunConfig
from mlm_repro.engine.guard import Guard, Iteration
from mlm_repro.engine.parallel.layout import layout_of
from mlm_repro.engine.parallel.mesh import ParallelMesh
from mlm_repro.engine.run.resolved import ResolvedRun
from mlm_repro.lineage.errors import BadInput, HardwareMissing

STATUS = Path("/proc/self/status")
WORTH = 0.98
"""A remedy is offered only if the run then needs less than this share of the memory that it needs
now."""


class PeakMemory:
    """Meter of this process's peak memory on `device`, which the method `bytes` returns. It is made
    before the memory is used.

    On a GPU torch's allocator counts the peak since the object was made, for which the constructor
    resets torch's own peak. On a CPU, where torch keeps no count, it is the peak of the resident
    set since the process began, less the resident set when the object was made: with freed buffers
    that are kept for reuse and the libraries that torch loads at its first step (about 0.15 GB).
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        if device.type == "cuda":
            torch.cuda.init()  # until then the allocator knows no device
            torch.cuda.reset_peak_memory_stats(device)
        self.first_iteration_bytes = 0
        """Peak in bytes up to the end of the first iteration, which MemoryGuard sets; 0 before."""
        self._before = 0
        self.measured_by = "torch.cuda.max_memory_allocated"
        if device.type != "cuda":
            self._before = _resident_bytes("VmRSS")
            self.measured_by = "growth of the peak resident set"

    def bytes(self) -> int:
        """Return the peak of this process's memory so far, an integer in bytes. On a GPU it is the
        most that torch has allocated there since this object was made. On a CPU it is the peak of
        the resident set since the process began, less the resident set when this object was made,
        at least 0."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        return max(_resident_bytes("VmHWM") - self._before, 0)


def _resident_bytes(field: str) -> int:
    """Return this process's resident set in bytes: `field` is `VmRSS` for the set now, `VmHWM` for
    its peak. Without /proc, as on macOS, it is always the peak.

    On Linux `getrusage` would not do: its peak includes the process that started this one, before
    `exec`.
    """
    if not STATUS.exists():
        unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    # Read from the process's own file, without a library: this is looked at after every first
    # iteration.
    line = next(
        line
        for line in STATUS.read_text(encoding="ascii").splitlines()
        if line.startswith(f"{field}:")
    )
    return int(line.split()[1]) * 1024


class MemoryGuard(Guard):
    """Guard that sets `first_iteration_bytes` of the constructor's `memory`, a PeakMemory, to the
    peak memory in bytes up to the end of the first iteration. It warns once, in the metrics too,
    when torch's allocator on a GPU has emptied its cache to find room in a later iteration; on a
    CPU it never warns.

    The allocator then waits for the GPU, returns its cache and tries again, which cost "Scaling
    Transformer-XL to 128 GPUs" up to 30 % of its speed.
    """

    def __init__(self, memory: PeakMemory) -> None:
        self._memory = memory
        self._retries: int | None = None
        self._has_told = False

    def after(self, iteration: Iteration) -> str:
        if not self._memory.first_iteration_bytes:
            self._memory.first_iteration_bytes = self._memory.bytes()
        device = self._memory.device
        warning = self.look(torch.cuda.memory_stats(device) if device.type == "cuda" else {})
        if warning:
            iteration.line.warning = warning
        return warning

    def look(self, statistics: Mapping[str, int]) -> str:
        """Return a warning, as text, when the number of the allocator's retries has grown since the
        last call, but only the first time that it has; otherwise an empty text.

        `statistics` is the dict that `torch.cuda.memory_stats` returns, and empty on a CPU. Retries
        before the first call do not count.
        """
        before = self._retries
        self._retries = statistics.get("num_alloc_retries", 0)
        if self._has_told or before is None or self._retries <= before:
            return ""
        self._has_told = True
        reserved = statistics.get("reserved_bytes.all.peak", 0) / 2**30
        return (
            f"the GPU's memory is nearly full ({reserved:.1f} GiB reserved): the allocator emptied"
            f" its cache {self._retries - before} times in this iteration, and every time the GPU"
            " waits; a smaller train.microbatch_size or parallel.recompute avoids it"
        )


class OutOfMemory(HardwareMissing):
    """Error that ends a training when a rank fails to allocate memory, on its GPU or on the host:
    exit code 4. `explaining_out_of_memory` raises it in place of the allocation's own error."""


@contextmanager
def explaining_out_of_memory(run: ResolvedRun, mesh: ParallelMesh, when: str) -> Iterator[None]:
    """Context manager: turn a failed allocation in the block, on a GPU or in the host's memory,
    into OutOfMemory, with a message that names this rank of `mesh` and says `when` it happened;
    other errors pass. Before that, the first rank that fails prints to stderr the memory that a
    rank of `run` needs and the changes that need less."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        is_allocation = isinstance(error, (MemoryError, torch.OutOfMemoryError))
        if not is_allocation and "can't allocate memory" not in str(error):
            raise
        # The table below needs memory itself.
        traceback.clear_frames(error.__traceback__)  # gives back what the failed pass held
        request = re.search("tried to allocate .*", str(error), re.IGNORECASE)
        is_first = _is_first_to_say()
        if is_first:
            print(describe_memory(run), file=sys.stderr, flush=True)
        rank = mesh.layout.rank(mesh.tp.rank, mesh.pp.rank, mesh.dp.rank)
        sentence = f"rank {rank} ran out of memory {when}" + (
            f": {request[0].lower()}" if request else ""
        )
        raise OutOfMemory(sentence, on_every_rank=is_first) from error


def _is_first_to_say() -> bool:
    """Return True if this rank is the first to run out of memory, so that one rank prints the
    message for all. A second call, on any rank, returns False, as does any call after rank 0 has
    ended.

    Always True without a process group: where ranks are threads, the first that fails ends the
    others before they compute again.
    """
    if not dist.is_initialized():
        return True
    try:
        return bool(dist.distributed_c10d._get_default_store().add("mlm/out-of-memory", 1) == 1)
    except RuntimeError:  # rank 0, which keeps the store, has ended
        return False


def describe_memory(run: ResolvedRun) -> str:
    """Return a table as text of several lines, in GiB, of the memory of the largest rank of a run,
    a ResolvedRun, by the closed form: model and optimizer, activations, a checkpoint's copy if
    there is one, the total, and the total with each remedy. Without a remedy a last line says that
    none needs clearly less."""
    memory = run.memory
    offered = remedies(run)
    rows = [("model and optimizer", memory.state), ("activations", memory.activations)]
    rows += [("copy for checkpoints", memory.copied)] if memory.copied else []
    rows.append(("the largest rank, by the closed form", memory.total))
    rows += [(f"with {change}", size) for change, size in offered]
    width = max(len(name) for name, _ in rows)
    lines = [f"{name:{width}}  {size / 2**30:10.3f} GiB" for name, size in rows]
    return "\n".join(
        lines
        if offered
        else [
            *lines,
            "no smaller microbatch, recomputation or division over ranks needs clearly less: take"
            " a smaller model",
        ]
    )


def remedies(run: ResolvedRun) -> list[tuple[str, int]]:
    """Return a list of pairs, the one that needs the least memory first: the options of the command
    line that change one setting of the run, as one text, such as `--set parallel.tp=4 --ranks=8`,
    and the bytes that the largest rank then needs, by the closed form. The list is empty if no
    change helps.

    Seven changes are tried: half the microbatch, selective or full recomputation, a sharded
    optimizer or model, and twice the `tp` or the `pp`. The list has those that the engine allows
    for this run and with which the largest rank needs less than 98 % of the bytes that it needs
    without a change. A change of `tp` or `pp` may need more ranks, which its options then name.
    """
    config = run.config
    ranks = run.layout.world_size
    parallel = config.parallel
    changes: list[tuple[str, str, Any]] = [
        ("train", "microbatch_size", config.train.microbatch_size // 2),
        ("parallel", "recompute", "selective"),
        ("parallel", "recompute", "full"),
        ("parallel", "shard_optimizer", True),
        ("parallel", "shard_parameters", True),
        ("parallel", "tp", 2 * parallel.tp),
        ("parallel", "pp", 2 * parallel.pp),
    ]
    offered = []
    for section, key, value in changes:
        values = config.model_dump()
        values[section][key] = value
        needed = (
            ranks if key not in ("tp", "pp") else math.lcm(ranks, 2 * parallel.tp * parallel.pp)
        )
        try:
            changed = RunConfig.model_validate(values)
            size = ResolvedRun(changed, run.dataset, layout_of(changed, needed)).memory.total
        except (ValidationError, BadInput):
            continue
        if size < WORTH * run.memory.total:
            more = f" --ranks={needed}" if needed != ranks else ""
            offered.append((f"--set {section}.{key}={str(value).lower()}{more}", size))
    return sorted(offered, key=lambda remedy: remedy[1])
