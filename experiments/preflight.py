"""Checks of a machine before days of training: versions, matrix products, all-reduce, disk.

`python -m mlm_repro.experiments.preflight OPTIONS` is one rank of it, under torchrun or Slurm.
"""

import os
import platform
import shutil
import socket
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import torch.distributed as dist
import typer

from mlm_repro.engine.launch.local import launch
from mlm_repro.engine.launch.mesh import join_ranks, leave_ranks
from mlm_repro.lineage import VERSION
from mlm_repro.lineage.command import run_command
from mlm_repro.lineage.environment import available_cores, list_gpus, source_state
from mlm_repro.lineage.errors import HardwareFault, HardwareMissing
from mlm_repro.lineage.numbers import aligned
from mlm_repro.lineage.progress import announce, format_bytes
from mlm_repro.lineage.variables import rank

SLOWEST_SHARE = 0.5
"""Least share of the median rank's matrix rate that every rank must reach."""
OF_A_NODE = {"matrix products", "matrix rate", "all-reduce"}
"""Checks that the same ranks may pass on other nodes."""
MATMUL_WIDTH = {"cuda": 8192, "cpu": 512}
REDUCED_BYTES = {"cuda": 2**28, "cpu": 2**24}
WRITTEN_BYTES = 2**26
REPEATS = 5


class Seen(NamedTuple):
    """One rank's findings about its machine."""

    rank: int
    host: str
    versions: dict[str, str]
    product_is_right: bool
    product_flops_per_second: float
    sum_is_right: bool
    bus_bytes_per_second: float
    """Bus bandwidth of the all-reduce; 0 with one rank."""
    free_bytes: int
    written_bytes_per_second: float
    write_failure: str
    """Empty where a file was written and read back as it was."""

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.host})"


class Check(NamedTuple):
    """A line of the table."""

    name: str
    result: str
    """Finding that is shown where the check passed."""
    failure: str
    """One sentence; empty where the check passed."""


def preflight(runs: Path, ranks: int | None = None, needed_bytes: int = 0) -> None:
    """Check this machine with a rank on every GPU, or core where there is none; inside a launched rank, all ranks.

    Prints one table. Leaves with exit code 4 where a check failed or `runs` cannot be made.
    """
    ranks = ranks or len(list_gpus()) or available_cores()
    announce(f"{ranks} processes multiply and reduce", f"each writes {format_bytes(WRITTEN_BYTES)} below {runs} once")
    if code := launch(partial(_rank, runs, needed_bytes), ranks):
        raise SystemExit(code)


def checks(seen: Sequence[Seen], needed_bytes: int) -> list[Check]:
    """The checks that the ranks' findings pass or fail."""
    first, least = seen[0], min(seen, key=lambda rank: rank.free_bytes)
    unlike = (f"{name} is {value} on {first} and {other.versions.get(name)} on {other}" for other in seen
              for name, value in first.versions.items() if other.versions.get(name) != value)  # fmt: skip
    products, sums = (
        ", ".join(str(rank) for rank in seen if not getattr(rank, is_right))
        for is_right in ("product_is_right", "sum_is_right")
    )
    rates = sorted(rank.product_flops_per_second / 1e12 for rank in seen)
    slowest, median = min(seen, key=lambda rank: rank.product_flops_per_second), rates[len(rates) // 2]
    slow = f"{slowest} reaches {rates[0]:.3g} TFLOP/s, under half of the median rank's {median:.3g}"
    bus = min(rank.bus_bytes_per_second for rank in seen) / 1e9
    free, needed = f"{least.free_bytes / 1e9:.1f} GB", f"{needed_bytes / 1e9:.1f} GB"
    written = min(rank.written_bytes_per_second for rank in seen) / 1e6
    unwritten = (f"{rank}: {rank.write_failure}" for rank in seen if rank.write_failure)
    return [
        Check("versions", ", ".join(map(" ".join, first.versions.items())), next(unlike, "")),
        Check("matrix products", "equal to what they must be", products and f"a matrix product is wrong on {products}"),
        Check("matrix rate", f"{rates[0]:.3g} to {rates[-1]:.3g} TFLOP/s",
              slow if rates[0] < SLOWEST_SHARE * median else ""),
        Check("all-reduce",
              f"{len(seen)} ranks, {bus:.3g} GB/s of bus bandwidth" if bus else "one rank: nothing to reduce",
              sums and f"an all-reduce gave a wrong sum on {sums}"),
        Check("disk space", f"{free} free" + f", {needed} needed" * bool(needed_bytes),
              f"{least} has {free} of disk for runs, and {needed} are needed" * (least.free_bytes < needed_bytes)),
        Check("disk writes", f"{written:.0f} MB/s a rank, synced", next(unwritten, "")),
    ]  # fmt: skip


def faulty_hosts(seen: Sequence[Seen]) -> tuple[str, ...]:
    """Nodes with a rank that multiplies wrongly or too slowly; none where that is so of every node."""
    least = SLOWEST_SHARE * sorted(rank.product_flops_per_second for rank in seen)[len(seen) // 2]
    faulty = {rank.host for rank in seen if not rank.product_is_right or rank.product_flops_per_second < least}
    return tuple(sorted(faulty)) if faulty < {rank.host for rank in seen} else ()


def format_checks(checks: Sequence[Check]) -> str:
    """The table: a check that failed shows its sentence."""
    return "\n".join(aligned([("failed" if each.failure else "good  ", each.name, each.failure or each.result)
                              for each in checks]))  # fmt: skip


def _look(runs: Path) -> Seen:
    """This rank's findings. All ranks call it at once."""
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    torch.set_num_threads(1)
    right, rate = _multiply(device)
    sum_is_right, bus = _reduce(device) if dist.is_initialized() else (True, 0.0)
    written_rate, write_failure = _write(runs)
    return Seen(
        rank=rank(), host=os.environ.get("SLURMD_NODENAME") or socket.gethostname(),
        versions=_software(), product_is_right=right, product_flops_per_second=rate, sum_is_right=sum_is_right,
        bus_bytes_per_second=bus, free_bytes=shutil.disk_usage(runs).free, written_bytes_per_second=written_rate,
        write_failure=write_failure,
    )  # fmt: skip


def _software() -> dict[str, str]:
    software = {"mlm-repro": VERSION, "python": platform.python_version(), "torch": torch.__version__}
    if commit := source_state().get("commit"):
        software["commit"] = str(commit)[:12]
    if torch.cuda.is_available():
        software["CUDA"] = str(torch.version.cuda)
        software["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    return software


def _multiply(device: torch.device) -> tuple[bool, float]:
    """True if a product of -1, 0 and 1, which is exact in every format, is right; and the best of a few rates."""
    width, dtype = MATMUL_WIDTH[device.type], torch.float16 if device.type == "cuda" else torch.float32
    drawn = torch.randint(0, 16, (2, width, width), generator=torch.Generator().manual_seed(0)).to(device)
    a, b = ((drawn == 0).to(dtype) - (drawn == 1).to(dtype)).unbind()
    ones = torch.ones(width, 1, dtype=torch.float64, device=device)
    right = torch.equal((a @ b).double() @ ones, a.double() @ (b.double() @ ones))
    clock = time.perf_counter if device.type == "cuda" else time.process_time  # other work on a core does not count
    return right, 2 * width**3 / min(_timed(lambda: a @ b, clock) for _ in range(REPEATS))


def _reduce(device: torch.device) -> tuple[bool, float]:
    """True if the sum over ranks is exact, and the best of a few bus bandwidths (2(n − 1)/n · bytes/seconds)."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    tensor = torch.full((REDUCED_BYTES[device.type] // 4,), float(rank + 1), device=device)
    dist.all_reduce(tensor)
    right = bool((tensor == ranks * (ranks + 1) / 2).all())
    tensor.zero_()
    best = min(_timed(lambda: dist.all_reduce(tensor)) for _ in range(REPEATS))
    return right, 2 * (ranks - 1) / ranks * REDUCED_BYTES[device.type] / best


def _timed(operation: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    start = clock()
    operation()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return clock() - start


def _write(runs: Path) -> tuple[float, str]:
    """Rate of a synced write below `runs`, and what went wrong with it or with reading it back."""
    path = runs / f".preflight-{socket.gethostname()}-{os.getpid()}"
    data = os.urandom(2**20) * (WRITTEN_BYTES // 2**20)
    try:
        start = time.perf_counter()
        with path.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        seconds = time.perf_counter() - start
        right = path.read_bytes() == data
        path.unlink()
    except OSError as error:
        path.unlink(missing_ok=True)
        return 0.0, f"{runs} cannot be written to: {error.strerror}"
    return WRITTEN_BYTES / seconds, "" if right else "a file read back differs from what was written"


def _rank(runs: Annotated[Path, typer.Option()], needed_bytes: Annotated[int, typer.Option()] = 0) -> None:
    """One rank's part; rank 0 prints the table."""
    try:
        runs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise HardwareMissing(f"{runs} cannot be made: {error.strerror}") from error
    join_ranks()
    try:
        mine = _look(runs)
        seen: list[Any] = [mine]
        if dist.is_initialized():
            seen = [None] * dist.get_world_size()
            dist.all_gather_object(seen, mine)
    finally:
        leave_ranks()
    done = checks(seen, needed_bytes)
    if mine.rank == 0:
        print(format_checks(done), flush=True)
    if failed := {check.name: check.failure for check in done if check.failure}:
        said = "; ".join(failed.values())
        raise HardwareFault(said, faulty_hosts(seen)) if failed.keys() <= OF_A_NODE else HardwareMissing(said)


def main() -> None:
    """Entry point of a rank."""
    app = typer.Typer()
    app.command()(_rank)
    run_command(app)


if __name__ == "__main__":
    main()
