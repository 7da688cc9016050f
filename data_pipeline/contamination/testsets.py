"""Where test sets and the GPT-2 vocabulary are on this machine.

A published one is looked for in `$MLM_DATA_DIR`, then in `~/.cache/mlm-repro/`, then on the Hugging Face hub; what
comes from the hub is cached only if its SHA-256 is the published file's.
"""

import difflib
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from data_pipeline.reading.hub import hub_is_reachable
from lineage.atomic import write_bytes, write_text
from lineage.digest import sha256_file
from lineage.environment import home
from lineage.errors import BadInput, DataMissing, IntegrityFailure


@dataclass(frozen=True)
class PublishedFile:
    """One file: its place in a data directory, its SHA-256, and where the hub has its content."""

    place: str
    sha256: str
    repository: str
    subset: str | None = None
    split: str = "test"
    line: Callable[[str], str] | None = None
    """Turns a row of the hub's text into a part of the file; None where the hub has the file itself."""

    @property
    def place_on_hub(self) -> str:
        """Repository and subset."""
        return f"{self.repository}/{self.subset}"


TEST_SETS = {
    "wikitext103": PublishedFile(
        "wikitext-103/wiki.test.tokens",
        "56db52eb157b1ab5c89646eef70510c1eca6e12a3bfdb99f0d6b05b4eacb75b9",
        "Salesforce/wikitext",
        "wikitext-103-v1",
        "test",
        lambda row: row or " \n",
    ),
    "wikitext103-valid": PublishedFile(
        "wikitext-103/wiki.valid.tokens",
        "9aee9f52d6e77de6c7751fc5e7c44287db3ec0eaf15477098acc6b93c1c4250b",
        "Salesforce/wikitext",
        "wikitext-103-v1",
        "validation",
        lambda row: row or " \n",
    ),
    "lambada": PublishedFile(
        "lambada/lambada_test.jsonl",
        "4aa8d02cd17c719165fc8a7887fddd641f43fcafa4b1c806ca8abc31fabdb226",
        "EleutherAI/lambada_openai",
        "default",
        "test",
        lambda row: json.dumps({"text": row}) + "\n",
    ),
    "lambada-standard": PublishedFile(
        "lambada/lambada_test_plain_text.txt",
        "4ab6062b68422bf2e83653d367c9765d42404f7ec21b8b59b6518b45606aaef2",
        "cimec/lambada",
        "plain_text",
        "test",
        "{}\n".format,
    ),
}
GPT2_FILES = (
    PublishedFile(
        "gpt2-bpe/vocab.json",
        "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
        "openai-community/gpt2",
    ),
    PublishedFile(
        "gpt2-bpe/merges.txt",
        "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
        "openai-community/gpt2",
    ),
)
FILE_KINDS = ("jsonl", "text")


def check_test_set_name(name: str) -> None:
    """Raise ValueError for what is neither one of `TEST_SETS`, naming the nearest, nor a file.

    A file is `jsonl:PATH`, where PATH ends in `.jsonl`, or `text:PATH`, where it does not.
    """
    kind, colon, path = name.partition(":")
    if colon and kind in FILE_KINDS:
        if not path or (kind == "jsonl") != path.endswith(".jsonl"):
            raise ValueError(f"test set {name!r}: jsonl: stands before a path that ends in .jsonl, text: before others")
    elif name not in TEST_SETS:
        close = difflib.get_close_matches(name, TEST_SETS, 1)
        hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(TEST_SETS)}, jsonl:PATH, text:PATH"
        raise ValueError(f"unknown test set {name!r}; {hint}")


def find_test_set(name: str) -> Path:
    """The file of a test set, named as `check_test_set_name` says.

    Raises DataMissing when a published one is nowhere, BadInput for another name or a file that is not there.
    """
    try:
        check_test_set_name(name)
    except ValueError as error:
        raise BadInput(str(error)) from error
    if name in TEST_SETS:
        return _find(TEST_SETS[name])
    path = Path(name.partition(":")[2])
    if not path.is_file():
        raise BadInput(f"test set {name!r}: there is no file {path}")
    return path


def find_gpt2_vocabulary() -> tuple[Path, Path]:
    """`vocab.json` and `merges.txt` of GPT-2. Raises DataMissing when they are nowhere."""
    vocabulary, merges = map(_find, GPT2_FILES)
    return vocabulary, merges


def fetch_published(out: Path) -> Iterator[Path]:
    """Write every test set and GPT-2's vocabulary to `out` as MLM_DATA_DIR has them; their paths, SHA256SUMS last.

    What is there already is kept. Raises DataMissing for a file that is nowhere, IntegrityFailure for another file.
    """
    files = [*TEST_SETS.values(), *GPT2_FILES]
    for file in files:
        path = out / file.place
        if not path.is_file():
            path.parent.mkdir(parents=True, exist_ok=True)
            write_bytes(path, _find(file).read_bytes())
        if sha256_file(path) != file.sha256:
            raise IntegrityFailure(f"{path} is not the published file: remove it, and MLM_DATA_DIR if it names another")
        yield path
    write_text(out / "SHA256SUMS", "".join(f"{file.sha256}  {file.place}\n" for file in files))
    yield out / "SHA256SUMS"


def cache_directory() -> Path:
    """Where files from the hub are kept."""
    return home() / ".cache" / "mlm-repro"


def _find(file: PublishedFile) -> Path:
    if data := os.environ.get("MLM_DATA_DIR"):
        path = Path(data) / file.place
        if path.is_file():
            return path
    path = cache_directory() / file.place
    if not path.is_file():
        content = _download(file)
        if hashlib.sha256(content).hexdigest() != file.sha256:
            raise DataMissing(f"{file.repository} on the hub is not the published {file.place}: {_remedy(file)}")
        write_bytes(path, content)
    return path


def _download(file: PublishedFile) -> bytes:
    if not hub_is_reachable():
        raise DataMissing(f"{file.place} is not here and the Hugging Face hub cannot be reached: {_remedy(file)}")
    try:
        if file.line is None:
            from huggingface_hub import hf_hub_download

            return Path(hf_hub_download(file.repository, Path(file.place).name)).read_bytes()
        from datasets import load_dataset

        rows = load_dataset(file.repository, file.subset, split=file.split)
        return "".join(map(file.line, rows["text"])).encode("utf-8")
    except Exception as error:  # the hub's client raises errors of many libraries
        raise DataMissing(f"{file.repository} could not be read from the hub ({error}): {_remedy(file)}") from error


def _remedy(file: PublishedFile) -> str:
    return f"put the file at {file.place} in a directory and name that directory in MLM_DATA_DIR"
