"""How models predict texts: bits per byte, last words, and paired differences between models. Imports no torch."""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Self

from pydantic import model_validator

from lineage.files import FileSchema, Finite
from lineage.records import Record


class Comparison(FileSchema):
    """How much fewer bits a byte of a text take in one model than in a smaller one, over the same articles."""

    text: str
    smaller: int
    """Place of the model among those that are compared, from 0; so is `larger`."""
    larger: int
    difference: Finite
    """Bits per byte of the larger model less those of the smaller."""
    low: Finite
    """With `high`, the 90 % interval."""
    high: Finite

    def sentence(self, names: Sequence[str]) -> str:
        """In words, without a full stop. Says so where the interval has zero in it."""
        least, size, most, how = -self.high, -self.difference, -self.low, "fewer"
        if self.difference > 0:
            least, size, most, how = self.low, self.difference, self.high, "more"
        return (
            f"On {self.text} {names[self.larger]} takes {size:.3f} bits per byte {how} than {names[self.smaller]} "
            f"(90 %: {least:.3f} to {most:.3f})" + ("; the interval has zero in it" if least <= 0 <= most else "")
        )


class TextScore(FileSchema):
    """How a model predicts a text."""

    bits_per_byte: Finite
    nll: list[Finite]
    """Summed over the tokens of each article, in nats."""
    words: list[Finite]
    """Of each article; where a part of it was scored, as large a part of them."""


class LastWords(FileSchema):
    """How a model predicts last words."""

    log_likelihood: Finite
    """Mean over the examples, in nats."""
    log_likelihood_error: Finite
    accuracy: Finite
    accuracy_error: Finite

    def sentence(self, name: str) -> str:
        """In words, without a full stop."""
        return (
            f"LAMBADA's last words have a mean log-likelihood of {self.log_likelihood:.2f} ± "
            f"{self.log_likelihood_error:.2f} nats in {name}, {self.accuracy:.1%} are right"
        )


class Scores(FileSchema):
    """scores.json of a reproduction: paired differences between its models on the same text."""

    text: str
    """The protocol of the text."""
    articles: int
    seeds: int
    models: list[str]
    """Smallest first."""
    comparisons: list[Comparison]
    """Of neighbours."""

    @model_validator(mode="after")
    def _is_of_its_models(self) -> Self:
        if not all(0 <= each.smaller < each.larger < len(self.models) for each in self.comparisons):
            raise ValueError("a comparison is of no model")
        return self

    @property
    def quantity(self) -> str:
        """Of the records that have the bits per byte of each model and seed."""
        return f"{self.text.removesuffix('-perplexity')}_bits_per_byte"

    def sentences(self, records: Iterable[Record]) -> list[str]:
        """Each paired difference, then in how many seeds larger models take fewer bits."""
        if not self.comparisons:
            return []
        over = f"{self.articles:,} articles" + (f" and {self.seeds} seeds" if self.seeds > 1 else "")
        differences = [f"{each.sentence(self.models)}." for each in self.comparisons]
        return [*differences, f"Intervals are over {over}.", order_sentence(self.quantity, records)]


def order_sentence(quantity: str, records: Iterable[Record]) -> str:
    """Whether, and in how many seeds, a quantity falls from every model to the next larger one; of a curve its end."""
    ends: dict[int, dict[str, float]] = {}
    for record in records:
        if record.quantity == quantity and record.seed is not None:
            ends.setdefault(record.seed, {})[record.series] = record.value
    broken = [str(seed) for seed, of in ends.items() if any(b >= a for a, b in pairwise(of.values()))]
    held = "does not hold" if broken else "holds"
    if len(ends) > 1:
        held = f"holds in {len(ends) - len(broken)} of {len(ends)} seeds"
        held += f", not in {', '.join(broken)}" if 0 < len(broken) < len(ends) else ""
    return f"The models' order by {quantity.replace('_', ' ')} {held}."
