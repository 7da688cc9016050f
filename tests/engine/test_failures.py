"""What fails on one rank ends all of them within seconds, with one sentence that says where to
look."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.engine.small_run import (
    finish,
    mlm_train,
    ranks_of,
    resolved,
    small_config,
    start,
    wait_for_iteration,
    write_toml,
)
from tests.ports import held_port
from tests.processes import is_running

WAIT_SECONDS = 8


@pytest.mark.parametrize(
    ("pp", "fault", "sentences"),
    [
        (
            1,
            "layers.1.mlp.dense_h_to_4h.weight@1",
            [
                "data-parallel rank 1;",
                "first output that is not finite: layers.1.mlp.dense_h_to_4h;",
                "first gradient: final_layernorm.",
                "samples of the global batch without a loss: 4, 5, 6, 7",
            ],
        ),
        (
            2,
            "layers.0.self_attention.dense.bias@0",
            [
                "data-parallel rank 0;",
                "first output that is not finite: layers.0.self_attention.dense;",
                "first gradient: embedding.word_embeddings.weight;",
                "samples of the global batch without a loss: 0, 1, 2, 3, 4, 5, 6, 7",
            ],
        ),
    ],
    ids=["dp2", "pp2"],
)
def test_a_nan_on_one_rank_is_found(
    pp: int, fault: str, sentences: list[str], dataset: Path, tmp_path: Path
) -> None:
    toml = write_toml(tmp_path / "small.toml", dataset, microbatch_size=2)
    code, _, err = mlm_train(
        toml,
        f"--runs={tmp_path}",
        "--ranks=2",
        f"--set=parallel.pp={pp}",
        "--quiet",
        plant=f"nan={fault}",
    )
    assert code == 3, err
    assert err.startswith(
        "error: training ends at iteration 3: loss nan, gradient norm nan; the weights were not"
        " updated, and earlier checkpoints are kept; "
    )
    assert sum(line.startswith("error: ") for line in err.splitlines()) == 1, err
    for sentence in sentences:
        assert sentence in err


def test_ranks_that_disagree_about_the_configuration_stop(dataset: Path, tmp_path: Path) -> None:
    toml = write_toml(tmp_path / "small.toml", dataset)
    code, _, err = mlm_train(toml, f"--runs={tmp_path / 'runs'}", "--ranks=2", plant="config=seed")
    assert (code, err) == (
        2,
        (
            "error: the ranks were given different configurations: train.seed is 1234 on rank 0 and"
            " 77 on rank 1\n"
        ),
    )
    assert not list((tmp_path / "runs").glob("*/metrics.jsonl"))


@pytest.mark.parametrize(
    ("rank", "sentence"),
    [
        (0, "1 of 2 ranks came within 3 seconds"),
        (1, "rank 1 of 2 could not meet the others at 127.0.0.1:"),
    ],
)
def test_a_rank_that_does_not_come_is_not_waited_for_in_vain(
    rank: int, sentence: str, dataset: Path, tmp_path: Path
) -> None:
    toml = write_toml(tmp_path / "small.toml", dataset)
    began = time.monotonic()
    with held_port() as port:
        code, _, err = mlm_train(
            toml,
            f"--runs={tmp_path / 'runs'}",
            MLM_JOIN_SECONDS="3",
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE="2",
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
        )
    assert code == 4, err
    said = [line for line in err.splitlines() if line.startswith("error: ")]
    assert len(said) == 1
    assert sentence in said[0]
    assert time.monotonic() - began < 60
    assert not (tmp_path / "runs").exists()


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="needs /proc")
@pytest.mark.parametrize("lost", [0, 1])
def test_a_rank_that_is_killed_takes_the_others_with_it(
    lost: int, dataset: Path, tmp_path: Path
) -> None:
    toml = write_toml(tmp_path / "small.toml", dataset, iterations=100_000)
    run = resolved(small_config(dataset, iterations=100_000)).begin(tmp_path)
    process = start(toml, "--runs", tmp_path, "--ranks", 2)
    wait_for_iteration(process, run.path, 3)
    ranks = ranks_of(process.pid)
    os.kill(ranks[lost], signal.SIGKILL)
    code, _, err = finish(process)
    assert code == 7, err
    assert f"error: rank {lost} was ended by SIGKILL; the same command continues" in err
    assert "waits here" not in err, "the other waited for the time-out"
    assert "most recent call first" not in err, "the other did not end by itself"
    assert not any(is_running(rank) for rank in ranks)


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="needs /proc")
def test_a_rank_that_hangs_is_named_with_every_stack(dataset: Path, tmp_path: Path) -> None:
    toml = write_toml(tmp_path / "small.toml", dataset, iterations=100_000)
    run = resolved(small_config(dataset, iterations=100_000)).begin(tmp_path)
    process = start(toml, f"--runs={tmp_path}", "--ranks=2", plant=f"wait_seconds={WAIT_SECONDS}")
    wait_for_iteration(process, run.path, 3)
    ranks = ranks_of(process.pid)
    os.kill(ranks[1], signal.SIGSTOP)
    code, _, err = finish(process)
    assert code == 7, err
    assert (
        f"error: rank 1 did not answer within {WAIT_SECONDS} seconds; the same command continues"
        in err
    )
    assert "rank 0 waits here:" in err
    waiting, *stopped = err.split("(most recent call first)")
    assert "in run_to_end" in waiting
    assert any("in run_to_end" in stack for stack in stopped)
    assert not any(is_running(rank) for rank in ranks)


ON_A_SMALL_DISK = """
mount -t tmpfs -o size=256k none "$1" || exit 77
shift
"$@"; echo $?
mount -o remount,size=26m none "$0" && "$@"; echo $?
"""


@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs unshare")
def test_a_disk_that_is_full_is_told_and_the_run_goes_on_where_it_has_room(
    dataset: Path, tmp_path: Path
) -> None:
    toml, runs = write_toml(tmp_path / "small.toml", dataset), tmp_path / "runs"
    runs.mkdir()
    program = [sys.executable, "-c", "from mlm_repro.engine.cli import main; main()"]
    done = subprocess.run(
        [
            "unshare",
            "-rm",
            "sh",
            "-c",
            ON_A_SMALL_DISK,
            runs,
            runs,
            *program,
            "run",
            toml,
            f"--runs={runs}",
            "--quiet",
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        pytest.skip(f"no file system can be mounted here: {done.stderr}")
    assert [line for line in done.stdout.splitlines() if line.isdigit()] == ["7", "0"]
    (said,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert said.startswith("error: the checkpoint "), done.stderr
    assert (
        "cannot be written (No space left on device): make room or mend the cause, and give the"
        " same command again" in said
    )
