"""Files of a sealed reproduction, its data and its training, unpacked."""

import tarfile
from collections.abc import Callable
from pathlib import Path

PACKED = Path(__file__).with_name("sealed_at_ba375c5.tar.gz")
REPRODUCTION, TRAINING, DATASET = "reproduce-355m-*", "355m-tiny-*", "tiny-*"
"""Names of the runs in it."""


def unpack(folder: Path) -> Path:
    """Put the folder of runs into the folder."""
    with tarfile.open(PACKED) as archive:
        archive.extractall(folder, filter="data")
    return folder


def packed(pattern: str) -> Callable[[Path], Path]:
    """What unpacks it and returns the file that fits the pattern."""

    def prepare(folder: Path) -> Path:
        (path,) = unpack(folder).glob(f"runs/{pattern}")
        return path

    return prepare
