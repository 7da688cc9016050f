"""Scripts that train with Slurm or torchrun, in as many attempts as it takes until the run is complete.

Their text is in `templates/`. Imports no torch.
"""

import shlex
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from experiments.launch.job import Job
from lineage.atomic import write_text
from lineage.errors import BadInput

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
    launcher = shlex.join([*command, job.python, "-P", "-m"])
    return _script("slurm.sh", job, out, launcher=launcher, output=f'"{quoted}/slurm-%j.txt"')


def torchrun_script(job: Job, out: Path) -> str:
    """The script to be started on every node; its files stand in `out`.

    SIGTERM and Ctrl-C stop the ranks after the iteration in progress, with a checkpoint.
    """
    sizes = [f"--nnodes={job.nodes}", f"--nproc-per-node={job.ranks_per_node}"]
    stop = f"--shutdown-timeout={job.signal_seconds}"
    launcher = shlex.join([job.python, "-P", "-m", "torch.distributed.run", *sizes, stop])
    meeting = "--standalone" if job.nodes == 1 else MEETING
    return _script("torchrun.sh", job, out, launcher=f"{launcher} {meeting}")


def _script(template: str, job: Job, out: Path, **values: str) -> str:
    """The template for this job. A rank runs the check before training, then training."""
    environment = Environment(
        loader=PackageLoader("experiments.launch"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    places = {"here": Path.cwd(), "run": job.runs.resolve() / job.config().name}
    places |= {name: out.resolve() / name for name in ("failed", "idle")}
    modules = {
        "preflight": ["experiments.preflight", f"--runs={job.runs.resolve()}"],
        "train": ["engine.cli", *job.train_arguments()],
    }
    return environment.get_template(template).render(
        job=job,
        most=ATTEMPTS_WITHOUT_PROGRESS,
        **{name: shlex.quote(str(path)) for name, path in places.items()},
        **{name: f'experiments.launch.rank "$failed" {shlex.join(words)}' for name, words in modules.items()},
        **values,
    )
