"""Schemas of a ladder's files: its plan, its forecast and what came of it. Imports no torch."""

from typing import Annotated, Literal

from pydantic import Field

from lineage.files import FileSchema, Finite, Positive
from lineage.scores import Comparison, LastWords, TextScore

Exponent = Annotated[float, Field(gt=0, le=10)]
Count = Annotated[int, Field(ge=1, le=10**15)]


class RungPlan(FileSchema):
    """One size of model."""

    layers: Count
    width: Count
    heads: Count
    parameters: Count
    """In all: the N of the law."""
    inner_parameters: Count
    """Without the embeddings."""
    seconds: Finite
    """One training was expected to take on one core."""


class LadderPlan(FileSchema):
    """plan.json: what a budget pays for, decided once."""

    budget_seconds: Finite
    cores: Count
    rungs: list[RungPlan] = Field(min_length=4)
    """Smallest first."""
    iterations: Count
    batch_size: Count
    seq_length: Count
    epochs: Finite
    """Passes over the training text."""
    seeds: list[int]
    """Of all rungs but the largest, whose seed the forecast gives."""
    rates: list[Positive]
    """Learning rates that every rung is tried at."""
    search_iterations: Count
    """Of each trial."""
    expected_seconds: Finite

    @property
    def tokens(self) -> int:
        """That each rung is trained on."""
        return self.iterations * self.batch_size * self.seq_length


class Law(FileSchema):
    """loss(N, D) = irreducible + by_size · n^-size_exponent + by_data · n^interaction · (D / tokens)^-data_exponent.

    n is N / parameters.
    """

    irreducible: Finite
    """In nats a token, as `by_size` and `by_data` are."""
    by_size: Positive
    """What a model of so many `parameters` loses by its size."""
    parameters: Positive
    size_exponent: Exponent
    by_data: Positive
    """What a training of that size on so many `tokens` loses by its length."""
    interaction: Annotated[float, Field(ge=-10, le=10)] = 0.0
    """By what power of its size a model gains more from a longer training."""
    tokens: Positive
    data_exponent: Exponent

    def loss(self, parameters: float, tokens: float) -> float:
        """Of a model of so many parameters after so many tokens."""
        size = parameters / self.parameters
        of_data = self.by_data * size**self.interaction * (tokens / self.tokens) ** -self.data_exponent
        return float(self.irreducible + self.by_size * size**-self.size_exponent + of_data)


class RateLaw(FileSchema):
    """rate(N, D) = rate · (N / parameters)^-size_exponent · (D / tokens)^-length_exponent."""

    rate: Positive
    """Of a model of so many `parameters` that is trained on so many `tokens`."""
    parameters: Positive
    size_exponent: Annotated[float, Field(ge=-10, le=10)]
    tokens: Positive
    length_exponent: Exponent

    def at(self, parameters: float, tokens: float) -> float:
        """The learning rate of a model of so many parameters for so many tokens, to three digits."""
        by_size = (parameters / self.parameters) ** -self.size_exponent
        return float(f"{self.rate * by_size * (tokens / self.tokens) ** -self.length_exponent:.3g}")

    def __str__(self) -> str:
        return (
            f"learning rate = {self.rate:.3g} · (N / {self.parameters:,.0f})^-{self.size_exponent:.3f} · "
            f"(tokens / {self.tokens:,.0f})^-{self.length_exponent:g}"
        )


class Foreseen(FileSchema):
    """A place on a curve with its 90 % interval."""

    tokens: Count
    loss: Finite
    low: Finite
    high: Finite


class Forecast(FileSchema):
    """forecast.json: the largest rung's curve, written before it is trained."""

    method: str
    law: Law
    exponent_low: Finite
    """With `exponent_high`, the 90 % interval of the law's size exponent."""
    exponent_high: Finite
    misfit: Finite
    """Largest share by which the law misses a rung's mean loss at the end."""
    rung: RungPlan
    curve: list[Foreseen] = Field(min_length=1)
    """The last is the end of training."""
    made_of: dict[str, str]
    """Digests of the trainings that the law was fitted to, by name."""
    left_out: dict[str, str] = Field(default_factory=dict)
    """Trainings that are no part of the fit, with the reason."""


class LadderRun(FileSchema):
    """A finished training of a ladder."""

    name: str
    rung: int
    """From 0, the smallest."""
    seed: int
    learning_rate: Positive
    curve: list[tuple[int, Finite]] = Field(min_length=1)
    """Loss in nats a token of a part of the validation text after so many tokens."""
    bits_per_byte: Finite
    """At the end, of all of the validation text."""

    @property
    def loss(self) -> float:
        """At the end."""
        return self.curve[-1][1]


class LadderScores(FileSchema):
    """A file of evaluations/: what one model of a ladder reached on the published texts."""

    texts: dict[str, TextScore]
    last_words: LastWords | None = None


class LadderResult(FileSchema):
    """ladder.json: what came of a ladder."""

    runs: list[LadderRun]
    verdict: Literal["HIT", "MISS"]
    """Whether the largest rung's loss at the end lies inside the sealed interval."""
    found: Finite
    """That loss."""
    bits_per_byte: dict[str, list[Finite]]
    """Of each text, by rung; of the first seed."""
    comparisons: list[Comparison]
    last_words: list[LastWords] = Field(default_factory=list)
    """By rung; of the first seed."""
    rates: RateLaw
    """That all were trained by."""
    exponents: str
    """The law's size exponent beside the published curve's own."""
    sentence: str
