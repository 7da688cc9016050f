"""Peak of resident memory of a piece of work, in a forked process of its own. Linux only."""

import ctypes
import re
from collections.abc import Callable
from pathlib import Path


def peak_bytes(make: Callable[[], Callable[[], object]]) -> int:
    """Bytes that `work = make(); work()` needs at most during `work()` above what `make()` left in use."""
    from engine.launch.forked import run_forked

    (found,) = run_forked(_measure, 1, make, timeout_seconds=600)
    return int(found)


def _measure(make: Callable[[], Callable[[], object]]) -> int:
    work = make()
    ctypes.CDLL(None).malloc_trim(0)  # what building it left free would hide what the work takes
    before = _status_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    work()
    return _status_bytes("VmHWM") - before


def _status_bytes(name: str) -> int:
    match = re.search(rf"^{name}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert match is not None
    return 1024 * int(match[1])
