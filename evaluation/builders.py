"""How the protocols of `evaluation.tasks` are built, and of which files."""

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
from lineage.errors import DataMissing

Build = Callable[[str, Path, Encoder, int], Task]
"""(name, test file, tokenizer, context of the model) → task."""
StandIn = Callable[[Path, Encoder, int, str], Task]
"""(dataset directory, tokenizer, context of the model, reason) → task."""


@dataclass(frozen=True)
class Builder:
    """What makes a protocol's task."""

    test_set: str
    """Its file, a name of `data_pipeline.contamination.testsets.TEST_SETS`."""
    build: Build
    stand_in: StandIn | None = None
    """What is measured, under its own name, where the file cannot be had."""


BUILDERS = {
    "wikitext103": Builder("wikitext103", sliding_wikitext103, heldout_perplexity),
    "wikitext103-stride512": Builder("wikitext103", partial(sliding_wikitext103, stride=512)),
    "wikitext103-stride1024": Builder("wikitext103", partial(sliding_wikitext103, stride=1024)),
    "wikitext103-raw": Builder("wikitext103", partial(sliding_wikitext103, detokenizer=UNCHANGED)),
    "wikitext103-correct": Builder("wikitext103", partial(sliding_wikitext103, detokenizer=INVERTIBLE)),
    "wikitext103-lm-eval": Builder("wikitext103", lm_eval_wikitext103),
    "wikitext103-memory": Builder("wikitext103", memory_wikitext103),
    "wikitext103-huggingface": Builder("wikitext103", huggingface_wikitext103),
    "lambada": Builder("lambada", openai_lambada, heldout_cloze),
    "lambada-lm-eval": Builder("lambada", partial(openai_lambada, rule=LM_EVAL)),
    "lambada-last-token": Builder("lambada", partial(openai_lambada, rule=LAST_TOKEN)),
    "lambada-stopword-filter": Builder("lambada", partial(openai_lambada, rule=STOP_WORD_FILTER)),
    "lambada-standard": Builder("lambada-standard", standard_lambada),
}


def build_task(name: str, tokenizer: Encoder, context: int, dataset: Callable[[], Path]) -> Task:
    """The protocol `name` of the table, or what stands in for it.

    `dataset` gives the directory a checkpoint was trained on. Raises DataMissing if neither is there.
    """
    builder = BUILDERS[name]
    try:
        path = find_test_set(builder.test_set)
    except DataMissing as missing:
        if builder.stand_in is None:
            raise
        try:
            directory = dataset()
        except DataMissing as also_missing:
            raise DataMissing(f"{missing}; and no held-out documents stand in, as {also_missing}") from also_missing
        return builder.stand_in(directory, tokenizer, context, str(missing))
    return builder.build(name, path, tokenizer, context)
