"""Models on the Hugging Face hub, `owner/name`, `name` or `name@revision`: found in its cache, or
fetched into a directory for a machine without a connection."""

import fnmatch
import re
from pathlib import Path
from typing import Any

from mlm_repro.evaluation.models import WEIGHTS
from mlm_repro.lineage.digest import sha256_file
from mlm_repro.lineage.errors import BadInput, DataMissing, IntegrityFailure
from mlm_repro.lineage.files import FileSchema, read_document, write_document

HUB_NAME = re.compile(r"((?:\w[\w.-]*/)?(\w[\w.-]*))(?:@(\w[\w./-]*))?")
FILES = ["*.json", "merges.txt", "vocab.txt", "*.model"]
"""Patterns of a model's files besides weights."""
RECORD = "fetched.json"


class Fetched(FileSchema):
    """fetched.json: the repository and commit of a directory's last fetch, and the SHA-256 of each
    other file in the directory."""

    repository: str
    commit: str
    files: dict[str, str]
    """Name of a file in the directory → its hexadecimal SHA-256. Large files were compared with the
    hub's digests."""


def cached_model(name: str) -> Path:
    """Return the path of a model's folder in the hub's cache, after a download if the hub can be
    reached. `name` is the model's: `owner/name` or `name`, with or without `@revision`.

    Raises BadInput for a name of another form, or if the hub's weights are several GGUF files.
    Raises DataMissing if the hub does not have the model or keeps it behind a gate, or if it cannot
    be reached and the model is not in the cache; Interrupted if the download fails otherwise, but
    OSError for a full or failing disk.
    """
    repository, _, revision = _parse(name)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    from mlm_repro.data_pipeline.reading.hub import hub_is_reachable

    if hub_is_reachable():
        return _download(name, repository, revision)[0]
    try:
        return Path(snapshot_download(repository, revision=revision, local_files_only=True))
    except LocalEntryNotFoundError as error:
        raise DataMissing(
            f"model {name} is not in the hub's cache, and the hub cannot be reached: connect this"
            " machine, or copy here what `mlm-eval fetch` writes on another and give its path"
        ) from error


def fetch_model(name: str, out: Path) -> Path:
    """Download the files of the hub's model `name` to the folder of `out` that has the model's name
    without owner and revision, write fetched.json there, and return the folder's path.

    Files that an earlier fetch left there unchanged are not downloaded again. fetched.json has the
    repository, the commit and every other file of the folder with its SHA-256. Raises BadInput for
    a name of another form or several GGUF files, DataMissing if the hub does not have the model or
    gates it, Interrupted if the download fails otherwise, OSError for a full or failing disk, and
    IntegrityFailure for a file with another digest than the hub's.
    """
    repository, short, revision = _parse(name)
    _, described = _download(name, repository, revision, local_dir=out / short)
    stated = {file.rfilename: file.lfs.sha256 for file in described.siblings or () if file.lfs}
    files = {
        path.name: sha256_file(path)
        for path in sorted((out / short).iterdir())
        if path.is_file() and path.name != RECORD
    }
    for file, digest in files.items():
        if stated.get(file, digest) != digest:
            raise IntegrityFailure(
                f"{out / short / file} is not what the hub has: remove it and fetch {name} again"
            )
    write_document(
        out / short / RECORD, Fetched(repository=repository, commit=str(described.sha), files=files)
    )
    return out / short


def _download(name: str, repository: str, revision: str | None, **where: Any) -> tuple[Path, Any]:
    """Download a model's configuration, tokenizer and weights, these in one format alone, and
    return a pair: the folder of the files, and the hub's description of the repository. They go
    into the hub's cache or, with `local_dir` in `where`, into that folder, where they are exactly
    the described commit's. `name` is the model's name in errors.

    Raises DataMissing if the hub does not have the model or gates it, Interrupted if the download
    fails otherwise, but OSError for a full or failing disk, and BadInput for several GGUF files.
    """
    from huggingface_hub import HfApi, snapshot_download

    from mlm_repro.data_pipeline.reading.hub import asking_for

    with asking_for(f"model {name}"):
        described = HfApi().model_info(repository, revision=revision, files_metadata=True)
    wanted = _wanted(name, described)
    pinned = described.sha if where else revision
    with asking_for(f"model {name}"):
        return (
            Path(snapshot_download(repository, revision=pinned, allow_patterns=wanted, **where)),
            described,
        )


def is_as_fetched(directory: Path, repository: str) -> bool:
    """Return True if fetched.json in `directory` names `repository` and every file that it lists is
    there unchanged; False also without a fetched.json. Raises IntegrityFailure if fetched.json is
    damaged."""
    if not (directory / RECORD).is_file():
        return False
    record = read_document(directory / RECORD, Fetched)
    pairs = [(directory / file, digest) for file, digest in record.files.items()]
    return record.repository == repository and all(
        file.is_file() and sha256_file(file) == sha for file, sha in pairs
    )


def _wanted(name: str, described: Any) -> list[str]:
    """Return a list of glob patterns of the files to download, with weights in the first format of
    `WEIGHTS` that the repository has, or in the first of `WEIGHTS` if the repository has none of
    these formats. `described` is the hub's description of the repository, with its files; `name` is
    the model's name in errors.

    Raises BadInput if that format is GGUF and there are several files.
    """
    names = [file.rfilename for file in described.siblings or ()]
    weights = next((pattern for pattern in WEIGHTS if fnmatch.filter(names, pattern)), WEIGHTS[0])
    several = fnmatch.filter(names, weights)
    if weights == "*.gguf" and len(several) > 1:
        raise BadInput(
            f"{name} has {len(several)} GGUF files: fetch one of them and give its path"
            f" ({several[0]}, …)"
        )
    return [*FILES, weights]


def _parse(name: str) -> tuple[str, str, str | None]:
    """Split a model's name on the hub, `owner/name@revision`, where owner and revision may be left
    out, into a triple: the repository, which is the name without revision, the short name without
    owner, and the revision or None. Raises BadInput for a name of another form; the hub is not
    asked."""
    if not (match := HUB_NAME.fullmatch(name)):
        raise BadInput(
            f"{name} is not a name on the Hugging Face hub, such as gpt2 or"
            " openai-community/gpt2@main"
        )
    return match[1], match[2], match[3]
