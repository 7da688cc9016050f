"""Recomputes numbers of an evaluation from its other numbers and from its text. Imports no
torch."""

from collections.abc import Callable
from math import exp, fsum, log
from pathlib import Path
from typing import Any

import numpy as np

from mlm_repro.data_pipeline.contamination.testsets import find_test_set
from mlm_repro.data_pipeline.tokens.tokenizer import Tokenizer
from mlm_repro.evaluation.schema import ClozeResult, PerplexityResult
from mlm_repro.evaluation.tasks.cloze import accuracy_numbers, cloze_numbers
from mlm_repro.evaluation.tasks.heldout import heldout_cloze, heldout_perplexity
from mlm_repro.evaluation.tasks.names import TASKS
from mlm_repro.evaluation.tasks.perplexity import block_weights
from mlm_repro.evaluation.tasks.uncertainty import ratio_standard_error
from mlm_repro.lineage.errors import DataMissing
from mlm_repro.lineage.files import SAME

STAND_INS: dict[str, Callable[..., Any]] = {
    "heldout-perplexity": heldout_perplexity,
    "heldout-cloze": heldout_cloze,
}
"""Name of a task on held-out documents, which stands in for a published test → function that builds
it."""
SPACES = 4
"""Largest number of spaces between two articles. They are words of the text but of no article."""


def follows(result: PerplexityResult | ClozeResult) -> dict[str, float]:
    """Return the numbers of an evaluation that its other numbers determine, recomputed from these,
    as a dict name of the result's field → number.

    A PerplexityResult must be by original tokens, without first tokens of the tokenizer, and its
    numbers by words must not be None. In the dict, `num_original_tokens` is the result's own, or
    the nearest number that its blocks allow; fewer than two blocks give no standard error. A
    ClozeResult without examples gives its accuracy, with its standard error and counts, alone.
    """
    if isinstance(result, ClozeResult):
        return _cloze_follows(result)
    share = result.normaliser / result.num_original_tokens
    nll = result.loss_per_token * result.num_scored_tokens
    blocks = result.blocks
    scored = np.array([block.nll for block in blocks])
    weights = block_weights(blocks, result.normaliser, result.num_windows)
    size = nll / log(2) / share
    given = {
        "num_scored_tokens": sum(block.num_scored for block in blocks),
        "loss_per_token": fsum(scored) / result.num_scored_tokens,
        "normaliser": result.num_original_tokens
        * result.num_scored_tokens
        / (result.num_tokens - 1),
        "token_ratio": (result.num_tokens - 1) / (result.num_original_tokens - 1),
        **dict.fromkeys(("perplexity", "original_token_perplexity"), exp(nll / result.normaliser)),
        "subword_perplexity": exp(result.loss_per_token),
        "lm_eval_word_perplexity": exp(nll / (result.num_lm_eval_words * share)),
        # Rounded to the nearest whole number of bytes, which is not stored.
        "bits_per_byte": size / round(size / result.bits_per_byte),
    }
    if (spread := ratio_standard_error(scored, weights)) is not None:
        given["log_perplexity_standard_error"] = spread
    words = sum(block.num_original_tokens for block in blocks)
    targets = sum(block.num_targets for block in blocks)
    largest = words + result.num_tokens - 1 - targets + SPACES * (len(blocks) + 2)
    # Without spaces between two blocks, the last word of one and the first of the next are one.
    smallest = words - (len(blocks) - 1) - SAME * words
    given["num_original_tokens"] = min(max(result.num_original_tokens, smallest), largest)
    return given


def _cloze_follows(result: ClozeResult) -> dict[str, float]:
    if result.examples:
        return cloze_numbers(*map(np.array, zip(*result.examples, strict=True)))
    return accuracy_numbers(result.num_correct, result.num_examples)


def counts(
    result: PerplexityResult | ClozeResult, dataset: Path, context: int, limit: int | None
) -> dict[str, float]:
    """Return the numbers of an evaluation's `result` that its text and the tokenizer in the
    directory `dataset` determine, recomputed from these, as a dict name of the result's field →
    number: the counts of words or passages, sub-words, windows or examples, and for a
    PerplexityResult `bits_per_byte`, which also needs the result's own loss. Its `num_tokens` is -1
    if the result has a block that the text has not.

    The text is found on this machine by the result's task, a key of TASKS or STAND_INS, or
    downloaded. `context` and `limit` are the evaluation's own. Raises DataMissing if the text is
    not to be had or is not the one that was scored, BadInput without a tokenizer, and the errors of
    the function that builds the task, such as IntegrityFailure for a changed file.
    """
    tokenizer = Tokenizer.load(dataset / "tokenizer")
    if result.task in STAND_INS:
        task = STAND_INS[result.task](dataset, tokenizer, context, "")
    else:
        protocol = TASKS[result.task]
        task = protocol.task(result.task, find_test_set(protocol.test_set), tokenizer, context)
    limited = task.limited(limit)
    if limited.source.digest != result.data_digest:
        raise DataMissing(
            f"the text of {result.task} on this machine is not the one that was scored: put that"
            " one in its place"
        )
    given = limited.counts | {
        "num_scored_tokens": sum(request.num_scored for request in limited.requests)
    }
    if isinstance(result, ClozeResult):
        return {**given, "num_examples": len(limited.requests)}
    blocks = {
        (block.title, block.num_targets, block.num_original_tokens)
        for block in limited.stream.blocks
    }
    if not blocks.issuperset(
        (block.title, block.num_targets, block.num_original_tokens) for block in result.blocks
    ):
        given["num_tokens"] = -1
    bits = result.loss_per_token * (result.num_tokens - 1) / log(2) / limited.running_text.num_bytes
    return {**given, "num_windows": len(limited.requests), "bits_per_byte": bits}
