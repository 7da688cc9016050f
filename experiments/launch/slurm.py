"""A Slurm batch script that trains until the run is complete. Imports no torch."""

import shlex
from pathlib import Path

from experiments.launch.attempts import opening, rank_commands
from experiments.launch.job import Job
from lineage.errors import BadInput


def slurm_script(job: Job, out: Path) -> str:
    """The script for `sbatch`; its files stand in `out`.

    Before the time limit Slurm signals the batch shell alone. It passes the signal on with `scancel`, because `srun`
    itself would kill the ranks; they write a checkpoint and end with exit code 7, and the job is queued again.
    Raises BadInput for a folder whose name cannot stand in a batch script.
    """
    options = [
        f"--job-name={job.name}",
        f"--nodes={job.nodes}",
        f"--ntasks-per-node={job.ranks_per_node}",
        *([f"--gpus-per-node={job.ranks_per_node}"] if job.gpus else []),
        f"--time={job.time_limit}",
        f"--signal=B:TERM@{job.signal_seconds}",
        "--requeue",
        "--open-mode=append",
        f"--output={_output(out)}",
        *([f"--partition={job.partition}"] if job.partition else []),
        *([f"--account={job.account}"] if job.account else []),
        *([f"--exclude={','.join(job.exclude)}"] if job.exclude else []),
    ]
    lines = [
        "#!/bin/bash",
        *(f"#SBATCH {option}" for option in options),
        *opening(job, out),
        'MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
        "MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))",
        "export MASTER_ADDR MASTER_PORT",
        """trap 'stopped=1; scancel --signal=TERM "$SLURM_JOB_ID"' TERM""",
        "",
        "# One step on every rank; waits for it, and leaves if it failed for good.",
        "step() {",
        '    if [ "$stopped" -eq 1 ]; then code=7; else',
        f'        {_srun(job)} "$@" &',
        '        ended "$!"',
        "        code=$?",
        "    fi",
        '    if [ "$code" -eq 0 ]; then return; fi',
        '    leave_if_over "$code"',
        '    scontrol requeue "$SLURM_JOB_ID"',
        '    exit "$code"',
        "}",
        "",
        *(f"step {command}" for command in rank_commands(job)),
        'rm -f "$idle"',
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def _srun(job: Job) -> str:
    command = ["srun", "--kill-on-bad-exit=1"]
    if job.container:
        folders = dict.fromkeys((Path.cwd(), job.runs.resolve()))
        command += [f"--container-image={job.container}", f"--container-workdir={Path.cwd()}"]
        command += ["--container-mounts=" + ",".join(f"{folder}:{folder}" for folder in folders)]
    return shlex.join([*command, job.python, "-P", "-m"])


def _output(out: Path) -> str:
    folder = str(out.resolve())
    if any(not character.isprintable() for character in folder):
        raise BadInput(f"{folder!r} cannot stand in a batch script: name a folder without control characters")
    quoted = folder.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return f'"{quoted}/slurm-%j.txt"'
