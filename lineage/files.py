"""Schemas of files that one room writes and another reads. Both use the class, so neither can rename a key alone."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from lineage.benchmark import Environment


class Document(BaseModel):
    """A file or a part of one. Fields are checked; a reader leaves fields that it does not know alone."""

    model_config = ConfigDict(frozen=True, extra="ignore", use_attribute_docstrings=True)


Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Finite = Annotated[float, Field(allow_inf_nan=False)]


class LearningRate(Document):
    """What `mlm-train lr-find` writes."""

    benchmark: Literal["learning-rate"]
    name: str
    optimizer: Literal["adam", "lamb", "lamb-clamped"]
    global_batch_size: int
    seed: int
    ranks: int = 1
    rates: list[Positive]
    losses: list[Finite]
    smoothed: list[Finite]
    lowest_rate: Positive | None
    steepest_rate: Positive | None
    suggestion: Positive | None
    notes: list[str] = Field(default_factory=list)
    environment: Environment = Environment()

    @model_validator(mode="after")
    def _has_a_curve(self) -> "LearningRate":
        if not len(self.rates) == len(self.losses) == len(self.smoothed) > 0:
            raise ValueError("rates, losses and smoothed losses are not of one length")
        return self
