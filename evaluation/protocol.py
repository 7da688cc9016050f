"""A task turns text into requests, a model answers with scores, the task makes a result of them.

A protocol is a named thing: a name stands for one recipe, written out in the result's `protocol`
line.
"""

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from mlm_repro.data_pipeline.contamination.testsets import TEST_SETS
from mlm_repro.evaluation.schema import Provenance, Result, Sample
from mlm_repro.evaluation.windows import Window, evenly_spread, rolling_windows
from mlm_repro.lineage.errors import BadInput, IntegrityFailure

Tokens = NDArray[np.int64]
Flags = NDArray[np.bool_]
Floats = NDArray[np.float64]
LARGEST_EXPONENT = 700.0


@dataclass(frozen=True, slots=True)
class Request:
    """Token ids of which the last `num_scored` are to be predicted, each from all those before
    it."""

    tokens: Tokens
    num_scored: int

    def __post_init__(self) -> None:
        if not 1 <= self.num_scored < len(self.tokens):
            raise BadInput(f"{self.num_scored} of {len(self.tokens)} tokens cannot be scored")

    @classmethod
    def of_window(cls, tokens: Tokens, window: Window) -> Self:
        """The request of a window over the tokens."""
        return cls(tokens[window.start : window.stop], window.num_scored)

    @classmethod
    def rolling(cls, document: Sequence[int], first: int, seq_length: int) -> list[Self]:
        """A document's sub-words, each scored once, after one token that is put before it."""
        tokens = np.asarray([first, *document], dtype=np.int64)
        return [
            cls.of_window(tokens, window) for window in rolling_windows(len(tokens), seq_length)
        ]


class Scores(NamedTuple):
    """A model's answer: one element per scored token, request after request, each request's in
    order.

    All but the last are columns, a row for each token.
    """

    log_probabilities: Floats
    """Log-probability of each token, in nats."""
    greedy: Flags
    """True if the token was the model's most likely one; of equally likely ones only the first
    counts."""
    greedy_allowed: Flags
    """True if the token was the most likely one of those that are not banned."""
    num_scored: Tokens
    """Scored tokens of each request."""

    @property
    def starts(self) -> Tokens:
        """Index of each request's first token."""
        return np.cumsum(self.num_scored) - self.num_scored

    @property
    def nll(self) -> Floats:
        """Summed negative log-likelihood of each request's scored tokens, in nats."""
        return -np.add.reduceat(self.log_probabilities, self.starts)

    @property
    def all_greedy(self) -> Flags:
        """True for each request whose scored tokens were all greedy."""
        return np.logical_and.reduceat(self.greedy, self.starts)

    def taken(self, places: Tokens, requests: Sequence[Request]) -> "Scores":
        """The scores of requests that are at `places` here: the last tokens that they themselves
        score."""
        counts = np.array([request.num_scored for request in requests], dtype=np.int64)
        ends = (self.starts + self.num_scored)[places]
        chosen = np.concatenate(
            [np.arange(end - count, end) for end, count in zip(ends, counts, strict=True)]
        )
        return Scores._make([*(column[chosen] for column in self[:-1]), counts])


class Encoder(Protocol):
    """Interface of a tokenizer for tasks."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def end_of_text(self) -> int: ...
    @property
    def first_tokens(self) -> tuple[int, ...]:
        """Tokens that the tokenizer puts before every text."""

    @property
    def document_start(self) -> int:
        """Token that a document is scored after, where one is put before it."""

    @property
    def digest(self) -> str: ...
    def encode(self, text: str) -> list[int]: ...
    def encode_batch(self, texts: list[str]) -> list[list[int]]: ...
    def decode(self, ids: Iterable[int]) -> str: ...


def with_first(tokenizer: Encoder, tokens: Sequence[int]) -> list[int]:
    """The tokens after what the tokenizer puts before every text."""
    return [*tokenizer.first_tokens, *tokens]


def shown_first(tokenizer: Encoder) -> str:
    """The tokenizer's first tokens as a reader knows them."""
    return repr(tokenizer.decode(tokenizer.first_tokens)) if tokenizer.first_tokens else "nothing"


def literal_tokens(tokenizer: Encoder, texts: Sequence[str]) -> Iterator[str]:
    """A sentence on each special token that texts contain literally: how often, and how it is
    read."""
    known = getattr(
        tokenizer,
        "special_tokens",
        {tokenizer.decode([tokenizer.end_of_text]): tokenizer.end_of_text},
    )
    for literal, token in known.items():
        if count := sum(text.count(literal) for text in texts) if literal.strip() else 0:
            is_token = token in tokenizer.encode(literal)
            how = "one token of its own" if is_token else "spelled in sub-words, as any other text"
            yield f"{literal} stands in it {count:,} times: each is {how}"


@dataclass(frozen=True)
class SourceText:
    """Name, title and digest of a test's text."""

    task: str
    title: str
    digest: str
    note: str = ""
    """Empty, or why this is not the task that was asked for."""
    remarks: tuple[str, ...] = ()
    """Sentences on what was done with an oddity of the text."""


class Task(ABC):
    """One named protocol bound to its text and to a tokenizer."""

    unit: str
    """Word for requests, in the plural."""
    with_memory = False
    """True if the requests are a text's segments in order, each scored with the memory of earlier
    ones."""
    banned: Tokens | None = None
    """Tokens that do not count as predictions."""

    def __init__(
        self,
        source: SourceText,
        tokenizer: Encoder,
        requests: Sequence[Request],
        texts: Sequence[str],
    ) -> None:
        self.source = source
        self.tokenizer = tokenizer
        self.requests = requests
        self._texts = texts
        self.name = source.task
        self.note = source.note
        self.whole = len(requests)
        """Number of requests of the whole test."""
        self.chosen: Sequence[int] = range(self.whole)
        """Numbers, in the whole test, of the requests in `requests`."""

    def limited(self, limit: int | None) -> Self:
        """The task with at most `limit` requests, spread evenly over the test; with memory, the
        first ones."""
        part, chosen = copy.copy(self), evenly_spread(self.whole, limit)
        part.chosen = range(len(chosen)) if self.with_memory else chosen
        part.requests = [self.requests[number] for number in part.chosen]
        return part

    @property
    def is_partial(self) -> bool:
        """True if requests of the test are left out."""
        return len(self.chosen) < self.whole

    @property
    def extent(self) -> str:
        """Part of the protocol line for a partial test; empty for a whole one."""
        return f"; only {len(self.chosen)} of {self.whole} {self.unit}" if self.is_partial else ""

    def samples(self, scores: Scores) -> Iterator[Sample]:
        """Each request with its scores."""
        correct = self.correct(scores)
        for place, (number, request, start) in enumerate(
            zip(self.chosen, self.requests, scores.starts, strict=True)
        ):
            part = slice(int(start), int(start) + request.num_scored)
            yield Sample(
                task=self.name,
                index=number,
                text=self.text(place),
                num_context_tokens=len(request.tokens) - request.num_scored,
                tokens=request.tokens[-request.num_scored :].tolist(),
                log_probabilities=scores.log_probabilities[part].tolist(),
                greedy=scores.greedy[part].tolist(),
                correct=None if correct is None else bool(correct[place]),
            )

    def correct(self, scores: Scores) -> Flags | None:
        """True for each request that is right by the protocol's rule; None if it has no such
        rule."""
        return None

    @abstractmethod
    def text(self, place: int) -> str:
        """Text of a request, for a sample."""

    @abstractmethod
    def result(self, scores: Scores, provenance: Provenance) -> Result:
        """Aggregate the scores of `requests`."""

    def facts(self, scores: Scores, provenance: Provenance) -> dict[str, Any]:
        """Fields of a result of any kind."""
        num_scored = len(scores.log_probabilities)
        subword = perplexity(math.fsum(scores.nll), num_scored)
        literals = literal_tokens(self.tokenizer, self._texts)
        size = self.tokenizer.vocab_size
        misload = (
            f"perplexity per sub-word is {subword:,.0f} with {size:,} sub-words to choose from: "
            "the checkpoint is untrained or was loaded wrongly"
        )
        places = {file.sha256: f"{file.repository}/{file.subset}" for file in TEST_SETS.values()}
        return dict(provenance) | {
            "task": self.name,
            "partial": self.is_partial,
            "note": self.note,
            "num_scored_tokens": num_scored,
            "warnings": [
                *self.source.remarks,
                *(f"{self.source.title}: {each}" for each in literals),
                *([misload] if subword >= size / 2 else []),
            ],
            "data_digest": self.source.digest,
            "data_repository": places.get(self.source.digest, ""),
        }


def perplexity(nll: float, count: float) -> float:
    """exp(nll / count). Raises IntegrityFailure when that is not a finite number."""
    exponent = nll / count
    if not math.isfinite(exponent) or exponent > LARGEST_EXPONENT:
        loss = f"a loss of {exponent:.4g} nats"
        raise IntegrityFailure(
            f"the checkpoint gives {loss}: it diverged or its weights are damaged"
        )
    return math.exp(exponent)
