"""Several ranks on one machine: they agree with one rank, stop together and never outlive their launcher."""

import os
import signal
import time
from functools import partial
from pathlib import Path

import pytest
import torch

from engine.config import RunConfig
from engine.launch.mesh import build_mesh
from engine.run.files import RankLayout, read_summary
from engine.run.resolved import default_ranks, resolve
from engine.trainer import Trainer
from lineage.errors import Interrupted
from tests.commands import Program
from tests.engine.small_run import (
    curve,
    finish,
    is_running,
    mlm_train,
    ranks_of,
    resolved,
    small_config,
    start,
    wait_for_iteration,
    write_toml,
)
from tests.ranks import run_ranks


def test_two_ranks_train_like_one(dataset: Path, uninterrupted: Path, tmp_path: Path) -> None:
    toml = write_toml(tmp_path / "small.toml", dataset)
    code, out, err = mlm_train(toml, "--runs", tmp_path / "runs", "--ranks", 2)
    run = tmp_path / "runs" / uninterrupted.name
    assert code == 0, err
    assert out == f"complete: {run}\n"
    assert read_summary(run).layout == RankLayout(tp=1, pp=1, dp=2)
    expected = curve(uninterrupted)
    assert [point[:2] for point in curve(run)] == [point[:2] for point in expected]
    assert [loss for *_, loss in curve(run)] == pytest.approx([loss for *_, loss in expected], abs=2e-3)
    assert [loss for *_, loss in curve(run)][:5] == pytest.approx([loss for *_, loss in expected][:5], abs=1e-5)


def stop_one_rank(config: RunConfig, root: Path) -> tuple[int, str]:
    run = resolve(config, 2)
    trainer = Trainer(run, run.begin(root), build_mesh(run.layout))
    trainer.stop_requested = torch.distributed.get_rank() == 1
    with pytest.raises(Interrupted) as caught:
        trainer.run_to_end()
    return trainer.state.iteration, str(caught.value)


@pytest.mark.parametrize("tp", [1, 2])
def test_a_signal_to_one_rank_stops_both_at_the_same_iteration(tp: int, dataset: Path, tmp_path: Path) -> None:
    values = small_config(dataset).model_dump() | {"parallel": {"tp": tp}}
    for iteration, sentence in run_ranks(
        stop_one_rank, 2, RunConfig.model_validate(values), tmp_path, timeout_seconds=300
    ):
        assert iteration == 1
        assert sentence.startswith("stopped after iteration 1 of 60")


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="needs /proc")
def test_ranks_stop_with_their_launcher_however_it_ends(dataset: Path, tmp_path: Path) -> None:
    toml = write_toml(tmp_path / "small.toml", dataset, iterations=100_000)
    run = resolved(small_config(dataset, iterations=100_000)).begin(tmp_path)
    command = (toml, "--runs", tmp_path, "--ranks", 2)
    process = start(*command)
    wait_for_iteration(process, run.path, 2)
    ranks = ranks_of(process.pid)
    assert len(ranks) == 2
    process.send_signal(signal.SIGTERM)
    code, _, err = finish(process)
    assert code == 7
    assert err.count("error: stopped after iteration ") == 1
    assert not any(Path(f"/proc/{rank}").exists() for rank in ranks)

    process = start(*command)
    reached = max(int(path.name.removeprefix("iter_")) for path in run.path.glob("checkpoints/iter_*"))
    wait_for_iteration(process, run.path, reached + 2)
    ranks = ranks_of(process.pid)
    process.kill()
    process.wait()
    deadline = time.monotonic() + 120
    while any(is_running(rank) for rank in ranks) and time.monotonic() < deadline:
        time.sleep(0.05)
    left = [rank for rank in ranks if is_running(rank)]
    for rank in left:
        os.kill(rank, signal.SIGKILL)
    process.communicate()
    assert left == []


def note_who_asks_for_a_gpu(folder: Path) -> None:
    launcher, is_available = os.getpid(), torch.cuda.is_available

    def asked() -> bool:
        (folder / ("launcher" if os.getpid() == launcher else "rank")).touch()
        return is_available()

    torch.cuda.is_available = asked


def test_the_launcher_touches_no_gpu(dataset: Path, tmp_path: Path) -> None:
    """CUDA cannot be used in a process whose parent used it before it forked."""
    toml = write_toml(tmp_path / "small.toml", dataset, iterations=6, warmup_iterations=3)
    prepare = partial(note_who_asks_for_a_gpu, tmp_path)
    code, _, err = finish(Program("mlm-train", toml, "--runs", tmp_path / "runs", "--ranks", 2, prepare=prepare))
    assert code == 0, err
    assert ((tmp_path / "rank").exists(), (tmp_path / "launcher").exists()) == (True, False)


@pytest.mark.parametrize(
    ("cores", "batch", "microbatch", "tp", "ranks"),
    [(4, 8, 2, 1, 4), (3, 8, 2, 1, 2), (16, 8, 8, 1, 1), (8, 8, 2, 2, 8), (1, 8, 2, 2, 2), (16, 6, 2, 1, 3)],
)
def test_as_many_ranks_as_divide_the_batch(
    cores: int, batch: int, microbatch: int, tp: int, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.run.resolved.list_gpus", list)
    monkeypatch.setattr("engine.run.resolved.available_cores", lambda: cores)
    values = small_config(Path("unused"), global_batch_size=batch, microbatch_size=microbatch).model_dump()
    assert default_ranks(RunConfig.model_validate(values | {"parallel": {"tp": tp}})) == ranks
