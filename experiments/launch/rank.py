"""One rank under torchrun or Slurm: `python -P -m experiments.launch.rank FILE MODULE ARGUMENTS` runs the module.

Slurm's variables become those by which ranks find each other. An exit code with which trying again is of no use is
written into FILE, because neither launcher passes on which rank failed first, and with what.
"""

import os
import sys
import time
import traceback
from collections.abc import MutableMapping
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import NoReturn

from lineage.atomic import write_text
from lineage.errors import BadInput, DataMissing, Diverged, Fault, HardwareMissing, IntegrityFailure

FINAL = {error.exit_code for error in (BadInput, Diverged, HardwareMissing, DataMissing, IntegrityFailure)}
"""Exit codes with which trying again is of no use. A fault may be the hardware's: it is tried again."""
FIRST_RANK_SECONDS = 3.0
"""Time that a failing rank leaves rank 0, which says why: the launcher ends all ranks when one ends."""
SLURM_VARIABLES = {"RANK": "SLURM_PROCID", "WORLD_SIZE": "SLURM_NTASKS", "LOCAL_RANK": "SLURM_LOCALID"}


def name_rank(environment: MutableMapping[str, str]) -> None:
    """Say in torchrun's words what Slurm says of this task; torchrun's own are left alone."""
    for name, slurm in SLURM_VARIABLES.items():
        if name not in environment and slurm in environment:
            environment[name] = environment[slurm]


def run_rank(failed: Path, module: str, arguments: list[str]) -> NoReturn:
    """Call the module's `main` and leave with its exit code, after writing one that is final into `failed`.

    A rank ends at once, because leftover threads of the libraries can abort a process that ends in the ordinary way.
    """
    name_rank(os.environ)
    sys.argv = [module, *arguments]
    code = Fault.exit_code
    try:
        import_module(module).main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    if code in FINAL:
        write_text(failed, f"{code}\n")
    sys.stdout.flush()
    sys.stderr.flush()
    if code and os.environ.get("RANK", "0") != "0":
        with suppress(BaseException):  # a signal ends the wait
            time.sleep(FIRST_RANK_SECONDS)
    os._exit(code)


if __name__ == "__main__":
    run_rank(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
