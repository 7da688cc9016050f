"""A run directory: manifest first, completion marker last, everything between in plain files.

A run's identity is a digest of its work: its kind, the version of that kind's schema, the settings
that differ from their defaults, and its inputs. A new key with a default changes no identity, nor
does a release of this package; a default that changes a result raises the schema's version.

Its directory is `<root>/<name>-<first 8 of identity>`, and `<root>/<name>` links to the newest
complete one, or to a training in progress if there is none. The same work asked for twice finds the
first result, and changed work never overwrites an old result.
"""

import errno
import os
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from mlm_repro.lineage.atomic import JSON, NO_LINKS, hidden_beside, make_directory, sync, write_json
from mlm_repro.lineage.digest import is_sealed, read_digest, seal, sha256_json
from mlm_repro.lineage.environment import code_digest, describe_environment
from mlm_repro.lineage.errors import BadInput, IntegrityFailure
from mlm_repro.lineage.files import Attempt, Manifest, parse_document, read_object
from mlm_repro.lineage.lock import LOCK, check_held, claimed, locked

MANIFEST = "manifest.json"
LONGEST_NAME = 200
"""Largest length of a run's name in bytes. File systems take 255; the identity and the marks of
unfinished files need some of them."""


@dataclass(frozen=True)
class RunDirectory:
    """Directory of one run, which its methods begin, open, lock and seal. The directory's name ends
    with the first eight characters of the run's identity, unless `begin_at` was given the path."""

    path: Path
    is_new: bool = field(default=False, compare=False)
    """True if the call that returned this object began the run."""
    made_directory: bool = field(default=False, compare=False)
    """True if the call that returned this object made the directory, and began the run."""

    @classmethod
    def begin(
        cls,
        root: Path,
        name: str,
        kind: str,
        config: JSON,
        parents: dict[str, str],
        without: frozenset[str] = frozenset(),
        settings: JSON | None = None,
        schema: int = 1,
    ) -> "RunDirectory":
        """Return the RunDirectory of `<root>/<name>-<first 8 of identity>` for this work, and write
        its manifest if it is new.

        `config` is the whole configuration as a dict; `parents` maps the name of each input to its
        digest. `settings` are the values of `config` that differ from their defaults, or None for
        all of `config`. Sections named in `without` only say where the run takes place, and the
        identity does not cover them. `schema` is the version of the kind's schema. Raises BadInput
        if `root` cannot hold directories, if the directory holds other work, if `name` there leads
        to a run of another kind, or if the name is too long; IntegrityFailure if a manifest that is
        there cannot be read.
        """
        manifest = asked_for(name, kind, config, parents, without, settings, schema)
        return cls.find(root, manifest).begun(manifest)

    @classmethod
    def find(cls, root: Path, manifest: Manifest) -> "RunDirectory":
        """Return the RunDirectory for the work of a manifest, at `<root>/<name>-<first 8 of
        identity>`, whether it was begun or not; nothing is written. Raises BadInput if the name is
        too long or `<root>/<name>` leads to a run of another kind, and IntegrityFailure if the
        manifest of that run cannot be read."""
        if (length := len(os.fsencode(manifest.name))) > LONGEST_NAME:
            raise BadInput(
                f"the run's name has {length} bytes: give it one of at most {LONGEST_NAME}, which"
                " leave room for the names of its files"
            )
        named = root / manifest.name
        if (named / MANIFEST).is_file() and (
            other := read_object(named / MANIFEST).get("kind")
        ) != manifest.kind:
            raise BadInput(
                f"{named} is the name of a {other} run: give this {manifest.kind} run another name,"
                " or another folder of runs"
            )
        return cls(root / f"{manifest.name}-{manifest.identity[:8]}")

    @classmethod
    def begin_at(
        cls, path: Path, kind: str, config: JSON, parents: dict[str, str]
    ) -> "RunDirectory":
        """Return the RunDirectory at exactly `path` for the work of this kind and configuration on
        the inputs whose digests `parents` has by name, and write its manifest if it is new. Raises
        BadInput if the directory holds anything else, cannot be made, or is reserved by another
        command, and IntegrityFailure if a manifest that is there is damaged."""
        manifest = asked_for(path.name, kind, config, parents)
        with claimed(path):
            is_begun = (path / MANIFEST).exists()
            if not is_begun and (
                path.is_file() or (path.is_dir() and not all(map(_is_leftover, path.iterdir())))
            ):
                raise BadInput(
                    f"{path} is a file, or a directory with files but no manifest.json: name a new"
                    " or an empty directory"
                )
            return cls(path).begun(manifest)

    def begun(self, manifest: Manifest) -> "RunDirectory":
        """Return this run as a RunDirectory with its manifest on disk: `manifest` is written, with
        the time and the environment, unless the directory has a manifest, which then stays as it
        is. Several processes may begin a run at once.

        Raises BadInput if the directory cannot be made or its manifest has another identity than
        the argument, IntegrityFailure if a manifest that is there is damaged. Files without a
        manifest are no error here.
        """
        path = self.path
        run = self
        if not (path / MANIFEST).exists():
            made = not path.exists()
            try:
                make_directory(path)
            except OSError as error:
                raise BadInput(
                    f"the run directory {path} cannot be made: {error.strerror}"
                ) from error
            manifest = manifest.model_copy(
                update={"created": _now(), "environment": describe_environment()}
            )
            is_new = write_json(path / MANIFEST, manifest.to_json(), replaces=False)
            run = RunDirectory(path, is_new, is_new and made)
        if run.manifest["identity"] != manifest.identity:
            raise BadInput(
                f"{path} holds the result of other work, with other settings or inputs or by"
                " another state of this program: name another place, or move it away"
            )
        return run

    def note_attempt(self, iteration: int, parallel: JSON, ranks: int) -> None:
        """Append an attempt to the run's manifest.json: this process begins or continues a training
        after `iteration` finished iterations, at the layout `parallel`, a dict, on `ranks` ranks.
        The attempt also has the time, code, machine and command, and a digest of the attempt before
        it or, if it is the first, the run's identity. One rank alone calls it. Raises
        IntegrityFailure if manifest.json cannot be read."""
        values = read_object(self.path / MANIFEST)
        here = describe_environment()
        attempts = values.get("attempts") or values.get("layouts", [])
        attempt = Attempt(
            iteration=iteration,
            parallel=parallel,
            ranks=ranks,
            began=_now(),
            code=code_digest(),
            release=here.code,
            versions={"Python": here.python, **here.packages},
            machine=here.machine,
            command=here.argv,
            before=sha256_json(attempts[-1]) if attempts else values["identity"],
        )
        write_json(self.path / MANIFEST, {**values, "attempts": [*attempts, attempt.to_json()]})

    @contextmanager
    def filled(self) -> Iterator[None]:
        """Context manager: hold the lock of the run's directory during the block.

        Raises BadInput if the lock is held or the file system has no locks. After BadInput in the
        block, a manifest that the call which returned this object wrote is removed, and a directory
        that the call made if nothing else is in it.
        """
        try:
            with locked(self.path):
                try:
                    yield
                except BadInput:
                    if self.is_new:
                        (self.path / MANIFEST).unlink(missing_ok=True)
                    raise
        except BadInput:
            if self.made_directory:
                with suppress(OSError):
                    self.path.rmdir()
            raise

    @classmethod
    def open(cls, path: Path, kind: str = "") -> "RunDirectory":
        """Return the RunDirectory of the existing run at `path`, without links in its path. Raises
        BadInput if there is no run, or if it is of another kind than `kind`, where that is given,
        and IntegrityFailure if its manifest is damaged."""
        run = cls(path.resolve())
        if (kind_of_run := run.manifest.get("kind", kind)) != kind and kind:
            raise BadInput(
                f"{path} is of the kind {kind_of_run}, not a {kind} run: name another directory"
            )
        return run

    @classmethod
    def open_named(cls, root: Path, name: str) -> "RunDirectory":
        """Return the RunDirectory that `<root>/<name>` leads to. Raises BadInput if there is no
        run, or if it began under another name or was renamed, and IntegrityFailure if its manifest
        is damaged."""
        run = cls.open(root / name)
        if (run.manifest["name"], f"{name}-{run.manifest['identity'][:8]}") != (
            name,
            run.path.name,
        ):
            raise BadInput(
                f"{root / name} does not lead to a run that began as {name}, or that run was"
                f" renamed: move {run.path} away"
            )
        return run

    @property
    def manifest(self) -> JSON:
        """Content of the run's manifest.json as a dict, read at each access, with defaults for
        missing keys. Raises BadInput without a manifest, IntegrityFailure if it is damaged."""
        path = self.path / MANIFEST
        if not path.is_file():
            name = self.path.name
            runs = [manifest.parent.name for manifest in self.path.parent.glob(f"*/{MANIFEST}")]
            begun = sorted(run for run in runs if run.startswith(f"{name}-")) or get_close_matches(
                name, runs, 1
            )
            near = f"; there is {', '.join(begun)}" if begun else ""
            raise BadInput(f"{self.path} is not a run directory: it has no {MANIFEST}{near}")
        values = read_object(path)
        try:
            return parse_document(values, Manifest, str(path)).model_dump(mode="json") | values
        except UnicodeEncodeError as error:
            raise IntegrityFailure(
                f"{path} holds an escape such as \\ud800, half of a character, which this program"
                " does not write: it was edited or damaged, so put back an undamaged copy of it"
            ) from error

    @property
    def other_code(self) -> str:
        """Sentence that the run was last worked on under another release, commit or digest of the
        source files than this process has, naming both; an empty text if all are equal, or if the
        run has not begun. A run without attempts is known by the release and commit that began
        it. Raises IntegrityFailure if the manifest is damaged."""
        if not (self.path / MANIFEST).is_file():
            return ""
        began = Manifest(**self.manifest)
        here = describe_environment()
        made = began.environment.code
        now = here.code
        if began.attempts and (code := began.attempts[-1].code):
            made = f"{began.attempts[-1].release} (code {code[:8]})"
            now = f"{now} (code {code_digest()[:8]})"
        return (
            f"{self.path.name} was last worked on under {made}, and here is {now}"
            if made != now
            else ""
        )

    @property
    def is_complete(self) -> bool:
        """True if the run is sealed: it has its completion marker."""
        return is_sealed(self.path)

    @property
    def is_at_rest(self) -> bool:
        """True if the run is sealed and has no lock: no process works in it, and none was killed
        there."""
        return self.is_complete and not (self.path / LOCK).exists()

    @property
    def digest(self) -> str:
        """Hexadecimal digest of the completed run's files, as its seal states it. Raises
        IntegrityFailure without a readable seal."""
        return read_digest(self.path)

    def complete(self, known: Mapping[str, str] | None = None) -> str:
        """Seal the run's directory, make `<root>/<name>` a link to it as `link` does, and return
        the directory's digest, hexadecimal.

        `known` has SHA-256 digests that need not be computed, by the file's path in the directory.
        Raises Interrupted if the directory is no longer the one that this process locked, and the
        errors of `seal` and `link`.
        """
        check_held(self.path)
        digest = seal(self.path, known)
        self.link()
        sync(self.path.parent)
        return digest

    def link(self, yields: bool = False) -> None:
        """Make `<root>/<name>` a symbolic link to this run's directory, unless anything but a link
        has that name. A link to another run is replaced.

        If `yields`, a link to a complete run stays as it is. Prints a note to standard error if the
        file system has no links. Raises BadInput if this user may not write there.
        """
        path = self.path
        link = path.parent / self.manifest["name"]
        if link.is_symlink() and os.readlink(link) == path.name:
            return
        if (link.exists() and not link.is_symlink()) or (yields and is_sealed(link)):
            return
        # A link cannot be changed in place. A new one is renamed over it: the name always exists.
        temporary = hidden_beside(path / link.name, "link")
        temporary.unlink(missing_ok=True)
        try:
            temporary.symlink_to(path.name)
            os.replace(temporary, link)
        except OSError as error:
            if error.errno == errno.EACCES:
                raise BadInput(
                    f"{link} cannot be linked to {path.name}: {error.strerror}; let this user"
                    " write in that folder, or name another folder for the runs"
                ) from error
            if error.errno not in NO_LINKS:
                raise
            print(
                f"note: this file system has no links: the run is {path}, and {link} does not"
                " lead to it",
                file=sys.stderr,
            )


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def asked_for(
    name: str,
    kind: str,
    config: JSON,
    parents: dict[str, str],
    without: Collection[str] = (),
    settings: JSON | None = None,
    schema: int = 1,
) -> Manifest:
    """Return the Manifest, with its identity, of the run of this name, kind, configuration and
    inputs, which `parents` gives as the digest of each by name. Time and environment of its
    beginning are left empty. Nothing is written.

    `settings` are the values of `config` that differ from their defaults, or None for all of
    `config`. The identity covers the kind, its schema's version `schema`, the inputs, and the
    settings without the sections named in `without`.
    """
    everything = config if settings is None else settings
    manifest = Manifest(
        name=name,
        kind=kind,
        created="",
        schema_version=schema,
        settings={
            section: value for section, value in everything.items() if section not in without
        },
        config=config,
        outside_identity=sorted(without),
        config_digest=sha256_json(config),
        parents=parents,
    )
    return manifest.model_copy(update={"identity": identity_in(manifest.model_dump())})


def identity_in(manifest: Mapping[str, Any]) -> str:
    """Return the identity of the run of a manifest, given as a dict, computed anew: the hexadecimal
    SHA-256 of the manifest's `kind`, `schema_version`, `settings` and `parents`, which are the
    digests of the inputs. Raises KeyError if the manifest lacks a key that is needed.

    A manifest without a schema version is from the first release, where the identity covers the
    kind, the inputs, the package's version and `config` without the sections that
    `outside_identity` names.
    """
    if manifest.get("schema_version") is not None:
        names = {
            "kind": "kind",
            "schema": "schema_version",
            "settings": "settings",
            "parents": "parents",
        }
        return sha256_json({name: manifest[key] for name, key in names.items()})
    without = manifest["outside_identity"]
    version = manifest["environment"]["mlm_repro"]
    config = {
        section: value for section, value in manifest["config"].items() if section not in without
    }
    return sha256_json(
        {
            "kind": manifest["kind"],
            "config": config,
            "parents": manifest["parents"],
            "version": version,
        }
    )


def _is_leftover(path: Path) -> bool:
    """Return True if `path` may be left in a directory by a run that was begun there and given up:
    an unfinished manifest, the work folder or the lock."""
    return path.name.startswith(f".{MANIFEST}.partial-") or path.name in (".work", LOCK)
