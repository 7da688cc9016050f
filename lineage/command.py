"""The start and end of every command: a user's mistake gets one sentence and an exit code, never a
traceback."""

import atexit
import errno
import io
import json
import os
import re
import signal
import sys
from collections.abc import Callable
from functools import partial
from os import environ
from signal import SIG_IGN, SIGINT
from typing import Any, NoReturn

import typer

from mlm_repro.lineage.atomic import OVERWRITE
from mlm_repro.lineage.errors import (
    STOPS,
    BadInput,
    Fault,
    HardwareMissing,
    Interrupted,
    UserError,
    afterwards,
    cause,
    refuse_non_text,
)
from mlm_repro.lineage.extras import check_torch
from mlm_repro.lineage.lock import release_claims
from mlm_repro.lineage.processes import hear_stops
from mlm_repro.lineage.progress import QUIET
from mlm_repro.lineage.variables import check_numbers, is_first_rank

NO_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS)
"""Error numbers of an OSError that tell of a full or failing disk."""
NO_WAY = (errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENAMETOOLONG, errno.ENOTDIR, errno.EEXIST)
"""Error numbers of an OSError for a path that this user cannot use: no permission, a loop of links,
a name that is too long or taken, a file where a folder should be."""
NO_HOME = "Could not determine home directory."
"""Text of pathlib's error for a user without a home directory."""
CIRCLE = "Symlink loop from "
"""Beginning of pathlib's error, before Python 3.13, for a loop of links."""
BARS_OF_LIBRARIES = (
    "TQDM_DISABLE",
    "HF_HUB_DISABLE_PROGRESS_BARS",
    "HF_DATASETS_DISABLE_PROGRESS_BARS",
)
"""Environment variables that silence the progress bars of libraries, which write control characters
into pipes."""
CONTROL = re.compile(r"(\x1b\[[\d;]*m)|[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""Matches control characters to escape, and as its first group the codes of colours, which are
kept."""
DEBUG = "MLM_DEBUG"
JSON_ERRORS = "--json-errors"
COMMON_OPTIONS = {
    "--quiet": "print no cost and no progress",
    "--debug": "keep the traceback of a fault of the program in a file",
    JSON_ERRORS: "print an error as a line of JSON",
    "--overwrite": "let an output replace an existing file of any kind",
}


class CommandLine(typer.Typer):
    """Typer application that lists the common options in the help of each verb. The function
    `run_command` takes these options from the command line."""

    def command(  # type: ignore[override]  # the settings depend on typer's version
        self, name: str | None = None, **settings: Any
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Return a decorator that adds a function to this application as the subcommand `name`, by
        default called after the function. The subcommand's help ends with the options that are
        common to all; `settings` are passed on to typer and must not have `epilog`."""
        options = "; ".join(f"{option}: {meaning}" for option, meaning in COMMON_OPTIONS.items())
        return super().command(name, epilog=f"Every verb takes {options}.", **settings)


def _take_common_options(arguments: list[str]) -> list[str]:
    """Return a list of the arguments without those common options, such as `--quiet`, that stand
    before `--`, and set the environment variables that these options mean. `--json-errors` sets
    none: it is looked up in `sys.argv`."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    given = COMMON_OPTIONS.keys() & set(arguments[:end])
    if "--debug" in given:
        environ[DEBUG] = "1"
    if "--overwrite" in given:
        environ[OVERWRITE] = "1"
    if "--quiet" in given:
        environ.update(dict.fromkeys((QUIET, *BARS_OF_LIBRARIES), "1"))
    return [argument for argument in arguments[:end] if argument not in given] + arguments[end:]


def run_command(app: Callable[..., Any], default: str | None = None) -> NoReturn:
    """Run a typer application on `sys.argv` and exit with a documented code; the exception behind a
    failure becomes the cause of the SystemExit. After a stop signal the process ends at once,
    without a SystemExit, unless it is one of `multiprocessing`. A failure is printed to standard
    error as one sentence, or with `--json-errors` as a line of JSON; ranks other than 0 print only
    errors that every rank is to print.

    Replaces the standard streams and the handlers of the stop signals, and sets environment
    variables that child processes inherit. With `default`, a first argument that is neither an
    option nor a verb becomes the argument of the default verb: `mlm-train config.toml` means
    `mlm-train run config.toml`.
    """
    arguments = _take_common_options(sys.argv[1:])
    if default and arguments and not arguments[0].startswith("-"):
        verbs = {verb.name or verb.callback.__name__ for verb in app.registered_commands}  # type: ignore[attr-defined]
        arguments = arguments if arguments[0] in verbs else [default, *arguments]
    _take_streams()
    # pydantic reads the metadata of every installed package to look for plugins.
    environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "true")
    # A child process must not import a module that happens to lie in the current folder.
    environ["PYTHONSAFEPATH"] = "1"
    if not sys.stderr.isatty():
        environ.update(dict.fromkeys(BARS_OF_LIBRARIES, "1"))
    code: str | int | None = 0
    cause: BaseException | None = None
    try:
        try:
            handler = partial(_stop, os.getpid())
            signal.signal(SIGINT, handler)
            for number in STOPS:
                if signal.getsignal(number) != SIG_IGN:  # nohup ignores SIGHUP on purpose
                    signal.signal(number, handler)
            sys.unraisablehook = _stop_again
            hear_stops()
            refuse_non_text([*arguments, os.getcwd()])
            check_numbers()
            # Outside standalone mode typer raises its usage errors, so that they become JSON too.
            result = app(args=arguments, standalone_mode=JSON_ERRORS not in sys.argv)
            code = result if isinstance(result, int) else 0
        except SystemExit as end:
            code = end.code
        except Exception as error:
            # A signal that arrives while a class is being made surfaces as another error. `_stop`
            # has ignored SIGINT by then, which tells that a stop caused it.
            if signal.getsignal(SIGINT) == SIG_IGN:
                raise _CtrlC from error
            code = _explain(error if isinstance(error, UserError) else _unforeseen(error))
            cause = error
        # From here on no signal may change the exit code. One that comes while an end is taken
        # down, or just before this line, is still caught.
        _ignore_stops()
    except _CtrlC as stop:
        code = _explain_stop()
        cause = stop
    release_claims()
    sys.stdout.flush()
    lost = getattr(sys.stdout, "lost", None)
    if lost and not code and lost.errno != errno.EPIPE:
        code = _explain(
            Interrupted(f"standard output cannot be written: {lost.strerror}; the work is done")
        )
    if isinstance(cause, _CtrlC):
        _end_at_once()
    raise SystemExit(code) from cause


def _end_at_once() -> None:
    """End this process with the exit code of Interrupted, after its exit functions, but without the
    interpreter's own end: a stop may have left an import half done, or native code at work in a
    thread, and either could abort that end. Does nothing in a process of `multiprocessing`, which
    ends in this way by itself, and has its parent's exit functions."""
    from multiprocessing import parent_process

    if not parent_process():
        atexit._run_exitfuncs()
        sys.stderr.flush()
        os._exit(Interrupted.exit_code)


class _Output(io.TextIOWrapper):
    """Standard output or error, as a stream that never raises OSError for a failed write.

    On a terminal, control characters other than colours, tabs and line breaks are escaped. Text
    that cannot be written, because its reader left or its disk is full, is dropped and the work
    goes on; `lost` holds the first OSError, or None.
    """

    lost: OSError | None = None

    def write(self, text: str) -> int:
        if self.isatty():
            text = CONTROL.sub(lambda match: match[1] or _escaped(match[0]), text)
        try:
            return super().write(text)
        except OSError as error:
            return self._lose(error)

    def flush(self) -> None:
        try:
            super().flush()
        except OSError as error:
            self._lose(error)

    def close(self) -> None:
        """Flush this stream, and leave the underlying file open, because it belongs to the standard
        stream that this object replaced."""
        self.flush()

    def _lose(self, error: OSError) -> int:
        # Later writes go to the null device, so that none of them fails.
        self.lost = self.lost or error
        os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
        return 0


def _take_streams() -> None:
    """Replace the streams `sys.stdout` and `sys.stderr` by `_Output`, and closed standard streams,
    `sys.stdin` too, by the null device. Streams that are an `_Output` already, or no text files,
    stay.

    Characters that an encoding lacks are escaped.
    """
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        stream = getattr(sys, name)
        if stream is None:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number: the closed stream's
            stream = os.fdopen(
                descriptor, "r" if name == "stdin" else "w", encoding="utf-8", closefd=False
            )
            for attribute in (name, f"__{name}__"):
                setattr(sys, attribute, stream)
        # A rank's streams come from its launcher as `_Output`: wrapping them again closed them.
        if (
            name != "stdin"
            and isinstance(stream, io.TextIOWrapper)
            and not isinstance(stream, _Output)
        ):
            stream.flush()
            setattr(
                sys,
                name,
                _Output(
                    stream.buffer,
                    stream.encoding,
                    "backslashreplace",
                    line_buffering=name == "stderr" or stream.isatty(),
                ),
            )


def _escaped(text: str) -> str:
    return text.encode("unicode_escape").decode()


def _unforeseen(error: Exception) -> UserError:
    """Return the error to report for an unforeseen exception, without raising it: BadInput for a
    wrong option, a path that this user cannot use or an unfit torch, HardwareMissing for too little
    memory, Interrupted for a failing disk, else, for a missing file too, a Fault.

    With `--debug` a Fault's traceback goes to a temporary file, which the Fault's sentence names.
    """
    # Told by its method: the class is click's, or that of the copy in newer versions of typer.
    if mistake := getattr(error, "format_message", None):
        return BadInput(mistake())
    text = str(error)
    message = " ".join(str(error).split())
    number = getattr(error, "errno", None)
    file = getattr(error, "filename", None) or "a file"
    if isinstance(error, MemoryError) or number == errno.ENOMEM or "can't allocate memory" in text:
        return HardwareMissing(f"this machine has too little memory for the work: {message[:200]}")
    if text == NO_HOME:
        return BadInput("this user has no home directory: set HOME")
    if text.startswith(CIRCLE):
        return BadInput(f"{text.removeprefix(CIRCLE)} cannot be used: the links form a loop")
    if number in NO_DISK:
        return Interrupted(
            f"the disk failed at {file} ({cause(error)}): make room or repair it, and the same"
            " command continues, or begins anew if it keeps no finished work"
        )
    if number in NO_WAY:
        return BadInput(f"{file} cannot be used: {cause(error)}")
    if "torch" in sys.modules or getattr(error, "name", None) == "torch":
        try:
            check_torch()
        except BadInput as unfit:
            return unfit
    hint = "`--debug` keeps where it arose in a file"
    if DEBUG in environ:
        import tempfile
        import traceback

        with tempfile.NamedTemporaryFile(
            "w", prefix="mlm-fault-", suffix=".txt", delete=False
        ) as file:
            traceback.print_exception(error, file=file)
        hint = f"{file.name} says where it arose"
    return Fault(
        f"a fault of this program, please report it: {type(error).__name__}: {message[:300]};"
        f" {hint}"
    )


class _CtrlC(BaseException):
    """Raised by the signal handler for a stop by any of the stop signals. It is not an Exception,
    so that code which catches the errors of libraries lets it through."""


def _stop(command: int, number: int, frame: object) -> NoReturn:
    """Signal handler for the signal `number`: raise `_CtrlC` in the command's own process, whose id
    is `command`, and ignore further stops. While torch is being imported, end the process instead.

    A process that was forked from the command raises `_CtrlC` for SIGINT alone. Any other signal
    ends the forked process at once.
    """
    if os.getpid() == command or number == SIGINT:
        _ignore_stops()
        torch = sys.modules.get("torch")
        if torch and torch.__spec__._initializing:  # type: ignore[union-attr]
            # torch's C++ code calls Python during its import, and aborts on an exception there.
            _explain_stop()
            release_claims()
            _end_at_once()
        raise _CtrlC
    signal.signal(number, signal.SIG_DFL)
    signal.raise_signal(number)
    raise SystemExit


def _ignore_stops() -> None:
    signal.setitimer(signal.ITIMER_REAL, 0)  # a stop of `_stop_again` may be on its way
    for number in STOPS:
        signal.signal(number, SIG_IGN)


def _stop_again(ignored: Any) -> None:
    """Hook for exceptions that Python drops, as in a finalizer or a callback: if the exception is a
    `_CtrlC`, let a timer call `_stop` 10 ms later, which raises `_CtrlC` again. Report any other
    exception, but not after a stop or at the command's end: an import that a stop broke off leaves
    objects behind whose finalizers fail."""
    if issubclass(ignored.exc_type, _CtrlC):
        signal.signal(signal.SIGALRM, partial(_stop, os.getpid()))
        signal.setitimer(signal.ITIMER_REAL, 0.01)
    elif signal.getsignal(SIGINT) != SIG_IGN:
        sys.__unraisablehook__(ignored)


def _explain_stop() -> int:
    return _explain(Interrupted(f"interrupted; the same command {afterwards()}"))


def _explain(error: UserError) -> int:
    _ignore_stops()
    if error.on_every_rank or is_first_rank():
        shown = "".join(c if c.isprintable() or c == "\n" else _escaped(c) for c in str(error))
        report = {"error": type(error).__name__, "exit_code": error.exit_code, "message": shown}
        print(json.dumps(report) if JSON_ERRORS in sys.argv else f"error: {shown}", file=sys.stderr)
    return error.exit_code
