"""How a command ended and what it said."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Outcome:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def error(self) -> str:
        """Its last words, which must be one sentence."""
        sentence = self.err.strip().splitlines()[-1]
        assert sentence.startswith("error: "), self.err
        return sentence

    @property
    def but_cost(self) -> str:
        """What it said on standard error beside its cost."""
        return "".join(line for line in self.err.splitlines(keepends=True) if not line.startswith("cost: "))


Command = Callable[..., Outcome]
