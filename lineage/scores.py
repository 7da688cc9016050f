"""How models predict texts: bits per byte, last words, and paired differences between models. Imports no torch."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Self

from pydantic import model_validator

from lineage.files import Document, Finite


class Comparison(Document):
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


class TextScore(Document):
    """How a model predicts a text."""

    bits_per_byte: Finite
    nll: list[Finite]
    """Summed over the tokens of each article, in nats."""
    words: list[Finite]
    """Of each article; where a part of it was scored, as large a part of them."""


class LastWords(Document):
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


class ModelScore(Document):
    """One training's results."""

    model: str
    seed: int | None
    bits_per_byte: Finite
    bits_per_byte_error: Finite | None
    """Standard error over articles."""
    last_words: LastWords


class Scores(Document):
    """scores.json of a reproduction: its models on the same text and last words."""

    text: str
    """The protocol of the running text."""
    last_words: str
    """That of the last words."""
    articles: int
    models: list[ModelScore]
    """By seed, then by size."""
    comparisons: list[Comparison]
    """Of neighbouring sizes."""

    @model_validator(mode="after")
    def _is_of_its_models(self) -> Self:
        if not all(0 <= each.smaller < each.larger < len(self.names) for each in self.comparisons):
            raise ValueError("a comparison is of no model")
        return self

    @property
    def names(self) -> list[str]:
        """The models, smallest first."""
        return list(dict.fromkeys(each.model for each in self.models))

    @property
    def by_seed(self) -> dict[int | None, list[float]]:
        """Bits per byte of the models, smallest first, of each seed."""
        seeds = dict.fromkeys(each.seed for each in self.models)
        return {seed: [each.bits_per_byte for each in self.models if each.seed == seed] for seed in seeds}

    def sentences(self) -> Iterator[str]:
        """Each paired difference, then whether larger models take fewer bits in each seed."""
        for each in self.comparisons:
            yield f"{each.sentence(self.names)}."
        if self.comparisons:
            seeds = f" and {len(self.by_seed)} seeds" if len(self.by_seed) > 1 else ""
            yield f"Intervals are over {self.articles:,} articles{seeds}."
            yield order_sentence("Bits per byte", self.by_seed)


def order_sentence(what: str, by_seed: Mapping[int | None, Sequence[float]]) -> str:
    """In how many seeds `what`, of each seed the models' values, falls from every model to the next larger one."""
    broken = [str(seed) for seed, values in by_seed.items() if any(b >= a for a, b in pairwise(values))]
    held = f"{len(by_seed) - len(broken)} of {len(by_seed)} seed{'s' if len(by_seed) > 1 else ''}"
    return f"{what}: the order of the models holds in {held}{', not in ' if broken else ''}{', '.join(broken)}."
