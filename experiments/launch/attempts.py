"""Lines of shell that both launchers share: attempts at one run until it is complete. Imports no torch."""

import shlex
from pathlib import Path

from experiments.launch.job import Job

ATTEMPTS_WITHOUT_PROGRESS = 3
"""Attempts in a row that may end without a new checkpoint and without having been told to stop."""


def opening(job: Job, out: Path) -> list[str]:
    """Where the work is done and what is kept between attempts."""
    checkpoints = shlex.quote(str(job.runs.resolve() / job.config().name))
    failed, idle = (shlex.quote(str(out.resolve() / name)) for name in ("failed", "idle"))
    return [
        "set -u",
        "export OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1",
        f"cd {shlex.quote(str(Path.cwd()))} || exit 2",
        f"failed={failed}  # exit code of a rank for which trying again is no use",
        f"idle={idle}-${{NODE_RANK:-0}}  # a line for each attempt in a row that made no checkpoint",
        "stopped=0",
        "",
        "checkpoints() {",
        f"    ls -d {checkpoints}-????????/checkpoints/iter_*/COMPLETE {checkpoints}-????????/COMPLETE 2>/dev/null",
        "}",
        "",
        "# The exit code of process $1, however many signals come while it is waited for.",
        "ended() {",
        '    wait "$1"',
        '    while kill -0 "$1" 2>/dev/null; do wait "$1"; done',
        '    wait "$1"',
        "}",
        "",
        "# Leaves with the attempt's exit code $1 unless another attempt is of use.",
        "leave_if_over() {",
        '    if [ "$1" -eq 0 ]; then rm -f "$idle"; exit 0; fi',
        '    if [ -s "$failed" ]; then exit "$(cat "$failed")"; fi',
        '    if [ "$stopped" -eq 1 ] || [ "$(checkpoints)" != "$before" ]; then rm -f "$idle"; return; fi',
        '    echo "exit code $1" >>"$idle"',
        f'    if [ "$(wc -l <"$idle")" -ge {ATTEMPTS_WITHOUT_PROGRESS} ]; then',
        f'        echo "error: {ATTEMPTS_WITHOUT_PROGRESS} attempts in a row made no checkpoint" >&2',
        '        rm -f "$idle"',
        "        exit 7",
        "    fi",
        "}",
        "",
        'rm -f "$failed"',
        "before=$(checkpoints)",
    ]


def rank_commands(job: Job) -> tuple[str, str]:
    """The check before training, and training: a rank's module and arguments, for a launcher to put Python before."""
    preflight = ["experiments.preflight", f"--runs={job.runs.resolve()}"]
    train = ["engine.cli", *job.train_arguments()]
    first, second = (f'experiments.launch.rank "$failed" {shlex.join(command)}' for command in (preflight, train))
    return first, second
