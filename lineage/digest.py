"""SHA-256 digests of files and of JSON values, and the seal of a finished directory.

A sealed directory holds a `COMPLETE` file, written last, that lists every file with its size and
SHA-256. The digest of the directory is the digest of that list. A sealed directory inside a sealed
directory is represented by its own `COMPLETE` file, so that digests form a chain. Folders named in
`DERIVED` are not covered.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

from mlm_repro.lineage.atomic import JSON, open_file, read_json, sync, write_json
from mlm_repro.lineage.atomic import MARKER as MARKER
from mlm_repro.lineage.errors import IntegrityFailure, UserError
from mlm_repro.lineage.progress import Progress

ENTRY = ("bytes", int), ("sha256", str)
"""Keys of a file's entry in a completion marker, in order, each with the type of its value."""
DERIVED = ("report", "wandb", "mlflow")
"""Folders that a seal does not cover: their content is derived from other files. Libraries change
the last two, for example on upload."""


def sha256_file(path: Path) -> str:
    """Return the hexadecimal SHA-256 of a file's bytes. Raises OSError for a path that is not a
    readable file."""
    with open_file(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sha256_json(value: Any) -> str:
    """Return the hexadecimal SHA-256 of a JSON value, given in Python's types, in canonical form
    (sorted keys, no spaces). Raises ValueError for a number that is not finite."""
    text = json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    )
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def bytes_below(directory: Path) -> int:
    """Return the total size in bytes of all files below the path `directory`, at any depth; 0 if
    there are none or the directory does not exist."""
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def seal(directory: Path, known: Mapping[str, str] | None = None) -> str:
    """Flush a finished directory to disk, write its completion marker, the file `COMPLETE`, and
    return its digest, hexadecimal.

    The marker lists all files but hidden ones and those in the folders `DERIVED` at the top level;
    of a sealed directory inside it lists the marker alone. `known` has SHA-256 digests that need
    not be computed, by the file's path in the directory. Raises IntegrityFailure for a link to a
    directory that is not sealed.
    """
    files = {}
    paths = _sealed_files(directory)
    above = chain.from_iterable(path.relative_to(directory).parents for path in paths)
    folders = {directory / folder for folder in above}
    for written in [*paths, *folders]:
        # A seal that survives a power cut needs files, names and removals that survive it too: a
        # harness that loses unsynced writes found names and old checkpoints that did not.
        sync(written)
    with Progress(
        f"sealing {directory.name}", sum(path.stat().st_size for path in paths), "bytes"
    ) as progress:
        for path in paths:
            size = path.stat().st_size
            name = str(path.relative_to(directory))
            files[name] = {"bytes": size, "sha256": (known or {}).get(name) or sha256_file(path)}
            progress.advance(size)
    digest = sha256_json(files)
    write_json(directory / MARKER, {"digest": digest, "files": files})
    return digest


def is_sealed(directory: Path) -> bool:
    """Return True if the directory has its completion marker, the file `COMPLETE`. The marker is
    not read."""
    return (directory / MARKER).is_file()


def read_digest(directory: Path) -> str:
    """Return the hexadecimal digest in the completion marker of a sealed directory, without
    checking the files. Raises IntegrityFailure if there is no readable marker."""
    return str(_read_marker(directory)["digest"])


def sealed_files(directory: Path) -> dict[str, JSON]:
    """Return a dict path in the directory → the file's entry in the completion marker, a dict with
    its `bytes` and `sha256`. The files are not checked. Raises IntegrityFailure if there is no
    readable marker."""
    return dict(_read_marker(directory)["files"])


def by_digest(
    place: Path, digest: str, digest_of: Callable[[Path], str], *folders: Path
) -> Path | None:
    """Return the path of the first directory for which the function `digest_of` gives `digest`,
    among `place`, its siblings and the directories in `folders`; None if there is none. Hidden
    directories other than `place`, and those whose digest cannot be read, are passed over.

    The path `place` alone does not decide: it may lead elsewhere by now, such as the link to a
    dataset that was built anew.
    """
    for path in chain(
        [place],
        *(sorted(folder.glob("[!.]*")) for folder in dict.fromkeys((place.parent, *folders))),
    ):
        with suppress(UserError, OSError):
            if path.is_dir() and digest_of(path) == digest:
                return path
    return None


def content_digest(directory: Path, without: frozenset[str] | set[str]) -> str:
    """Return one hexadecimal digest of a sealed directory's files, from its completion marker,
    without the files whose paths in the directory are in `without`: equal for equal content made
    at different times. The files are not read. Raises IntegrityFailure if there is no readable
    marker."""
    return sha256_json(
        {name: entry for name, entry in sealed_files(directory).items() if name not in without}
    )


def check_seal(directory: Path, is_read: Callable[[str], bool] = lambda name: True) -> str:
    """Compare the files that the seal of `directory` covers with its completion marker and return
    the directory's digest, hexadecimal.

    A sealed directory inside is compared by its marker alone, and a file by its size alone if
    `is_read`, given its path in the directory, returns False. Raises IntegrityFailure naming the
    first file that is missing, added, changed or unreadable, or if there is no readable marker.
    """
    marker = _read_marker(directory)
    files: dict[str, JSON] = marker["files"]
    present = {str(path.relative_to(directory)) for path in _sealed_files(directory)}
    total = sum(file["bytes"] for file in files.values())
    with Progress(f"checking {directory.name}", total, "bytes") as progress:
        for name in sorted(files.keys() | present):
            if name not in present:
                raise IntegrityFailure(
                    f"{directory / name} is missing and was there when {directory.name} was sealed:"
                    " put it back, or make the directory again"
                )
            if name not in files:
                raise IntegrityFailure(
                    f"{directory / name} was added after {directory.name} was sealed: move it away"
                )
            path = directory / name
            expected = files[name]
            try:
                size = path.stat().st_size
                same = size == expected["bytes"] and (
                    not is_read(name) or sha256_file(path) == expected["sha256"]
                )
            except OSError as error:
                raise IntegrityFailure(
                    f"{path} cannot be read to compare it with the seal; make it readable, or put"
                    f" the old file back: {error.strerror}"
                ) from error
            if not same:
                had = (
                    "other content"
                    if size == expected["bytes"]
                    else f"{size:,} of {expected['bytes']:,} bytes"
                )
                raise IntegrityFailure(
                    f"{path} was changed after {directory.name} was sealed: it has {had}; put the"
                    " old file back, or make the directory again"
                )
            progress.advance(expected["bytes"])
    return str(marker["digest"])


def _read_marker(directory: Path) -> JSON:
    """Return the content of a directory's completion marker as a dict with `digest` and `files`.
    Raises IntegrityFailure if the directory or the marker is missing, or the marker is unreadable
    or edited."""
    path = directory / MARKER
    if not directory.is_dir():
        raise IntegrityFailure(
            f"{directory} is missing or is not a directory: put it back, or name another"
        )
    if not path.is_file():
        raise IntegrityFailure(
            f"{directory} has no {MARKER} file: if the command that makes it has not finished, give"
            " that command again; else this program did not make it, so name another directory"
        )
    return checked_marker(lambda: read_json(path), directory)


def checked_marker(read: Callable[[], Any], name: object) -> JSON:
    """Call `read` and return the dict that it gives, which must have the keys of a completion
    marker, each of its type, and the digest of its files. Raises IntegrityFailure, which names the
    directory by `name`, if the dict does not have these, or if `read` raises OSError or
    ValueError."""
    try:
        marker = read()
        files = marker["files"]
        types = {
            tuple((key, type(value)) for key, value in sorted(file.items()))
            for file in files.values()
        }
        is_whole = marker.keys() == {"digest", "files"} and types <= {ENTRY}
        if not is_whole or marker["digest"] != sha256_json(files):
            raise ValueError
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise IntegrityFailure(
            f"{MARKER} of {name} is damaged or was edited, or cannot be read: put back an undamaged"
            " copy of it"
        ) from error
    return dict(marker)


def _sealed_files(directory: Path, outside: tuple[str, ...] = (MARKER, *DERIVED)) -> list[Path]:
    """Return a sorted list of the paths of the files that the seal covers: all but hidden files and
    folders and, at the top level alone, those named in `outside`; of a sealed directory inside, its
    marker alone. Raises IntegrityFailure for a link to a directory that is not sealed."""
    files = []
    for path in sorted(directory.iterdir()):
        if path.name.startswith(".") or path.name in outside:
            continue
        if path.is_dir() and is_sealed(path):
            files.append(path / MARKER)
        elif path.is_dir() and path.is_symlink():
            raise IntegrityFailure(
                f"{path} is a link to a directory without a COMPLETE file, whose content no digest"
                " would cover: remove the link"
            )
        elif path.is_dir():
            files.extend(_sealed_files(path, outside=()))
        else:
            files.append(path)
    return files
