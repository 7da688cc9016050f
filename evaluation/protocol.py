"""A task turns text into requests, a model answers with scores, the task makes a result of them.

A protocol is a named thing: a name stands for one recipe, written out in the result's `protocol` line.
"""

import math
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from lineage.config import Config
from lineage.errors import BadInput, IntegrityFailure
from lineage.records import Kind

Tokens = NDArray[np.int64]

LARGEST_EXPONENT = 700.0


@dataclass(frozen=True, slots=True)
class Request:
    """Token ids of which the last `num_scored` are to be predicted, each from all those before it."""

    tokens: Tokens
    num_scored: int

    def __post_init__(self) -> None:
        if not 1 <= self.num_scored < len(self.tokens):
            raise BadInput(f"{self.num_scored} of {len(self.tokens)} tokens cannot be scored")


@dataclass(frozen=True)
class Scores:
    """A model's answer: one element per scored token, request after request, each request's in order."""

    log_probabilities: NDArray[np.float64]
    """Of the token, in nats."""
    greedy: NDArray[np.bool_]
    """Whether the token was the model's most likely one."""
    greedy_allowed: NDArray[np.bool_]
    """Whether it was the most likely one of those that are not banned."""
    num_scored: NDArray[np.int64]
    """Scored tokens of each request."""

    @property
    def starts(self) -> NDArray[np.int64]:
        """Where each request's tokens begin."""
        return np.cumsum(self.num_scored) - self.num_scored

    @property
    def nll(self) -> NDArray[np.float64]:
        """Summed negative log-likelihood of each request's scored tokens, in nats."""
        return -np.add.reduceat(self.log_probabilities, self.starts)

    @property
    def all_greedy(self) -> NDArray[np.bool_]:
        """Whether every scored token of a request was the model's most likely one."""
        return np.logical_and.reduceat(self.greedy, self.starts)


class Provenance(Config):
    """Where a result came from."""

    kind: Kind
    checkpoint: str
    checkpoint_digest: str
    tokenizer_digest: str
    dtype: str
    """Precision the weights were evaluated in; log-probabilities are always float32 and sums float64."""
    seconds: float
    environment: dict[str, Any]


class Result(Provenance):
    """One evaluation of one checkpoint by one protocol."""

    task: str
    protocol: str
    """The whole recipe in one line."""
    partial: bool
    """True when a limit left part of the test out."""
    note: str
    """Empty, or why this is not the task that was asked for."""
    warnings: list[str]
    data_digest: str
    """SHA-256 of the test file."""
    perplexity: float
    num_original_tokens: int
    """What the perplexity is divided by when the whole test is scored: words, not sub-words."""
    num_tokens: int
    """Sub-words of the whole test."""
    num_scored_tokens: int
    """Sub-words predicted."""


class PerplexityResult(Result):
    """Word-level perplexity of a running text."""

    normaliser: float
    """Divisor of the summed loss: `num_original_tokens`, pro rata when partial."""
    loss_per_token: float
    """Mean negative log-likelihood of a scored sub-word, in nats."""
    subword_perplexity: float
    bits_per_byte: float
    """Per UTF-8 byte of the text before the detokenizer."""
    token_ratio: float
    """Scored sub-words of the whole test per original token, as Megatron prints it: (T - 1) / (T_o - 1)."""
    num_windows: int
    """Windows scored."""
    megatron: dict[str, float]
    """The same under Megatron's names, with its divisor (T_o - 1) and its clamp (exp of at most 20)."""


class ClozeResult(Result):
    """Last-word prediction. `perplexity` is that of the target word."""

    accuracy: float
    """Share of examples in which every sub-word of the target was the most likely one."""
    standard_error: float
    """Of the accuracy."""
    num_examples: int
    """Examples scored."""
    num_correct: int
    num_truncated: int
    """Examples scored that lost their beginning because the model's context is shorter."""


class Encoder(Protocol):
    """What a task needs of a tokenizer."""

    @property
    def vocab_size(self) -> int: ...

    def encode(self, text: str) -> list[int]: ...

    def encode_batch(self, texts: list[str]) -> list[list[int]]: ...


class Task(Protocol):
    """One named protocol bound to its text and to a tokenizer."""

    @property
    def name(self) -> str: ...

    @property
    def unit(self) -> str:
        """What one request is, in the plural."""

    @property
    def note(self) -> str:
        """Empty, or why this is not the task that was asked for."""

    @property
    def requests(self) -> list[Request]: ...

    def result(self, scores: Scores, provenance: Provenance) -> Result:
        """Aggregate the scores of `requests`."""


@dataclass(frozen=True)
class SourceText:
    """A text to test on and what may be said about it."""

    task: str
    title: str
    digest: str
    note: str = ""


def perplexity(nll: float, count: float) -> float:
    """exp(nll / count). Raises IntegrityFailure when that is not a finite number."""
    exponent = nll / count
    if not math.isfinite(exponent) or exponent > LARGEST_EXPONENT:
        raise IntegrityFailure(
            f"the checkpoint gives a loss of {exponent:.4g} nats: it diverged or its weights are damaged"
        )
    return math.exp(exponent)


def misload_warnings(subword_perplexity: float, vocab_size: int) -> list[str]:
    """A warning when the model does little better than guessing uniformly."""
    if subword_perplexity < vocab_size / 2:
        return []
    return [
        f"perplexity per sub-word is {subword_perplexity:,.0f} with {vocab_size:,} sub-words to choose from: "
        "the checkpoint is untrained or was loaded wrongly"
    ]
