"""A run directory: manifest first, completion marker last, everything between in plain files.

A run's identity is a digest of what it does (kind, configuration, digests of its inputs, version of this package).
Its directory is `<root>/<name>-<first 8 of identity>`, and `<root>/<name>` links to the newest complete one, so
asking for the same work twice finds the first result and changed work never overwrites an old result.
"""

import json
import os
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from lineage import VERSION
from lineage.digest import is_sealed, read_digest, seal, sha256_json
from lineage.environment import describe_environment
from lineage.errors import BadInput, IntegrityFailure
from lineage.files import Manifest, StartedWith, write_document
from lineage.lock import LOCK

MANIFEST = "manifest.json"


@dataclass(frozen=True)
class RunDirectory:
    """One run on disk."""

    path: Path

    @classmethod
    def begin(
        cls,
        root: Path,
        name: str,
        kind: str,
        config: dict[str, Any],
        parents: dict[str, str],
        without: frozenset[str] = frozenset(),
    ) -> "RunDirectory":
        """Open the directory for this work, writing its manifest if it is new.

        `parents` maps the name of each input to its digest; sections of `config` named in `without` only say where the
        inputs lie and are no part of the identity. Raises BadInput if `root` cannot hold directories.
        """
        what = {section: value for section, value in config.items() if section not in without}
        identity = identity_of(kind, what, parents, VERSION)
        run = cls(root / f"{name}-{identity[:8]}")
        run._write_manifest(name, kind, identity, config, parents, without)
        return run

    @classmethod
    def begin_at(cls, path: Path, kind: str, config: dict[str, Any], parents: dict[str, str]) -> "RunDirectory":
        """Open `path` itself for this work. Raises BadInput if it holds anything else."""
        run, identity = cls(path), identity_of(kind, config, parents, VERSION)
        if (path / MANIFEST).exists():
            if run.manifest.get("identity") != identity:
                raise BadInput(f"{path} holds the result of other work: name another place or remove it")
        elif path.is_file() or (path.is_dir() and not all(_is_leftover(file) for file in path.iterdir())):
            raise BadInput(f"{path} is in use: name a place that is empty or new")
        run._write_manifest(path.name, kind, identity, config, parents)
        return run

    def _write_manifest(
        self, name: str, kind: str, identity: str, config: dict[str, Any], parents: dict[str, str],
        without: frozenset[str] = frozenset(),
    ) -> None:  # fmt: skip
        """Write what comes first, unless it is there."""
        if not (self.path / MANIFEST).exists():
            try:
                self.path.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise BadInput(f"the run directory {self.path} cannot be made: {error.strerror}") from error
            manifest = Manifest(
                name=name,
                kind=kind,
                identity=identity,
                created=datetime.now(UTC).isoformat(timespec="seconds"),
                config=config,
                outside_identity=sorted(without),
                config_digest=sha256_json(config),
                parents=parents,
                environment=StartedWith.model_validate(describe_environment()),
            )
            write_document(self.path / MANIFEST, manifest)

    @classmethod
    def open(cls, path: Path) -> "RunDirectory":
        """An existing run. Raises BadInput if there is none at `path`."""
        run = cls(path.resolve())
        run.manifest  # noqa: B018  (reading it is the check)
        return run

    @property
    def manifest(self) -> dict[str, Any]:
        """What was written first. Raises IntegrityFailure if it is damaged."""
        path = self.path / MANIFEST
        if not path.is_file():
            raise BadInput(f"{self.path} is not a run directory: it has no {MANIFEST}")
        try:
            return dict(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError, RecursionError) as error:
            raise IntegrityFailure(f"{path} cannot be read: {error}") from error

    @property
    def is_complete(self) -> bool:
        """Whether the run was sealed."""
        return is_sealed(self.path)

    @property
    def is_at_rest(self) -> bool:
        """Whether the run was sealed, and nobody is at work in it or was killed there."""
        return self.is_complete and not (self.path / LOCK).exists()

    @property
    def digest(self) -> str:
        """Digest of everything the completed run wrote."""
        return read_digest(self.path)

    def complete(self) -> str:
        """Seal the run, point `<root>/<name>` at it, and return its digest."""
        digest = seal(self.path)
        self.link()
        return digest

    def link(self) -> None:
        """Make `<root>/<name>` a link to this run (left alone if a real file stands there)."""
        link = self.path.parent / self.manifest["name"]
        if link.is_symlink() and os.readlink(link) == self.path.name:
            return
        if link.exists() and not link.is_symlink():
            return
        for leftover in self.path.glob(f".{link.name}.link-*"):
            leftover.unlink(missing_ok=True)
        temporary = self.path / f".{link.name}.link-{os.getpid()}"
        temporary.symlink_to(self.path.name)
        os.replace(temporary, link)


def identity_of(kind: str, config: dict[str, Any], parents: dict[str, str], version: str) -> str:
    """Digest of what a run does: kind, configuration, digests of its inputs, version of this package."""
    return sha256_json({"kind": kind, "config": config, "parents": parents, "version": version})


def _is_leftover(path: Path) -> bool:
    """Whether a file is a manifest whose writing was cut short, or the work of a run that had none."""
    return path.name.startswith(f".{MANIFEST}.partial-") or path.name in (".work", LOCK)
