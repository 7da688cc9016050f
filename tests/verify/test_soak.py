"""A process that trains and verifies again and again keeps nothing of it."""

import ctypes
import os
import re
import tempfile
import threading
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from mlm_repro.verify.recomputed import RunCheck
from tests.commands import FORKED
from tests.engine.conftest import write_dataset
from tests.engine.small_run import small_config, train

ROUNDS = 12
WARM = 4
"""Rounds after which whatever is made once has been made."""
MOST_GROWN = 2_000_000
"""Bytes that a process keeps."""


class HeapFacts(ctypes.Structure):
    """`struct mallinfo` of glibc; `uordblks` is the bytes of the heap that are in use."""

    _fields_ = (
        ("before", ctypes.c_uint * 7),
        ("uordblks", ctypes.c_uint),
        ("after", ctypes.c_uint * 2),
    )


def kept_bytes() -> int:
    """Bytes of the heap that are in use, and resident memory outside of it. The heap itself grows
    by 8 MB at once, where none of its holes has room for a large buffer."""
    mallinfo = ctypes.CDLL(None).mallinfo
    mallinfo.restype = HeapFacts
    kept: int = mallinfo().uordblks
    for mapping in re.split(r"^(?=\w+-)", Path("/proc/self/smaps").read_text(), flags=re.MULTILINE):
        if found := re.search(r"^Rss: +(\d+) kB$", mapping, re.MULTILINE):
            kept += int(found[1]) * 1024 * ("[heap]" not in mapping)
    return kept


def holds() -> tuple[int, int, set[str]]:
    """Open descriptors, threads and temporary files of this process."""
    temporary = {*os.listdir(tempfile.gettempdir())}
    return len(os.listdir("/proc/self/fd")), threading.active_count(), temporary


def train_and_verify(folder: Path) -> tuple[list[int], list[tuple[int, int, set[str]]]]:
    """What this process takes and holds after each of the rounds."""
    (folder / "temporary").mkdir()
    tempfile.tempdir = str(folder / "temporary")
    dataset = write_dataset(folder / "words")
    sizes, held = [], []
    for number in range(ROUNDS):
        config = small_config(dataset, iterations=6, warmup_iterations=1, checkpoint_interval=3)
        run = train(config, folder / str(number)).path
        # The stand-in for a dataset has no manifest.
        assert [each for each in RunCheck(run).broken if str(dataset) not in each] == []
        sizes.append(kept_bytes())
        held.append(holds())
    return sizes, held


def test_a_dozen_trainings_leave_nothing_behind_in_their_process(tmp_path: Path) -> None:
    """In a process of their own: what other tests left may go during the rounds."""
    with ProcessPoolExecutor(1, FORKED) as process:
        sizes, held = process.submit(train_and_verify, tmp_path).result()
    assert held[WARM:] == [held[WARM]] * (ROUNDS - WARM)
    assert max(sizes[-3:]) - min(sizes[WARM : WARM + 3]) < MOST_GROWN, sizes
