"""A stage is one class: its section of a recipe, its verb, its entry in the ledger and its work."""

from abc import ABC, abstractmethod
from typing import Any, ClassVar, NamedTuple

from mlm_repro.data_pipeline.document import Drop
from mlm_repro.lineage.config import Config

SOURCE = "source"
"""The ledger's name for reading, which comes before every stage."""


class Example(NamedTuple):
    """Example of a filter with default settings, a triple: `text`; `outcome`, which is the kept or
    changed text or a Drop; and `tokens`, how many tokens the text has, which a TokenFilter alone is
    given. A filter lists its Examples in `examples`, and a test checks each."""

    text: str
    outcome: str | Drop
    tokens: int = 0
    """Tokens of the text, end-of-text included; for a TokenFilter."""


class Stage(Config):
    """Base class of the stages of a build: a name and settings. The first sentence of a subclass's
    docstring is the help of its verb; its fields are its section of a recipe. The work of a
    TextFilter or TokenFilter, from which users' own stages derive, is its method `apply`; that of a
    stage on the whole corpus stands in `passes/`."""

    name: ClassVar[str]
    """Name of the stage, of its section and of its entry in the ledger."""
    verb: ClassVar[str]
    """Verb of `mlm-data` that runs the stage alone."""
    step: ClassVar[int]
    """Rank among the steps of a build: 1 on text, 2 on text with tokens; each step from 3 on has
    one stage, which works on the whole corpus."""
    needs_tokenizer: ClassVar[bool] = False
    examples: ClassVar[tuple[Example, ...]] = ()

    @classmethod
    def made_with(cls) -> dict[str, Any]:
        """Return a dict name → JSON value of the facts that the result depends on beside the
        settings, such as a library's version; by default the dict is empty. A stage that has such
        facts overrides this class method, which is called without settings. The facts stand in the
        data card, and a build with other facts is another run."""
        return {}


class TextFilter(Stage, ABC):
    """Base class of the stages that keep, change or drop each document by its text alone. A
    subclass defines `apply`; every setting needs a default."""

    step = 1

    @abstractmethod
    def apply(self, text: str) -> str | Drop:
        """Return the text, a changed text, or a Drop with the reason. A build calls this for each
        document that the stages before have kept. The result must depend on the text and the
        settings alone, so that the filter may run anywhere. May raise Unfit, for a text that it
        cannot treat in reasonable time: the document then goes to quarantine.

        Libraries that are slow to import are imported here.
        """


class TokenFilter(Stage, ABC):
    """Base class of the stages that keep or drop each document by its text and its number of
    tokens. A subclass defines the method `apply`, which returns a Drop with the reason, or None to
    keep the document unchanged; every setting needs a default."""

    step = 2
    needs_tokenizer = True

    @abstractmethod
    def apply(self, text: str, tokens: int) -> Drop | None:
        """Return a Drop with the reason, or None if the document is kept. `tokens` is the number of
        its tokens, its end-of-text token included. A build calls this for each document that the
        stages before have kept. The result must depend on the text, `tokens` and the settings
        alone."""
