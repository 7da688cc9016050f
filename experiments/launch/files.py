"""Writes the files that start a job. Imports no torch."""

from pathlib import Path

from experiments.launch.job import Job
from experiments.launch.slurm import slurm_script
from experiments.launch.torchrun import torchrun_script
from lineage.atomic import write_text
from lineage.errors import BadInput


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
