"""The Hugging Face hub: a quick test of the connection, clear errors, and the paper's corpora as
streams.

Megatron-LM section 4.1 names the corpora: Wikipedia, OpenWebText, RealNews, CC-Stories.
"""

import os
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import orjson

from mlm_repro.data_pipeline.document import Malformed
from mlm_repro.data_pipeline.reading.config import HUB, SourcesConfig
from mlm_repro.data_pipeline.reading.pieces import Piece, cut_lines
from mlm_repro.data_pipeline.reading.readers import EXCERPT_CHARACTERS, document_of
from mlm_repro.data_pipeline.reading.splits import TRAIN, choose_splits
from mlm_repro.data_pipeline.work.tasks import NO_ROOM, Counts, Settings
from mlm_repro.data_pipeline.work.workspace import Job, Workspace
from mlm_repro.lineage.digest import sha256_json
from mlm_repro.lineage.errors import DataMissing, Interrupted

TIMEOUT_SECONDS = 5.0
HARVESTED = "documents.jsonl"
PROXY_REFUSALS = (403, 407)
"""Statuses with which a proxy between this machine and the hub refuses requests."""
LARGE_BYTES = 20 << 30
TEXT_PER_BYTE = 3
"""Estimated bytes of text for each byte of compressed Parquet."""


@cache
def hub_is_reachable() -> bool:
    """Return True if the Hugging Face hub, or the server that `HF_ENDPOINT` names, answers a
    request for the first byte of its start page within two times TIMEOUT_SECONDS, with a status
    under 500 that is none of PROXY_REFUSALS; False without a request if `HF_HUB_OFFLINE` is on. It
    is tried once per process, and later calls return the same.

    Name resolution has no timeout of its own, so the request is made in a thread that is abandoned.
    """
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return False
    answers = []
    thread = threading.Thread(target=lambda: answers.append(_answers()), daemon=True)
    thread.start()
    thread.join(2 * TIMEOUT_SECONDS)
    return bool(answers and answers[0])


def _answers() -> bool:
    # Some mirrors refuse HEAD, and others have the data sets but no start page.
    request = urllib.request.Request(
        os.environ.get("HF_ENDPOINT", "https://huggingface.co"), headers={"Range": "bytes=0-0"}
    )
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS):
            return True
    except urllib.error.HTTPError as error:
        return error.code < 500 and error.code not in PROXY_REFUSALS
    except (OSError, ValueError):
        return False


@contextmanager
def asking_for(what: str) -> Iterator[None]:
    """Context manager: turn the errors that the hub's clients raise in the block into one sentence,
    which calls the requested thing `what`.

    Raises DataMissing if the hub does not have the repository, the revision or the file, or gates
    it; Interrupted for any other exception of the block. The error of a full disk is passed on.
    """
    from huggingface_hub import errors

    try:
        yield
    except Exception as error:  # the hub's clients raise errors of many libraries
        if isinstance(error, OSError) and error.errno in NO_ROOM:
            raise
        # A file that is missing from the cache was requested in vain, which does not show that the
        # hub lacks it.
        causes = [
            cause
            for cause in _causes(error)
            if not isinstance(cause, errors.LocalEntryNotFoundError)
        ]
        if any(isinstance(cause, errors.GatedRepoError) for cause in causes):
            raise DataMissing(
                f"{what} on the Hugging Face hub is given only to accounts that accept its terms:"
                " accept them on its page there, and set the environment variable HF_TOKEN to a"
                " token of that account"
            ) from error
        absent = (
            errors.RepositoryNotFoundError,
            errors.RevisionNotFoundError,
            errors.EntryNotFoundError,
        )
        if any(isinstance(cause, absent) for cause in causes):
            raise DataMissing(
                f"the Hugging Face hub has no {what}, or keeps it private: correct the name, its"
                " subset or its revision, or set HF_TOKEN"
            ) from error
        raise Interrupted(
            f"{what} could not be read from the Hugging Face hub:"
            f" {str(error).partition(chr(10))[0]}; correct what that names, or run the same command"
            " again: files that arrived are kept"
        ) from error


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error:
        yield error
        error = error.__cause__ or error.__context__


@dataclass(frozen=True)
class Location:
    """A corpus on the Hugging Face hub: its repository, as OWNER/NAME, its subset and its revision;
    a subset or a revision of None stands for the hub's default."""

    repository: str
    subset: str | None
    revision: str | None


LOCATIONS = {
    "wikipedia": Location(
        "wikimedia/wikipedia", "20231101.en", "b04c8d1ceb2f5cd4588862100d08de323dccfbaa"
    ),
    "openwebtext": Location("Skylion007/openwebtext", None, "refs/convert/parquet"),
}
WITHDRAWN = ("realnews", "cc-stories")
"""Corpora that can no longer be downloaded."""


class HubSource:
    """Source of one corpus on the Hugging Face hub, `wikipedia`, `openwebtext` or `hub:OWNER/NAME`.
    Each of its files is streamed into a local file by a task before documents are read from
    there."""

    def __init__(self, name: str, config: SourcesConfig | None = None) -> None:
        self.name = name
        self._keys: dict[str, Any] = {}
        self._splits = (config.split if config else ()) or (TRAIN,)
        if config and name.startswith(HUB):
            self._keys = config.piece_keys

    @cached_property
    def _location(self) -> Location:
        """Location of the corpus on the hub: its repository, subset and revision. `wikipedia` and
        `openwebtext` have the ones in LOCATIONS, without a look-up. A corpus that the user names is
        looked up on the hub at first access; without a revision in its name it has the revision
        that is newest today. Raises DataMissing if the hub does not have it, Interrupted if it
        cannot be asked."""
        if self.name in LOCATIONS:
            return LOCATIONS[self.name]
        from huggingface_hub import HfApi

        path, _, revision = self.name.removeprefix(HUB).partition("@")
        owner, repository, *subset = path.split("/", 2)
        location = Location(
            f"{owner}/{repository}", subset[0] if subset else None, revision or None
        )
        with asking_for(self.name):
            return replace(
                location,
                revision=HfApi().dataset_info(location.repository, revision=location.revision).sha,
            )

    def fingerprint(self) -> str:
        """Return a digest of the corpus's repository, subset, revision and splits. A corpus that
        the user names is looked up on the hub for it; its files are not read. Raises DataMissing if
        the hub does not have it, Interrupted if the hub cannot be asked."""
        more = {"splits": self._splits} if self._splits != (TRAIN,) else {}
        return sha256_json(asdict(self._location) | more)

    def describe(self) -> str:
        """Return a description for the ledger: the corpus's name with its repository, subset and
        the splits that are read, if they are not `train` alone. A corpus that the user names is
        looked up on the hub for it, with the same errors as `fingerprint`."""
        location = self._location
        splits = "" if self._splits == (TRAIN,) else f", {' and '.join(self._splits)}"
        return (
            f"{self.name} ({'/'.join(filter(None, (location.repository, location.subset)))} on the"
            f" Hugging Face hub{splits})"
        )

    @cached_property
    def total_bytes(self) -> int:
        """Approximate number of bytes of text, from the sizes of the subset's compressed files, of
        all splits; LARGE_BYTES if the hub does not answer or gives no sizes. Raises DataMissing if
        the hub does not have the corpus, and Interrupted if a corpus that the user names cannot be
        looked up."""
        from huggingface_hub import HfApi

        location = self._location
        files = []
        with suppress(Interrupted), asking_for(self.name):
            described = HfApi().dataset_info(
                location.repository, revision=location.revision, files_metadata=True
            )
            files = described.siblings or []
        sizes = [
            file.size or 0 for file in files if file.rfilename.startswith(location.subset or "")
        ]
        return TEXT_PER_BYTE * sum(sizes) or LARGE_BYTES

    def pieces(self, workspace: Workspace, shard_bytes: int) -> Iterator[Piece]:
        """Stream each file of the wanted splits from the hub into a local file, by one task of
        `workspace` for each file, and yield the local files in Pieces of `shard_bytes`, the last of
        a file shorter. Raises DataMissing if the hub does not have the corpus, Interrupted if the
        corpus cannot be read or has no such subset, and BadInput for a split that the corpus does
        not have."""
        with asking_for(self.name):
            streams = _open(self._location)
        choose_splits(self.name, [*streams], self._splits, is_whole=True)
        fixed = {"name": self.name, "location": self._location, "keys": self._keys}
        jobs: list[Job] = []
        for split in self._splits:
            files = int(streams[split].num_shards)
            of_split = {**fixed, "split": split, "files": files}
            jobs += [({**of_split, "file": number}, ()) for number in range(files)]
        for done in workspace.each(f"harvest-{self.name}", harvest, jobs, self.name, len(jobs)):
            path = done.path / HARVESTED
            yield from cut_lines(
                Piece("harvest", self.name, str(path), done.digest, path.stat().st_size),
                shard_bytes,
            )


def harvest(settings: Settings, inputs: list[Path], directory: Path) -> Counts:
    """Task: download one file of a corpus, and write it as JSON lines to `documents.jsonl`: its
    documents, and records of its malformed rows. Settings: `name` and `location` of the corpus;
    `split`; `file`, the number of the file among the split's `files`; `keys`, as in
    `SourcesConfig.piece_keys`. Raises DataMissing if the hub lacks the corpus or the file, or gates
    the corpus, Interrupted if the file cannot be read. Returns no counts."""
    name = settings["name"]
    number = settings["file"]
    split = settings["split"]
    name = name if split == TRAIN else f"{name}/{split}"
    with (directory / HARVESTED).open("wb") as file, asking_for(name):
        rows = _open(settings["location"])[split].shard(num_shards=settings["files"], index=number)
        for row_number, row in enumerate(rows, 1):
            piece = Piece("hub", f"{name}/{number}", "", "", 0, **settings["keys"])
            try:
                line = document_of(piece, row_number, row).to_json()
            except ValueError as error:
                excerpt = str(row.get(piece.text_key))[:EXCERPT_CHARACTERS]
                line = asdict(Malformed(piece.name, row_number, str(error), excerpt))
            file.write(orjson.dumps(line, default=str) + b"\n")
    return {}


def _open(location: Location) -> Any:
    """Return a dict from the name of each split of the corpus at `location` on the hub to an
    IterableDataset of the library `datasets`: an iterable of the split's rows, dicts by column,
    which downloads them as they are read. `num_shards` is the number of its files, and its method
    `shard` gives the rows of one file. The libraries' errors are passed on, so that calling and
    reading belong in `asking_for`."""
    from datasets import load_dataset

    return load_dataset(
        location.repository, location.subset, revision=location.revision, streaming=True
    )
