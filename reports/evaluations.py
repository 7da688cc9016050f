"""Evaluation results as the evaluation room wrote them: every convention of a perplexity side by side."""

from collections.abc import Mapping, Sequence
from typing import Annotated

from pydantic import Field

from lineage.files import Document
from lineage.records import Kind
from reports.exhibit import Table
from reports.numbers import show

EVALUATIONS = "evaluations"
CONVENTIONS = ("perplexity", "per sub-word", "per original word", "per lm-eval word", "bits per byte")
LAST_WORD = ("accuracy", "correct", "perplexity of the target")


class Block(Document):
    """An article, and the loss of what was scored of it in nats."""

    title: str
    num_scored: Annotated[int, Field(ge=0)] = 0
    nll: float = 0.0

    @property
    def loss(self) -> float | None:
        """Nats per sub-word; None where nothing was scored."""
        return self.nll / self.num_scored if self.num_scored else None


class Evaluation(Document):
    """One checkpoint under one protocol; older results have fewer of the fields."""

    task: str
    kind: Kind
    protocol: str
    checkpoint: str = ""
    checkpoint_digest: str = ""
    partial: bool = False
    perplexity: float
    perplexity_standard_error: float | None = None
    log_perplexity_standard_error: float | None = None
    subword_perplexity: float | None = None
    original_token_perplexity: float | None = None
    lm_eval_word_perplexity: float | None = None
    bits_per_byte: float | None = None
    accuracy: float | None = None
    standard_error: float | None = None
    num_correct: int | None = None
    num_examples: int | None = None
    blocks: list[Block] = Field(default_factory=list)

    @property
    def spread(self) -> float | None:
        """Standard error of the perplexity."""
        if self.log_perplexity_standard_error is not None:
            return self.perplexity * self.log_perplexity_standard_error
        return self.perplexity_standard_error

    @property
    def cells(self) -> tuple[str, ...]:
        """As text what CONVENTIONS names, or for a last-word test what LAST_WORD names."""
        first = show(self.perplexity) + ("" if self.spread is None else f" ± {show(self.spread)}")
        if self.accuracy is None:
            words = (self.subword_perplexity, self.original_token_perplexity, self.lm_eval_word_perplexity)
            return (first, *map(show, (*words, self.bits_per_byte)))
        error = "" if self.standard_error is None else f" ± {100 * self.standard_error:.2f}"
        correct = f"{show(self.num_correct)} of {show(self.num_examples)}"
        return f"{100 * self.accuracy:.2f}{error} %", correct, first

    @property
    def articles(self) -> list[tuple[str, str, str]]:
        """Title, sub-words scored and loss per sub-word of each."""
        return [(block.title, show(block.num_scored), show(block.loss)) for block in self.blocks]


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
            (model, result.task, f"{result.kind}{', partial' if result.partial else ''}", *result.cells,
             result.checkpoint_digest[:16])
            for model, result in by_protocol(evaluations, order) if (result.accuracy is not None) == is_cloze
        ]  # fmt: skip
        tables += [Table(("model", "protocol", "kind", *heads, "checkpoint"), rows, 3, title)] if rows else []
    return tables


def evaluations_data(evaluations: Mapping[str, Evaluation]) -> Table:
    """A line for each result, numbers as recorded."""
    fields = [name for name in Evaluation.model_fields if name not in ("protocol", "checkpoint", "blocks")]
    rows = [
        [stem, *("" if (v := getattr(evaluation, field)) is None else str(v) for field in fields)]
        for stem, evaluation in evaluations.items()
    ]
    return Table(["evaluation", *fields], rows, 3)
