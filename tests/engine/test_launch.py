"""Several ranks on one machine agree with one rank, stop together, go on alike and never outlive
their launcher."""

import os
import signal
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from mlm_repro.engine.config import RunConfig
from mlm_repro.engine.launch.mesh import build_mesh, local_device
from mlm_repro.engine.launch.threads import RanksFailed, run_threads
from mlm_repro.engine.parallel.layout import Layout
from mlm_repro.engine.run.resolved import default_ranks
from mlm_repro.engine.trainer import Trainer
from mlm_repro.lineage.errors import BadInput, Interrupted
from tests.commands import Program, call
from tests.engine.small_run import (
    assert_same_training,
    finish,
    ranks_of,
    resolved,
    small_config,
    start,
    train,
    wait_for_iteration,
    write_toml,
)
from tests.processes import is_running
from tests.ranks import run_ranks


@pytest.mark.parametrize(
    ("variables", "number"),
    [
        ({}, 0),
        ({"SLURM_LOCALID": "3"}, 3),
        ({"SLURM_LOCALID": "3", "LOCAL_RANK": "1"}, 1),
    ],
)
def test_a_rank_takes_the_gpu_of_its_number_on_its_machine(
    variables: dict[str, str], number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`srun` alone sets SLURM_LOCALID, torchrun LOCAL_RANK."""
    for name in ("LOCAL_RANK", "SLURM_LOCALID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert local_device() == torch.device("cuda", number)


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
    reached = max(
        int(path.name.removeprefix("iter_")) for path in run.path.glob("checkpoints/iter_*")
    )
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
    code, _, err = finish(
        Program("mlm-train", toml, "--runs", tmp_path / "runs", "--ranks", 2, prepare=prepare)
    )
    assert code == 0, err
    assert ((tmp_path / "rank").exists(), (tmp_path / "launcher").exists()) == (True, False)


@pytest.mark.parametrize(
    ("cores", "batch", "microbatch", "tp", "ranks"),
    [
        (4, 8, 2, 1, 4),
        (3, 8, 2, 1, 2),
        (16, 8, 8, 1, 1),
        (8, 8, 2, 2, 8),
        (1, 8, 2, 2, 2),
        (16, 6, 2, 1, 3),
    ],
)
def test_as_many_ranks_as_divide_the_batch(
    cores: int, batch: int, microbatch: int, tp: int, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlm_repro.engine.run.resolved.list_gpus", list)
    monkeypatch.setattr("mlm_repro.engine.run.resolved.available_cores", lambda: cores)
    values = small_config(
        Path("unused"), global_batch_size=batch, microbatch_size=microbatch
    ).model_dump()
    assert default_ranks(RunConfig.model_validate(values | {"parallel": {"tp": tp}})) == ranks


ONE_LAYER = {"num_layers": 1, "hidden_size": 16, "num_heads": 2, "seq_length": 16}
KILLED = {"iterations": 12, "checkpoint_interval": 4, "validation_interval": 12}
KILLED_IN = 6


def train_on_a_rank(config: RunConfig, root: Path, killed: int | None) -> int:
    """Train on this worker, which ends itself in its first life if its rank is `killed`; how often
    it began again."""
    torch.set_num_threads(1)
    iterate, life = Trainer.iterate, int(os.environ["TORCHELASTIC_RESTART_COUNT"])

    def iterate_or_die(trainer: Trainer, iteration: int) -> Any:
        if iteration + 1 == KILLED_IN and life == 0 and int(os.environ["RANK"]) == killed:
            os.kill(os.getpid(), signal.SIGKILL)
        return iterate(trainer, iteration)

    Trainer.iterate = iterate_or_die  # type: ignore[method-assign]
    train(config, root)
    return life


def under_torchrun(config: RunConfig, root: Path, killed: int | None) -> int:
    """How often the agent of `torch.distributed.run --nproc-per-node=2 --max-restarts=1` had to
    begin again."""
    settings = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=2,
        max_restarts=1,
        monitor_interval=0.1,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        run_id=root.name,
        start_method="forkserver",
    )
    [life] = {*elastic_launch(settings, train_on_a_rank)(config, root, killed).values()}
    return int(life)


def test_the_curve_of_a_worker_that_was_killed_goes_on(dataset: Path, tmp_path: Path) -> None:
    config = small_config(dataset, ONE_LAYER, **KILLED)
    for folder, killed, lives in (("whole", None, 0), ("first", 0, 1), ("last", 1, 1)):
        assert under_torchrun(config, tmp_path / folder, killed) == lives
    whole, *runs = (next((tmp_path / name).glob("small-*")) for name in ("whole", "first", "last"))
    for run in runs:
        assert_same_training(run, whole)


MODEL = {"num_layers": 2, "hidden_size": 16, "num_heads": 2, "seq_length": 16}
RECIPE = {"iterations": 6, "warmup_iterations": 1, "microbatch_size": 2, "keep_checkpoints": 1}
STOPPED_IN, STOPPED_RANK = 3, 5


def train_until_a_signal(config: RunConfig, root: Path, is_stopped: bool) -> str:
    """What a rank has to say at the end; one of them gets a SIGTERM in the middle if
    `is_stopped`."""
    iterate = Trainer.iterate

    def iterate_and_stop(trainer: Trainer, iteration: int) -> Any:
        if is_stopped and iteration + 1 == STOPPED_IN and int(os.environ["RANK"]) == STOPPED_RANK:
            os.kill(os.getpid(), signal.SIGTERM)
        return iterate(trainer, iteration)

    Trainer.iterate = iterate_and_stop  # type: ignore[method-assign]
    try:
        return str(train(config, root).path)
    except Interrupted as error:
        return str(error)


def test_eight_ranks_finish_and_go_on_after_a_signal(dataset: Path, tmp_path: Path) -> None:
    values = small_config(dataset, MODEL, **RECIPE).model_dump() | {"parallel": {"tp": 2, "pp": 2}}
    config = RunConfig.model_validate(values)
    [whole] = {*run_ranks(train_until_a_signal, 8, config, tmp_path / "whole", False)}
    said = run_ranks(train_until_a_signal, 8, config, tmp_path / "stopped", True)
    assert all(
        sentence.startswith(f"stopped after iteration {STOPPED_IN} of 6, with a checkpoint")
        for sentence in said
    )
    [resumed] = {*run_ranks(train_until_a_signal, 8, config, tmp_path / "stopped", False)}
    assert_same_training(Path(resumed), Path(whole))


def test_the_exception_of_a_rank_is_raised_once_and_ends_the_others() -> None:
    def fail_on_rank_2() -> None:
        mesh = build_mesh(Layout(tp=4))
        mesh.tp.barrier()
        if mesh.tp.rank == 2:
            raise BadInput("planted")
        mesh.tp.barrier()

    with pytest.raises(BadInput, match="planted") as failure:
        run_threads(fail_on_rank_2, 4)
    assert failure.value.__notes__ == ["on rank 2 of 4"]
    assert failure.traceback[-1].name == "fail_on_rank_2"
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("rank ")]


def test_ranks_that_wait_for_each_other_are_ended_at_once() -> None:
    def leave_out_rank_1() -> None:
        mesh = build_mesh(Layout(tp=3))
        if mesh.tp.rank != 1:
            mesh.tp.barrier()

    with pytest.raises(RuntimeError, match="deadlock: 2 of 3 ranks wait, rank 0 among them"):
        run_threads(leave_out_rank_1, 3)


def test_a_rank_that_does_not_end_is_given_up_with_its_stack() -> None:
    def sleep_on_rank_1() -> None:
        mesh = build_mesh(Layout(tp=2))
        if mesh.tp.rank == 1:
            time.sleep(3)
        mesh.tp.barrier()

    with pytest.raises(RanksFailed, match="rank 1 was not done after 1 s") as failure:
        run_threads(sleep_on_rank_1, 2, timeout_seconds=1)
    assert "time.sleep(3)" in str(failure.value)


def test_a_run_on_threads_is_the_run_on_processes(dataset: Path, tmp_path: Path) -> None:
    config = write_toml(
        tmp_path / "small.toml", dataset, iterations=8, checkpoint_interval=4, validation_interval=4
    )
    runs = []
    for name, how in (("threads", ["--threads"]), ("processes", [])):
        words = ["--ranks", 4, "--set", "parallel.tp=2", "--set", "parallel.pp=2", *how]
        done = call({}, "mlm-train", "run", config, "--runs", tmp_path / name, *words, ends=0)
        assert done.out.count("complete: ") == 1
        runs.append(Path(done.out.removeprefix("complete: ").strip()))
    assert_same_training(*runs)
