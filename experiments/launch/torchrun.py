"""A shell script that trains with torchrun until the run is complete. Imports no torch."""

import shlex
from pathlib import Path

from experiments.launch.attempts import opening, rank_commands
from experiments.launch.job import Job

MEETING = '--node-rank="$NODE_RANK" --master-addr="$MASTER_ADDR" --master-port="${MASTER_PORT:-29500}"'
"""How ranks of several nodes find each other; on a single node torchrun chooses a port itself."""


def torchrun_script(job: Job, out: Path) -> str:
    """The script to be started on every node; its files stand in `out`.

    SIGTERM and Ctrl-C stop the ranks after the iteration in progress, with a checkpoint.
    """
    torchrun = [
        job.python,
        "-P",
        "-m",
        "torch.distributed.run",
        f"--nnodes={job.nodes}",
        f"--nproc-per-node={job.ranks_per_node}",
        f"--shutdown-timeout={job.signal_seconds}",
    ]
    preflight, train = rank_commands(job)
    meeting = "--standalone" if job.nodes == 1 else MEETING
    lines = [
        "#!/bin/bash",
        *(["# On every node: NODE_RANK=0 MASTER_ADDR=first-node bash torchrun.sh"] if job.nodes > 1 else []),
        *opening(job, out),
        "launcher=",
        """trap 'stopped=1; kill -TERM "$launcher" 2>/dev/null' TERM INT""",
        "",
        "# One attempt on every rank, in a session of its own so that Ctrl-C reaches this shell alone.",
        "attempt() {",
        '    if [ "$stopped" -eq 1 ]; then return 7; fi',
        f'    setsid {shlex.join(torchrun)} {meeting} -m "$@" &',
        "    launcher=$!",
        '    ended "$launcher"',
        "}",
        "",
        "while :; do",
        f"    attempt {preflight} &&",
        f"        attempt {train}",
        '    leave_if_over "$?"',
        '    if [ "$stopped" -eq 1 ]; then exit 7; fi',
        "    before=$(checkpoints)",
        "done",
    ]
    return "\n".join(lines) + "\n"
