"""The Slurm script in a real Slurm of one node: checked, run on two ranks, stopped, queued again,
complete."""

import os
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from mlm_repro.engine.run.files import read_metrics
from mlm_repro.experiments.launch.job import write_launch_files
from tests.experiments.launch.jobs import ENVIRONMENT, assert_trained, small_job, wait_for
from tests.experiments.launch.test_scripts import ROOT, with_fault
from tests.ports import held_port

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun", "scontrol")
ITERATIONS = 400
ASK_SECONDS = 5.0
"""Slurm lets two minutes pass before a job's second start, counted from when all has ended; so it
is asked again. Not at once: a start in the second in which the job was stopped is refused for
good."""
CONFIGURATION = Path(__file__).with_name("slurm.conf").read_text(encoding="utf-8")


class Slurm:
    """A Slurm whose commands are called by name."""

    def __init__(self, folder: Path) -> None:
        self.environment = {**ENVIRONMENT, "SLURM_CONF": str(folder / "slurm.conf")}

    def __call__(self, *command: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            command, env=self.environment, capture_output=True, text=True, timeout=120
        )

    def state(self, job: str) -> str:
        """The job's state in Slurm's words."""
        fields = self("scontrol", "show", "job", job).stdout.split()
        return next(
            (field.removeprefix("JobState=") for field in fields if field.startswith("JobState=")),
            "",
        )


@contextmanager
def running_slurm(folder: Path, *names: str) -> Iterator[Slurm]:
    """slurmctld, and a slurmd for each node, which all are this machine; to them, its names are
    those of the nodes.

    Skips the test where Slurm is missing: `apt-get install slurmctld slurmd slurm-client` brings it
    on Debian.
    """
    if missing := [name for name in PROGRAMS if not shutil.which(name)]:
        pytest.skip(
            f"{', '.join(missing)} of Debian's slurmctld, slurmd and slurm-client not installed"
        )
    if os.geteuid():
        pytest.skip("slurmd must be root to start other users' jobs")
    with ExitStack() as held:
        ports = [held.enter_context(held_port()) for _ in range(len(names) + 1)]
        host = socket.gethostname().split(".")[0]
        nodes = [
            f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port}"
            f" CPUs={os.cpu_count()} State=UNKNOWN"
            for name, port in zip(names, ports[1:], strict=True)
        ]
        for name in ("state", *(f"spool-{name}" for name in names)):
            (folder / name).mkdir()
        (folder / "hosts").write_text(f"127.0.0.1 localhost {host} {' '.join(names)}\n")
        (folder / "slurm.conf").write_text(
            CONFIGURATION.format(
                folder=folder, host=host, ports=ports, user="root", nodes="\n".join(nodes)
            )
        )
        slurm = Slurm(folder)
        known = [
            "unshare",
            "-m",
            "sh",
            "-c",
            'mount --bind "$0/hosts" /etc/hosts && exec slurmd -D -N "$1"',
            str(folder),
        ]
        daemons = [
            subprocess.Popen(
                command, env=slurm.environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
            for command in (["slurmctld", "-D"], *([*known, name] for name in names))
        ]
        try:
            wait_for(
                lambda: (
                    slurm("sinfo", "--noheader", "--Node", "--format=%T").stdout.count("idle")
                    == len(names)
                ),
                300,
                lambda: "".join(path.read_text() for path in folder.glob("*.log")),
            )
            yield slurm
        finally:
            for job in slurm("squeue", "--noheader", "--format=%A").stdout.split():
                slurm("scancel", job)
            for daemon in reversed(daemons):
                daemon.terminate()
                daemon.wait(300)


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """A machine of one node: this one."""
    with running_slurm(
        tmp_path_factory.mktemp("slurm"), socket.gethostname().split(".")[0]
    ) as slurm:
        yield slurm


def test_slurm_accepts_the_script(slurm: Slurm, tmp_path: Path) -> None:
    script, _ = write_launch_files(
        small_job(tmp_path, ITERATIONS), tmp_path / "launch files, 100 %"
    )
    done = slurm("sbatch", "--test-only", str(script))
    assert done.returncode == 0, done.stderr
    assert f"using {os.cpu_count()} processors" in done.stderr + done.stdout  # the whole node


def test_a_job_that_is_stopped_is_queued_again_and_completes(slurm: Slurm, tmp_path: Path) -> None:
    out = tmp_path / "launch files, 100 %"
    script, _ = write_launch_files(small_job(tmp_path, ITERATIONS), out)
    with_fault(script)
    slow = tmp_path / "slow"
    slow.touch()
    exported = f"--export=ALL,FAULT=slow-while={slow},PYTHONPATH={ROOT}"
    done = slurm("sbatch", "--parsable", exported, str(script))
    assert done.returncode == 0, done.stderr
    job, runs = done.stdout.strip(), tmp_path / "runs"

    def log() -> str:
        return "".join(path.read_text() for path in out.glob("slurm-*.txt"))

    def trained() -> int:
        lines = [line for run in runs.glob("small-*") for line in read_metrics(run)]
        return max((line["iteration"] for line in lines), default=0)

    wait_for(lambda: trained() > 10, 600, log)
    slurm("scancel", "--batch", "--signal=TERM", job)  # as `--signal=B:TERM@60` does
    wait_for(lambda: slurm.state(job) == "PENDING", 600, log)
    reached = trained()
    assert reached < ITERATIONS
    assert len(list(runs.glob("small-*/checkpoints/iter_*/COMPLETE"))) == 1

    slow.unlink()
    asked = time.monotonic()

    def completed() -> bool:
        nonlocal asked
        if (state := slurm.state(job)) == "PENDING" and time.monotonic() > asked + ASK_SECONDS:
            slurm("scontrol", "update", f"JobId={job}", "StartTime=now")
            asked = time.monotonic()
        assert state != "FAILED", log()
        return state == "COMPLETED"

    wait_for(
        completed,
        600,
        lambda: log() + slurm("scontrol", "show", "job", job).stdout + slurm("sinfo", "-R").stdout,
    )
    assert_trained(runs, ITERATIONS)
    text = log()
    assert text.count(f"stopped after iteration {reached} of {ITERATIONS}") == 1
    assert sorted(path.name for path in out.iterdir()) == [
        f"slurm-{job}.txt",
        "slurm.sh",
        "torchrun.sh",
    ]


def test_a_job_that_cannot_run_is_not_queued_again(slurm: Slurm, tmp_path: Path) -> None:
    job = small_job(tmp_path, ITERATIONS)
    job.runs.write_text("not a folder")
    script, _ = write_launch_files(job, tmp_path / "out")
    number = slurm("sbatch", "--parsable", str(script)).stdout.strip()
    wait_for(lambda: slurm.state(number) == "FAILED", 600, lambda: slurm.state(number))
    assert "ExitCode=2:0" in slurm("scontrol", "show", "job", number).stdout
    (log,) = (tmp_path / "out").glob("slurm-*.txt")
    assert re.search(
        f"error: not tried again: rank . on .*: BadInput: .*{job.runs}", log.read_text()
    )


def test_a_node_whose_gpu_failed_is_not_asked_for_again(slurm: Slurm, tmp_path: Path) -> None:
    script, _ = write_launch_files(small_job(tmp_path, ITERATIONS), tmp_path / "out")
    with_fault(script)
    exported = f"--export=ALL,FAULT=gpu,PYTHONPATH={ROOT}"
    number = slurm("sbatch", "--parsable", exported, str(script)).stdout.strip()

    def shown() -> str:
        return slurm("scontrol", "show", "job", number).stdout

    (host,) = slurm(
        "scontrol", "show", "hostnames", slurm("sinfo", "--noheader", "--format=%N").stdout.strip()
    ).stdout.split()
    wait_for(
        lambda: f"ExcNodeList={host}" in shown(),
        300,
        lambda: shown() + "".join(p.read_text() for p in (tmp_path / "out").glob("slurm-*")),
    )
    # After the node was cleaned: COMPLETING.
    wait_for(lambda: slurm.state(number) == "PENDING", 300, shown)
    assert "Restarts=1" in shown()
