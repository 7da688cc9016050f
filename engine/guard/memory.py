"""How much memory this rank has taken, to be held against the closed form of `engine.costs`."""

import resource
from collections.abc import Mapping
from pathlib import Path

import torch

from engine.guard import Guard, Iteration

STATUS = Path("/proc/self/status")


class PeakMemory:
    """The most memory taken since this object was made.

    On a GPU what torch's allocator handed out; on a CPU, where torch keeps no such count, the growth of the process's
    resident set: freed buffers kept for reuse count as taken, and so do the libraries torch loads at its first step
    (about 0.15 GB).
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        self.first_iteration_bytes = 0
        """The peak after the first iteration, which MemoryGuard reads."""
        self._before = 0 if device.type == "cuda" else _resident_bytes("VmRSS")

    @property
    def measured_by(self) -> str:
        """What counts the bytes."""
        return "torch.cuda.max_memory_allocated" if self.device.type == "cuda" else "growth of the peak resident set"

    def bytes(self) -> int:
        """Bytes at the peak."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        return max(_resident_bytes("VmHWM") - self._before, 0)


class MemoryGuard(Guard):
    """Reads the peak once the first iteration is over, and warns when training runs too close to a GPU's memory.

    Torch's caching allocator then finds no room, waits for the GPU, gives its cache back and tries again, which cost
    "Scaling Transformer-XL to 128 GPUs" up to 30 % of its speed.
    """

    def __init__(self, memory: PeakMemory) -> None:
        self._memory = memory
        self._retries: int | None = None
        self._has_told = False

    def after(self, iteration: Iteration) -> str:
        """Add the warning to the metrics."""
        if not self._memory.first_iteration_bytes:
            self._memory.first_iteration_bytes = self._memory.bytes()
        device = self._memory.device
        warning = self.look(torch.cuda.memory_stats(device) if device.type == "cuda" else {})
        if warning:
            iteration.line.warning = warning
        return warning

    def look(self, statistics: Mapping[str, int]) -> str:
        """A warning, the first time that retries grew since the last look; otherwise nothing.

        `statistics` are those of `torch.cuda.memory_stats`. Retries before the first look do not count.
        """
        before, self._retries = self._retries, statistics.get("num_alloc_retries", 0)
        if self._has_told or before is None or self._retries <= before:
            return ""
        self._has_told = True
        reserved = statistics.get("reserved_bytes.all.peak", 0) / 2**30
        return (
            f"the GPU's memory is nearly full ({reserved:.1f} GiB reserved): the allocator emptied its "
            f"cache {self._retries - before} times in this iteration, and every time the GPU waits; a smaller "
            "train.microbatch_size or parallel.recompute avoids it"
        )


def _resident_bytes(field: str) -> int:
    """`VmRSS`, the resident set now, or `VmHWM`, its peak; the peak in both cases where the system does not tell.

    `getrusage` would not do on Linux: its peak goes back to before `exec`, to the process that started this one.
    """
    if not STATUS.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    line = next(line for line in STATUS.read_text(encoding="ascii").splitlines() if line.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024
