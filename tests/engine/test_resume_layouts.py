"""A run on four ranks that is stopped goes on as if it had not been: bit for bit there, within
1e-10 elsewhere."""

import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest

from mlm_repro.engine.parallel.layout import Layout
from mlm_repro.engine.run.files import read_metrics, read_summary
from tests.commands import Program
from tests.engine.small_run import (
    assert_same_training,
    curve,
    finish,
    mlm_train,
    ranks_of,
    start,
    wait_for_iteration,
    write_toml,
)
from tests.processes import is_running

RECIPE = {
    "iterations": 30,
    "microbatch_size": 2,
    "precision": "fp64",
    "checkpoint_interval": 4,
    "validation_interval": 10,
}
TP2_PP2 = ("--ranks", 4, "--set", "parallel.tp=2", "--set", "parallel.pp=2")
BEFORE_THE_END = "wait_at=29"
"""A run of this recipe that is not complete when it is stopped, however fast the machine."""
TP1_PP2_DP2 = ("--ranks", 4, "--set", "parallel.tp=1", "--set", "parallel.pp=2")

pytestmark = pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="needs /proc")


@pytest.fixture(scope="module")
def toml(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_toml(tmp_path_factory.mktemp("recipe") / "small.toml", dataset, **RECIPE)


@pytest.fixture(scope="module")
def reference(toml: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run at tp 2, pp 2 from beginning to end without a stop."""
    runs = tmp_path_factory.mktemp("reference")
    code, out, err = mlm_train(toml, "--runs", runs, *TP2_PP2)
    assert code == 0, err
    return Path(out.removeprefix("complete: ").strip())


def kill_all(process: Program) -> None:
    """SIGKILL to the launcher and every rank at once; returns when none runs."""
    everyone = [process.pid, *ranks_of(process.pid)]
    for one in everyone:
        try:
            os.kill(one, signal.SIGKILL)
        except ProcessLookupError:
            continue
    process.communicate(timeout=300)
    deadline = time.monotonic() + 120
    while any(is_running(one) for one in everyone):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_kill_9_at_random_moments_changes_no_bit(
    toml: Path, reference: Path, tmp_path: Path
) -> None:
    rng = random.Random(2021)
    run = tmp_path / reference.name
    command = (toml, "--runs", tmp_path, *TP2_PP2)
    process = start(*command, plant=BEFORE_THE_END)
    # While it starts, or in its first iterations.
    deadline = time.monotonic() + rng.uniform(0.5, 6.0)
    while time.monotonic() < deadline and not (run / "metrics.jsonl").exists():
        time.sleep(0.01)
    kill_all(process)
    process = start(*command, plant=BEFORE_THE_END)
    wait_for_iteration(process, run, rng.randrange(4, 27))
    time.sleep(rng.uniform(0.0, 0.1))
    kill_all(process)
    assert not (run / "COMPLETE").exists()
    code, out, err = mlm_train("resume", run, "--ranks", 4)
    assert (code, out) == (0, f"complete: {run}\n"), err
    assert read_summary(run).layout == Layout(tp=2, pp=2, dp=1)
    assert_same_training(run, reference)


def test_another_layout_goes_on_with_the_run(toml: Path, reference: Path, tmp_path: Path) -> None:
    run = tmp_path / reference.name
    process = start(toml, "--runs", tmp_path, *TP2_PP2, plant=BEFORE_THE_END)
    wait_for_iteration(process, run, 12)
    process.send_signal(signal.SIGTERM)
    code, _, err = finish(process)
    assert code == 7, err
    reached = max(line["iteration"] for line in read_metrics(run))
    assert 12 <= reached < 30
    assert curve(run) == curve(reference)[: len(curve(run))]
    interrupted = shutil.copytree(run, tmp_path / "interrupted")
    code, out, err = mlm_train(toml, "--runs", tmp_path, *TP1_PP2_DP2)
    assert (code, out) == (0, f"complete: {run}\n"), err
    assert read_summary(run).layout == Layout(tp=1, pp=2, dp=2)
    assert curve(run)[: len(curve(interrupted))] == curve(interrupted)
    assert [point[:2] for point in curve(run)] == [point[:2] for point in curve(reference)]
    differences = [
        abs(a - b) for (*_, a), (*_, b) in zip(curve(run), curve(reference), strict=True)
    ]
    assert max(differences) <= 1e-10
    assert max(differences) > 0  # another order of additions, so it was another layout
