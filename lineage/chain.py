"""The checkpoints of a run, and a check that they descend from one another and belong to it.

A seal proves that nothing changed after it was made; the check proves that the sealed parts belong
together, so that a directory that was exchanged and sealed anew is noticed too. Reads JSON alone.
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
"""Files of a checkpoint."""


def checkpoint_path(run: Path, iteration: int) -> Path:
    """Place of a run's checkpoint of an iteration."""
    return run / CHECKPOINTS / f"iter_{iteration:07d}"


def iteration_of(checkpoint: Path) -> int:
    """Iteration that a checkpoint is named after."""
    return int(checkpoint.name.removeprefix("iter_"))


def complete_checkpoints(run: Path) -> list[Path]:
    """Sealed checkpoints of a run, oldest first."""
    return sorted(path for path in (run / CHECKPOINTS).glob("iter_*") if is_sealed(path))


def own_checkpoints(run: Path) -> list[Path]:
    """Sealed checkpoints of a run that this process works in. Raises BadInput if one belongs to
    another run.

    A link to a checkpoint, which a replay begins from, leads to another run on purpose.
    """
    check_held(run)
    identity = read_object(run / MANIFEST)["identity"] if (run / MANIFEST).is_file() else None
    for path in (checkpoints := complete_checkpoints(run)):
        of = identity
        with suppress(IntegrityFailure):  # what is damaged is found when it is loaded
            of = read_object(path / LINEAGE).get("run")
        if of != identity and not path.is_symlink():
            raise BadInput(
                f"{path} belongs to another run ({str(of)[:8]}): move it away to go on with"
                f" {run.name}"
            )
    return checkpoints


def resolve_checkpoint(path: Path) -> Path:
    """The checkpoint itself, or the newest complete one of a run directory."""
    if not path.is_dir():
        raise BadInput(f"there is no checkpoint directory {path}")
    path = path.resolve()
    folder = path if path.name == CHECKPOINTS else path / CHECKPOINTS
    if folder.is_dir():
        complete = complete_checkpoints(folder.parent)
        if not complete:
            raise IntegrityFailure(f"{path} has no complete checkpoint")
        return complete[-1]
    if not is_sealed(path):
        raise IntegrityFailure(f"{path} has no COMPLETE file: it is not a finished checkpoint")
    if not (path / INDEX).is_file():
        raise BadInput(f"{path} is complete but is not a checkpoint: it has no {INDEX}")
    return path


def read_newest(path: Path, read: Callable[[Path], T]) -> T:
    """Read a checkpoint, or the newest of a run; if a training removes that meanwhile, the next
    newest is read."""
    while True:
        chosen = resolve_checkpoint(path)
        try:
            return read(chosen)
        except (OSError, UserError):
            if chosen.is_dir() or chosen == path.resolve():
                raise


def broken_links(run: Path) -> list[str]:
    """A sentence for each broken link of a run that has a manifest."""
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
    """Compare the identity in the manifest of the run of that name with the configuration and the
    inputs."""
    config = manifest["config"]
    if sha256_json(config) != manifest["config_digest"]:
        yield f"{name}: the configuration in {MANIFEST} is not the one its digest was made of"
    if identity_in(manifest) != manifest["identity"]:
        yield f"{name}: the identity in {MANIFEST} is not that of its configuration and inputs"
    for section, value in manifest.get("settings", {}).items():
        if not _states(config.get(section), value):
            yield f"{name}: the {section} in `settings` of {MANIFEST} is not the one in `config`"
    yield from _attempts(name, manifest)


def _attempts(name: str, manifest: JSON) -> Iterator[str]:
    """Check that each attempt names the one before it; those of earlier versions name none."""
    attempts = manifest.get("attempts", [])
    for number, attempt in enumerate(attempts):
        before = sha256_json(attempts[number - 1]) if number else manifest["identity"]
        if attempt.get("before", before) != before or (
            "before" not in attempt and "layouts" not in manifest
        ):
            yield f"{name}: attempt {number + 1} in {MANIFEST} does not follow on the one before it"


def _states(whole: Any, part: Any) -> bool:
    """True if a value has everything of another that leaves keys out."""
    if isinstance(part, dict) and isinstance(whole, dict):
        return all(key in whole and _states(whole[key], value) for key, value in part.items())
    if isinstance(part, list) and isinstance(whole, list):
        return len(whole) == len(part) and all(map(_states, whole, part))
    return bool(whole == part)


def _check_checkpoint(path: Path, manifest: JSON) -> Iterator[str]:
    """Compare a checkpoint's iteration with its name, and its run, inputs and configuration with
    the manifest."""
    lineage, iteration = read_object(path / LINEAGE), read_object(path / STATE).get("iteration")
    if path.name != f"iter_{iteration:07d}":
        yield f"{path.name} holds iteration {iteration}: it was exchanged or copied"
    if lineage["run"] != manifest["identity"]:
        yield (
            f"{path.name} belongs to another run, {str(lineage['run'])[:8]}, not to"
            f" {manifest['identity'][:8]}"
        )
    if lineage["parents"] != manifest["parents"]:
        changed = sorted(
            name
            for name, digest in manifest["parents"].items()
            if lineage["parents"].get(name) != digest
        )
        yield f"{path.name} was trained on other inputs: {', '.join(changed)}"
    attempts: dict[Any, Any] = {
        sha256_json(each): each for each in manifest.get("attempts", [])
    } | {None: {}}
    if (by := lineage.get("attempt")) not in attempts:
        yield f"{path.name} was written by an attempt that {MANIFEST} does not have"
    config = read_object(path / CONFIG)
    due = {section: manifest["config"].get(section) for section in ("name", "model", "twin")}
    # Earlier versions noted no attempts.
    due["parallel"] = attempts.get(by, {}).get("parallel", config.get("parallel"))
    yield from islice(unlike(path.name, config, due, "the run's is"), 1)


def _check_descent(older: Path, newer: Path) -> Iterator[str]:
    """Check that the newer checkpoint names the older one, after the same ancestors."""
    ancestors = read_object(newer / LINEAGE)["ancestors"]
    before = read_object(older / LINEAGE)["ancestors"]
    iteration = read_object(older / STATE)["iteration"]
    own = [ancestor for ancestor in ancestors if ancestor["iteration"] == iteration]
    here = {"iteration": iteration, "digest": read_digest(older), "weights": _weights(older)}
    if not own:
        parent = f"iteration {ancestors[-1]['iteration']}" if ancestors else "none: it began anew"
        yield f"{newer.name} does not descend from {older.name}: its parent is {parent}"
    elif own != [here]:
        other = f"another {older.name} ({own[0]['digest'][:16]}) than is here"
        yield f"{newer.name} descends from {other}: one of them was exchanged"
    elif ancestors[: len(before)] != before:
        yield f"{newer.name} and {older.name} name different checkpoints before them"


def _check_weights(checkpoints: list[Path]) -> Iterator[str]:
    """Check that no two iterations have the same weights, including removed checkpoints."""
    seen: dict[str, str] = {}
    if checkpoints:
        for ancestor in read_object(checkpoints[-1] / LINEAGE)["ancestors"]:
            name = f"iter_{ancestor['iteration']:07d}"
            if (other := seen.setdefault(ancestor["weights"], name)) != name:
                yield f"{name} had the same weights as {other}: nothing was trained between them"
    for path in checkpoints:
        if (other := seen.setdefault(_weights(path), path.name)) != path.name:
            yield (
                f"{path.name} has the same weights as {other}: one was copied, or nothing was"
                " trained between them"
            )


def _weights(checkpoint: Path) -> str:
    """Digest of the weights alone."""
    others = {name for name in sealed_files(checkpoint) if not name.startswith("model-")}
    return content_digest(checkpoint, without=others)
