"""Texts without published numbers: a checkpoint's own validation documents and a user's files, through the same code.

If a published test file is missing, the validation documents stand in for it, under their own name and with a note.
"""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from evaluation.cloze import STRICT, ClozeTask
from evaluation.documents import RunningText
from evaluation.perplexity import UNCHANGED, PerplexityTask, sliding_stream
from evaluation.protocol import Encoder, SourceText
from evaluation.windows import STRIDES_PER_WINDOW
from lineage.atomic import parse_json, read_bytes
from lineage.digest import sha256_file
from lineage.errors import BadInput, DataMissing, IntegrityFailure

VALIDATION_DOCUMENTS = Path("documents") / "valid.jsonl"
PASSAGE_WORDS = 64
SHORTEST_PASSAGE_WORDS = 40
MOST_BYTES = 64 << 20
"""Largest size of a user's text, whose tokens are all in memory."""


def heldout_perplexity(dataset: Path, tokenizer: Encoder, context: int, reason: str) -> PerplexityTask:
    """Sliding-window perplexity of all validation documents, joined by blank lines."""
    source = _source("heldout-perplexity", dataset, reason, "WikiText-103")
    return _perplexity(source, read_documents(dataset), tokenizer, context)


def heldout_cloze(dataset: Path, tokenizer: Encoder, context: int, reason: str) -> ClozeTask:
    """Strict last-word accuracy on passages cut from the validation documents."""
    passages = [passage for text in read_documents(dataset) for passage in cut_passages(text)]
    if not passages:
        raise DataMissing(f"no validation document of {dataset} has {SHORTEST_PASSAGE_WORDS} words")
    return ClozeTask(_source("heldout-cloze", dataset, reason, "LAMBADA"), passages, STRICT, tokenizer, context)


def file_perplexity(path: Path, tokenizer: Encoder, context: int) -> PerplexityTask:
    """Sliding-window perplexity of a text file, or of a `.jsonl` file's documents joined by blank lines."""
    content = _read_text(path)
    documents = _read_lines(path, content) if path.suffix == ".jsonl" else [content]
    return _perplexity(SourceText("perplexity", path.name, sha256_file(path)), documents, tokenizer, context)


def file_cloze(path: Path, tokenizer: Encoder, context: int) -> ClozeTask:
    """Strict last-word accuracy on the lines of a text file, or of a `.jsonl` file's documents."""
    content = _read_text(path)
    passages = _read_lines(path, content) if path.suffix == ".jsonl" else content.split("\n")
    passages = [passage for passage in passages if passage.strip()]
    for number, passage in enumerate(passages, 1):
        if len(passage.split()) < 2:
            raise BadInput(f"{path}: passage {number}, {passage.strip()!r}, has no words before its last")
    return ClozeTask(SourceText("cloze", path.name, sha256_file(path)), passages, STRICT, tokenizer, context)


def read_documents(dataset: Path) -> list[str]:
    """Texts of a dataset directory's validation documents, in order. Raises DataMissing if there are none."""
    path = dataset / VALIDATION_DOCUMENTS
    if not path.is_file():
        raise DataMissing(f"the checkpoint's validation documents are not at {path}")
    try:
        documents = _read_lines(path, path.read_text(encoding="utf-8"))
    except (ValueError, BadInput) as error:
        raise IntegrityFailure(str(error)) from error
    if not any(map(str.strip, documents)):
        raise DataMissing(f"{path} holds no text")
    return documents


def cut_passages(text: str) -> Iterator[str]:
    """Consecutive passages of 64 words, the last one of 40 to 64 or left out; white space inside is kept."""
    words: Sequence[re.Match[str]] = list(re.finditer(r"\S+", text))
    for first in range(0, len(words), PASSAGE_WORDS):
        passage = words[first : first + PASSAGE_WORDS]
        if len(passage) >= SHORTEST_PASSAGE_WORDS:
            yield text[passage[0].start() : passage[-1].end()]


def _perplexity(source: SourceText, documents: list[str], tokenizer: Encoder, context: int) -> PerplexityTask:
    text = RunningText.of_documents(source, documents)
    stream = sliding_stream(text, UNCHANGED, tokenizer, context, max(1, context // STRIDES_PER_WINDOW))
    return PerplexityTask(text, stream, tokenizer)


def _read_text(path: Path) -> str:
    try:
        return read_bytes(path, MOST_BYTES).decode("utf-8")
    except OSError as error:
        raise BadInput(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise BadInput(f"{path} is not UTF-8 text: byte {error.start} cannot be read") from error


def _read_lines(path: Path, content: str) -> list[str]:
    documents = []
    for number, line in enumerate(content.split("\n"), 1):
        if line.strip():
            try:
                document = parse_json(line)["text"]
                if not isinstance(document, str):
                    raise TypeError("its text is not a string")
            except (ValueError, KeyError, TypeError) as error:
                raise BadInput(f"{path} is not a file of documents: line {number}: {error!r}") from error
            documents.append(document)
    return documents


def _source(task: str, dataset: Path, reason: str, published: str) -> SourceText:
    note = (
        f"This is NOT {published}. It is the held-out validation split of the data this checkpoint was "
        f"trained on, and its numbers cannot be compared with published {published} results"
    )
    return SourceText(
        task=task,
        title=f"held-out documents of {dataset.name} (not {published})",
        digest=sha256_file(dataset / VALIDATION_DOCUMENTS),
        note=f"{note} ({reason})." if reason else f"{note}.",
    )
