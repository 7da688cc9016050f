"""One rank under torchrun or Slurm: `python -P -m mlm_repro.experiments.launch.rank FILE MODULE
ARGUMENTS`.

Slurm's variables become those by which ranks find each other. Neither launcher passes on which rank
failed first, and with what, so beside the scripts `failed` is written where trying again is of no
use, else `last-failure`: the exit code and the cause. A node that its own hardware failed leaves
`bad-node-NAME`, and Slurm is asked for others.
"""

import os
import re
import socket
import sys
import time
import traceback
from collections.abc import MutableMapping
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import NoReturn

from mlm_repro.lineage.atomic import write_text
from mlm_repro.lineage.errors import (
    BadInput,
    DataMissing,
    Diverged,
    Fault,
    HardwareFault,
    HardwareMissing,
    IntegrityFailure,
    Interrupted,
)
from mlm_repro.lineage.variables import is_first_rank

FINAL = {
    error.exit_code
    for error in (BadInput, Diverged, HardwareMissing, DataMissing, IntegrityFailure)
}
"""Exit codes after which another attempt is useless. Fault is not among them: it may be the
hardware's, so it is tried again."""
FAILED_GPU = re.compile(
    r"\becc\b|\bxid\b|nvlink|fallen off the bus|no cuda-capable device|hardware stack", re.I
)
"""Regular expression of words in messages of CUDA and its driver that mean a failed GPU."""
FIRST_RANK_SECONDS = 3.0
"""Seconds that a failing rank waits before it ends, so that rank 0 can say why: the launcher ends
all ranks when one ends."""
SLURM_VARIABLES = {
    "RANK": "SLURM_PROCID",
    "WORLD_SIZE": "SLURM_NTASKS",
    "LOCAL_RANK": "SLURM_LOCALID",
}


def name_rank(environment: MutableMapping[str, str]) -> None:
    """Set RANK, WORLD_SIZE and LOCAL_RANK in the mapping `environment`, each only if it is missing
    and Slurm's variable for it is there, to the value of Slurm's variable."""
    for name, slurm in SLURM_VARIABLES.items():
        if name not in environment and slurm in environment:
            environment[name] = environment[slurm]


def note_failure(failed: Path, code: int, cause: BaseException | None) -> None:
    """Write why this rank ended into a file, in place of an earlier one. Its first line is the exit
    `code` alone, which the job's script reads; its second line has the rank, the node, and the type
    and message of `cause`.

    The file is the path `failed` if another attempt is useless, as it is for a code in FINAL unless
    the cause is a HardwareFault; else it is `last-failure` beside it; after an interruption neither
    is written. If the message means a failed GPU, it is written, whatever the code, to
    `bad-node-NAME` there too, where NAME is the node. Raises OSError if a file cannot be written.
    """
    text = " ".join(str(cause).split())
    node = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    is_again = isinstance(cause, HardwareFault) or code not in FINAL
    if FAILED_GPU.search(text):
        write_text(failed.with_name(f"bad-node-{node}"), f"{text}\n")
    if code != Interrupted.exit_code:
        line = (
            f"{code}\nrank {os.environ.get('RANK', '0')} on {node}: {type(cause).__name__}:"
            f" {text}\n"
        )
        write_text(failed.with_name("last-failure") if is_again else failed, line)


def run_rank(failed: Path, module: str, arguments: list[str]) -> NoReturn:
    """Name this rank by `name_rank`, call the function `main` of the module called `module` with
    these arguments as a command line, then end this process with the exit code of that command; it
    never returns. After a failure, `note_failure` first writes the code and the cause to `failed`
    or beside it, if they can be written, and a rank other than the first waits FIRST_RANK_SECONDS.

    The process ends at once, without Python's clean-up, because leftover threads of the libraries
    can abort one that ends in the ordinary way.
    """
    name_rank(os.environ)
    sys.argv = [module, *arguments]
    code = 0
    cause = None
    try:
        import_module(module).main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        cause = end.__cause__
    except BaseException as error:
        code = Fault.exit_code
        cause = error
        traceback.print_exc()
    if code:
        with suppress(OSError):
            note_failure(failed, code, cause)
    sys.stdout.flush()
    sys.stderr.flush()
    if code and not is_first_rank():
        with suppress(BaseException):  # a signal ends the wait
            time.sleep(FIRST_RANK_SECONDS)
    os._exit(code)


if __name__ == "__main__":
    run_rank(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
