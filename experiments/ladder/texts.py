"""The published texts that a ladder's models are scored on, in windows that overlap by half. Imports no torch.

WikiText-103's two files with Megatron-LM's detokenizer, OpenAI's LAMBADA as plain text, and its last words by the
strict rule.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from data_pipeline.contamination.testsets import TEST_SETS, find_test_set
from evaluation.documents import RunningText
from evaluation.lambada import openai_lambada, openai_passages
from evaluation.perplexity import UNCHANGED, PerplexityTask, sliding_stream
from evaluation.protocol import SourceText, Task
from evaluation.wikitext103 import MEGATRON, read_wikitext
from lineage.errors import DataMissing

if TYPE_CHECKING:
    from evaluation.checkpoints import EvaluatedCheckpoint
    from evaluation.evaluate import MakeTask


def _lambada(name: str, path: Path) -> RunningText:
    source = SourceText(name, "LAMBADA as plain text", TEST_SETS["lambada"].sha256)
    return RunningText.of_documents(source, openai_passages(path))


LAST_WORDS = "lambada"
TEXTS: dict[str, tuple[str, Callable[[str, Path], RunningText]]] = {
    "wikitext103": ("wikitext103", partial(read_wikitext, test_set="wikitext103")),
    "wikitext103-valid": ("wikitext103-valid", partial(read_wikitext, test_set="wikitext103-valid")),
    "lambada-text": ("lambada", _lambada),
}
"""Of each text its test set and how the set is read."""


def find_tasks() -> tuple[dict[str, "MakeTask"], dict[str, str]]:
    """By name the tasks whose test set is here, and why others are not."""
    tasks: dict[str, MakeTask] = {}
    missing: dict[str, str] = {}
    for name, test_set in [*((name, text[0]) for name, text in TEXTS.items()), (LAST_WORDS, LAST_WORDS)]:
        try:
            path = find_test_set(test_set)
        except DataMissing as error:
            missing[name] = str(error)
        else:
            tasks[name] = partial(_last_words if name == LAST_WORDS else _running_text, name, path)
    return tasks, missing


def _running_text(name: str, path: Path, evaluated: "EvaluatedCheckpoint") -> Task:
    text, window = TEXTS[name][1](name, path), evaluated.context
    detokenizer = MEGATRON if name.startswith("wikitext") else UNCHANGED
    stream = sliding_stream(text, detokenizer, evaluated.tokenizer, window, window // 2)
    return PerplexityTask(text, stream, evaluated.tokenizer)


def _last_words(name: str, path: Path, evaluated: "EvaluatedCheckpoint") -> Task:
    return openai_lambada(name, path, evaluated.tokenizer, evaluated.context)
