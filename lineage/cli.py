"""`mlm-verify run`: prove that what is on disk is what was written."""

from pathlib import Path
from typing import Annotated

import typer

from lineage.digest import MARKER, check_seal, is_sealed
from lineage.errors import BadInput


def run(path: Annotated[Path, typer.Argument(help="Run or checkpoint directory.")]) -> None:
    """Check every file of a sealed directory, and of the sealed directories inside it, against its digest."""
    path = path.resolve()
    if not path.is_dir():
        raise BadInput(f"{path} is not a directory")
    for directory in [*_sealed_below(path), path]:
        digest = check_seal(directory)
        print(f"ok {digest[:16]} {directory}")


def _sealed_below(path: Path) -> list[Path]:
    """Sealed directories inside `path`, not those in hidden leftovers of a writer that was killed."""
    inner = [marker.parent for marker in sorted(path.rglob(MARKER)) if is_sealed(marker.parent)]
    return [
        directory
        for directory in inner
        if directory != path and not any(part.startswith(".") for part in directory.relative_to(path).parts)
    ]
