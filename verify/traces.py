"""Traces on disk: write the tensors that the ranks of an engine record, and compare two traces. Imports no torch.

A trace is a directory with `trace.json` and `draw-D/rank-R.safetensors`. Such a file has one tensor for each recorded
part, named by its number, its iteration, its start in the whole tensor and the tensor's name. Draw 0 is the training
itself; the others are the same training with perturbed weights, from which tolerances are computed
(`engine.compare.tolerance`). The reference of a comparison needs at least one such draw.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from pydantic import Field
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from engine.compare.tensors import Array, Key, TensorDifference, TensorPart, assemble, compare_all
from lineage.errors import BadInput, IntegrityFailure
from lineage.files import FileSchema, read_document, write_document

DESCRIPTION = "trace.json"


class Trace(FileSchema):
    """trace.json: describes a trace."""

    engine: str
    """Name and version."""
    precision: str = "fp32"
    """bf16, or a number format at least as fine as fp32."""
    setting: str = ""
    """Configuration, layout and iterations, in words."""
    unnamed: list[str] = Field(default_factory=list)
    """Parameters left out because the name map does not name them."""


class Compared(NamedTuple):
    """Differences between two traces."""

    first: TensorDifference | None
    """The first tensor beyond its tolerance, if any."""
    rows: list[TensorDifference]
    """All common tensors, in order of computation."""
    only: tuple[list[str], list[str]]
    """Tensors of the first trace alone and of the second alone."""


def write_rank(directory: Path, draw: int, rank: int, pieces: Iterable[TensorPart]) -> None:
    """Write the pieces that a rank recorded."""
    path = directory / f"draw-{draw}" / f"rank-{rank}.safetensors"
    path.parent.mkdir(parents=True, exist_ok=True)
    named = {
        f"{number:06} {piece.iteration} {','.join(map(str, piece.start))} {piece.tensor}": piece.value
        for number, piece in enumerate(pieces)
    }
    save_file(named, path)


def finish_trace(directory: Path, trace: Trace) -> None:
    """Write trace.json, after all ranks have written their pieces."""
    write_document(directory / DESCRIPTION, trace)


def read_trace(directory: Path) -> Trace:
    """Read trace.json. Raises BadInput if there is none, IntegrityFailure if it is damaged."""
    if not (directory / DESCRIPTION).is_file():
        raise BadInput(f"{directory} is not a trace: it has no {DESCRIPTION}")
    return read_document(directory / DESCRIPTION, Trace)


def read_draw(directory: Path, draw: int) -> dict[str, list[TensorPart]]:
    """Pieces of each rank by the name of its file. Raises IntegrityFailure for a damaged file."""
    paths = sorted(
        (directory / f"draw-{draw}").glob("rank-*.safetensors"), key=lambda path: (len(path.name), path.name)
    )
    return {path.stem: list(_read_pieces(path)) for path in paths}


def _read_pieces(path: Path) -> Iterable[TensorPart]:
    try:
        for name, value in sorted(load_file(path).items()):
            _, iteration, start, tensor = name.split(" ", 3)
            place = tuple(map(int, filter(None, start.split(","))))
            if len(place) != value.ndim:
                raise ValueError(f"{name!r} has {value.ndim} dims")
            yield TensorPart(int(iteration), tensor, place, value)
    except (OSError, SafetensorError, ValueError) as error:
        raise IntegrityFailure(f"{path} is not a file that a rank recorded: {error}") from error


def compare_traces(reference: Path, other: Path) -> Compared:
    """Compare every tensor of `other` with that of `reference`, whose draws give the tolerances.

    Raises BadInput if a directory is not a trace or the reference has no draws, IntegrityFailure if shards overlap or
    leave holes.
    """
    precision = read_trace(reference).precision
    read_trace(other)
    draws = [read_draw(reference, int(path.name[5:])) for path in sorted(reference.glob("draw-[1-9]"))]
    if not draws:
        raise BadInput(f"{reference} has no draws to take tolerances from: record it with --draws 4")
    whole = _assemble(reference, read_draw(reference, 0))
    moved = [_assemble(reference, draw) for draw in draws]
    if any(
        {key: array.shape for key, array in draw.items()} != {key: whole[key].shape for key in whole} for draw in moved
    ):
        raise IntegrityFailure(f"{reference}: its draws do not have the tensors of the step")
    ranks = read_draw(other, 0)
    theirs = _assemble(other, ranks)
    if not whole.keys() & theirs.keys():
        raise BadInput(f"{reference} and {other} have no tensor in common")
    first, rows = compare_all(whole, moved, ranks, precision)
    return Compared(first, rows, (_only(whole, theirs), _only(theirs, whole)))


def _assemble(directory: Path, ranks: dict[str, list[TensorPart]]) -> dict[Key, Array]:
    try:
        return assemble(piece for pieces in ranks.values() for piece in pieces)
    except IntegrityFailure as error:
        raise IntegrityFailure(f"{directory}: {error}") from error


def _only(these: Iterable[Key], others: Iterable[Key]) -> list[str]:
    theirs = {tensor for _, tensor in others}
    return list(dict.fromkeys(tensor for _, tensor in these if tensor not in theirs))
