"""Checkpoints are written while training goes on: the bits of their moment, one at a time, none
lost by a kill."""

import errno
import json
import os
import signal
import threading
import time
import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from mlm_repro.engine.checkpoint import checkpoint, shards, statistics
from mlm_repro.engine.inputs import ValidationSplit
from mlm_repro.engine.launch.threads import run_threads
from mlm_repro.engine.parallel.mesh import serial_mesh
from mlm_repro.engine.run.files import read_metrics
from mlm_repro.engine.trainer import Trainer
from mlm_repro.lineage.chain import checkpoint_path, complete_checkpoints
from mlm_repro.lineage.digest import check_seal, sha256_file
from mlm_repro.lineage.errors import Diverged, Interrupted
from mlm_repro.lineage.files import read_object
from mlm_repro.lineage.run import RunDirectory
from tests.engine.small_run import (
    mlm_train,
    resolved,
    small_config,
    start,
    train,
    wait_for_iteration,
    write_toml,
)
from tests.engine.test_resume_layouts import kill_all

SHORT = {"iterations": 40, "checkpoint_interval": 10, "keep_checkpoints": 9}


def slowly(monkeypatch: pytest.MonkeyPatch, until: int) -> list[int]:
    """Files are written only once the run is `until` iterations on; returns the iterations of the
    writings."""
    reached, began = [0], list[int]()
    iterate, write, more = Trainer.iterate, shards.write_shard, threading.Condition()

    def iterate_and_tell(trainer: Trainer, number: int) -> Any:
        with more:
            reached[0] = number
            more.notify_all()
        return iterate(trainer, number)

    def write_later(*arguments: Any) -> str:
        with more:
            began.append(reached[0])
            more.wait_for(lambda: reached[0] >= min(began[-1] + until, 39), 5)
        return write(*arguments)

    monkeypatch.setattr(Trainer, "iterate", iterate_and_tell)
    monkeypatch.setattr(shards, "write_shard", write_later)
    return began


def tensors_of(run: Path, iteration: int) -> dict[str, str]:
    return {
        path.name: sha256_file(path)
        for path in checkpoint_path(run, iteration).glob("*.safetensors")
    }


@pytest.mark.parametrize("ranks", [1, 2])
def test_it_has_the_bits_of_its_moment(
    ranks: int, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_config(dataset, **SHORT)
    with pytest.raises(Interrupted):
        run_threads(train, ranks, config, tmp_path / "stopped", 20)
    began = slowly(monkeypatch, 7)
    run = run_threads(train, ranks, config, tmp_path / "beside")[0].path
    assert len({*began}) > 3
    (stopped,) = (tmp_path / "stopped").glob("small-*")
    assert tensors_of(run, 20) == tensors_of(stopped, 20) != tensors_of(run, 30)
    ancestors = read_object(checkpoint_path(run, 40) / "lineage.json")["ancestors"]
    assert [ancestor["iteration"] for ancestor in ancestors] == [10, 20, 30]
    assert [path.name for path in sorted((run / "checkpoints").iterdir())] == [
        f"iter_{iteration:07}" for iteration in (10, 20, 30, 40)
    ]


def test_one_is_complete_before_the_next_begins(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slowly(monkeypatch, 15)
    begin, before = checkpoint.CheckpointWriter.begin, list[tuple[int, int]]()

    def begin_and_note(writer: Any, run: Path, config: Any, state: Any, *more: Any) -> None:
        before.append((state.iteration, len(complete_checkpoints(run))))
        begin(writer, run, config, state, *more)

    monkeypatch.setattr(checkpoint.CheckpointWriter, "begin", begin_and_note)
    train(small_config(dataset, **SHORT), tmp_path)
    assert before == [(10, 0), (20, 1), (30, 2), (40, 3)]


def test_the_metrics_of_a_checkpoint_outlive_a_power_cut_that_it_outlives(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a file held when it was last synced is what a power cut leaves of it."""
    fsync, replace = os.fsync, os.replace
    synced, iterations = [""], dict[str, list[int]]()

    def fsync_and_note(descriptor: int) -> None:
        fsync(descriptor)
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if "metrics.jsonl" in path.name:
            synced.append(path.read_text())

    def replace_and_note(source: Path, target: Path) -> None:
        if Path(target).name.startswith("iter_"):
            lines = [json.loads(line) for line in synced[-1].splitlines()]
            iterations[Path(target).name] = [
                line["iteration"] for line in lines if line["kind"] == "train"
            ]
        replace(source, target)

    monkeypatch.setattr(os, "fsync", fsync_and_note)
    monkeypatch.setattr(os, "replace", replace_and_note)
    train(small_config(dataset, **SHORT), tmp_path)
    assert [*iterations] == [f"iter_{number:07}" for number in (10, 20, 30, 40)]
    for name, there in iterations.items():
        wanted = int(name.removeprefix("iter_"))
        assert there[:wanted] == [*range(1, wanted + 1)]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_write_that_fails_ends_the_run_and_leaves_the_one_before(
    ranks: int, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, count = shards.write_shard, [0]

    def write_or_fail(path: Path, *arguments: Any) -> str:
        count[0] += 1
        if "0000020" in str(path) and "optimizer" in path.name:
            path.write_bytes(b"half")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(path, *arguments)

    config = small_config(dataset, **SHORT)
    with monkeypatch.context() as patch:
        patch.setattr(shards, "write_shard", write_or_fail)
        with pytest.raises(
            Interrupted, match=r"iter_0000020 cannot be written \(No space left on device\)"
        ):
            run_threads(train, ranks, config, tmp_path)
    (run,) = tmp_path.glob("small-*")
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["iter_0000010"]
    check_seal(checkpoint_path(run, 10))
    assert run_threads(train, ranks, config, tmp_path)[0].is_complete


def test_one_that_is_written_when_training_diverges_is_kept(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slowly(monkeypatch, 3)
    iterate = Trainer.iterate

    def diverge(trainer: Trainer, number: int) -> Any:
        if number == 11:
            raise Diverged("no number")
        return iterate(trainer, number)

    monkeypatch.setattr(Trainer, "iterate", diverge)
    with pytest.raises(Diverged, match="no number"):
        train(small_config(dataset, **SHORT), tmp_path)
    (run,) = tmp_path.glob("small-*")
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["iter_0000010"]


def test_one_that_is_given_up_is_no_longer_being_written(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slowly(monkeypatch, 3)
    iterate, seen = Trainer.iterate, list[tuple[checkpoint.CheckpointWriter, bool]]()

    def fail(trainer: Trainer, number: int) -> Any:
        if number == 11:
            seen.append((trainer.writer, trainer.writer.is_writing))
            raise ValueError("a fault")
        return iterate(trainer, number)

    monkeypatch.setattr(Trainer, "iterate", fail)
    with pytest.raises(ValueError, match="a fault"):
        train(small_config(dataset, **SHORT), tmp_path)
    [(writer, was_writing)] = seen
    assert was_writing
    assert (writer.is_writing, writer.is_ready) == (False, False)
    (run,) = tmp_path.glob("small-*")
    assert not complete_checkpoints(run)


@pytest.mark.parametrize("ranks", [1, 2])
def test_killed_while_one_is_written_the_run_goes_on_from_the_one_before(
    ranks: int, dataset: Path, tmp_path: Path
) -> None:
    toml = write_toml(tmp_path / "small.toml", dataset, **SHORT)
    command = ("run", toml, "--ranks", ranks)
    code, _, err = mlm_train(*command, "--runs", tmp_path / "whole")
    assert code == 0, err
    (whole,) = (tmp_path / "whole").glob("small-*")
    run = tmp_path / "killed" / whole.name
    process = start(*command, "--runs", tmp_path / "killed", plant="write_seconds=0@20,600@30")
    wait_for_iteration(process, run, 33)
    deadline = time.monotonic() + 60
    while not list((run / "checkpoints").glob(".*.partial")) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert read_metrics(run)[-1]["iteration"] > 30  # training went on beside the writing
    kill_all(process)
    assert [path.name for path in complete_checkpoints(run)][-1] == "iter_0000020"
    code, _, err = mlm_train("resume", run, "--ranks", ranks)
    assert code == 0, err
    assert RunDirectory.open(run).is_complete
    for iteration in (20, 30, 40):
        assert tensors_of(run, iteration) == tensors_of(whole, iteration)
    kept = ("iteration", "loss", "gradient_norm")
    curves = [
        [[line.get(key) for key in kept] for line in read_metrics(each)] for each in (run, whole)
    ]
    assert curves[0] == curves[1]


def test_a_signal_waits_for_the_one_that_is_written(dataset: Path, tmp_path: Path) -> None:
    toml = write_toml(
        tmp_path / "small.toml", dataset, **SHORT | {"iterations": 4000, "checkpoint_interval": 20}
    )
    process = start("run", toml, "--runs", tmp_path / "runs", plant="write_seconds=2@20")
    deadline = time.monotonic() + 120
    while not (
        found := list((tmp_path / "runs").glob("small-*/checkpoints/.iter_0000020.partial"))
    ):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=120)
    assert process.wait() == 7, err
    run = found[0].parents[1]
    first, last = complete_checkpoints(run)
    assert first.name == "iter_0000020"
    assert int(last.name[5:]) > 20
    assert f"stopped after iteration {int(last.name[5:])} of 4000" in err


def test_bytes_of_a_tensor_are_written_without_a_copy(tmp_path: Path) -> None:
    """A copy would be made while no other thread runs Python, training among them."""
    tensors = [torch.zeros(1 << 20), torch.ones(1 << 18)]
    shapes = {str(number): (each.dtype, each.shape) for number, each in enumerate(tensors)}
    tracemalloc.start()
    try:
        written = shards.write_shard(tmp_path / "file", shapes, tensors)
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert most < 1 << 18
    assert written == sha256_file(tmp_path / "file")


@pytest.mark.parametrize(("dim", "ranks"), [(None, 2), (0, 1), (0, 2), (1, 2), (1, 4)])
def test_a_checksum_is_of_bits_and_of_their_position_in_the_whole_tensor(
    dim: int | None, ranks: int
) -> None:
    whole = torch.randn(12, statistics.PART // 8, generator=torch.Generator().manual_seed(1))
    positions = np.arange(whole.numel(), dtype=np.uint64).reshape(whole.shape)
    for rank in range(ranks):
        local, places = whole, positions
        if dim is not None:
            local = whole.chunk(ranks, dim)[rank].contiguous()
            places = np.split(positions, ranks, dim)[rank]
        parameter: Any = SimpleNamespace(
            dim=dim, local=local, axis=SimpleNamespace(size=ranks, rank=rank)
        )
        bits = local.view(torch.int32).long().numpy().astype(np.uint64)
        expected = int((bits * (2 * places + 1)).sum(dtype=np.uint64))
        halves = [local.flatten()[:1000], local.flatten()[1000:]]
        numbers = [statistics.measure(local, parameter), statistics.measure(halves[0], parameter)]
        numbers.append(statistics.measure(halves[1], parameter, 1000))
        assert numbers[0][4] == expected
        assert statistics.merge(numbers[1:])[4] == expected


@pytest.mark.parametrize(("batch_size", "samples"), [(8, 1), (64, 2), (128, 4), (1024, 8)])
def test_a_probe_has_a_sixteenth_of_an_iteration_at_most(
    batch_size: int, samples: int, dataset: Path
) -> None:
    run = resolved(small_config(dataset, global_batch_size=batch_size))
    files = run.data.token_files("valid")
    split = ValidationSplit(run.config, files, serial_mesh(), run.data.tokenizer)
    assert np.shape(split.probed) == (samples, 33)
