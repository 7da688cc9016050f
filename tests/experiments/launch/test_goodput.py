"""A cluster whose nodes fail, in a time of its own: what is kept of it is what was predicted, and
the job stays in its allocation while there are good nodes."""

import math
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

from mlm_repro.experiments.launch.job import Job, failures_of, saved_seconds, write_launch_files
from mlm_repro.experiments.simulator.goodput import Failures
from tests.experiments.launch.jobs import ENVIRONMENT, small_job

SRUN = r"""#!/bin/bash
cd "$FAKE"
seconds=$(sed -E 's/.*record\.checkpoint_minutes=([0-9.]+).*/\1/' <<<"$*" | awk '{printf "%d", $1 * 60 + 0.5}')
trained=$(<saved) began=$(<clock)
fails=$(awk -v now="$began" '$1 > now {print; exit}' failures)
now=$((began + RESTART)) copied=0
# Stand for the ranks until the time $1, unless they fail before.
until_() {
    [ "$1" -gt "$fails" ] || return 0
    worked=$((fails > now ? fails - now : 0))
    echo "{\"iteration\": $((trained + worked))}" >>"$RUN/metrics.jsonl"
    echo "$fails" >clock
    nodes=$(sed -E 's/.*--nodelist=([^ ]+).*/\1/' <<<"$*")
    echo "$nodes" >>attempts
    [ $((fails % 5)) -ne 0 ] || touch "$BAD${nodes%%,*}"
    exit 137
}
while :; do
    if [ "$copied" -gt 0 ]; then
        until_ $((now + CHECKPOINT)) "$@"
        rm -rf "$RUN"/checkpoints/iter_*
        mkdir -p "$RUN/checkpoints/iter_$copied"
        touch "$RUN/checkpoints/iter_$copied/COMPLETE"
        echo "$copied" >saved
        [ "$copied" -lt "$TOTAL" ] || break
    fi
    until_ $((now + seconds)) "$@"
    now=$((now + seconds)) trained=$((trained + seconds))
    copied=$trained
done
echo $((now + CHECKPOINT)) >clock
"""  # noqa: E501
SCONTROL = """#!/bin/bash
if [ "$1" = show ]; then printf 'n1\\nn2\\nn3\\n'; else echo "$*" >>"$FAKE/scontrol"; fi
"""


def fake_cluster(job: Job, folder: Path, seed: int) -> tuple[float, int, int]:
    """Seconds of virtual time that the job takes, its failures, and how often it was queued."""
    failures, total = failures_of(job), round(100 * failures_of(job).mean)
    fake, run, out = folder / "fake", job.runs / "small-00000000", folder / "out"
    for path in (fake, run):
        path.mkdir(parents=True)
    script, _ = write_launch_files(job, out)
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("sinfo", "#!/bin/bash\n")):
        (fake / name).write_text(text)
        (fake / name).chmod(0o755)
    times = np.random.default_rng(seed).exponential(failures.mean, 2000).cumsum().astype(int)
    (fake / "failures").write_text("".join(f"{time}\n" for time in times))
    for name in ("clock", "saved"):
        (fake / name).write_text("0\n")
    environment = ENVIRONMENT | {
        "PATH": f"{fake}:{os.environ['PATH']}",
        "FAKE": str(fake),
        "RUN": str(run),
        "TOTAL": str(total),
        "RESTART": str(round(failures.restart)),
        "CHECKPOINT": str(round(failures.checkpoint)),
        "BAD": str(out / "bad-node-"),
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "n[1-3]",
    }
    queued = 0
    while True:
        queued += 1
        done = subprocess.run(
            ["bash", str(script)], env=environment, capture_output=True, text=True, timeout=600
        )
        if done.returncode == 0:
            clock = int((fake / "clock").read_text())
            return (
                clock * total / int((fake / "saved").read_text()),
                len((fake / "attempts").read_text().split()),
                queued,
            )
        assert f"requeue {environment['SLURM_JOB_ID']}" in (fake / "scontrol").read_text(), (
            done.stderr
        )
        for bad in out.glob("bad-node-*"):
            bad.unlink()  # repaired while the job waits


def test_predicted_and_seen_goodput_agree(tmp_path: Path) -> None:
    job = small_job(tmp_path, 60).model_copy(
        update={
            "nodes": 2,
            "ranks_per_node": 1,
            "spare_nodes": 1,
            "failures_per_gpu_hour": 0.5,
            "restart_seconds": 120.0,
            "disk_mb_per_second": 0.04,
            "signal_seconds": 900,
            "time_limit": "24:00:00",
        }
    )
    failures, interval = failures_of(job), saved_seconds(job)
    assert failures.mean == 3600
    predicted = failures.share(interval)
    assert 0.5 < predicted < 0.95
    seconds, failed, queued = fake_cluster(job, tmp_path, 1)
    assert 100 * failures.mean / seconds == pytest.approx(predicted, rel=0.1)
    assert failed == pytest.approx(seconds / failures.mean, rel=0.1)
    assert 1 < queued < failed / 4  # of five failures one takes a node, and one node is spare


@pytest.mark.parametrize(
    ("mean", "checkpoint"), [(3600, 10), (3600, 300), (59_000, 87), (100, 500)]
)
def test_no_other_interval_is_better(mean: float, checkpoint: float) -> None:
    for copy in (checkpoint, checkpoint / 50):
        failures = Failures(mean, checkpoint, 120, copy)
        best = failures.best_interval
        others = [best * factor for factor in (0.5, 0.8, 1.25, 2) if best * factor >= checkpoint]
        assert failures.share(best) >= max(map(failures.share, others)) * 0.999
        assert best >= checkpoint
        if checkpoint < best and copy < mean / 100:
            assert best == pytest.approx(math.sqrt(2 * copy * mean), rel=0.1)  # Young 1974
