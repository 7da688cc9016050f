"""Traces on disk: what the ranks of an engine recorded, how far two are apart, and their page. Imports no torch.

A trace is a directory with `trace.json` and `draw-D/rank-R.safetensors`, a tensor in it for each part, named by its
place in the order of recording, iteration, start in the whole and name. Draw 0 is the step itself, further ones are the
same step with moved weights, as `tolerance` says; the trace that another is held against needs some.
"""

import math
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from markupsafe import Markup
from pydantic import Field
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from engine.compare.tensors import Array, Key, TensorDifference, TensorPart, assemble, compare_all
from lineage.atomic import write_text
from lineage.errors import BadInput, IntegrityFailure
from lineage.files import FileSchema, read_document, write_document
from reports.markup import template_environment
from reports.style import theme_css

DESCRIPTION = "trace.json"
DECADES = 8
"""Of the page's bars: a full one is this many decades of tolerances beyond, an empty one as many within."""


class Trace(FileSchema):
    """trace.json: what was recorded."""

    engine: str
    """With its version."""
    precision: str = "fp32"
    """bf16, or a format that is no coarser than fp32."""
    setting: str = ""
    """Configuration, layout and the like, in words."""
    unnamed: list[str] = Field(default_factory=list)
    """Parameters that the name map does not have, so that they are not in the trace."""


class Compared(NamedTuple):
    """Two traces side by side."""

    first: TensorDifference | None
    """The first tensor beyond its tolerance; None where all are within."""
    rows: list[TensorDifference]
    """Every tensor that both have, in order of computation."""
    only: tuple[list[str], list[str]]
    """Tensors that the one or the other alone has."""


def write_rank(directory: Path, draw: int, rank: int, pieces: Iterable[TensorPart]) -> None:
    """Write what a rank recorded."""
    path = directory / f"draw-{draw}" / f"rank-{rank}.safetensors"
    path.parent.mkdir(parents=True, exist_ok=True)
    named = {
        f"{number:06} {one.iteration} {','.join(map(str, one.start))} {one.tensor}": one.value
        for number, one in enumerate(pieces)
    }
    save_file(named, path)


def finish_trace(directory: Path, trace: Trace) -> None:
    """Write what was recorded, after the ranks have."""
    write_document(directory / DESCRIPTION, trace)


def read_trace(directory: Path) -> Trace:
    """What was recorded. Raises BadInput where there is no trace, IntegrityFailure where it is damaged."""
    if not (directory / DESCRIPTION).is_file():
        raise BadInput(f"{directory} is not a trace: it has no {DESCRIPTION}")
    return read_document(directory / DESCRIPTION, Trace)


def read_draw(directory: Path, draw: int) -> dict[str, list[TensorPart]]:
    """What each rank recorded, by the name of its file. Raises IntegrityFailure for a file that is damaged."""
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
        raise IntegrityFailure(f"{path} is not what a rank recorded: {error}") from error


def compare_traces(reference: Path, other: Path) -> Compared:
    """Every tensor of `other` beside that of `reference`, whose draws give the tolerances.

    Raises BadInput where a trace is none or the reference has no draws, IntegrityFailure where shards overlap or leave
    holes.
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
    found = {tensor for _, tensor in others}
    return list(dict.fromkeys(tensor for _, tensor in these if tensor not in found))


def write_page(path: Path, names: tuple[str, str], compared: Compared) -> None:
    """The network top to bottom, each difference beside its tolerance; it refers to nothing outside itself."""
    first = compared.first
    verdict = f"First: {first.sentence(names[0])}." if first else "Every tensor is within its tolerance."
    page = template_environment().get_template("traces.html").render(
        names=names, verdict=verdict, compared=compared, share=_share, theme=Markup(theme_css())
    )  # fmt: skip
    write_text(path, page + "\n")


def _share(row: TensorDifference) -> float:
    """Percent of the bar."""
    if not row.largest or not math.isfinite(row.largest) or not row.tolerance:
        return 100.0 * (row.largest > row.tolerance)
    return min(max(50 + 50 * math.log10(row.largest / row.tolerance) / DECADES, 0.0), 100.0)
