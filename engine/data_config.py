"""Where a run's tokens are, as frozen data. Imports no torch."""

import math
from pathlib import Path
from typing import Any, Self

from pydantic import ValidationError, ValidatorFunctionWrapHandler, field_validator, model_validator

from lineage.config import Config


class DataSection(Config):
    """Where the tokens are."""

    dataset: Path | tuple[tuple[Path, float], ...] | None = None
    """Dataset directory made by `mlm-data run`, or several, each with its weight: `[["runs/a", 0.7], ["runs/b", 0.3]]`.
    Weights are divided by their sum."""

    @field_validator("dataset", mode="wrap")
    @classmethod
    def _in_words(cls, value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        try:
            return handler(value)
        except ValidationError as error:
            raise ValueError(f"{value!r} is neither a directory nor a list of [directory, weight] pairs") from error

    @model_validator(mode="after")
    def _check(self) -> Self:
        if isinstance(self.dataset, tuple):
            if not self.dataset:
                raise ValueError("dataset = [] names no dataset")
            for number, (directory, weight) in enumerate(self.dataset):
                if not 0 < weight < math.inf:
                    raise ValueError(f"the weight of dataset {directory}, {weight}, must be above 0 and finite")
                if directory in dict(self.dataset[:number]):
                    raise ValueError(f"dataset {directory} is named twice: give it one weight")
        return self
