"""Environment variables that hold numbers: each is read and checked here. Imports no torch."""

import os

from mlm_repro.lineage.errors import BadInput

JOIN_SECONDS = "MLM_JOIN_SECONDS"
DOOR = "MLM_DOOR"
"""Name of the environment variable with the descriptor of a socket, open to this machine alone, at
which rank 0 meets the ranks that it was started with."""
LEAST = {
    "RANK": 0,
    "LOCAL_RANK": 0,
    "SLURM_LOCALID": 0,
    "WORLD_SIZE": 1,
    "MASTER_PORT": 1,
    "TORCHELASTIC_RESTART_COUNT": 0,
    JOIN_SECONDS: 1,
    DOOR: 0,
    "NUMBA_NUM_THREADS": 1,
    "OMP_NUM_THREADS": 1,
    "MKL_NUM_THREADS": 1,
}
MOST = 1_000_000


def number(name: str) -> int | None:
    """Return the value, as an int, of an environment variable that LEAST names, such as RANK, or
    None if it is not set. Raises BadInput on every rank if it is not an integer from its minimum in
    LEAST to MOST."""
    text = os.environ.get(name)
    if text is None:
        return None
    if not (
        text.isascii() and text.isdigit() and len(text) < 8 and LEAST[name] <= int(text) <= MOST
    ):
        sentence = (
            f"the environment variable {name} is {text[:40]!r}, not a whole number from"
            f" {LEAST[name]} to a million"
        )
        raise BadInput(sentence, on_every_rank=True)
    return int(text)


def check_numbers() -> None:
    """Raise BadInput, on every rank, if an environment variable that LEAST names, such as RANK, is
    set and is not a whole number within its limits, or if RANK is not below WORLD_SIZE, which
    counts as 1 if it is not set."""
    values = {name: number(name) for name in LEAST}
    if (values["RANK"] or 0) >= (values["WORLD_SIZE"] or 1):
        sentence = (
            "the environment variable RANK is set, and WORLD_SIZE is not or is not larger: start"
            " ranks with torchrun, or unset both"
        )
        raise BadInput(sentence, on_every_rank=True)


def rank() -> int:
    """Return the number of this process among the launched ranks, from RANK; 0 for a plain process.
    Raises BadInput, on every rank, if RANK is not a whole number."""
    return number("RANK") or 0


def is_first_rank() -> bool:
    """Return True for a plain process and for rank 0, which prints for all ranks. A RANK that is
    not a number counts as another rank's."""
    return os.environ.get("RANK") in (None, "0")


def launched_ranks() -> int | None:
    """Return the number of launched ranks, which torchrun or another launcher states in WORLD_SIZE;
    None if it is not set, as in a plain process. Raises BadInput, on every rank, if it is not a
    whole number from 1 to a million."""
    return number("WORLD_SIZE")
