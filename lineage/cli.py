"""`mlm-verify run`: prove that what is on disk is what was written."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from lineage.chain import broken_links
from lineage.digest import MARKER, bytes_below, check_seal, is_sealed
from lineage.errors import BadInput, IntegrityFailure
from lineage.progress import announce, format_bytes
from lineage.run import MANIFEST


def run(path: Annotated[Path, typer.Argument(help="Run or checkpoint directory.")]) -> None:
    """Check every file of a sealed directory, and of those inside it, against its digest, and what descends from what.

    Of a run: its identity against configuration and inputs; each checkpoint against the run and the one before it; each
    record against the evaluation that gave it. Everything that does not hold is named.
    """
    path = path.resolve()
    if not path.is_dir():
        raise BadInput(f"{path} is not a directory")
    directories = [*_sealed_below(path), path]
    announce(f"reads {format_bytes(bytes_below(path))} in {len(directories)} sealed directories")
    for directory in directories:
        digest = check_seal(directory)
        print(f"ok {digest[:16]} {directory}")
    if (path / MANIFEST).is_file() and (broken := broken_links(path)):
        for sentence in broken[:-1]:
            print(f"broken: {sentence}", file=sys.stderr)
        raise IntegrityFailure(broken[-1])


def _sealed_below(path: Path) -> list[Path]:
    """Sealed directories inside `path`, not those in hidden leftovers of a writer that was killed."""
    inner = [marker.parent for marker in sorted(path.rglob(MARKER)) if is_sealed(marker.parent)]
    return [
        directory
        for directory in inner
        if directory != path and not any(part.startswith(".") for part in directory.relative_to(path).parts)
    ]
