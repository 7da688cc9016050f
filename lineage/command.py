"""How every command starts and ends: one sentence and an exit code for a user's mistake, never a traceback."""

import errno
import os
import signal
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from lineage.errors import Interrupted, UserError
from lineage.installation import check_installation
from lineage.torch_range import refuse_unfit_torch

NO_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS)
"""What the system says when a disk is full or fails."""


def run_command(app: Callable[..., Any], default: str | None = None, verbs: tuple[str, ...] = ()) -> NoReturn:
    """Run a typer application and exit.

    With `default`, a first argument that is neither an option nor one of `verbs` is taken as the default verb's
    argument, so that `mlm-train config.toml` means `mlm-train run config.toml`. A torch that does not fit ends the
    command where it is first imported.
    """
    arguments = sys.argv[1:]
    if default and arguments and not arguments[0].startswith("-") and arguments[0] not in verbs:
        arguments = [default, *arguments]
    signal.signal(signal.SIGINT, _interrupt)
    refuse_unfit_torch()
    code: str | int | None = 0
    try:
        check_installation()
        app(args=arguments)
    except SystemExit as end:
        code = end.code
    except _CtrlC:
        code = _explain(Interrupted("interrupted; the same command goes on from what was finished"))
    except UserError as error:
        code = _explain(error)
    except OSError as error:
        if error.errno not in NO_DISK:
            raise
        where = f" {error.filename}" if error.filename else ""
        code = _explain(Interrupted(f"the disk failed{where} ({error.strerror}); the same command goes on from there"))
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    raise SystemExit(code)


class _CtrlC(BaseException):
    """Not an Exception, so that no code which outlives a library's errors outlives Ctrl-C as well."""


def _interrupt(number: int, frame: object) -> NoReturn:
    raise _CtrlC


def _explain(error: UserError) -> int:
    if error.on_every_rank or os.environ.get("RANK", "0") == "0":
        print(f"error: {error}", file=sys.stderr)
    return error.exit_code
