"""A run as a Process Run Crate: an RO-Crate 1.1 that says what was run, by what software, of what, and what came of it.

https://w3id.org/ro/wfrun/process/0.5
"""

import base64
import shlex
import shutil
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

from lineage.atomic import new_directory, write_json
from lineage.numbers import size_bytes
from lineage.progress import Progress
from reports.exports.sealed_run import SOFTWARE, Json, SealedFile, SealedRun

LARGEST_COPY_BYTES = 10_000_000
"""Larger files of a run are named in its crate, not copied into it."""
METADATA = "ro-crate-metadata.json"
SPECIFICATION = "https://w3id.org/ro/crate/1.1"
PROFILE = "https://w3id.org/ro/wfrun/process/0.5"
CONTEXT = [f"{SPECIFICATION}/context", "https://w3id.org/ro/terms/workflow-run/context"]


def write_crate(run: SealedRun, out: Path) -> None:
    """A folder with a copy of the run without its large files, and the metadata, which describe them all.

    The run lies in a folder of its own, so that one without large files is still sealed there.
    """
    folder = run.path.name
    copied = [file.name for file in run.files if file.size <= LARGEST_COPY_BYTES]
    with new_directory(out) as crate, Progress("copy", len(copied), "files") as progress:
        for name in copied:
            target = crate / folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(run.path / name, target)
            progress.advance()
        write_json(crate / METADATA, {"@context": CONTEXT, "@graph": _graph(run, quote(f"{folder}/"))})


def _graph(run: SealedRun, folder: str) -> list[Json]:
    """The crate, the run's folder in it, the action that made that, the software, the inputs and the files."""
    manifest, started = run.manifest, run.manifest.environment
    title = f"{manifest.kind} run {run.path.name}"
    large = f"Files of more than {size_bytes(LARGEST_COPY_BYTES)} are named by their SHA-256 and not included."
    files = [_file(folder, file) for file in run.files]
    inputs = [
        _entity(f"#input-{number}", "CreativeWork", name=name, identifier=f"sha256:{digest}")
        for number, (name, digest) in enumerate(manifest.parents.items())
        if len(digest) == 64
    ]
    return [
        _entity(METADATA, "CreativeWork", about=_link("./"), conformsTo=_link(SPECIFICATION)),
        _entity(PROFILE, "CreativeWork", name="Process Run Crate", version="0.5"),
        _entity(
            "./",
            "Dataset",
            name=title,
            description=f"The sealed directory of a {manifest.kind} run of {SOFTWARE}. {large}",
            license="The run records no licence.",
            datePublished=datetime.now(UTC).date().isoformat(),
            conformsTo=_link(PROFILE),
            hasPart=_link(folder),
            mentions=_link("#run"),
        ),
        _entity(folder, "Dataset", name=run.path.name, identifier=f"sha256:{run.digest}", hasPart=_links(files)),
        _entity(
            "#run",
            "CreateAction",
            name=title,
            description=f"{shlex.join(started.argv)} on {started.machine}, {started.system}",
            startTime=manifest.created,
            actionStatus="http://schema.org/CompletedActionStatus",
            instrument=_link(f"#{SOFTWARE}"),
            object=_links(inputs),
            result=_link(folder),
        ),
        _entity(f"#{SOFTWARE}", "SoftwareApplication", name=SOFTWARE, softwareVersion=started.version),
        *inputs,
        *files,
    ]


def _file(folder: str, file: SealedFile) -> Json:
    """A file of the run; one that is not copied is named after its SHA-256 (RFC 6920)."""
    identity = folder + quote(file.name)
    if file.size > LARGEST_COPY_BYTES:
        digest = base64.urlsafe_b64encode(bytes.fromhex(file.sha256)).decode("ascii").rstrip("=")
        identity = f"ni:///sha-256;{digest}?name={quote(file.name, safe='')}"
    return _entity(identity, "File", name=file.name, **file.facts)


def _entity(identity: str, kind: str, **facts: Any) -> Json:
    return {"@id": identity, "@type": kind, **facts}


def _link(identity: str) -> Json:
    return {"@id": identity}


def _links(entities: Sequence[Json]) -> list[Json]:
    return [_link(entity["@id"]) for entity in entities]
