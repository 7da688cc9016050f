"""One file written at the end of another."""

import shutil
from pathlib import Path
from typing import BinaryIO


def append_file(path: Path, out: BinaryIO) -> None:
    """Write the file at `path` at the end of `out`, in bounded memory."""
    with path.open("rb") as file:
        shutil.copyfileobj(file, out, 1 << 20)
