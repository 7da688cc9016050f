"""The errors a user can cause or meet, each with its documented exit code."""

import os
import signal
from collections.abc import Iterable

STOPS = signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2
"""Signals that stop a command: a second one changes nothing, and one that was ignored from the
start stays so."""
KEEPS_NOTHING = "MLM_KEEPS_NOTHING"
"""Environment variable of a command that leaves nothing to continue from."""


def afterwards() -> str:
    """Says how the same command goes on after an interruption."""
    return "begins anew" if KEEPS_NOTHING in os.environ else "continues from what was finished"


def did_you_mean(name: str, known: Iterable[str], otherwise: str) -> str:
    """A question with the known name nearest to `name`; `otherwise` where none is near."""
    from difflib import get_close_matches

    near = get_close_matches(name, known, 1)
    return f"did you mean {near[0]!r}?" if near else otherwise


def cause(error: Exception) -> str:
    """Return the system's words for an OSError, without number and path; another error's text."""
    return getattr(error, "strerror", None) or str(error)


class UserError(Exception):
    """An error that the user can correct; its message is one clear sentence, shown without a
    traceback."""

    exit_code = 2
    on_every_rank = False
    """True if every rank of a distributed run prints it, False if only rank 0 does."""

    def __init__(self, sentence: object, on_every_rank: bool = False) -> None:
        super().__init__(sentence)
        self.on_every_rank = on_every_rank or self.on_every_rank


class BadInput(UserError):
    """A usage error, an unreadable file or an impossible configuration: exit code 2."""

    exit_code = 2


class Diverged(UserError):
    """A loss is not a number, or a claim, an answer, a layout or another run is beyond its
    tolerance: exit code 3."""

    exit_code = 3


class HardwareMissing(UserError):
    """The machine cannot run the work, which was only planned, or a rank did not start: exit code
    4."""

    exit_code = 4


class HardwareFault(HardwareMissing):
    """A rank did not come in time, and in another attempt it may: exit code 4."""


class DataMissing(UserError):
    """Data that the run needs is neither local nor reachable: exit code 5."""

    exit_code = 5


class IntegrityFailure(UserError):
    """A file or directory is incomplete or does not match its digest: exit code 6."""

    exit_code = 6


class Fault(UserError):
    """An error in this program, which the user should report: exit code 70."""

    exit_code = 70
    on_every_rank = True


class Interrupted(UserError):
    """The run was stopped or lost a rank; the same command continues it: exit code 7."""

    exit_code = 7
