"""The checkpoints of a run, and a check that they descend from one another and belong to it.

A seal proves that nothing changed after it was made. The check proves that the sealed parts belong
together, so that it notices a checkpoint that was exchanged and sealed anew. Reads JSON alone.
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, TypeVar

from mlm_repro.lineage.atomic import JSON
from mlm_repro.lineage.digest import (
    content_digest,
    is_sealed,
    read_digest,
    sealed_files,
    sha256_json,
)
from mlm_repro.lineage.errors import BadInput, IntegrityFailure, UserError
from mlm_repro.lineage.files import read_object, unlike
from mlm_repro.lineage.lock import check_held
from mlm_repro.lineage.run import MANIFEST, identity_in

T = TypeVar("T")
CHECKPOINTS = "checkpoints"
"""Folder of a run that holds its checkpoints."""
LINEAGE, CONFIG, STATE, INDEX = "lineage.json", "config.json", "state.json", "index.json"
"""Names of the files of a checkpoint that this module reads."""


def checkpoint_path(run: Path, iteration: int) -> Path:
    """Return the path of a run's checkpoint directory at an iteration, such as
    `RUN/checkpoints/iter_0000100`, whether it is there or not."""
    return run / CHECKPOINTS / f"iter_{iteration:07d}"


def iteration_of(checkpoint: Path) -> int:
    """Return as an int the iteration in the name of a checkpoint directory: 100 for `iter_0000100`.
    A name without `iter_` is read too. Raises ValueError if the rest is no whole number."""
    return int(checkpoint.name.removeprefix("iter_"))


def complete_checkpoints(run: Path) -> list[Path]:
    """Return a list of the paths of a run's sealed checkpoints, oldest first. Seals are not read,
    and a checkpoint that belongs to another run counts too."""
    return sorted(path for path in (run / CHECKPOINTS).glob("iter_*") if is_sealed(path))


def own_checkpoints(run: Path) -> list[Path]:
    """Return a list of the paths of the sealed checkpoints of a run, oldest first.

    Raises BadInput if the run has a manifest and a checkpoint belongs to another run or names none,
    unless it is a link: a replay begins from a link to another run's checkpoint. Raises
    IntegrityFailure if the manifest cannot be read, and Interrupted if this process locked the run
    and it was moved or removed since. A damaged checkpoint is returned: loading it reports the
    damage.
    """
    check_held(run)
    checkpoints = complete_checkpoints(run)
    if not (run / MANIFEST).is_file():
        return checkpoints
    identity = read_object(run / MANIFEST)["identity"]
    for path in checkpoints:
        lineage = path / LINEAGE
        with suppress(IntegrityFailure):  # loading a checkpoint reports its damage
            owner = read_object(lineage).get("run") if lineage.is_file() else None
            if owner != identity and not path.is_symlink():
                raise BadInput(
                    f"{path} is not a checkpoint of {run.name}: its {LINEAGE} names another run or"
                    " is missing; move the checkpoint away"
                )
    return checkpoints


def resolve_checkpoint(path: Path) -> Path:
    """Return the path of the checkpoint at `path` without links in it, or of the newest complete
    one if `path` is a run directory or its folder of checkpoints.

    Raises BadInput if `path` is not a directory, or is sealed and not a checkpoint, or is a run
    that holds a checkpoint of another run, and IntegrityFailure if there is no complete checkpoint.
    The other errors of `own_checkpoints` are passed on.
    """
    if not path.is_dir():
        raise BadInput(f"there is no checkpoint directory {path}")
    path = path.resolve()
    folder = path if path.name == CHECKPOINTS else path / CHECKPOINTS
    if folder.is_dir():
        complete = own_checkpoints(folder.parent)
        if not complete:
            raise IntegrityFailure(
                f"{path} has no complete checkpoint: none in it has the file COMPLETE, which is"
                " written last; name another run, or train this one until it has saved a checkpoint"
            )
        return complete[-1]
    if not is_sealed(path):
        raise IntegrityFailure(
            f"{path} has no COMPLETE file: it is neither a finished checkpoint nor a run with"
            " checkpoints"
        )
    if not (path / INDEX).is_file():
        raise BadInput(
            f"{path} is complete but is not a checkpoint: it has no {INDEX}; name a checkpoint, or"
            " a run that has one"
        )
    return path


def read_newest(path: Path, read: Callable[[Path], T]) -> T:
    """Call `read` with the path of a checkpoint, the one at `path` or the newest one in the run
    directory `path`, and return its result. Raises the errors of `resolve_checkpoint` and `read`.

    If `path` is a run directory and a training removes the checkpoint while it is read, the one
    that is newest by then is read.
    """
    while True:
        chosen = resolve_checkpoint(path)
        try:
            return read(chosen)
        except (OSError, UserError):
            if chosen.is_dir() or chosen == path.resolve():
                raise


def broken_links(run: Path) -> list[str]:
    """Return a list of a sentence for each contradiction within a run's manifest, between it and
    the run's sealed checkpoints, and between the checkpoints. Empty if there is none. Files are not
    compared with their seals. Checkpoints without a lineage.json are left out. The run directory
    must have a manifest. Raises IntegrityFailure if a JSON file or a seal cannot be read, KeyError,
    TypeError or AttributeError if a JSON file lacks a key or has a value of another kind."""
    manifest = read_object(run / MANIFEST)
    broken = list(broken_manifest(run.name, manifest))
    checkpoints = [path for path in complete_checkpoints(run) if (path / LINEAGE).is_file()]
    for path in checkpoints:
        broken += _check_checkpoint(path, manifest)
    for older, newer in pairwise(checkpoints):
        broken += _check_descent(older, newer)
    broken += _check_weights(checkpoints)
    return broken


def broken_manifest(name: str, manifest: JSON) -> Iterator[str]:
    """Yield a sentence for each contradiction within the content of manifest.json: in its digest of
    the configuration, its identity, its settings or its attempts. `name` is the run's name. Raises
    KeyError, TypeError or AttributeError if the content lacks a key or has a value of another kind.
    """
    config = manifest["config"]
    if sha256_json(config) != manifest["config_digest"]:
        yield (
            f"{name}: the configuration in {MANIFEST} is not the one its digest was made of, so"
            " `config` or `config_digest` was edited"
        )
    if identity_in(manifest) != manifest["identity"]:
        yield (
            f"{name}: the identity in {MANIFEST} is not that of its configuration and inputs, so"
            " one of the three was edited"
        )
    for section, value in manifest.get("settings", {}).items():
        if not _states(config.get(section), value):
            yield (
                f"{name}: the {section} in `settings` of {MANIFEST} is not the one in `config`, so"
                " one of the two was edited"
            )
    yield from _attempts(name, manifest)


def _attempts(name: str, manifest: JSON) -> Iterator[str]:
    """Yield a sentence for each attempt with a wrong field `before` in a manifest: the field must
    be the digest of the previous attempt, and in the first attempt the run's identity. `name` is
    the run's, for the sentences.

    Manifests of earlier versions, which list `layouts`, may lack `before`.
    """
    attempts = manifest.get("attempts", [])
    for number, attempt in enumerate(attempts):
        before = sha256_json(attempts[number - 1]) if number else manifest["identity"]
        if attempt.get("before", before) != before or (
            "before" not in attempt and "layouts" not in manifest
        ):
            yield (
                f"{name}: `before` of attempt {number + 1} in {MANIFEST} is not the digest of the"
                " attempt before it, or for the first the run's identity: attempts were edited,"
                " added or removed"
            )


def _states(full: Any, partial: Any) -> bool:
    """Return True if the JSON value `full` has every key and value of `partial`, which may leave
    out keys at any depth; lists must have equal lengths."""
    if isinstance(partial, dict) and isinstance(full, dict):
        return all(key in full and _states(full[key], value) for key, value in partial.items())
    if isinstance(partial, list) and isinstance(full, list):
        return len(full) == len(partial) and all(map(_states, full, partial))
    return bool(full == partial)


def _check_checkpoint(path: Path, manifest: JSON) -> Iterator[str]:
    """Yield a sentence for each contradiction of the checkpoint directory `path`: between its
    iteration and its name, and between its run, inputs or attempt and the content of manifest.json,
    `manifest`. Of its configuration, the name, the model, the twin and the layout are compared, and
    the first difference alone gives a sentence. Raises IntegrityFailure if a JSON file in the
    directory cannot be read, KeyError or TypeError if a file or the manifest lacks a key."""
    name = path.name
    lineage = read_object(path / LINEAGE)
    iteration = read_object(path / STATE).get("iteration")
    if name != f"iter_{iteration:07d}":
        yield f"{name} holds iteration {iteration}: it was exchanged or copied"
    if lineage["run"] != manifest["identity"]:
        yield (
            f"{name} belongs to another run, {str(lineage['run'])[:8]}, not to"
            f" {manifest['identity'][:8]}"
        )
    yield from unlike(
        f"{name} was trained on other inputs",
        lineage["parents"],
        manifest["parents"],
        "the run's is",
    )
    attempts: dict[Any, Any] = {
        sha256_json(attempt): attempt for attempt in manifest.get("attempts", [])
    } | {None: {}}
    if (writer := lineage.get("attempt")) not in attempts:
        yield (
            f"{name} was written by an attempt that {MANIFEST} does not have: the checkpoint"
            " was exchanged, or an attempt was edited or removed"
        )
    config = read_object(path / CONFIG)
    due = {section: manifest["config"].get(section) for section in ("name", "model", "twin")}
    # Checkpoints of earlier versions name no attempt: their layout is taken as it is.
    due["parallel"] = attempts.get(writer, {}).get("parallel", config.get("parallel"))
    yield from islice(unlike(name, config, due, "the run's is"), 1)


def _check_descent(older: Path, newer: Path) -> Iterator[str]:
    """Yield a sentence, at most one, if the `ancestors` in lineage.json of the checkpoint `newer`
    lack the checkpoint `older`, have another digest of it, or have other ancestors before it than
    `older` names. `older` and `newer` are directories of the same run. Raises IntegrityFailure if a
    JSON file or the seal of `older` cannot be read, KeyError or TypeError if a file lacks a key."""
    ancestors = read_object(newer / LINEAGE)["ancestors"]
    before = read_object(older / LINEAGE)["ancestors"]
    iteration = read_object(older / STATE)["iteration"]
    named = [ancestor for ancestor in ancestors if ancestor["iteration"] == iteration]
    if not named:
        parent = f"iteration {ancestors[-1]['iteration']}" if ancestors else "none: it began anew"
        yield f"{newer.name} does not descend from {older.name}: its parent is {parent}"
    elif named != [
        {"iteration": iteration, "digest": read_digest(older), "weights": _weights(older)}
    ]:
        yield (
            f"{newer.name} descends from another {older.name} ({named[0]['digest'][:16]}) than is"
            " here: one of them was exchanged"
        )
    elif ancestors[: len(before)] != before:
        yield (
            f"{newer.name} and {older.name} name different checkpoints before them in lineage.json:"
            " one of the two was exchanged or edited"
        )


def _check_weights(checkpoints: list[Path]) -> Iterator[str]:
    """Yield a sentence for each checkpoint whose weights an earlier checkpoint has too.
    `checkpoints`, the directories of one run, come oldest first. Removed checkpoints count, because
    the newest one keeps digests of their weights. Raises IntegrityFailure if a JSON file or a seal
    cannot be read."""
    ancestors = read_object(checkpoints[-1] / LINEAGE)["ancestors"] if checkpoints else []
    every = [(f"iter_{each['iteration']:07d}", each["weights"]) for each in ancestors]
    every += [(path.name, _weights(path)) for path in checkpoints]
    seen: dict[str, str] = {}
    for name, weights in every:
        if (other := seen.setdefault(weights, name)) != name:
            yield (
                f"{name} has the same weights as {other}: one was copied, or nothing was trained"
                " between them"
            )


def _weights(checkpoint: Path) -> str:
    """Return one hexadecimal digest of the weights, the files `model-*`, in the directory of a
    sealed checkpoint, from the digests in its seal; the files are not read. Raises IntegrityFailure
    if there is no readable seal."""
    others = {name for name in sealed_files(checkpoint) if not name.startswith("model-")}
    return content_digest(checkpoint, without=others)
