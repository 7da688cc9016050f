"""A complete run as every format needs it: what its manifest says, and each of its files with size and digest."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from lineage.digest import MARKER, check_seal, sealed_files, sha256_file
from lineage.files import Manifest, read_document
from lineage.run import MANIFEST, RunDirectory

SOFTWARE = "mlm-repro"
ENCODINGS = {".json": "application/json", ".jsonl": "application/jsonlines"}

Json = dict[str, Any]


@dataclass(frozen=True)
class SealedFile:
    """A file of a run, as it was sealed."""

    name: str
    """Path within the run."""
    size: int
    """Bytes."""
    sha256: str

    @property
    def facts(self) -> Json:
        """Encoding, size and digest in the words of schema.org."""
        encoding = ENCODINGS.get(Path(self.name).suffix, "application/octet-stream")
        return {"encodingFormat": encoding, "contentSize": str(self.size), "sha256": self.sha256}


@dataclass(frozen=True)
class SealedRun:
    """A run whose files are those that were sealed."""

    path: Path
    digest: str
    manifest: Manifest
    files: tuple[SealedFile, ...]
    """Those of sealed directories inside it, such as checkpoints, included."""

    @classmethod
    def open(cls, path: Path) -> Self:
        """The run at `path`. Raises BadInput if there is none, IntegrityFailure if it is incomplete or damaged."""
        path = RunDirectory.open(path).path
        digest = check_seal(path)
        return cls(path, digest, read_document(path / MANIFEST, Manifest), tuple(_files(path)))


def _files(directory: Path, inside: str = "") -> Iterator[SealedFile]:
    marker = directory / MARKER
    yield SealedFile(inside + MARKER, marker.stat().st_size, sha256_file(marker))
    for name, entry in sealed_files(directory).items():
        if Path(name).name == MARKER:
            inner = Path(name).parent.as_posix()
            check_seal(directory / inner)
            yield from _files(directory / inner, f"{inside}{inner}/")
        else:
            yield SealedFile(inside + name, entry["bytes"], entry["sha256"])
