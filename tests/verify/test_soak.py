"""A process that trains and verifies again and again keeps nothing of it."""

import os
import tempfile
import threading
from pathlib import Path

import pytest

from mlm_repro.verify.recomputed import RunCheck
from tests.engine.conftest import write_dataset
from tests.engine.small_run import small_config, train

ROUNDS = 12
WARM = 4
"""Rounds after which whatever is made once has been made."""
MOST_GROWN = 8_000_000
"""Bytes of resident memory."""


def resident_bytes() -> int:
    """Resident memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def holds() -> tuple[int, int, set[str]]:
    """Open descriptors, threads and temporary files of this process."""
    temporary = {*os.listdir(tempfile.gettempdir())}
    return len(os.listdir("/proc/self/fd")), threading.active_count(), temporary


def test_a_dozen_trainings_leave_nothing_behind_in_their_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    dataset = write_dataset(tmp_path / "words")
    sizes, held = [], []
    for number in range(ROUNDS):
        config = small_config(dataset, iterations=6, warmup_iterations=1, checkpoint_interval=3)
        run = train(config, tmp_path / str(number)).path
        # The stand-in for a dataset has no manifest.
        assert [each for each in RunCheck(run).broken if str(dataset) not in each] == []
        sizes.append(resident_bytes())
        held.append(holds())
    assert held[WARM:] == [held[WARM]] * (ROUNDS - WARM)
    assert max(sizes[-3:]) - min(sizes[WARM : WARM + 3]) < MOST_GROWN, sizes
