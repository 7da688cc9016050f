"""The scripts are good shell, hold no word of a manifest unquoted, and try again exactly where that is of use."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.launch.job import Job, slurm_script, torchrun_script, write_launch_files
from lineage.errors import BadInput, DataMissing
from lineage.run import RunDirectory
from tests.experiments.launch.jobs import ENVIRONMENT, small_job
from tests.experiments.launch.test_slurm import wait_for

ODD = 'a b\'c $(touch planted) `touch planted` "d" %j é'
FAKE = """#!/bin/bash
# In place of the interpreter: what torchrun was told to start, and the exit codes that stand in a file, in turn.
echo "$*" >>{folder}/calls
case "$*" in *experiments.preflight*) exit 0;; esac
code=$(head -n 1 {folder}/codes)
sed -i 1d {folder}/codes
case $code in
    *checkpoint) mkdir -p {folder}/runs/small-00000000/checkpoints/iter_$RANDOM; touch $_/COMPLETE; exit 7;;
    *final) echo "${{code%% *}}" >{folder}/launch/failed; exit 1;;
    *) exit $code;;
esac
"""


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return small_job(tmp_path, 60)


def attempts(job: Job, folder: Path, codes: list[str], monkeypatch: pytest.MonkeyPatch) -> tuple[int, int, str]:
    """Exit code of torchrun.sh when training ends with these codes in turn, how often it trained, and its errors."""
    fake = folder / "python"
    fake.write_text(FAKE.format(folder=folder))
    fake.chmod(0o755)
    (folder / "codes").write_text("".join(f"{code}\n" for code in codes))
    monkeypatch.setattr(sys, "executable", str(fake))
    _, script = write_launch_files(job, folder / "launch")
    done = subprocess.run(["bash", str(script)], env=ENVIRONMENT, capture_output=True, text=True, timeout=600)
    return done.returncode, (folder / "calls").read_text().count("engine.cli"), done.stderr


@pytest.mark.parametrize(
    ("codes", "code", "trained"),
    [
        (["0"], 0, 1),
        (["7 checkpoint", "0"], 0, 2),
        (["137", "1", "0"], 0, 3),
        (["1", "1", "7 checkpoint", "1", "1", "0"], 0, 6),
        (["2 final", "0"], 2, 1),
        (["7 checkpoint", "3 final", "0"], 3, 2),
        (["1", "1", "1", "0"], 7, 3),
    ],
)
def test_it_is_tried_again_where_that_is_of_use(
    job: Job, tmp_path: Path, codes: list[str], code: int, trained: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, count, errors = attempts(job, tmp_path, codes, monkeypatch)
    assert (found, count) == (code, trained)
    assert ("3 attempts in a row made no checkpoint" in errors) == (code == 7)


def test_a_real_rank_says_that_another_attempt_is_of_no_use(tmp_path: Path) -> None:
    job = small_job(tmp_path, 60)
    shutil.rmtree(job.dataset)
    _, script = write_launch_files(job, tmp_path / "launch")
    done = subprocess.run(["bash", str(script)], env=ENVIRONMENT, capture_output=True, text=True, timeout=600)
    assert done.returncode == DataMissing.exit_code, done.stderr
    assert done.stderr.count("Root Cause") == 1


@pytest.mark.parametrize("container", ["", "nvcr.io/nvidia/pytorch:24.01-py3"])
@pytest.mark.parametrize("gpus", [False, True])
def test_odd_names_stay_words(
    job: Job, tmp_path: Path, container: str, gpus: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / ODD
    folder.mkdir()
    monkeypatch.chdir(folder)
    changed = job.model_copy(
        update={"runs": folder / "runs", "dataset": folder / "data", "container": container, "gpus": gpus}
    )  # fmt: skip
    for path in write_launch_files(changed, folder / "out"):
        assert subprocess.run(["bash", "-n", path], capture_output=True).stderr == b""
        head = path.read_text().partition("\nstep experiments")[0].partition("\nattempt")[0]
        subprocess.run(["bash", "-c", f"{head.partition('MASTER_ADDR=')[0]}\ncheckpoints"], capture_output=True)
    assert not list(tmp_path.rglob("planted"))
    script = slurm_script(changed, folder / "out")
    assert ("#SBATCH --gpus-per-node=2\n" in script) == gpus
    assert ("--container-image=nvcr.io" in script) == bool(container)
    assert ("python -P -m" in script.replace(sys.executable, "")) == bool(container)


def test_several_nodes_meet_at_the_first(job: Job, tmp_path: Path) -> None:
    script = torchrun_script(job.model_copy(update={"nodes": 2, "ranks_per_node": 1}), tmp_path)
    assert "--nnodes=2 --nproc-per-node=1" in script
    assert '--node-rank="$NODE_RANK" --master-addr="$MASTER_ADDR"' in script


def test_a_folder_that_no_script_can_name_is_refused(job: Job, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="control characters"):
        write_launch_files(job, tmp_path / "a\nb")
    assert not (tmp_path / "a\nb").exists()


def test_torchrun_stops_its_ranks_with_a_checkpoint(tmp_path: Path) -> None:
    job = small_job(tmp_path, 400)
    _, script = write_launch_files(job, tmp_path / "launch")
    log = tmp_path / "log"
    with log.open("w") as output, subprocess.Popen(
        ["bash", script], env=ENVIRONMENT, stdout=output, stderr=output, start_new_session=True
    ) as process:  # fmt: skip
        try:
            wait_for(lambda: any(map(Path.read_text, job.runs.glob("small-*/metrics.jsonl"))), 600, log.read_text)
            process.send_signal(signal.SIGTERM)
            assert process.wait(300) == 7, log.read_text()
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    (checkpoint,) = job.runs.glob("small-*/checkpoints/iter_*/COMPLETE")
    assert f"stopped after iteration {int(checkpoint.parent.name[5:])} of 400" in log.read_text()
    assert not RunDirectory.open(checkpoint.parents[2]).is_complete
