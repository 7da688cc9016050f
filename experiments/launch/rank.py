"""One rank under torchrun or Slurm: `python -P -m experiments.launch.rank FILE MODULE ARGUMENTS` runs the module.

Slurm's variables become those by which ranks find each other. An exit code with which trying again is of no use is
written into FILE, because neither launcher passes on which rank failed first, and with what.
"""

import os
import runpy
import sys
from collections.abc import MutableMapping
from pathlib import Path

from lineage.atomic import write_text
from lineage.errors import Interrupted

SLURM_VARIABLES = {"RANK": "SLURM_PROCID", "WORLD_SIZE": "SLURM_NTASKS", "LOCAL_RANK": "SLURM_LOCALID"}


def name_rank(environment: MutableMapping[str, str]) -> None:
    """Say in torchrun's words what Slurm says of this task; torchrun's own are left alone."""
    for name, slurm in SLURM_VARIABLES.items():
        if name not in environment and slurm in environment:
            environment[name] = environment[slurm]


def run_rank(failed: Path, module: str, arguments: list[str]) -> None:
    """Run `module` as the main program and leave with its exit code, after writing one that is final into `failed`."""
    name_rank(os.environ)
    sys.argv = [module, *arguments]
    code: object = 1
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = end.code or 0
        raise
    finally:
        if code not in (0, Interrupted.exit_code):
            write_text(failed, f"{code if isinstance(code, int) else 1}\n")


if __name__ == "__main__":
    run_rank(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
