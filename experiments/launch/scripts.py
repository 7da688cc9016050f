"""Scripts that train with Slurm or torchrun, in as many attempts as it takes until the run is complete.

Their text is in `templates/`. Imports no torch.
"""

import re
import shlex
from pathlib import Path

from experiments.launch.job import Job
from lineage.atomic import write_text
from lineage.errors import BadInput

TEMPLATES = Path(__file__).parent / "templates"
ATTEMPTS_WITHOUT_PROGRESS = 3
"""Attempts in a row that may end without a new checkpoint and without having been told to stop."""
MEETING = '--node-rank="$NODE_RANK" --master-addr="$MASTER_ADDR" --master-port="${MASTER_PORT:-29500}"'
"""How ranks of several nodes find each other; on a single node torchrun chooses a port itself."""


def write_launch_files(job: Job, out: Path) -> tuple[Path, Path]:
    """Write `slurm.sh` and `torchrun.sh` into `out` and return where they are. Raises BadInput where it cannot."""
    scripts = {out / "slurm.sh": slurm_script(job, out), out / "torchrun.sh": torchrun_script(job, out)}
    try:
        for path, text in scripts.items():
            write_text(path, text)
    except OSError as error:
        raise BadInput(f"{out} cannot be written to: {error.strerror}") from error
    slurm, torchrun = scripts
    return slurm, torchrun


def slurm_script(job: Job, out: Path) -> str:
    """The script for `sbatch`; its files stand in `out`.

    Before the time limit Slurm signals the batch shell alone. It passes the signal on with `scancel`, because `srun`
    itself would kill the ranks; they write a checkpoint and end with exit code 7, and the job is queued again.
    Raises BadInput for a folder whose name cannot stand in a batch script.
    """
    folder = str(out.resolve())
    if any(not character.isprintable() for character in folder):
        raise BadInput(f"{folder!r} cannot stand in a batch script: name a folder without control characters")
    quoted = folder.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    command = ["srun", "--kill-on-bad-exit=1"]
    if job.container:
        folders = dict.fromkeys((Path.cwd(), job.runs.resolve()))
        command += [f"--container-image={job.container}", f"--container-workdir={Path.cwd()}"]
        command += ["--container-mounts=" + ",".join(f"{folder}:{folder}" for folder in folders)]
    options = [
        f"--job-name={job.name}",
        f"--nodes={job.nodes}",
        f"--ntasks-per-node={job.ranks_per_node}",
        f"--gpus-per-node={job.ranks_per_node}" if job.gpus else "",
        f"--time={job.time_limit}",
        f"--signal=B:TERM@{job.signal_seconds}",
        "--requeue",
        "--open-mode=append",
        f'--output="{quoted}/slurm-%j.txt"',
        f"--partition={job.partition}" if job.partition else "",
        f"--account={job.account}" if job.account else "",
        f"--exclude={','.join(job.exclude)}" if job.exclude else "",
    ]
    head = [f"#SBATCH {option}" for option in options if option]
    return _script(head, "slurm.sh", shlex.join([*command, job.python, "-P", "-m"]), job, out)


def torchrun_script(job: Job, out: Path) -> str:
    """The script to be started on every node; its files stand in `out`.

    SIGTERM and Ctrl-C stop the ranks after the iteration in progress, with a checkpoint.
    """
    sizes = [f"--nnodes={job.nodes}", f"--nproc-per-node={job.ranks_per_node}"]
    stop = f"--shutdown-timeout={job.signal_seconds}"
    launcher = shlex.join([job.python, "-P", "-m", "torch.distributed.run", *sizes, stop])
    meeting = "--standalone" if job.nodes == 1 else MEETING
    head = ["# On every node: NODE_RANK=0 MASTER_ADDR=first-node bash torchrun.sh"] if job.nodes > 1 else []
    return _script(head, "torchrun.sh", f"{launcher} {meeting}", job, out)


def _script(head: list[str], body: str, launcher: str, job: Job, out: Path) -> str:
    """The templates' text with this job's values. A rank runs the check before training, then training."""
    paths = {"here": Path.cwd(), "run": job.runs.resolve() / job.config().name}
    paths |= {name: out.resolve() / name for name in ("failed", "idle")}
    modules = {
        "preflight": ["experiments.preflight", f"--runs={job.runs.resolve()}"],
        "train": ["engine.cli", *job.train_arguments()],
    }
    values = {name: shlex.quote(str(path)) for name, path in paths.items()}
    values |= {name: f'experiments.launch.rank "$failed" {shlex.join(words)}' for name, words in modules.items()}
    values |= {"launcher": launcher, "most": str(ATTEMPTS_WITHOUT_PROGRESS)}
    text = "".join((TEMPLATES / name).read_text(encoding="utf-8") for name in ("attempts.sh", body))
    return "\n".join(["#!/bin/bash", *head, re.sub(r"{{ (\w+) }}", lambda place: values[place[1]], text)])
