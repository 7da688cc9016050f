"""Compares results of evaluations in pairs.

A pair is one part of the text scored by two models: an article that both scored whole, or an
example. A window of one tokenizer covers another text than the same window of another, so windows
are never paired across tokenizers.
"""

import csv
import io
import math
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from mlm_repro.evaluation.schema import ClozeResult, PerplexityResult, Result
from mlm_repro.evaluation.tasks.perplexity import STRETCH, block_weights
from mlm_repro.evaluation.tasks.uncertainty import difference_standard_error, mean_standard_error
from mlm_repro.lineage.config import Config
from mlm_repro.lineage.errors import BadInput
from mlm_repro.lineage.files import read_object

NORMAL_95 = 1.959964
"""Number of standard errors on each side of a normal distribution's mean that enclose 95 % of
it."""


class Difference(Config):
    """Result of the model `model` minus the first model's, in one protocol, `task`, over
    `num_pairs` pairs: the same articles, stretches of a text or examples. It has the differences of
    ln perplexity and, for a last-word test, of accuracy, each with its standard error, a 95 %
    interval for the ln perplexity, and a p value."""

    task: str
    model: str
    num_pairs: int
    log_perplexity: float
    """The model's ln perplexity minus the first model's, whatever the task; negative if the model
    predicts better."""
    log_perplexity_standard_error: float | None
    interval: tuple[float, float] | None
    """95 % interval of the difference of ln perplexity, as its lower and upper end; None if the
    standard error is not known."""
    p: float | None
    """Two-sided p value: how probable so large a difference is for two equally good models. For a
    perplexity it is from a normal distribution, and None without a standard error or with one of 0;
    for an accuracy from an exact sign test."""
    accuracy: float | None
    """The model's accuracy minus the first model's, as a share; None for a perplexity task."""
    accuracy_standard_error: float | None


Compared = tuple[Result, Difference | None]
"""A result and its Difference from the first model's result. The latter is None for the first model
itself, and for a protocol that the first model does not have."""


def read_results(path: Path) -> dict[str, Result]:
    """Read a JSON file that a score's `--json` wrote, and return a dict protocol → Result. The key
    is the requested name if the file is of `all`, else the result's task.

    Raises IntegrityFailure if the file cannot be read as a JSON object, BadInput if the object is
    neither a result nor a file of `all`, or if a result in it does not fit its schema.
    """
    content = read_object(path)
    results = content.get("results", {content.get("task", ""): content})
    try:
        return {name: Result.model_validate(result) for name, result in results.items()}
    except (ValueError, AttributeError) as error:
        raise BadInput(
            f"{path} holds no results of mlm-eval: name a file that a score's --json wrote"
        ) from error


def paired_difference(first: Result, second: Result) -> Difference:
    """Return the Difference of the second result minus the first, paired over the parts of a text:
    difference of ln perplexity with its 95 % interval, for last-word tests also of accuracy, and
    their standard errors. The p value is for the perplexities, in last-word tests for the
    accuracies. With a single part the errors, the interval and a perplexity's p value are None;
    this p value is None too where the standard error is 0, as for two equal results.

    Raises BadInput if the two results are of different protocols, or on different texts or parts,
    or if a last-word result keeps no examples.
    """
    if (first.task, first.data_digest) != (second.task, second.data_digest):
        raise BadInput(
            f"{first.task} of the first file and {second.task} of {second.checkpoint} are different"
            " protocols or on different texts: score both models by one, on the same text"
        )
    accuracy = accuracy_error = p = None
    if isinstance(first, ClozeResult) and isinstance(second, ClozeResult):
        pairs = [np.array(result.examples, np.float64).reshape(-1, 2) for result in (first, second)]
        if len(pairs[0]) != len(pairs[1]) or not len(pairs[0]):
            raise BadInput(
                f"{first.task}: the two models were not scored on the same parts of the text, or"
                " their files have no examples: score both again with the same --limit"
            )
        loss, change = (pairs[1] - pairs[0]).T
        accuracy = float(change.mean())
        accuracy_error = mean_standard_error(change)
        p = _sign_test(int((change > 0).sum()), int((change < 0).sum()))
        count = len(loss)
        difference = float(loss.mean())
        error = mean_standard_error(loss)
    else:
        assert isinstance(first, PerplexityResult)
        assert isinstance(second, PerplexityResult)
        _check_parts(first, second)
        sums = [np.array([block.nll for block in result.blocks]) for result in (first, second)]
        weights = [
            block_weights(result.blocks, result.normaliser, result.num_windows)
            for result in (first, second)
        ]
        count = len(first.blocks)
        difference = float(sums[1].sum() / weights[1].sum() - sums[0].sum() / weights[0].sum())
        error = difference_standard_error((sums[0], weights[0]), (sums[1], weights[1]))
        p = math.erfc(abs(difference) / error / math.sqrt(2)) if error else None
    side = None if error is None else NORMAL_95 * error
    return Difference(
        task=first.task,
        model=second.checkpoint,
        num_pairs=count,
        log_perplexity=difference,
        log_perplexity_standard_error=error,
        p=p,
        accuracy=accuracy,
        interval=None if side is None else (difference - side, difference + side),
        accuracy_standard_error=accuracy_error,
    )


def _check_parts(first: PerplexityResult, second: PerplexityResult) -> None:
    """Raise BadInput unless both results are on the same parts of the text: the same articles in
    the same order, all scored whole, or else the same blocks with the same numbers of scored
    targets, in equal windows with the same tokenizer."""
    whole = all(
        block.num_scored == block.num_targets and not block.title.startswith(STRETCH)
        for block in (*first.blocks, *second.blocks)
    )

    def parts(result: PerplexityResult) -> list[object]:
        titles = [block.title for block in result.blocks]
        if whole:
            return [titles]
        sizes = [block.num_scored for block in result.blocks]
        return [titles, sizes, result.window, result.stride, result.tokenizer_digest]

    if parts(first) != parts(second):
        reason = (
            "were not scored on the same parts of the text, since their windows, tokenizers or"
            " --limit differ"
        )
        raise BadInput(
            f"{first.task}: the two models {reason}: score both without --limit, on a text with"
            " articles, such as the documents of a .jsonl file"
        )


def _sign_test(better: int, worse: int) -> float:
    """Return the two-sided p value of the sign test: the probability of a split at least as uneven
    as `better` to `worse`, if each example favours either model with probability 1/2. `better` and
    `worse` are numbers of examples, those without a difference left out."""
    count = better + worse
    return min(1.0, 2 * sum(math.comb(count, k) for k in range(min(better, worse) + 1)) / 2**count)


def rows(compared: Iterable[Compared]) -> list[list[str]]:
    """Return a table as a list of rows of text: the headings, then a row for each pair in
    `compared`, a result and its Difference from the first model or None, in order. A row has the
    result's model, task, perplexity, standard error of the perplexity and, for a last-word test,
    accuracy; then the Difference's ln perplexity, the two ends of its 95 % interval, its p value
    and number of pairs. Numbers have at most six significant digits; a cell without a number is
    empty."""
    table = [
        [
            "model",
            "task",
            "perplexity",
            "±",
            "accuracy",
            "ln ppl - first",
            "95 % interval from",
            "to",
            "p",
            "pairs",
        ]
    ]
    for result, change in compared:
        share = result.accuracy if isinstance(result, ClozeResult) else None
        cells = [result.perplexity, result.spread, share, *[None] * 5]
        if change:
            ends = change.interval or (None, None)
            cells[3:] = [change.log_perplexity, *ends, change.p, change.num_pairs]
        shown = ["" if cell is None else f"{cell:.6g}" for cell in cells]
        table.append([result.checkpoint, result.task, *shown])
    return table


def as_csv(rows: Sequence[Sequence[str]]) -> str:
    """Return a table, a list of rows of cells, as the text of a CSV file: a line for each row,
    ended by a newline."""
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerows(rows)
    return buffer.getvalue()
