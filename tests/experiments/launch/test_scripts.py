"""The scripts are good shell, hold no word of a manifest unquoted, and try again exactly where that
is of use."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from mlm_repro.experiments.launch.job import Job, slurm_script, torchrun_script, write_launch_files
from mlm_repro.lineage.errors import BadInput
from mlm_repro.lineage.run import RunDirectory
from tests.experiments.launch.jobs import ENVIRONMENT, assert_trained, small_job, wait_for
from tests.ports import held_port

ROOT = Path(__file__).parents[3]
FAULTY = "tests.experiments.launch.faulty"
ODD = 'a b\'c $(touch planted) `touch planted` "d" %j é'


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return small_job(tmp_path, 60)


def with_fault(script: Path) -> Path:
    """The script, with `faulty` before the module of a rank."""
    text = script.read_text()
    changed = re.sub(
        r"(experiments\.launch\.rank .*?) (mlm_repro\.engine\.cli)", rf"\1 {FAULTY} \2", text
    )
    assert changed.count(FAULTY) == 1
    script.write_text(changed)
    return script


def lose_data(job: Job) -> None:
    shutil.rmtree(job.dataset)


def damage_data(job: Job) -> None:
    path = next(job.dataset.glob("*.bin"))
    path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:])


def edit_model(job: Job) -> None:
    path = Path(job.model)
    path.write_text(re.sub("num_heads = .*", "num_heads = 5", path.read_text()))


def diverge(job: Job) -> None:
    path = Path(job.model)
    path.write_text(re.sub("learning_rate = 0.003", "learning_rate = 1e30", path.read_text()))


@pytest.mark.parametrize(
    ("spoil", "fault", "code", "trained", "said"),
    [
        (edit_model, "", 2, 1, "not tried again: rank [01] on .*: BadInput: .*num_heads = 5"),
        (
            diverge,
            "",
            3,
            1,
            "not tried again: rank [01] on .*: NotFinite: training ends at",
        ),
        (lose_data, "", 5, 1, "not tried again: rank [01] on .*: DataMissing: "),
        (damage_data, "", 6, 1, "not tried again: rank [01] on .*: IntegrityFailure: "),
        # The checkpoint of 20 iterations is written beside training, and whole before that of 40.
        (None, "killed=45", 0, 2, ""),
        (
            None,
            "killed=5",
            7,
            3,
            "3 attempts in a row made no checkpoint; the last failure: exit code .* was killed",
        ),
        (None, "killed-in-turn=3+9+6", 0, 4, ""),
        (
            None,
            "gpu",
            7,
            3,
            "the last failure: rank 1 on .*: RuntimeError: CUDA error: uncorrectable ECC",
        ),
        (None, "late=9", 7, 3, "the last failure: rank [01] on .*Missing: .* within 3 seconds"),
        (None, "late=90", 0, 1, ""),
    ],
)
def test_ranks_are_started_again_where_that_is_of_use(
    spoil: Callable[[Job], None] | None,
    fault: str,
    code: int,
    trained: int,
    said: str,
    tmp_path: Path,
) -> None:
    job = small_job(tmp_path, 60).model_copy(
        update={"join_seconds": 3} if fault == "late=9" else {}
    )
    recipe = Path(job.model)
    recipe.write_text(
        recipe.read_text().replace("checkpoint_interval = 1000", "checkpoint_interval = 20")
    )
    _, script = write_launch_files(job, tmp_path / "launch")
    if spoil:
        spoil(job)
    environment = ENVIRONMENT | {
        "FAULT": fault,
        "FAULT_COUNTER": str(tmp_path / "count"),
        "PYTHONPATH": str(ROOT),
    }
    done = subprocess.run(
        ["bash", str(with_fault(script))],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert (done.returncode, done.stdout.count("begins mlm_repro.engine.cli")) == (code, trained), (
        done.stderr
    )
    assert re.search(said, done.stderr), done.stderr
    if code == 0:
        assert_trained(job.runs, 60)
    bad = [path.name for path in (tmp_path / "launch").glob("bad-node-*")]
    assert bad == [f"bad-node-{socket.gethostname()}"] * (fault == "gpu")


@pytest.mark.parametrize("container", ["", "nvcr.io/nvidia/pytorch:24.01-py3"])
@pytest.mark.parametrize("gpus", [False, True])
def test_odd_names_stay_words(
    job: Job, tmp_path: Path, container: str, gpus: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / ODD
    folder.mkdir()
    monkeypatch.chdir(folder)
    changed = job.model_copy(
        update={
            "runs": folder / "runs",
            "dataset": folder / "data",
            "container": container,
            "gpus": gpus,
        }
    )
    for path in write_launch_files(changed, folder / "out"):
        assert subprocess.run(["bash", "-n", path], capture_output=True).stderr == b""
        head = path.read_text().partition("\nstep experiments")[0].partition("\nattempt")[0]
        subprocess.run(
            ["bash", "-c", f"{head.partition('MASTER_ADDR=')[0]}\ncheckpoints"], capture_output=True
        )
    assert not list(tmp_path.rglob("planted"))
    script = slurm_script(changed, folder / "out")
    assert ("#SBATCH --gpus-per-node=2\n" in script) == gpus
    assert ("--container-image=nvcr.io" in script) == bool(container)
    assert ("python -P -m" in script.replace(sys.executable, "")) == bool(container)


def test_several_nodes_meet_at_the_first(job: Job, tmp_path: Path) -> None:
    script = torchrun_script(job.model_copy(update={"nodes": 2, "ranks_per_node": 1}), tmp_path)
    assert "--nnodes=2 --nproc-per-node=1" in script
    assert '--node-rank="$NODE_RANK" --master-addr="$MASTER_ADDR"' in script


@pytest.mark.parametrize(
    "name",
    [
        "x;touch${IFS}pwned;",
        "$(touch${IFS}pwned)",
        "`touch`",
        "-oProxyCommand=touch",
        "-F/evil",
        "me@-oProxyCommand=x",
        "a|b",
        "a&b",
        "a>b",
        "'a'",
        "ä",
        "@a",
        "a@b@c",
    ],
)
def test_a_host_that_a_shell_or_ssh_would_act_on_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text(f"first.example\n{name}\n", encoding="utf-8")
    job = small_job(tmp_path, 8).model_copy(
        update={"nodes": 2, "ranks_per_node": 1, "hosts": tmp_path / "hosts"}
    )
    with pytest.raises(BadInput, match="is not a host's name"):
        write_launch_files(job, tmp_path / "launch")
    assert not (tmp_path / "launch").exists()
    (tmp_path / "hosts").write_text("me@node-1.example\nfe80::1\n")
    assert job.host_names() == ["me@node-1.example", "fe80::1"]


def test_one_call_starts_stops_and_starts_again_the_ranks_of_all_hosts(tmp_path: Path) -> None:
    """Two addresses of this machine are the hosts, and `ssh` a shell on it."""
    hosts, bin_ = tmp_path / "hosts", tmp_path / "bin"
    hosts.write_text("127.0.0.1\nme@127.0.0.2\n")
    bin_.mkdir()
    (bin_ / "ssh").write_text('#!/bin/bash\necho "on $2" >&2\nexec bash -c "$3"\n')
    (bin_ / "ssh").chmod(0o755)
    job = small_job(tmp_path, 400).model_copy(
        update={"nodes": 2, "ranks_per_node": 1, "hosts": hosts}
    )
    _, script = write_launch_files(job, tmp_path / "launch")
    with_fault(script)
    log, slow = tmp_path / "log", tmp_path / "slow"
    slow.touch()
    with held_port() as port:
        environment = ENVIRONMENT | {
            "PATH": f"{bin_}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "FAULT": f"slow-while={slow}",
            "MASTER_PORT": str(port),
        }
        for stop, code in ((True, 7), (False, 0)):
            with (
                log.open("a") as output,
                subprocess.Popen(
                    ["bash", script],
                    env=environment,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                ) as process,
            ):
                try:
                    if stop:
                        wait_for(
                            lambda: any(
                                map(Path.read_text, job.runs.glob("small-*/metrics.jsonl"))
                            ),
                            600,
                            log.read_text,
                        )
                        process.send_signal(signal.SIGTERM)
                    assert process.wait(600) == code, log.read_text()
                    slow.unlink(missing_ok=True)
                finally:
                    if process.poll() is None:
                        os.killpg(process.pid, signal.SIGKILL)
    assert log.read_text().count("on me@127.0.0.2") == 3
    assert_trained(job.runs, 400)
    hosts.write_text("127.0.0.1\n")
    with pytest.raises(BadInput, match="names 1 hosts, and nodes = 2: name one host a line"):
        write_launch_files(job, tmp_path / "again")


def test_a_folder_that_no_script_can_name_is_refused(job: Job, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="control characters"):
        write_launch_files(job, tmp_path / "a\nb")
    assert not (tmp_path / "a\nb").exists()


def test_torchrun_stops_its_ranks_with_a_checkpoint(tmp_path: Path) -> None:
    job = small_job(tmp_path, 100_000)  # far more than pass until the signal comes
    _, script = write_launch_files(job, tmp_path / "launch")
    log = tmp_path / "log"
    with (
        log.open("w") as output,
        subprocess.Popen(
            ["bash", script], env=ENVIRONMENT, stdout=output, stderr=output, start_new_session=True
        ) as process,
    ):
        try:
            wait_for(
                lambda: any(map(Path.read_text, job.runs.glob("small-*/metrics.jsonl"))),
                600,
                log.read_text,
            )
            process.send_signal(signal.SIGTERM)
            assert process.wait(300) == 7, log.read_text()
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    (checkpoint,) = job.runs.glob("small-*/checkpoints/iter_*/COMPLETE")
    assert f"stopped after iteration {int(checkpoint.parent.name[5:])} of 100000" in log.read_text()
    assert not RunDirectory.open(checkpoint.parents[2]).is_complete


def test_the_best_interval_is_written_and_kept_by_the_clock(tmp_path: Path) -> None:
    """A failure an hour for two ranks and checkpoints of an instant: saved after a minute; stated,
    after that. That is six milliseconds here, as sixty iterations may take a tenth of a second."""
    job = small_job(tmp_path, 60).model_copy(
        update={"failures_per_gpu_hour": 0.5, "checkpoint_minutes": 0.0001}
    )
    _, script = write_launch_files(job, tmp_path / "launch")
    assert "--set=record.checkpoint_minutes=0.0001" in script.read_text()
    done = subprocess.run(
        ["bash", str(script)], env=ENVIRONMENT, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    run = RunDirectory.open(job.runs / "small")
    # The newest that are kept; one alone without the clock.
    assert len(list(run.path.glob("checkpoints/iter_*"))) == 2
    assert_trained(job.runs, 60)
