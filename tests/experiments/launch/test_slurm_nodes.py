"""The Slurm script on five nodes, of which a job gets two and a spare one: retries inside the
allocation, the queue."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlm_repro.experiments.launch.job import write_launch_files
from tests.experiments.launch.jobs import assert_trained, small_job, wait_for
from tests.experiments.launch.test_scripts import ROOT, with_fault
from tests.experiments.launch.test_slurm import ASK_SECONDS, Slurm, running_slurm

ITERATIONS = 120


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with running_slurm(tmp_path_factory.mktemp("slurm"), "n1", "n2", "n3", "n4", "n5") as slurm:
        yield slurm


class Submitted:
    """A job of two ranks, on two of three nodes, with a fault."""

    def __init__(self, slurm: Slurm, folder: Path, fault: str) -> None:
        self.slurm = slurm
        job = small_job(folder, ITERATIONS, nodes=2, ranks_per_node=1, spare_nodes=1)
        recipe = Path(job.model)
        recipe.write_text(
            recipe.read_text().replace("checkpoint_interval = 1000", "checkpoint_interval = 20")
        )
        self.runs, self.out = job.runs, folder / "out"
        script, _ = write_launch_files(job, self.out)
        with_fault(script)
        exported = f"--export=ALL,FAULT={fault},PYTHONPATH={ROOT}"
        done = slurm("sbatch", "--parsable", exported, str(script))
        assert done.returncode == 0, done.stderr
        self.number = done.stdout.strip()

    def shown(self) -> str:
        return self.slurm("scontrol", "show", "job", self.number).stdout

    def log(self) -> str:
        return "".join(path.read_text() for path in self.out.glob("slurm-*.txt")) + self.shown()

    def wait_until(self, state: str) -> None:
        wait_for(lambda: f"JobState={state}" in self.shown(), 500, self.log)


def test_killed_ranks_are_started_again_inside_the_allocation(slurm: Slurm, tmp_path: Path) -> None:
    job = Submitted(slurm, tmp_path, "killed=50")
    job.wait_until("COMPLETED")
    assert_trained(job.runs, ITERATIONS)
    assert "Restarts=0" in job.shown()
    assert job.log().count("begins mlm_repro.engine.cli") == 2


def test_a_bad_node_gives_way_to_the_spare_one(slurm: Slurm, tmp_path: Path) -> None:
    job = Submitted(slurm, tmp_path, "gpus-of=n2")
    job.wait_until("COMPLETED")
    assert_trained(job.runs, ITERATIONS)
    assert "Restarts=0" in job.shown()
    assert [path.name for path in job.out.glob("bad-node-*")] == ["bad-node-n2"]


def test_without_a_spare_node_left_the_job_is_queued_for_others(
    slurm: Slurm, tmp_path: Path
) -> None:
    job = Submitted(slurm, tmp_path, "gpus-of=n2+n3")
    wait_for(lambda: "ExcNodeList=n2,n3" in job.shown(), 300, job.log)

    def is_complete() -> bool:
        # Slurm lets two minutes pass before a second start. One in the same second as the requeue
        # would find its credential revoked, so some seconds pass here too.
        time.sleep(ASK_SECONDS)
        slurm("scontrol", "update", f"JobId={job.number}", "StartTime=now")
        return "JobState=COMPLETED" in job.shown()

    wait_for(is_complete, 500, job.log)
    assert_trained(job.runs, ITERATIONS)
    assert "Restarts=1" in job.shown()
    assert "NodeList=n[1,4]" in job.log() or "NodeList=n[1,4-5]" in job.log()
    assert job.log().count("begins mlm_repro.engine.cli") == 3
