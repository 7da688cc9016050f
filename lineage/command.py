"""How every command starts and ends: one sentence and an exit code for a user's mistake, never a traceback."""

import errno
import inspect
import io
import json
import os
import re
import signal
import sys
from collections.abc import Callable
from functools import partial, wraps
from typing import Annotated, Any, NoReturn

import typer

from lineage.errors import BadInput, Fault, Interrupted, UserError
from lineage.installation import check_installation
from lineage.progress import QUIET
from lineage.torch_range import refuse_unfit_torch

NO_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS)
"""What the system says when a disk is full or fails."""
NO_WAY = (errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENAMETOOLONG, errno.ENOTDIR, errno.EEXIST)
"""What it says of a place that this user cannot use, or that is none."""
NO_HOME, CIRCLE = "Could not determine home directory.", "Symlink loop from "
"""What pathlib says, before Python 3.13 of a circle too, to this package or to a library."""

BARS_OF_LIBRARIES = ("TQDM_DISABLE", "HF_HUB_DISABLE_PROGRESS_BARS", "HF_DATASETS_DISABLE_PROGRESS_BARS")
"""Environment variables that silence the progress bars of libraries; those write control characters into pipes too."""

OBEYED = re.compile(r"(\x1b\[[\d;]*m)|[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""What a terminal does not show but obey; the first group, colours, may stay."""

DEBUG, JSON_ERRORS = "MLM_DEBUG", "--json-errors"
Verb = Callable[..., Any]
Quiet = Annotated[bool, typer.Option("--quiet", help="Say nothing of cost and progress.")]
Debug = Annotated[bool, typer.Option("--debug", help="Keep where a fault of the program arose in a file.")]
JsonErrors = Annotated[bool, typer.Option(JSON_ERRORS, help="Say an error as a line of JSON.")]


class CommandLine(typer.Typer):
    """A typer application whose every verb takes `--quiet`, `--debug` and `--json-errors`."""

    def command(  # type: ignore[override]  # which settings there are depends on typer's version
        self, name: str | None = None, **settings: Any
    ) -> Callable[[Verb], Verb]:
        """As typer's."""
        register = super().command(name, **settings)

        def decorate(verb: Verb) -> Verb:
            register(_with_options_of_all(verb))
            return verb

        return decorate


def _with_options_of_all(verb: Verb) -> Verb:
    @wraps(verb)
    def run(*arguments: Any, quiet: bool, debug: bool, json_errors: bool, **options: Any) -> Any:
        if debug:
            os.environ[DEBUG] = "1"
        if quiet:
            os.environ.update(dict.fromkeys((QUIET, *BARS_OF_LIBRARIES), "1"))
        return verb(*arguments, **options)

    own = inspect.signature(verb)
    added = {"quiet": Quiet, "debug": Debug, "json_errors": JsonErrors}
    options = [
        inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=a) for n, a in added.items()
    ]
    vars(run)["__signature__"] = own.replace(parameters=[*own.parameters.values(), *options])
    run.__annotations__ = verb.__annotations__ | added
    return run


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
    signal.signal(signal.SIGTERM, partial(_terminate, os.getpid()))
    refuse_unfit_torch()
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "true")  # it reads every installed package to look for them
    if not sys.stderr.isatty():
        os.environ.update(dict.fromkeys(BARS_OF_LIBRARIES, "1"))
    code: str | int | None = 0
    _show_what_is_obeyed()
    try:
        check_installation()
        _refuse_other_than_text(arguments)
        ended = app(args=arguments, standalone_mode=JSON_ERRORS not in arguments)
        code = ended if isinstance(ended, int) else 0
    except SystemExit as end:
        code = end.code
    except _CtrlC:
        code = _explain(Interrupted("interrupted; the same command goes on from what was finished"))
    except UserError as error:
        code = _explain(error)
    except Exception as error:
        code = _explain(_unforeseen(error))
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if code == Interrupted.exit_code:
        from lineage.processes import is_at_work

        if is_at_work():
            sys.stderr.flush()
            os._exit(code)
    raise SystemExit(code)


class _Terminal(io.TextIOWrapper):
    """A terminal to which what it would obey is shown, but for colours."""

    def write(self, text: str) -> int:
        return super().write(OBEYED.sub(lambda found: found[1] or _escaped(found[0]), text))


def _show_what_is_obeyed() -> None:
    """Text from outside changes no terminal; what the output's encoding lacks is escaped."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
            if stream.isatty():
                setattr(sys, name, _Terminal(stream.buffer, stream.encoding, "backslashreplace", line_buffering=True))


def _refuse_other_than_text(arguments: list[str]) -> None:
    """Raise BadInput for an argument, or a name of the current folder, that no file of a run could hold."""
    for text in (*arguments, os.getcwd()):
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise BadInput(f"{text} is not UTF-8 text: rename what it names") from error


def _escaped(text: str) -> str:
    return text.encode("unicode_escape").decode()


def _unforeseen(error: Exception) -> UserError:
    """What a failing disk or a mistaken option is to the user, or a fault of ours, with its traceback if asked for."""
    if mistake := getattr(error, "format_message", None):  # click has it, or the copy that newer versions of typer have
        return BadInput(mistake())
    if isinstance(error, RuntimeError) and str(error) == NO_HOME:
        return BadInput("this user has no home directory: set HOME")
    if isinstance(error, RuntimeError) and str(error).startswith(CIRCLE):
        return BadInput(f"{str(error).removeprefix(CIRCLE)} cannot be used: links lead in a circle")
    if isinstance(error, OSError) and error.errno in NO_DISK:
        where = f" {error.filename}" if error.filename else ""
        return Interrupted(f"the disk failed{where} ({error.strerror}); the same command goes on from there")
    if isinstance(error, OSError) and error.errno in NO_WAY:
        return BadInput(f"{error.filename or 'a file'} cannot be used: {error.strerror}")
    kept = "`--debug` keeps where it arose in a file"
    if DEBUG in os.environ:
        import tempfile
        import traceback

        with tempfile.NamedTemporaryFile("w", prefix="mlm-fault-", suffix=".txt", delete=False) as file:
            traceback.print_exception(error, file=file)
        kept = f"{file.name} says where it arose"
    said = " ".join(str(error).split())[:300]
    return Fault(f"a fault of this program, please report it: {type(error).__name__}: {said}; {kept}")


class _CtrlC(BaseException):
    """Not an Exception, so that no code which outlives a library's errors outlives Ctrl-C as well."""


def _interrupt(number: int, frame: object) -> NoReturn:
    raise _CtrlC


def _terminate(command: int, number: int, frame: object) -> NoReturn:
    """The command cleans up as after Ctrl-C; processes that it forks end at once."""
    if os.getpid() == command:
        raise _CtrlC
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    raise SystemExit


def _explain(error: UserError) -> int:
    if error.on_every_rank or os.environ.get("RANK", "0") == "0":
        shown = "".join(c if c.isprintable() or c == "\n" else _escaped(c) for c in str(error))
        said = {"error": type(error).__name__, "exit_code": error.exit_code, "message": shown}
        print(json.dumps(said) if JSON_ERRORS in sys.argv else f"error: {shown}", file=sys.stderr)
    return error.exit_code
