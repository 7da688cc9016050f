"""What a kept evaluation says by its own sums, and by its text where that is here. Imports no torch."""

import math
from pathlib import Path
from typing import Any

import numpy as np

from mlm_repro.data_pipeline.contamination.testsets import find_test_set
from mlm_repro.data_pipeline.tokens.tokenizer import Tokenizer
from mlm_repro.evaluation.protocol import Task
from mlm_repro.evaluation.schema import ClozeResult, PerplexityResult
from mlm_repro.evaluation.tasks.cloze import accuracy_of, outcomes
from mlm_repro.evaluation.tasks.names import TASKS, made_by
from mlm_repro.evaluation.tasks.perplexity import PerplexityTask, columns
from mlm_repro.evaluation.tasks.uncertainty import ratio_standard_error
from mlm_repro.lineage.derived import SAME, Partly
from mlm_repro.lineage.errors import DataMissing

SPACES = 4
"""Most spaces between two articles, which are words of the text and of no article."""


def task_of(
    protocol: str, result: PerplexityResult | ClozeResult, dataset: Path, context: int, limit: int | None
) -> Task:
    """The task that a result is of, for a model of that context. Raises DataMissing if its text is not here."""
    named, tokenizer = TASKS[protocol], Tokenizer.load(dataset / "tokenizer")
    if result.task == protocol:
        task = made_by(named.function, protocol, find_test_set(named.test_set), tokenizer, context)
    else:
        task = made_by(named.stand_in, dataset, tokenizer, context, "")
    if task.source.digest != result.data_digest:
        raise DataMissing(f"the text of {result.task}")
    return task.limited(limit)


def follows(result: PerplexityResult | ClozeResult, task: Task | None) -> Partly:
    """What follows of a result from the losses that it keeps and from its task; without one, from its own counts."""
    counted = Partly()
    if task is not None:
        scored = sum(request.num_scored for request in task.requests)
        counted = Partly(partial=task.is_partial, num_scored_tokens=scored, **task.counts)
    if isinstance(result, ClozeResult):
        answers = accuracy_of(result.num_correct, result.num_examples)  # of the first release, which kept no examples
        if result.examples:
            losses, correct = zip(*result.examples, strict=True)
            answers = outcomes(np.array(losses), np.array(correct))
        return Partly(answers | counted | ({"num_examples": len(task.requests)} if task else {}))
    if isinstance(task, PerplexityTask):
        blocks = task.scored_blocks(np.zeros(counted["num_scored_tokens"]))
        shapes = [Partly(block.model_dump(exclude={"nll"})) for block in blocks]
        counted |= {"blocks": shapes, "num_windows": len(task.requests)}
        return Partly(_columns(result, task.running_text.num_bytes) | counted)
    return Partly(_columns(result, None) | {"num_original_tokens": _words(result)})


def _columns(result: PerplexityResult, num_bytes: int | None) -> dict[str, Any]:
    """The columns of a result by the losses of its blocks; without a number of bytes, by the nearest whole one."""
    blocks, targets = result.blocks, result.num_tokens - 1
    losses = np.array([block.nll for block in blocks])
    weights = np.array([block.num_original_tokens * block.num_scored / block.num_targets for block in blocks])
    nll, scored = math.fsum(losses), sum(block.num_scored for block in blocks)
    num_bytes = num_bytes or round(nll / math.log(2) / (scored / targets) / result.bits_per_byte)
    made = columns(nll, scored, targets, result.num_original_tokens, result.num_lm_eval_words, num_bytes)
    spread = ratio_standard_error(losses, weights * (made["normaliser"] / weights.sum()))
    return made | {"num_scored_tokens": scored, "log_perplexity_standard_error": spread}


def _words(result: PerplexityResult) -> float:
    """The number of words nearest to the stated one that the words of its blocks allow."""
    blocks = result.blocks
    words, targets = sum(block.num_original_tokens for block in blocks), sum(block.num_targets for block in blocks)
    most = words + result.num_tokens - 1 - targets + SPACES * (len(blocks) + 2)
    least = words - (len(blocks) - 1) - SAME * words  # where no spaces part two blocks, their words meet
    return min(max(result.num_original_tokens, least), most)
