"""Token diagrams of the protocols: each is built on a small text, and its requests are drawn."""

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from mlm_repro.evaluation.protocol import Scores, SourceText, Task
from mlm_repro.evaluation.schema import Provenance
from mlm_repro.evaluation.tasks.documents import RunningText
from mlm_repro.evaluation.tasks.names import TASKS
from mlm_repro.lineage.files import Environment

CONTEXT = 8
"""Tokens that the model of the diagrams sees; full models see 1024."""
ARTICLES = (
    " = Tea = \n \n We like well @-@ known tea . \n = Rain = \n \n It rained , so we sat . \n"
)
PASSAGE = "He likes a bowl of\nstrawberries"
FIRST_SHOWN = 3
END_OF_TEXT = "<eot>"
UNSCORED = "·"


class Pieces:
    """A small tokenizer for drawings, whose sub-words are words or parts of words of up to five
    letters, punctuation and line ends, numbered in the order of their first use; 0 is the end of a
    text."""

    vocab_size = 1000
    end_of_text = 0
    first_tokens = ()
    document_start = 0

    def __init__(self) -> None:
        self.texts = [END_OF_TEXT]

    def encode(self, text: str) -> list[int]:
        """Return a list of the ids of the text's sub-words; new sub-words get the next ids, and
        this tokenizer keeps these sub-words. A space belongs to the sub-word after it."""
        pieces = re.findall(r" ?\w{1,5}| ?[^\w\s]+|\s", text)
        self.texts += [piece for piece in dict.fromkeys(pieces) if piece not in self.texts]
        return [self.texts.index(piece) for piece in pieces]

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """Return a list with, for each text, the list of its sub-words' numbers; new sub-words get
        the next numbers, and this tokenizer keeps them."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        """Return the texts of the sub-words with these numbers, joined; a number that is not used
        yet gives an empty text."""
        return "".join(self.texts[number] for number in ids if number < len(self.texts))


def small_task(name: str, tokenizer: Pieces) -> Task:
    """Return the evaluation Task of the protocol `name`, a key of TASKS, built by the protocol's
    own code with this tokenizer for a model that sees `CONTEXT` tokens, but on a built-in text of
    two articles or one passage in place of the test set's file."""

    def read_articles(task: str, path: Path, test_set: str = "") -> RunningText:
        return RunningText.of_wikitext(SourceText(task, "two short articles", ""), ARTICLES)

    def read_passage(path: Path, digest: str, title: str) -> str:
        if "lambada_test.jsonl" in title:
            return json.dumps({"text": PASSAGE})
        return PASSAGE.lower().replace("\n", " ")

    with (
        patch("mlm_repro.evaluation.tasks.wikitext103.read_wikitext", read_articles),
        patch("mlm_repro.evaluation.tasks.lambada.read_official", read_passage),
    ):
        return TASKS[name].task(name, Path(), tokenizer, CONTEXT)


def section(name: str) -> str:
    """Return as one Markdown text the part of the page on the protocol `name`, a key of TASKS:
    heading and sentence, and, of the small task that is built here on a built-in text without a
    model, the token diagram, the numbers of its requests and scored sub-words, and the sentence
    that its result states about the protocol."""
    tokenizer = Pieces()
    task = small_task(name, tokenizer)
    counts = np.array([request.num_scored for request in task.requests])
    right = np.ones(counts.sum(), dtype=bool)
    provenance = Provenance(
        kind="computed",
        checkpoint="",
        checkpoint_digest="",
        tokenizer_digest="",
        dtype="float32",
        seconds=0.0,
        environment=Environment(),
    )
    result = task.result(Scores(np.full(counts.sum(), -1.0), right, right, counts), provenance)
    title = TASKS[name].title
    return (
        f"## {name}\n\n{title[0].upper()}{title[1:]}.\n\n"
        f"```text\n{diagram(task, tokenizer)}\n```\n\n{len(counts)}"
        f" {task.unit if len(counts) > 1 else task.unit.removesuffix('s')} here, {counts.sum()}"
        f" sub-words scored. The result says: *{_plain(result.protocol)}*."
    )


def diagram(task: Task, tokenizer: Pieces) -> str:
    """Return a drawing, as text, of the first three requests of a task and its last, with "…" for
    those between: a line of the inputs above a line of the tokens that are predicted from them; a
    dot stands for a token that is not scored. `tokenizer` must be the one that the task was built
    with. If the task is scored with a Transformer-XL's memory, a line also shows the memory's
    content, except for the first request."""
    blocks = []
    requests: list[Any] = list(task.requests)
    for number, request in enumerate(requests):
        if FIRST_SHOWN <= number < len(requests) - 1:
            if number == FIRST_SHOWN:
                blocks.append("…")
            continue
        texts = [_visible(tokenizer.texts[token]) for token in request.tokens]
        inputs = texts[:-1]
        targets = texts[1:]
        unscored = len(targets) - request.num_scored
        targets[:unscored] = [UNSCORED] * unscored
        widths = [max(map(len, pair)) for pair in zip(inputs, targets, strict=True)]
        rows = [("INPUT", inputs), ("PRED", targets)]
        block = [f"{task.unit.removesuffix('s')} {number}"]
        if task.with_memory and number:
            before = " ".join(
                _visible(tokenizer.texts[token]) for token in requests[number - 1].tokens[:-1]
            )
            block.append(
                f"  MEMORY {before}  (and what stands before that, as far as the memory reaches)"
            )
        block += [
            f"  {head:<6} {' '.join(map(str.ljust, row, widths))}".rstrip() for head, row in rows
        ]
        blocks.append("\n".join(block))
    return "\n\n".join(blocks)


def _visible(text: str) -> str:
    return text.replace(" ", "_").replace("\n", "\\n")


def _plain(text: str) -> str:
    return text.replace("*", "\\*").replace("_", "\\_").replace("<", "&lt;")
