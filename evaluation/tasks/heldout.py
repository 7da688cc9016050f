"""Tasks on texts without published numbers: a checkpoint's own validation documents, and a user's
files.

If a published test file is missing, the validation documents stand in for it, under their own name
and with a note.
"""

import re
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from mlm_repro.evaluation.protocol import Encoder, SourceText
from mlm_repro.evaluation.tasks.cloze import STRICT, ClozeTask
from mlm_repro.evaluation.tasks.documents import RunningText
from mlm_repro.evaluation.tasks.perplexity import UNCHANGED, First, PerplexityTask, sliding_stream
from mlm_repro.evaluation.tasks.programs import PROGRAMS, program_perplexity
from mlm_repro.evaluation.windows import STRIDES_PER_WINDOW
from mlm_repro.lineage.atomic import parse_json, read_bytes
from mlm_repro.lineage.digest import sha256_file
from mlm_repro.lineage.errors import BadInput, DataMissing, IntegrityFailure

VALIDATION_DOCUMENTS = Path("documents") / "valid.jsonl"
PASSAGE_WORDS = 64
SHORTEST_PASSAGE_WORDS = 40
DOCUMENTS = (".json", ".jsonl")
MARK = "\ufeff"
SURROGATE = re.compile("[\ud800-\udfff]")
MOST_BYTES = 64 << 20
"""Largest size in bytes of a user's text, whose tokens are all in memory."""


def heldout_perplexity(
    dataset: Path, tokenizer: Encoder, context: int, reason: str
) -> PerplexityTask:
    """Return the PerplexityTask on all validation documents of a dataset directory, joined by blank
    lines, in sliding windows. A window is `context` inputs, the stride a 32nd of it, at least 1.

    `reason` says, in the task's note, why the published test is not taken. Raises DataMissing if
    the documents are missing or blank, IntegrityFailure if they are damaged, BadInput if they have
    too few sub-words to score.
    """
    documents = read_documents(dataset)
    source = _source("heldout-perplexity", dataset, reason, "WikiText-103")
    text = RunningText.of_documents(source, documents)
    stream = sliding_stream(
        text, UNCHANGED, tokenizer, context, max(1, context // STRIDES_PER_WINDOW)
    )
    return PerplexityTask(text, stream, tokenizer)


def heldout_cloze(dataset: Path, tokenizer: Encoder, context: int, reason: str) -> ClozeTask:
    """Return the ClozeTask of strict last-word prediction on passages of 40 to 64 words, cut from
    the validation documents of a dataset directory. A passage longer than `context` inputs loses
    its beginning.

    `reason` says, in the task's note, why the published test is not taken. Raises DataMissing if
    the documents are missing or blank or none is long enough, IntegrityFailure if they are damaged,
    BadInput if a last word has more sub-words than `context`.
    """
    passages = list(chain.from_iterable(map(cut_passages, read_documents(dataset))))
    if not passages:
        raise DataMissing(
            f"no validation document of {dataset} has {SHORTEST_PASSAGE_WORDS} words, so none can"
            " stand in for LAMBADA: get the test itself by `mlm-data fetch FOLDER`, and name that"
            " folder in MLM_DATA_DIR"
        )
    return ClozeTask(
        _source("heldout-cloze", dataset, reason, "LAMBADA"), passages, STRICT, tokenizer, context
    )


def file_perplexity(
    path: Path,
    tokenizer: Encoder,
    context: int,
    window: int | None = None,
    stride: int | None = None,
    name: str = "perplexity",
    first: First = "once",
) -> PerplexityTask:
    """Return the PerplexityTask on a text file, or on the documents of a .jsonl or .json file,
    joined by blank lines or as the recipe `name` has them: `perplexity`, `perplexity-huggingface`
    or one of `PROGRAMS`, such as `perplexity-gptq`.

    The window is `window`, or else the context, for a recipe in `PROGRAMS` at most its usual
    window. The stride is `stride`, or else a 32nd of the window, for `perplexity-huggingface` half;
    `first` is `once` or `every`: the tokenizer's first tokens come once, or in every window. A
    recipe in `PROGRAMS` takes neither a stride nor `every`. The task's name states a `window`, a
    `stride` and an `every` that are given. Raises BadInput for a file that cannot be read, has
    another form or too little text, or for a stride or `first` that the name or the window does not
    take.
    """
    documents, remarks = read_texts(path)
    named = "".join(
        f"-{word}{size}" for word, size in (("window", window), ("stride", stride)) if size
    )
    named += "-first-every" if first == "every" else ""
    text = RunningText.of_documents(
        SourceText(name + named, path.name, sha256_file(path), remarks=remarks), documents
    )
    inside = name == "perplexity-huggingface"
    size = window or context
    if name in PROGRAMS:
        if stride or first == "every":
            raise BadInput(
                f"{name} has its own stride and first tokens: leave out --stride and --first"
            )
        usual = min(PROGRAMS[name] or context, context)
        return program_perplexity(text, name, documents, tokenizer, window or usual)
    stride = stride or max(1, size // (2 if inside else STRIDES_PER_WINDOW))
    stream = sliding_stream(text, UNCHANGED, tokenizer, size - inside, stride, first)
    return PerplexityTask(
        text, stream, tokenizer, "transformers labels" if inside else "original tokens"
    )


def file_cloze(
    path: Path, tokenizer: Encoder, context: int, window: int | None = None
) -> ClozeTask:
    """Return the ClozeTask of strict last-word prediction on the lines of a text file, or on the
    documents of a .jsonl or .json file. Blank passages are left out; one longer than `window`, by
    default `context`, loses its beginning.

    Raises BadInput for a file that cannot be read or has another form, for a passage of one word,
    for a last word of more sub-words than the window, and if there is no passage.
    """
    passages, remarks = read_texts(path)
    passages = passages if path.suffix in DOCUMENTS else passages[0].split("\n")
    passages = [passage for passage in passages if passage.strip()]
    for number, passage in enumerate(passages, 1):
        if len(passage.split()) < 2:
            raise BadInput(
                f"{path}: passage {number}, {passage.strip()!r}, has no words before its last:"
                " add words, or take it out"
            )
    source = SourceText(
        f"cloze-window{window}" if window else "cloze",
        path.name,
        sha256_file(path),
        remarks=remarks,
    )
    return ClozeTask(source, passages, STRICT, tokenizer, window or context)


def read_documents(dataset: Path) -> list[str]:
    """Return a list of the texts of a dataset directory's validation documents, the file
    `documents/valid.jsonl`, in order.

    Raises DataMissing if that file is missing or all its texts are blank, IntegrityFailure if it is
    damaged.
    """
    path = dataset / VALIDATION_DOCUMENTS
    if not path.is_file():
        raise DataMissing(
            f"the published test is not here, and {dataset}, the dataset that the checkpoint was"
            f" trained on, has no {VALIDATION_DOCUMENTS} to stand in for it: where there is a"
            " connection, get it by `mlm-data fetch FOLDER`, and name that folder in MLM_DATA_DIR"
        )
    try:
        documents = _read_lines(path, path.read_text(encoding="utf-8"))
    except (ValueError, BadInput) as error:
        raise IntegrityFailure(str(error)) from error
    if not any(map(str.strip, documents)):
        raise DataMissing(
            f"{path}, the validation documents of the data that the checkpoint was trained on,"
            " holds no text, so it cannot stand in for a published test: get the test itself by"
            " `mlm-data fetch FOLDER`, and name that folder in MLM_DATA_DIR"
        )
    return documents


def cut_passages(text: str) -> Iterator[str]:
    """Yield consecutive passages of 64 words of `text`. The last passage has 40 to 64 words or is
    left out. White space inside a passage is kept."""
    words: Sequence[re.Match[str]] = list(re.finditer(r"\S+", text))
    for first in range(0, len(words), PASSAGE_WORDS):
        passage = words[first : first + PASSAGE_WORDS]
        if len(passage) >= SHORTEST_PASSAGE_WORDS:
            yield text[passage[0].start() : passage[-1].end()]


def read_texts(path: Path) -> tuple[list[str], tuple[str, ...]]:
    """Return a pair: a list of the documents of a .jsonl file, one in each line that is not blank,
    or of the array in a .json file, or of the whole text of any other file; and a tuple of a
    sentence on each oddity of the file. In JSON a document is a string, or an object with a string
    `text`. A byte order mark is left out, and a lone surrogate is read as U+FFFD.

    Raises BadInput for a file that cannot be read, has more than MOST_BYTES (64 MiB), is not UTF-8
    or has another form, and if there is no document or all are empty. White space counts as text.
    """
    remarks = []
    try:
        content = read_bytes(path, MOST_BYTES).decode("utf-8")
    except OSError as error:
        raise BadInput(
            f"{path} cannot be read: {error.strerror}; give a file of text that can be"
        ) from error
    except UnicodeDecodeError as error:
        raise BadInput(
            f"{path} is not UTF-8 text: byte {error.start} cannot be read; save the file as UTF-8"
        ) from error
    if content.startswith(MARK):
        content = content[1:]
        remarks.append("its byte order mark is left out")
    if path.suffix in DOCUMENTS:
        documents = (_read_array if path.suffix == ".json" else _read_lines)(path, content)
    else:
        if lines := content.count("\r\n"):
            remarks.append(f"its {lines:,} line ends of CRLF are scored as they stand")
        documents = [content]
    if not any(documents):
        raise BadInput(
            f"{path} has no text: it is empty, or has no document but empty ones; give a file with"
            " text"
        )
    clean = [SURROGATE.sub("\ufffd", document) for document in documents]
    changed = [
        number
        for number, pair in enumerate(zip(documents, clean, strict=True), 1)
        if pair[0] != pair[1]
    ]
    if changed:
        remarks.append(
            f"a lone surrogate, which is no character, is read as U+FFFD in document {changed[0]:,}"
        )
    return clean, tuple(f"{path.name}: {remark}" for remark in remarks)


def _read_lines(path: Path, content: str) -> list[str]:
    texts = []
    for number, line in enumerate(content.split("\n"), 1):
        if line.strip():
            where = f"{path}: line {number}"
            texts.append(_text_of(_parse(line, where), where))
    return texts


def _read_array(path: Path, content: str) -> list[str]:
    if not isinstance(values := _parse(content, str(path)), list):
        raise BadInput(
            f'{path} is not a JSON array of {{"text": ...}} documents: make it one, or a .jsonl'
            " file with a document on each line"
        )
    return [_text_of(value, f"{path}: document {number}") for number, value in enumerate(values, 1)]


def _parse(content: str, where: str) -> Any:
    try:
        return parse_json(content)
    except ValueError as error:
        raise BadInput(
            f"{where} is not JSON, so no document can be read from it: correct or replace it"
        ) from error


def _text_of(value: object, where: str) -> str:
    text = value.get("text") if isinstance(value, dict) else value
    if not isinstance(text, str):
        raise BadInput(
            f'{where} has no "text" that is a string, so the file is not a file of documents:'
            " put an undamaged copy of it there, or take another text"
        )
    return text


def _source(task: str, dataset: Path, reason: str, published: str) -> SourceText:
    """Return the SourceText of the task named `task` on a dataset's validation documents, which
    stands in for the test `published`, with a note that says so and gives the `reason`. Reads the
    file of documents for its digest."""
    note = (
        f"This is NOT {published}. It is the held-out validation split of the data this checkpoint"
        f" was trained on, and its numbers cannot be compared with published {published} results"
    )
    return SourceText(
        task=task,
        title=f"held-out documents of {dataset.name} (not {published})",
        digest=sha256_file(dataset / VALIDATION_DOCUMENTS),
        note=f"{note} ({reason})." if reason else f"{note}.",
    )
