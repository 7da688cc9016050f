"""Kinds of sealed directories: the files that each must and may have, its name, and how its files
follow from one another.

Each room declares its kinds beside the schemas of their files. Lists are closed: a directory that
they do not describe is not verified. Imports no torch.
"""

import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel

from mlm_repro.lineage.atomic import JSON, parse_json
from mlm_repro.lineage.chain import CHECKPOINTS
from mlm_repro.lineage.digest import MARKER
from mlm_repro.lineage.files import Comparisons, FileSchema, unlike
from mlm_repro.lineage.lock import LOCK
from mlm_repro.lineage.run import MANIFEST

NAME = "[^/]+"
PIECES = (
    rf"(model|optimizer|memory)-{NAME}\.safetensors|"
    rf"(statistics|probe|tokenizer/tokenizer(_config)?)\.json"
)
"""Matches the names of a checkpoint's files, except its configuration and progress."""
OUTSIDE = re.compile(r"(.*/)?\..*|(wandb|mlflow)/.*")
"""Matches paths that no seal covers: hidden files, and the files of logging libraries."""
ALWAYS_FREE = (
    "manifest.json created",
    "manifest.json environment",
    "a key left out where that means 0, no or nothing",
)


class Kind(NamedTuple):
    """Rules for one kind of sealed directory: its files, its name, what its identity covers,
    and the checks that recompute its files."""

    files: Mapping[str, type[FileSchema] | None]
    """Name of a required file → its schema, or None if it is not a JSON document."""
    others: str = "(?!)"
    """Regular expression that matches the names of optional files."""
    name: Callable[[JSON], str] = lambda config: NAME
    """Function from a configuration, as a dict, to the regular expression that matches the run's
    name."""
    outside: frozenset[str] = frozenset()
    """Sections of the configuration that the identity does not cover."""
    settings: Callable[[JSON], JSON] = lambda config: config
    """Function from a configuration, as a dict, to the values that differ from their defaults,
    which the identity covers."""
    schema: int = 1
    """Version of the settings' meaning that this program knows. Settings under another version are
    not recomputed."""
    free: tuple[str, ...] = ()
    """Files, each with the keys in it that no check can contradict; `mlm-verify run` prints
    them."""
    made: tuple[Callable[[Path], Comparisons], ...] = ()
    """Functions that are given the directory and yield comparisons: its files are recomputed from
    one another and from the run's inputs."""


def differing(model: type[BaseModel], values: JSON) -> JSON:
    """Return as a dict of plain values, nested as the configuration is, the fields of the
    configuration `values` that differ from their default in the pydantic class `model`, or have no
    default. A section that equals its default is left out; another has the fields that differ from
    the defaults of the section's own class. Raises pydantic's ValidationError if `model` refuses
    `values`."""
    return model.model_validate(values).model_dump(mode="json", exclude_defaults=True)


def parts_within(run: Path) -> list[Path]:
    """Return a sorted list of the paths of the directories below a run, at any depth, that are
    sealed, and of all directories in its `checkpoints`. Hidden ones and the folders of logging
    libraries are left out."""
    markers = (marker.parent for marker in run.rglob(MARKER))
    directories = {*markers, *(path for path in (run / CHECKPOINTS).glob("*") if path.is_dir())} - {
        run
    }
    return sorted(
        path
        for path in directories
        if not OUTSIDE.fullmatch(f"{path.relative_to(run).as_posix()}/")
    )


def misfits(directory: Path, kind: Kind, values: JSON) -> Iterator[str]:
    """Yield a sentence for each way in which a directory departs from its kind: a file that is
    missing, unknown, a link or not JSON, a key that stands twice, a wrong setting or a wrong name.
    Hidden files and the folders of logging libraries are passed over, and a link from a run's name
    to the run beside it is no fault.

    `values` is the content of its manifest.json, an empty dict for a kind without one. Settings are
    not compared if they are of another version of the kind's schema. Raises KeyError, TypeError or
    ValueError if `values` lacks a key or has a configuration that does not fit the kind.
    """
    called = directory.name
    missing = {*kind.files, MARKER, *([MANIFEST] if values else [])}
    known = rf"{'|'.join(map(re.escape, missing))}|{kind.others}"
    for path in sorted(directory.rglob("*")):
        name = path.relative_to(directory).as_posix()
        if OUTSIDE.fullmatch(name):
            continue
        if path.is_symlink() and not _is_name_for(path):
            yield f"{called} has {name}, which is a link: it could lead anywhere"
        if path.is_dir():
            continue
        if name.endswith((".json", ".jsonl", MARKER)):
            yield from _repeated(path, f"{called}/{name}")
        if not re.fullmatch(known, name, re.ASCII):
            yield f"{called} has {name}, which no run of its kind has"
        missing.discard(name)
    yield from (f"{called} has no {name}" for name in sorted(missing))
    if not values:
        return
    if set(values["outside_identity"]) != kind.outside:
        yield (
            f"{MANIFEST} of {called} was edited: its `outside_identity` does not name the"
            " sections that the identity of such a run leaves out"
        )
    # Under another version of the schema the settings cannot be recomputed by this program.
    if values.get("schema_version") == kind.schema:
        counted = {
            key: value
            for key, value in kind.settings(values["config"]).items()
            if key not in kind.outside
        }
        yield from unlike(
            f"{MANIFEST} of {called}: settings",
            values["settings"],
            counted,
            "its configuration has",
        )
    name = values["name"]
    named = f"{name}-{values['identity'][:8]}"
    if not re.fullmatch(kind.name(values["config"]), name):
        yield f"{called} is called {name}, and its configuration gives it another name"
    if called not in (name, named):
        yield f"{called} was renamed or copied over another: it began as {named}"


def _is_name_for(link: Path) -> bool:
    """Return True if the target of `link` is `NAME-XXXXXXXX` beside it, where NAME is the link's
    own name and the digits are hexadecimal: a run under its name without the digest."""
    target = os.readlink(link)
    return bool(re.fullmatch(rf"{re.escape(link.name)}-[0-9a-f]{{8}}", target))


def _repeated(path: Path, where: str) -> Iterator[str]:
    """Yield one sentence if the file `path` is not JSON, or has an object with a key twice, because
    readers take only one of the values; otherwise yield nothing. A file whose name ends in `.jsonl`
    has JSON in each line. `where` names the file in the sentence."""

    def once(pairs: list[tuple[str, Any]]) -> JSON:
        if len(values := dict(pairs)) < len(pairs):
            raise KeyError
        return values

    text = path.read_bytes()
    try:
        for document in text.splitlines() if path.suffix == ".jsonl" else (text,):
            parse_json(document, once)
    except KeyError:
        yield f"{where} has a key twice"
    except ValueError:
        yield f"{where} is not JSON"


def hidden(directory: Path) -> list[str]:
    """Return a sorted list of the names of the files and folders directly in `directory`, a path,
    that are or hold, at any depth, a file that no seal covers: one whose name, or a folder's above
    it, begins with a dot, or one in the folder `wandb` or `mlflow` of a logging library. Each name
    is there once; a folder without files and the lock are left out."""
    paths = (path.relative_to(directory) for path in directory.rglob("*") if path.is_file())
    return sorted(
        {
            path.parts[0]
            for path in paths
            if path.name != LOCK and OUTSIDE.fullmatch(path.as_posix())
        }
    )
