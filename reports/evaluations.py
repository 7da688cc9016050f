"""Evaluation results as the evaluation room wrote them: every convention of a perplexity side by side."""

from collections.abc import Mapping, Sequence
from math import log

from lineage.evaluations import Evaluation
from lineage.numbers import with_error
from reports.exhibit import Table
from reports.numbers import show

EVALUATIONS = "evaluations"
CONVENTIONS = ("perplexity", "per sub-word", "per original word", "per lm-eval word", "bits per byte")
UNLISTED = {"protocol", "checkpoint", "blocks", "environment", "tokenizer_digest", "data_digest", "data_repository",
            "dtype", "num_scored_tokens"}  # fmt: skip
LAST_WORD = ("accuracy", "correct", "log-likelihood of the target, nats", "perplexity of the target")


def cells_of(result: Evaluation) -> tuple[str, ...]:
    """As text what CONVENTIONS names, or for a last-word test what LAST_WORD names."""
    first, error = with_error(result.perplexity, result.spread), result.log_perplexity_error
    if result.accuracy is None:
        words = (result.subword_perplexity, result.original_token_perplexity, result.lm_eval_word_perplexity)
        return (first, *map(show, words), with_error(result.bits_per_byte, result.bits_per_byte_error))
    spread = "" if result.standard_error is None else f" ± {100 * result.standard_error:.2f}"
    correct = f"{show(result.num_correct)} of {show(result.num_examples)}"
    return f"{100 * result.accuracy:.2f}{spread} %", correct, with_error(-log(result.perplexity), error), first


def with_models(evaluations: Mapping[str, Evaluation], order: Sequence[str]) -> list[tuple[str, Evaluation]]:
    """Each result with its model, which its file stem begins with, in the models' order."""
    named = [(stem.removesuffix(f"-{result.task}"), result) for stem, result in evaluations.items()]
    places = {name: place for place, name in enumerate(order)}
    return sorted(named, key=lambda pair: (places.get(pair[0], len(places)), pair[0]))


def by_protocol(evaluations: Mapping[str, Evaluation], order: Sequence[str]) -> list[tuple[str, Evaluation]]:
    """Perplexities of texts, then last-word tests, each by protocol and model."""
    return sorted(with_models(evaluations, order), key=lambda pair: (pair[1].accuracy is not None, pair[1].task))


def evaluations_tables(evaluations: Mapping[str, Evaluation], order: Sequence[str]) -> list[Table]:
    """Perplexities by convention and last-word tests as the page shows them."""
    tables = []
    for title, heads, is_cloze in (("Perplexity", CONVENTIONS, False), ("Last word", LAST_WORD, True)):
        rows = [
            (model, result.task, f"{result.kind}{', partial' if result.partial else ''}", *cells_of(result),
             result.checkpoint_digest[:16])
            for model, result in by_protocol(evaluations, order) if (result.accuracy is not None) == is_cloze
        ]  # fmt: skip
        tables += [Table(("model", "protocol", "kind", *heads, "checkpoint"), rows, 3, title)] if rows else []
    return tables


def evaluations_data(evaluations: Mapping[str, Evaluation]) -> Table:
    """A line for each result, numbers as recorded."""
    fields = [name for name in Evaluation.model_fields if name not in UNLISTED]
    rows = [
        [stem, *("" if (v := getattr(evaluation, field)) is None else str(v) for field in fields)]
        for stem, evaluation in evaluations.items()
    ]
    return Table(["evaluation", *fields], rows, 3)
