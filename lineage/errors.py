"""The errors a user can cause or meet, each with its documented exit code."""

import os
import signal
from collections.abc import Iterable

STOPS = signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2
"""Signals that stop a command. A second one changes nothing. A signal other than SIGINT that was
ignored at the start, as under nohup, stays ignored."""
KEEPS_NOTHING = "MLM_KEEPS_NOTHING"
"""Name of the environment variable that a command sets if it keeps no finished work from which it
could continue."""


def afterwards() -> str:
    """Return the words for what the same command does after an interruption: `begins anew` if
    `MLM_KEEPS_NOTHING` is set, else `continues from what was finished`."""
    return "begins anew" if KEEPS_NOTHING in os.environ else "continues from what was finished"


def did_you_mean(name: str, known: Iterable[str], otherwise: str) -> str:
    """Return the question `did you mean 'NAME'?` with the name in `known` that is nearest to
    `name`, or the text `otherwise` if no name is near."""
    from difflib import get_close_matches

    near = get_close_matches(name, known, 1)
    return f"did you mean {near[0]!r}?" if near else otherwise


def cause(error: Exception) -> str:
    """Return the system's words for an OSError, without number and path, or the text of another
    error."""
    return getattr(error, "strerror", None) or str(error)


class UserError(Exception):
    """Raised for an error that ends a command with its exit code; its message is one clear
    sentence, shown without a traceback."""

    exit_code = 2
    on_every_rank = False
    """True if every rank of a distributed run prints the error, False if only rank 0 does."""

    def __init__(self, sentence: object, on_every_rank: bool = False) -> None:
        super().__init__(sentence)
        self.on_every_rank = on_every_rank or self.on_every_rank


class BadInput(UserError):
    """A usage error, an unreadable file or an impossible configuration: exit code 2."""

    exit_code = 2


def refuse_non_text(names: Iterable[str]) -> None:
    """Raise BadInput for the first of `names`, names of files and folders or other words of a
    command line, that is no text in UTF-8. Python hands on such bytes as lone surrogates, which
    cannot be written to a file."""
    for name in names:
        try:
            name.encode()
        except UnicodeEncodeError as error:
            raise BadInput(
                f"{name} is not UTF-8 text: rename the file or folder, or type other text"
            ) from error


class Diverged(UserError):
    """A loss is not a number, or a result is beyond its tolerance, such as a claim, an answer, a
    layout or another run: exit code 3."""

    exit_code = 3


class HardwareMissing(UserError):
    """This machine lacks hardware that the work needs, so that it was at most planned, or a rank
    did not start: exit code 4."""

    exit_code = 4


class HardwareFault(HardwareMissing):
    """A rank did not join in time, and another attempt may succeed: exit code 4."""


class DataMissing(UserError):
    """Data that the run needs is neither local nor reachable: exit code 5."""

    exit_code = 5


class IntegrityFailure(UserError):
    """A file or directory is incomplete or damaged, or contradicts its digest or another record:
    exit code 6."""

    exit_code = 6


class Fault(UserError):
    """An error in this program, which the user should report: exit code 70."""

    exit_code = 70
    on_every_rank = True


class Interrupted(UserError):
    """The run was stopped, lost a rank or a worker, or met too little memory for a task, a full or
    failing disk, a server that does not answer, or a file or directory that changed meanwhile; the
    same command continues it, or begins anew if it keeps no finished work: exit code 7."""

    exit_code = 7
