"""Schema of an evaluation's JSON, which `mlm-eval --json` and `--samples` write and other rooms
read. Imports no torch."""

import math
from typing import Any, Self

from pydantic import Field, ModelWrapValidatorHandler, model_validator

from mlm_repro.lineage.files import Environment, FileSchema, Positive
from mlm_repro.lineage.records import Kind


class Provenance(FileSchema):
    """Fields of every result of an evaluation that say what it was computed with: checkpoint and
    tokenizer, program, precision, batch size, seconds and machine."""

    kind: Kind
    checkpoint: str
    checkpoint_digest: str
    tokenizer_digest: str
    dtype: str
    """Precision of the weights. Log-probabilities are always float32 and sums float64."""
    seconds: float
    environment: Environment
    backend: str = ""
    """Program that computed the model; for transformers also the class and the attention kernel.
    Earlier versions wrote neither this field nor `batch_size`, `first_tokens` and `checked`."""
    batch_size: int | None = None
    """Requested rows per forward pass; None for as many as fit."""
    first_tokens: list[str] = Field(default_factory=list)
    """Tokens that the tokenizer puts before every text, each decoded."""
    checked: dict[str, str] = Field(default_factory=dict)
    """Subject of a check of the loaded model → sentence on its outcome."""


class Block(FileSchema):
    """An article or stretch of a running text, taken as independent of the others: its `title`, its
    number of words, the number of its sub-words that the whole test scores and the number that were
    scored, and `nll`, the loss of the scored ones, a sum in nats."""

    title: str
    num_targets: int
    """Number of the block's sub-words that the whole test scores."""
    num_original_tokens: float
    num_scored: int = 0
    nll: float = 0.0
    """Summed negative log-likelihood of the scored sub-words, in nats."""


class Result(Provenance):
    """Result of an evaluation of a checkpoint by a protocol. Validating a file's values as this
    class returns the subclass of their kind: ClozeResult if they have an accuracy, else
    PerplexityResult."""

    task: str
    protocol: str
    """The recipe of the task in one line: text, windows, tokens before it and divisor."""
    partial: bool
    """True if a limit left out a part of the test."""
    note: str
    """Reason why this is not the task that was requested; empty if it is."""
    warnings: list[str]
    data_digest: str
    """SHA-256 of the test file."""
    data_repository: str = ""
    """Repository and subset of the published file on the Hugging Face hub; empty for other
    texts."""
    perplexity: Positive | None
    """Perplexity by the protocol's divisor; None for a running text of too few words."""
    num_original_tokens: int
    """Number of words, not sub-words: space-separated tokens T_o of a running text, or examples."""
    num_tokens: int
    """Number of sub-words in the whole test."""
    num_scored_tokens: int
    """Number of predicted sub-words."""

    @model_validator(mode="wrap")
    @classmethod
    def _choose_kind(cls, values: Any, handler: ModelWrapValidatorHandler[Self]) -> "Result":
        if cls is Result and isinstance(values, dict):
            return (ClozeResult if "accuracy" in values else PerplexityResult).model_validate(
                values
            )
        return handler(values)

    @property
    def log_perplexity_error(self) -> float | None:
        """Standard error of ln perplexity, that is, of the summed loss over the protocol's divisor
        (words, sub-words or examples); None if it is unknown. Each kind of result has its own; here
        it is None."""
        return None

    @property
    def spread(self) -> float | None:
        """Standard error of the perplexity; None if it is unknown."""
        error = self.log_perplexity_error
        return None if error is None or self.perplexity is None else self.perplexity * error


class PerplexityResult(Result):
    """Result of an evaluation on a running text: its summed loss as loss per sub-word, bits per
    byte and perplexity by each convention, and the losses of its articles or stretches."""

    normaliser: float
    """Divisor of the summed loss: `num_original_tokens` or `num_lm_eval_words`, pro rata if
    partial, or sub-words."""
    log_perplexity_standard_error: float | None
    """Standard error of ln perplexity, by a bootstrap over `blocks`; None for a single block."""
    loss_per_token: float
    """Mean negative log-likelihood of a scored sub-word, in nats."""
    subword_perplexity: float
    original_token_perplexity: float | None
    """Perplexity per original token."""
    lm_eval_word_perplexity: float | None
    """Perplexity per word as lm-evaluation-harness counts words."""
    num_lm_eval_words: int
    bits_per_byte: float
    """Bits per UTF-8 byte of the text before the detokenizer."""
    token_ratio: float | None
    """Scored sub-words of the whole test for each original token, (T - 1) / (T_o - 1), as Megatron
    prints it."""
    num_windows: int
    """Number of scored windows."""
    window: int | None = None
    """Longest input, in sub-words. Earlier versions kept neither this nor the stride."""
    stride: int | None = None
    """Sub-words between the starts of windows."""
    megatron: dict[str, float]
    """Megatron's name of a number → the number, with Megatron's divisor (T_o - 1) and its clamp
    (exp of at most 20)."""
    blocks: list[Block]
    """The articles, or stretches of a text without articles, that have scored sub-words."""

    @property
    def log_perplexity_error(self) -> float | None:
        """Standard error of ln perplexity, as recorded; None for a single block."""
        return self.log_perplexity_standard_error

    @property
    def bits_per_byte_error(self) -> float | None:
        """Standard error over articles of the bits per byte, which are proportional to ln
        perplexity. None if the perplexity or its error is unknown, or the perplexity is at most
        1."""
        if self.log_perplexity_error is None or self.perplexity is None or self.perplexity <= 1:
            return None
        return self.bits_per_byte * self.log_perplexity_error / math.log(self.perplexity)


class ClozeResult(Result):
    """Result of an evaluation by predicting the last word of passages, the examples: the accuracy,
    a share from 0 to 1, and the perplexity, each with its standard error; the numbers of examples
    that were scored, right and truncated; and the loss of each example. `perplexity` is exp of the
    mean loss of a whole target, the sum over its sub-words."""

    perplexity: Positive
    accuracy: float
    """Share of examples that are right by the protocol's rule."""
    standard_error: float
    """Standard error of the accuracy."""
    perplexity_standard_error: float | None
    """Standard error of the perplexity, from the spread of the examples' losses; None for a single
    example."""
    num_examples: int
    """Number of scored examples."""
    num_correct: int
    num_truncated: int
    """Number of scored examples that lost their beginning because the model's context is
    shorter."""
    examples: list[tuple[float, bool]] = Field(default_factory=list)
    """Loss of each scored example in nats, and whether it is right. Earlier versions kept none."""

    @property
    def log_perplexity_error(self) -> float | None:
        """Standard error of ln perplexity: the perplexity's standard error divided by the
        perplexity. None for a single example."""
        return (
            None
            if self.perplexity_standard_error is None
            else self.perplexity_standard_error / self.perplexity
        )


class Sample(FileSchema):
    """A window or example of an evaluation, as a line of `--samples`: the name of its task, its
    number in the whole test and its text; the number of sub-words before the scored ones; `tokens`,
    the ids of the scored sub-words; and in lists of the same length their log-probabilities in nats
    and True where one was the model's most likely sub-word. `correct` is True or False for an
    example, None for a window."""

    task: str
    index: int
    """Number of the window or example in the whole test."""
    text: str
    num_context_tokens: int
    """Number of sub-words before the scored ones."""
    tokens: list[int]
    """The scored sub-words. The lists below have one element for each."""
    log_probabilities: list[float]
    greedy: list[bool]
    """True for each sub-word that was the model's most likely one."""
    correct: bool | None = None
    """True if an example is right by the protocol's rule; None for a window."""
