"""Evaluation results on the page, by convention of perplexity."""

from collections.abc import Mapping, Sequence
from math import floor, log, log10

from evaluation.schema import ClozeResult, PerplexityResult, Result
from lineage.numbers import show
from reports.exhibit import Table

CONVENTIONS = ("perplexity", "per sub-word", "per original word", "per lm-eval word", "bits per byte")
COLUMNS = (
    "task", "kind", "checkpoint_digest", "partial", "perplexity", "perplexity_standard_error",
    "log_perplexity_standard_error", "subword_perplexity", "original_token_perplexity", "lm_eval_word_perplexity",
    "bits_per_byte", "accuracy", "standard_error", "num_correct", "num_examples",
)  # fmt: skip
"""Fields of a result that the CSV lists; empty where a result of its kind has none."""
LAST_WORD = ("accuracy", "correct", "log-likelihood of the target, nats", "perplexity of the target")


def with_error(value: float | None, error: float | None) -> str:
    """A number with its standard error, both to the error's second digit; without an error as `show` writes it."""
    if value is None or not error:
        return show(value)
    if abs(value) >= 1e7:
        return f"{value:.2g} ± {error:.1g}"
    places = 1 - floor(log10(error))
    return " ± ".join(f"{round(each, places):,.{max(places, 0)}f}" for each in (value, error))


def cells_of(result: Result) -> tuple[str, ...]:
    """Cells of the columns CONVENTIONS, or LAST_WORD for a last-word test."""
    first, error = with_error(result.perplexity, result.spread), result.log_perplexity_error
    if isinstance(result, PerplexityResult):
        words = (result.subword_perplexity, result.original_token_perplexity, result.lm_eval_word_perplexity)
        return (first, *map(show, words), with_error(result.bits_per_byte, result.bits_per_byte_error))
    assert isinstance(result, ClozeResult)
    accuracy = f"{100 * result.accuracy:.2f} ± {100 * result.standard_error:.2f} %"
    correct = f"{show(result.num_correct)} of {show(result.num_examples)}"
    return accuracy, correct, with_error(-log(result.perplexity), error), first


def by_protocol(evaluations: Mapping[str, Result], order: Sequence[str]) -> list[tuple[str, Result]]:
    """Results with their models: perplexities of texts, then last-word tests, by protocol and model.

    A file stem begins with the model's name.
    """
    named = [(stem.removesuffix(f"-{result.task}"), result) for stem, result in evaluations.items()]
    places = {name: place for place, name in enumerate(order)}

    def key(pair: tuple[str, Result]) -> tuple[bool, str, int, str]:
        model, result = pair
        return isinstance(result, ClozeResult), result.task, places.get(model, len(places)), model

    return sorted(named, key=key)


def evaluations_tables(evaluations: Mapping[str, Result], order: Sequence[str]) -> list[Table]:
    """The page's tables of perplexities by convention and of last-word tests."""
    tables = []
    for title, heads, is_cloze in (("Perplexity", CONVENTIONS, False), ("Last word", LAST_WORD, True)):
        rows = [
            (model, result.task, f"{result.kind}{', partial' if result.partial else ''}", *cells_of(result),
             result.checkpoint_digest[:16])
            for model, result in by_protocol(evaluations, order) if isinstance(result, ClozeResult) == is_cloze
        ]  # fmt: skip
        tables += [Table(("model", "protocol", "kind", *heads, "checkpoint"), rows, 3, title)] if rows else []
    return tables


def evaluations_data(evaluations: Mapping[str, Result]) -> Table:
    """A row for each result with numbers as recorded."""
    rows = [
        [stem, *("" if (v := getattr(evaluation, field, None)) is None else str(v) for field in COLUMNS)]
        for stem, evaluation in evaluations.items()
    ]
    return Table(["evaluation", *COLUMNS], rows, 3)
