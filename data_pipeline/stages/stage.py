"""What a stage is: a class that is its section of a recipe, its verb, its entry in the ledger and what it does."""

import re
from abc import ABC, abstractmethod
from typing import Any, ClassVar, NamedTuple

from data_pipeline.document import Drop
from lineage.config import Config

SOURCE = "source"
"""The ledger's name for reading, which comes before every stage."""


class Example(NamedTuple):
    """A text and what a filter with its default settings makes of it; a test holds the filter to it."""

    text: str
    outcome: str | Drop
    tokens: int = 0
    """Of the text, its end-of-text token counted; for a TokenFilter."""


class Stage(Config):
    """A stage. The first sentence of its docstring is the help of its verb; its fields are its section of a recipe."""

    name: ClassVar[str]
    """Also that of its section and of its entry in the ledger."""
    verb: ClassVar[str]
    """Of `mlm-data`."""
    after: ClassVar[str]
    """The stage that it follows; of several that follow the same one, the first by name comes first."""
    step: ClassVar[int] = 3
    """When it runs: 1 while documents are read, 2 when they have tokens, 3 when all of them are known."""
    needs_tokenizer: ClassVar[bool] = False
    optional: ClassVar[bool] = False
    """Whether it runs only for a recipe that has its section."""
    examples: ClassVar[tuple[Example, ...]] = ()

    @classmethod
    def summary(cls) -> str:
        """One sentence about it."""
        return re.split(r"(?<=\.)\s", str(cls.__doc__))[0]

    @classmethod
    def made_with(cls) -> dict[str, Any]:
        """What its result depends on beside its settings, for the data card."""
        return {}


class TextFilter(Stage, ABC):
    """A stage that keeps, changes or drops each document by its text alone. Every setting needs a default."""

    step = 1

    @abstractmethod
    def apply(self, text: str) -> str | Drop:
        """The text, a changed one, or why its document is dropped; it depends on nothing else, so it may run anywhere.

        Libraries that are slow to import are imported here.
        """


class TokenFilter(Stage, ABC):
    """A stage that keeps or drops each document by its text and its number of tokens. Every setting needs a default."""

    step = 2
    needs_tokenizer = True

    @abstractmethod
    def apply(self, text: str, tokens: int) -> Drop | None:
        """Why the document is dropped, None if it is kept; `tokens` counts its end-of-text token."""
