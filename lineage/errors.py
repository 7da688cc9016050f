"""The errors a user can cause or meet, each with its documented exit code."""


class UserError(Exception):
    """Something the user can mend; its message is one clear sentence, shown without a traceback."""

    exit_code = 2
    on_every_rank = False
    """Whether each rank of a distributed run says it, and not rank 0 alone."""


class BadInput(UserError):
    """A usage error, an unreadable file or an impossible configuration: exit code 2."""

    exit_code = 2


class Diverged(UserError):
    """A run is no longer a number, or a claim, an answer or a layout is beyond its tolerance: exit code 3."""

    exit_code = 3


class HardwareMissing(UserError):
    """The machine cannot run what was asked, which was only planned, or not every rank came: exit code 4."""

    exit_code = 4


class DataMissing(UserError):
    """Data that the run needs is neither local nor reachable: exit code 5."""

    exit_code = 5


class IntegrityFailure(UserError):
    """A file or directory is incomplete or is not what its digest says: exit code 6."""

    exit_code = 6


class Fault(UserError):
    """An error that no user can mend, which please report: exit code 70."""

    exit_code = 70
    on_every_rank = True


class Interrupted(UserError):
    """The run was stopped or lost a rank, and the same command goes on with it: exit code 7."""

    exit_code = 7
