"""An evaluation's result as a file: the evaluation room writes it, others read it."""

from typing import Annotated

from pydantic import Field

from lineage.files import Document, Environment
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
    num_scored_tokens: int | None = None
    tokenizer_digest: str = ""
    data_digest: str = ""
    data_repository: str = ""
    dtype: str = ""
    blocks: list[Block] = Field(default_factory=list)
    environment: Environment = Field(default_factory=Environment)

    @property
    def spread(self) -> float | None:
        """Standard error of the perplexity."""
        if self.log_perplexity_standard_error is not None:
            return self.perplexity * self.log_perplexity_standard_error
        return self.perplexity_standard_error
