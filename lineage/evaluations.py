"""An evaluation's result as a file: the evaluation room writes it, others read it."""

import math
from typing import Annotated

from pydantic import Field

from lineage.files import Document, Environment, Positive
from lineage.records import Kind


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
    """One checkpoint under one protocol."""

    task: str
    kind: Kind
    protocol: str
    checkpoint: str = ""
    checkpoint_digest: str = ""
    partial: bool = False
    perplexity: Positive
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
    num_scored_tokens: int | None = None
    tokenizer_digest: str = ""
    data_digest: str = ""
    data_repository: str = ""
    dtype: str = ""
    blocks: list[Block] = Field(default_factory=list)
    environment: Environment = Field(default_factory=Environment)

    @property
    def log_perplexity_error(self) -> float | None:
        """Standard error of the perplexity's logarithm: of the mean loss of a word, or of an example."""
        if self.log_perplexity_standard_error is not None:
            return self.log_perplexity_standard_error
        return None if self.perplexity_standard_error is None else self.perplexity_standard_error / self.perplexity

    @property
    def bits_per_byte_error(self) -> float | None:
        """Standard error over articles of the bits per byte, which are in proportion to the perplexity's logarithm."""
        if self.bits_per_byte is None or self.log_perplexity_error is None or self.perplexity <= 1:
            return None
        return self.bits_per_byte * self.log_perplexity_error / math.log(self.perplexity)

    @property
    def spread(self) -> float | None:
        """Standard error of the perplexity."""
        return None if self.log_perplexity_error is None else self.perplexity * self.log_perplexity_error
