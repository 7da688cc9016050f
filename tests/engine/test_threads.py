"""Ranks as threads compute what processes compute, fail as one, and never wait for ever."""

import threading
import time
from pathlib import Path

import pytest
import torch

from engine.config import TrainConfig
from engine.launch.mesh import build_mesh
from engine.launch.threads import RanksFailed, run_threads
from engine.parallel.layout import Layout
from engine.parallel.mesh import MAX, MIN
from lineage.config import parse_config
from lineage.errors import BadInput
from tests.commands import call
from tests.engine.small_run import assert_same_training, write_toml
from tests.ranks import run_ranks

LAYOUT = Layout(tp=2, pp=2)


def every_operation() -> list[list[float]]:
    """Results of each collective and of messages in both directions."""
    mesh = build_mesh(LAYOUT)
    results, own = [], torch.randn(4, 3, generator=torch.Generator().manual_seed(mesh.world.rank)).mul(8).round()
    for axis in (mesh.tp, mesh.pp, mesh.world):
        reduced, copied = own.clone(), own.clone()
        axis.reduce(reduced, owner=1)
        axis.broadcast(copied, owner=1)
        results += [axis.all_reduce(own.clone(), op) for op in (MAX, MIN)]
        results += [axis.all_reduce(own.clone()), axis.all_gather(own, dim=1), axis.reduce_scatter(own), copied]
        results += [reduced] if axis.rank == 1 else []
    peer, arrived = 1 - mesh.pp.rank, [torch.empty(12), torch.empty(12)]
    sends = [mesh.pp.start_send(own.view(-1) * factor, peer) for factor in (1, 2)]
    receives = [mesh.pp.start_receive(tensor, peer) for tensor in arrived]
    for pending in (*reversed(receives), *sends):
        pending.wait()
    results += arrived
    results.append(torch.tensor([float(number) for number in mesh.world.gather_objects(mesh.world.rank)]))
    return [result.flatten().tolist() for result in results]


def test_every_operation_gives_what_it_gives_between_processes() -> None:
    assert run_threads(every_operation, 4) == run_ranks(every_operation, 4)


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

    with pytest.raises(RanksFailed, match="rank 1 did not answer within 1 s") as failure:
        run_threads(sleep_on_rank_1, 2, timeout_seconds=1)
    assert "time.sleep(3)" in str(failure.value)


def test_a_run_on_threads_is_the_run_on_processes(dataset: Path, tmp_path: Path) -> None:
    config = write_toml(tmp_path / "small.toml", dataset, iterations=8, checkpoint_interval=4, validation_interval=4)
    runs = []
    for name, how in (("threads", ["--threads"]), ("processes", [])):
        words = ["--ranks", 4, "--set", "parallel.tp=2", "--set", "parallel.pp=2", *how]
        done = call({}, "mlm-train", "run", config, "--runs", tmp_path / name, *words, ends=0)
        assert done.out.count("complete: ") == 1
        runs.append(Path(done.out.removeprefix("complete: ").strip()))
    assert_same_training(*runs)


def test_a_file_with_the_former_option_of_the_same_bits_is_refused_or_read() -> None:
    values = {"iterations": 9, "warmup_iterations": 1}
    assert parse_config(values | {"invariant": 0}, TrainConfig, "a manifest") == TrainConfig.model_validate(values)
    with pytest.raises(BadInput, match=r"train.invariant no longer exists.*mlm-verify replay.*parallel --threads"):
        parse_config(values | {"invariant": 4}, TrainConfig, "a recipe")
