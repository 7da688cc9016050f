"""`heldout-perplexity` and `heldout-cloze`: a checkpoint's own validation documents through the same code.

They stand in where the published test files cannot be had, under their own names, and say that they are not
those.
"""

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from evaluation.cloze import StrictCloze
from evaluation.perplexity import UNCHANGED, SlidingPerplexity
from evaluation.protocol import Encoder, SourceText
from lineage.digest import sha256_file
from lineage.errors import DataMissing, IntegrityFailure

VALIDATION_DOCUMENTS = Path("documents") / "valid.jsonl"
PASSAGE_WORDS = 64
SHORTEST_PASSAGE_WORDS = 40


def heldout_perplexity(
    dataset: Path, tokenizer: Encoder, seq_length: int, limit: int | None = None, reason: str = ""
) -> SlidingPerplexity:
    """Sliding-window perplexity of all validation documents, joined by blank lines."""
    documents = read_documents(dataset)
    source = _source("heldout-perplexity", dataset, reason, "WikiText-103")
    return SlidingPerplexity(source, "\n\n".join(documents), UNCHANGED, tokenizer, seq_length, limit)


def heldout_cloze(
    dataset: Path, tokenizer: Encoder, seq_length: int, limit: int | None = None, reason: str = ""
) -> StrictCloze:
    """Strict last-word accuracy on passages cut from the validation documents."""
    passages = [passage for text in read_documents(dataset) for passage in cut_passages(text)]
    if not passages:
        raise DataMissing(f"no validation document of {dataset} has {SHORTEST_PASSAGE_WORDS} words")
    source = _source("heldout-cloze", dataset, reason, "LAMBADA")
    return StrictCloze(source, passages, tokenizer, seq_length, limit)


def read_documents(dataset: Path) -> list[str]:
    """Texts of a dataset directory's validation documents, in order. Raises DataMissing if there are none."""
    path = dataset / VALIDATION_DOCUMENTS
    if not path.is_file():
        raise DataMissing(f"the checkpoint's validation documents are not at {path}")
    try:
        with path.open(encoding="utf-8") as file:
            documents = [str(json.loads(line)["text"]) for line in file]
    except (ValueError, KeyError, TypeError) as error:
        raise IntegrityFailure(f"{path} is not a file of documents: {error!r}") from error
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
