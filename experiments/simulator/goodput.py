"""Goodput: the interval between checkpoints that loses the least to failures, and the share of the
time that is kept.

Failures come at random at a constant rate, also while a checkpoint is written and while the ranks
start again (Daly 2006, "A higher order estimate of the optimum checkpoint interval for restart
dumps"). Training pauses while its state is copied. The copy is written beside training, and a
failure before the write ends loses that checkpoint. Imports no torch.
"""

import math
from typing import NamedTuple

from mlm_repro.lineage.progress import format_duration

FAILURES_PER_GPU_HOUR = 419 / (54 * 24 * 16_384)
"""Failures of a GPU in an hour. Llama 3 (arXiv:2407.21783, Section 3.3.4): 419 unexpected
interruptions of 16,384 H100 GPUs in 54 days."""
RESTART_SECONDS = 300.0
"""Default seconds from a failure to the first iteration after it."""
WRITTEN_BYTES_PER_SECOND = 100e6
"""Default rate at which a rank writes a checkpoint while all ranks write: low for a shared file
system."""
COPIED_BYTES_PER_SECOND = 5e9
"""Rate at which a rank copies its state to the host: low for page-locked memory on PCIe 3, which
carries 16e9."""


class Failures(NamedTuple):
    """A job's times, all in seconds and in this order: `mean`, the mean time between failures;
    `checkpoint`, to write a checkpoint beside training; `restart`, from a failure to the first
    iteration after it; and `copy`, to copy a checkpoint to the host, while training pauses."""

    mean: float
    """Mean seconds between failures of any of the job's GPUs."""
    checkpoint: float
    """Seconds to write a checkpoint beside training."""
    restart: float
    copy: float
    """Seconds for which a checkpoint pauses training."""

    @classmethod
    def of(
        cls,
        gpus: int,
        written_bytes: int,
        rate: float = WRITTEN_BYTES_PER_SECOND,
        restart: float = RESTART_SECONDS,
        per_gpu_hour: float = FAILURES_PER_GPU_HOUR,
    ) -> "Failures":
        """Return the Failures of a job on `gpus` GPUs, with all times in seconds: the mean time
        between failures, infinite if `per_gpu_hour`, the failures of a GPU in an hour, is 0; the
        time to write a checkpoint, `written_bytes` at `rate` bytes a second; the time to copy it to
        the host, the same bytes at COPIED_BYTES_PER_SECOND; and `restart` as it is given.

        The caller gives as `written_bytes` the most that any one rank writes of a checkpoint.
        """
        mean = 3600 / (per_gpu_hour * gpus) if per_gpu_hour else math.inf
        return cls(mean, written_bytes / rate, restart, written_bytes / COPIED_BYTES_PER_SECOND)

    @property
    def best_interval(self) -> float:
        """The seconds of training between checkpoints that lose the least, computed from the
        attributes `mean` and `copy` (Daly's Equation 37); infinite if `mean` is infinite. They are
        at least `checkpoint`, the time to write one beside training, because only one is written at
        a time."""
        if self.copy >= 2 * self.mean:
            return max(self.mean, self.checkpoint)
        ratio = self.copy / (2 * self.mean)
        best = (
            math.sqrt(2 * self.copy * self.mean) * (1 + math.sqrt(ratio) / 3 + ratio / 9)
            - self.copy
        )
        return max(best, self.checkpoint)

    def describe(self, interval: float) -> str:
        """Return a clause that begins with "it fails every": how often the job fails and is saved,
        and the share of its time that is kept. `interval` is the seconds of training between
        checkpoints; it and the mean time between failures must be finite."""
        every = " and is saved every ".join(map(format_days, (self.mean, interval)))
        return (
            f"it fails every {every}: {self.share(interval):.1%} of the time is training that is"
            " kept"
        )

    def share(self, interval: float) -> float:
        """Return the share of a job's time, 0 to 1, that is training and is kept in spite of
        failures (Daly's Equation 20), with `interval` seconds of training between checkpoints. The
        attributes have the other times, in seconds: `mean` between failures, `restart`,
        `checkpoint` to write a checkpoint and `copy` to copy it to the host. `interval` and `mean`
        must be finite."""
        lost = math.exp(-(self.restart + self.checkpoint) / self.mean) / math.expm1(
            (interval + self.copy) / self.mean
        )
        return interval / self.mean * lost


def format_days(seconds: float, longest: float = 0.0) -> str:
    """Return the time `seconds` as a text: in days if it, or `longest`, also in seconds, is more
    than two days, else as `format_duration` does."""
    return (
        f"{seconds / 86400:,.1f} days"
        if max(seconds, longest) > 2 * 86400
        else format_duration(seconds)
    )
