"""The table of protocols: each name, what it means, which file it needs and how it is built."""

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from data_pipeline.contamination.testsets import find_test_set
from evaluation.cloze import LAST_TOKEN, LM_EVAL, STOP_WORD_FILTER
from evaluation.heldout import heldout_cloze, heldout_perplexity
from evaluation.lambada import openai_lambada, standard_lambada
from evaluation.perplexity import UNCHANGED
from evaluation.protocol import Encoder, Task
from evaluation.wikitext103 import (
    INVERTIBLE,
    huggingface_wikitext103,
    lm_eval_wikitext103,
    memory_wikitext103,
    sliding_wikitext103,
)
from lineage.errors import BadInput, DataMissing

Build = Callable[[str, Path, Encoder, int], Task]
"""(name, test file, tokenizer, context of the model) → task."""
StandIn = Callable[[Path, Encoder, int, str], Task]
"""(dataset directory, tokenizer, context of the model, reason) → task."""


@dataclass(frozen=True)
class NamedTask:
    """A protocol of the table."""

    title: str
    test_set: str
    """Its file, a name of `data_pipeline.contamination.testsets.TEST_SETS`."""
    build: Build
    stand_in: StandIn | None = None
    """What is measured, under its own name, where the file cannot be had."""


TASKS = {
    "wikitext103": NamedTask(
        "Megatron-LM's recipe, the published one: 24 detokenizer rules, stride 32, per space-separated token",
        "wikitext103", sliding_wikitext103, heldout_perplexity,
    ),
    "wikitext103-stride512": NamedTask(
        "the same in windows that overlap by half", "wikitext103", partial(sliding_wikitext103, stride=512)
    ),
    "wikitext103-stride1024": NamedTask(
        "the same in disjoint windows", "wikitext103", partial(sliding_wikitext103, stride=1024)
    ),
    "wikitext103-raw": NamedTask(
        "stride 32 without a detokenizer", "wikitext103", partial(sliding_wikitext103, detokenizer=UNCHANGED)
    ),
    "wikitext103-correct": NamedTask(
        "stride 32 with a detokenizer that can be undone",
        "wikitext103", partial(sliding_wikitext103, detokenizer=INVERTIBLE),
    ),
    "wikitext103-lm-eval": NamedTask(
        "as lm-evaluation-harness's wikitext: 62 documents, disjoint windows, its word count",
        "wikitext103", lm_eval_wikitext103,
    ),
    "wikitext103-memory": NamedTask(
        "Transformer-XL's: no detokenizer, disjoint segments, each with the memory of those before",
        "wikitext103", memory_wikitext103,
    ),
    "wikitext103-huggingface": NamedTask(
        "transformers' strided recipe: rows joined by blank lines, overlap by half, per sub-word",
        "wikitext103", huggingface_wikitext103,
    ),
    "lambada": NamedTask(
        "Megatron's --strict-lambada, the published one: OpenAI's text, every sub-word of the last word",
        "lambada", openai_lambada, heldout_cloze,
    ),
    "lambada-lm-eval": NamedTask(
        "as lm-evaluation-harness's lambada_openai: what follows the last space",
        "lambada", partial(openai_lambada, rule=LM_EVAL),
    ),
    "lambada-last-token": NamedTask(
        "Megatron without --strict-lambada: the last sub-word only",
        "lambada", partial(openai_lambada, rule=LAST_TOKEN),
    ),
    "lambada-stopword-filter": NamedTask(
        "the strict rule where no stop word counts as an answer",
        "lambada", partial(openai_lambada, rule=STOP_WORD_FILTER),
    ),
    "lambada-standard": NamedTask(
        "the strict rule on the original lower-cased plain text", "lambada-standard", standard_lambada
    ),
}  # fmt: skip


def build_task(name: str, tokenizer: Encoder, context: int, dataset: Callable[[], Path]) -> Task:
    """The protocol `name` of the table, or what stands in for it.

    `dataset` gives the directory a checkpoint was trained on. Raises DataMissing if neither is there.
    """
    named = TASKS[name]
    try:
        path = find_test_set(named.test_set)
    except DataMissing as missing:
        if named.stand_in is None:
            raise
        try:
            directory = dataset()
        except DataMissing as also_missing:
            raise DataMissing(f"{missing}; and no held-out documents stand in, as {also_missing}") from also_missing
        return named.stand_in(directory, tokenizer, context, str(missing))
    return named.build(name, path, tokenizer, context)


def check_task_name(name: str) -> None:
    """Raise BadInput, with the nearest known name, for a protocol that does not exist."""
    if name not in TASKS:
        close = difflib.get_close_matches(name, TASKS, 1)
        hint = f"did you mean {close[0]!r}?" if close else "`mlm-eval list` names them"
        raise BadInput(f"unknown protocol {name!r}; {hint}")
