"""Evaluation results as the evaluation room wrote them: every convention of a perplexity side by side."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field

from lineage.errors import UserError
from lineage.files import Document, read_document
from lineage.records import Kind
from reports.exhibit import Table
from reports.files import Problem
from reports.numbers import MISSING, show

EVALUATIONS = "evaluations"
CONVENTIONS = ("perplexity", "per sub-word", "per original word", "per lm-eval word", "bits per byte")
LAST_WORD = ("accuracy", "correct", "perplexity of the target")


class Block(Document):
    """An article, and the loss of what was scored of it in nats."""

    title: str
    num_scored: Annotated[int, Field(ge=0)] = 0
    nll: float = 0.0


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
    def conventions(self) -> tuple[float | None, ...]:
        """Values in the order of CONVENTIONS."""
        words = (self.subword_perplexity, self.original_token_perplexity, self.lm_eval_word_perplexity)
        return (self.perplexity, *words, self.bits_per_byte)


@dataclass(frozen=True)
class Row:
    """One evaluation as the page shows it."""

    model: str
    result: Evaluation
    cells: tuple[str, ...]
    articles: tuple[tuple[str, str, str], ...]
    """Title, sub-words scored and loss per sub-word."""


def load_evaluations(directory: Path) -> tuple[dict[str, Evaluation], list[Problem]]:
    """The results of a reproduction by file stem, and a sentence for each that cannot be used."""
    evaluations, problems = {}, []
    for path in sorted((directory / EVALUATIONS).glob("*.json")):
        try:
            evaluations[path.stem] = read_document(path, Evaluation)
        except UserError as error:
            problems.append(Problem(EVALUATIONS, f"An evaluation cannot be shown: {error}.", damaged=True))
    return evaluations, problems


def evaluation_rows(evaluations: dict[str, Evaluation], order: Sequence[str]) -> tuple[list[Row], list[Row]]:
    """Perplexities of texts and last-word tests, each by model size."""
    rows = [_row(stem.removesuffix(f"-{result.task}"), result) for stem, result in evaluations.items()]
    places = {name: place for place, name in enumerate(order)}
    rows.sort(key=lambda row: (row.result.task, places.get(row.model, len(places)), row.model))
    texts = [row for row in rows if row.result.accuracy is None]
    return texts, [row for row in rows if row.result.accuracy is not None]


def evaluations_tables(evaluations: dict[str, Evaluation], order: Sequence[str]) -> list[Table]:
    """Perplexities by convention and last-word tests as the page shows them."""
    groups = zip(
        ("Perplexity", "Last word"), (CONVENTIONS, LAST_WORD), evaluation_rows(evaluations, order), strict=True
    )
    return [
        Table(("model", "protocol", "kind", *heads, "checkpoint"), [_line(row) for row in rows], 3, title)
        for title, heads, rows in groups
        if rows
    ]


def evaluations_data(evaluations: dict[str, Evaluation]) -> Table:
    """A line for each result, numbers as recorded."""
    fields = [name for name in Evaluation.model_fields if name not in ("protocol", "checkpoint", "blocks")]
    rows = [
        [stem, *("" if (v := getattr(evaluation, field)) is None else str(v) for field in fields)]
        for stem, evaluation in evaluations.items()
    ]
    return Table(["evaluation", *fields], rows, 3)


def _line(row: Row) -> tuple[str, ...]:
    result = row.result
    kind = f"{result.kind}{', partial' if result.partial else ''}"
    return row.model, result.task, kind, *row.cells, result.checkpoint_digest[:16]


def _row(model: str, result: Evaluation) -> Row:
    perplexity = show(result.perplexity) + ("" if result.spread is None else f" ± {show(result.spread)}")
    if result.accuracy is None:
        cells = (perplexity, *map(show, result.conventions[1:]))
    else:
        error = "" if result.standard_error is None else f" ± {100 * result.standard_error:.2f}"
        correct = f"{show(result.num_correct)} of {show(result.num_examples)}"
        cells = (f"{100 * result.accuracy:.2f}{error} %", correct, perplexity)
    articles = tuple(
        (block.title, show(block.num_scored), show(block.nll / block.num_scored) if block.num_scored else MISSING)
        for block in result.blocks
    )
    return Row(model, result, cells, articles)
