"""Finds the published test sets and GPT-2's vocabulary, and downloads them if need be.

A published file is looked for in `$MLM_DATA_DIR`, then in the cache, the folder `mlm-repro` below
`$XDG_CACHE_HOME` or `~/.cache`, then on the Hugging Face hub. A file from the hub is cached only if
its SHA-256 is the published one.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

from mlm_repro.data_pipeline.reading.hub import hub_is_reachable
from mlm_repro.lineage.atomic import write_bytes, write_text
from mlm_repro.lineage.config import Config, load_config
from mlm_repro.lineage.digest import sha256_file
from mlm_repro.lineage.environment import user_cache
from mlm_repro.lineage.errors import BadInput, DataMissing, IntegrityFailure, did_you_mean


class PublishedFile(Config):
    """An entry of published.toml: one file, its SHA-256, and the hub's repository that it comes
    from. There it is a file too or, as `rows` tells, made of the rows of text of a subset and a
    split."""

    place: str
    """Path of the file below a data directory."""
    sha256: str
    repository: str
    """Repository on the hub."""
    subset: str | None = None
    split: str = "test"
    rows: Literal["file", "wikitext", "jsonl", "lines"] = "file"
    """How the repository holds it: as the file itself, or as rows of text, each of which the
    function of that name in `ROWS` turns into a part of the file."""


class Published(Config):
    """published.toml: the published test sets by name, and the two files of GPT-2's tokenizer."""

    test_sets: dict[str, PublishedFile]
    gpt2: tuple[PublishedFile, PublishedFile]


ROWS: dict[str, Callable[[str], str]] = {
    "wikitext": lambda row: row or " \n",
    "jsonl": lambda row: json.dumps({"text": row}) + "\n",
    "lines": "{}\n".format,
}
PUBLISHED = load_config(Path(__file__).with_name("published.toml"), Published)
TEST_SETS = PUBLISHED.test_sets
GPT2_FILES = PUBLISHED.gpt2
FILE_KINDS = ("jsonl", "text")


def check_test_set_name(name: str) -> None:
    """Raise ValueError unless `name` is the name of a published test set or has the form of a file,
    which is not looked for. The error has the nearest known name, or all if none is near.

    A file is `jsonl:PATH`, where PATH ends in `.jsonl`, or `text:PATH`, where it does not; an error
    about the ending states this rule.
    """
    kind, colon, path = name.partition(":")
    if colon and kind in FILE_KINDS:
        if not path or (kind == "jsonl") != path.endswith(".jsonl"):
            raise ValueError(
                f"test set {name!r} has no path, or a path with an ending of the other kind: write"
                " jsonl:PATH for a path that ends in .jsonl, text:PATH for any other"
            )
    elif name not in TEST_SETS:
        others = f"known: {', '.join(TEST_SETS)}, jsonl:PATH, text:PATH"
        raise ValueError(f"unknown test set {name!r}; {did_you_mean(name, TEST_SETS, others)}")


def find_test_set(name: str) -> Path:
    """Return the path of a test set: a published one, such as `lambada`, or the PATH of
    `jsonl:PATH` or `text:PATH`. A published one is downloaded if this machine does not have it; a
    file that it has is not checked.

    Raises DataMissing if a published one cannot be found or downloaded, BadInput if there is no
    file at PATH.
    """
    if name in TEST_SETS:
        return _find(TEST_SETS[name])
    path = Path(name.partition(":")[2])
    if not path.is_file():
        raise BadInput(
            f"test set {name!r}: there is no file {path}, which `decontaminate.test_sets` or"
            " `overlap.test_sets` names"
        )
    return path


def find_gpt2_vocabulary() -> tuple[Path, Path]:
    """Return a pair, the paths of GPT-2's `vocab.json` and `merges.txt`, downloaded if this machine
    does not have them; files that it has are not checked. Raises DataMissing if they cannot be
    found or downloaded."""
    vocabulary, merges = map(_find, GPT2_FILES)
    return vocabulary, merges


def fetch_published(out: Path) -> Iterator[Path]:
    """Write every published test set and GPT-2's two vocabulary files below `out`, at the paths at
    which they are looked for below MLM_DATA_DIR, and at the end SHA256SUMS, the list of their
    digests. Yield the path of each file when it is there.

    Existing files are kept. Raises IntegrityFailure if one of them, or a file copied from
    MLM_DATA_DIR or the cache, is not the published file. Raises DataMissing at the end, with the
    first file that could not be found or downloaded.
    """
    written = []
    missing = None
    for file in (*TEST_SETS.values(), *GPT2_FILES):
        path = out / file.place
        if not path.is_file():
            try:
                content = _find(file).read_bytes()
            except DataMissing as error:
                missing = missing or error
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            write_bytes(path, content)
        if sha256_file(path) != file.sha256:
            raise IntegrityFailure(
                f"{path} is not the published file, by its SHA-256: remove it, and {file.place} in"
                " MLM_DATA_DIR and in the cache, mlm-repro below $XDG_CACHE_HOME or ~/.cache, from"
                " which it may have been copied, and run `mlm-data fetch` again"
            )
        written.append(file)
        yield path
    write_text(out / "SHA256SUMS", "".join(f"{file.sha256}  {file.place}\n" for file in written))
    yield out / "SHA256SUMS"
    if missing:
        raise missing


def _find(file: PublishedFile) -> Path:
    """Return the path of a published file in MLM_DATA_DIR or in the cache; if neither has it, it is
    downloaded into the cache. Raises DataMissing if the download fails or has another digest; a
    file that is here already is not checked."""
    if data := os.environ.get("MLM_DATA_DIR"):
        path = Path(data) / file.place
        if path.is_file():
            return path
    path = user_cache(file.place)
    if not path.is_file():
        content = _download(file)
        if hashlib.sha256(content).hexdigest() != file.sha256:
            raise DataMissing(
                f"the hub's {file.repository} does not give the published {file.place}: the"
                f" download has another SHA-256 and was not saved; {_remedy(file)}"
            )
        write_bytes(path, content)
    return path


def _download(file: PublishedFile) -> bytes:
    """Return the content of a published file as bytes, downloaded from the Hugging Face hub: the
    file itself, or rows of text that are joined into it. Raises DataMissing if the download fails
    for any reason; the content is not compared with the published SHA-256 here."""
    if not hub_is_reachable():
        raise DataMissing(
            f"{file.place} is neither in MLM_DATA_DIR nor in the cache, mlm-repro below"
            " $XDG_CACHE_HOME or ~/.cache, and the Hugging Face hub cannot be reached: connect, or"
            f" {_remedy(file)}"
        )
    try:
        if file.rows == "file":
            from huggingface_hub import hf_hub_download

            return Path(hf_hub_download(file.repository, Path(file.place).name)).read_bytes()
        from datasets import load_dataset

        rows = load_dataset(file.repository, file.subset, split=file.split)
        return "".join(map(ROWS[file.rows], rows["text"])).encode("utf-8")
    except Exception as error:  # the hub's client raises errors of many libraries
        raise DataMissing(
            f"{file.place} could not be downloaded from {file.repository} on the Hugging Face hub"
            f" ({error}): {_remedy(file)}"
        ) from error


def _remedy(file: PublishedFile) -> str:
    return f"put the file at {file.place} in a folder, and name that folder in MLM_DATA_DIR"
