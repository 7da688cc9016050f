"""Interface of protocols: a task turns text into requests, a model answers with scores, the task
turns these into a result.

A name stands for one recipe, written out in the result's `protocol` line.
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
    """One input to a model: token ids. The last `num_scored` of them are predicted, each from all
    tokens before it. Raises BadInput if no token is predicted, or every one."""

    tokens: Tokens
    num_scored: int

    def __post_init__(self) -> None:
        if not 1 <= self.num_scored < len(self.tokens):
            raise BadInput(
                f"{self.num_scored} of the {len(self.tokens)} tokens of a window or passage are to"
                " be scored: at least one must be, and never the first; the text or --window may be"
                " too short"
            )

    @classmethod
    def of_window(cls, tokens: Tokens, window: Window) -> Self:
        """Return the request of a window over `tokens`, a text's ids: it has the tokens that the
        window covers, as a view and no copy, and predicts those at its end that the window
        scores."""
        return cls(tokens[window.start : window.stop], window.num_scored)

    @classmethod
    def rolling(cls, document: Sequence[int], first: int, seq_length: int) -> list[Self]:
        """Return a list of Requests that together score each sub-word of a document once. A Request
        has token ids, and the number of ids at its end that are scored. The token `first` stands
        before the document. The windows are as `rolling_windows` gives them: each scores the next
        `seq_length` sub-words, or the rest, and begins with the one token before them; but if the
        rest is shorter, the last of several windows begins earlier, so that it too has `seq_length`
        + 1 ids. `document` has the sub-words' ids; without any the list is empty."""
        tokens = np.asarray([first, *document], dtype=np.int64)
        return [
            cls.of_window(tokens, window) for window in rolling_windows(len(tokens), seq_length)
        ]


class Scores(NamedTuple):
    """Answer of a model to requests. Three columns have one element per scored token, in the order
    of the requests: `log_probabilities`, in nats; `greedy`, True if the token was the most likely
    one; and `greedy_allowed`, the same among the tokens that are not banned. `num_scored` has the
    number of scored tokens of each request."""

    log_probabilities: Floats
    """Log-probability of each scored token, in nats."""
    greedy: Flags
    """True for each scored token that was the model's most likely one. Of equally likely tokens
    only the first counts."""
    greedy_allowed: Flags
    """True for each scored token that was the most likely one among tokens that are not banned."""
    num_scored: Tokens
    """Number of scored tokens of each request, [requests]."""

    @property
    def starts(self) -> Tokens:
        """Index of each request's first scored token, [requests], in `log_probabilities` and the
        other columns of one element per scored token."""
        return np.cumsum(self.num_scored) - self.num_scored

    @property
    def nll(self) -> Floats:
        """Summed negative log-likelihood of each request's scored tokens, [requests], in nats."""
        return -np.add.reduceat(self.log_probabilities, self.starts)

    @property
    def all_greedy(self) -> Flags:
        """Array of booleans, [requests]: True for a request if all its scored tokens were the
        model's most likely tokens."""
        return np.logical_and.reduceat(self.greedy, self.starts)

    def taken(self, indices: Tokens, requests: Sequence[Request]) -> "Scores":
        """Return a Scores of `requests`, in order: `requests[n]` has the tokens of this object's
        request number `indices[n]`, and gets that request's scores for as many of the last tokens
        as `requests[n]` scores."""
        counts = np.array([request.num_scored for request in requests], dtype=np.int64)
        ends = (self.starts + self.num_scored)[indices]
        chosen = np.concatenate(
            [np.arange(end - count, end) for end, count in zip(ends, counts, strict=True)]
        )
        return Scores._make([*(column[chosen] for column in self[:-1]), counts])


class Encoder(Protocol):
    """Interface of a tokenizer, as tasks use it. The tokenizers of this suite and of transformers'
    models have it. The methods `encode`, for one text, and `encode_batch`, for several, return
    token ids as lists without the `first_tokens`, which the task itself puts before a text."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def end_of_text(self) -> int: ...
    @property
    def first_tokens(self) -> tuple[int, ...]:
        """Ids of the tokens that the tokenizer puts before every text; empty if it puts none."""

    @property
    def document_start(self) -> int:
        """Id of the token after which a document is scored if a protocol puts one before it."""

    @property
    def digest(self) -> str: ...
    def encode(self, text: str) -> list[int]: ...
    def encode_batch(self, texts: list[str]) -> list[list[int]]: ...
    def decode(self, ids: Iterable[int]) -> str: ...


def with_first(tokenizer: Encoder, tokens: Sequence[int]) -> list[int]:
    """Return a list of token ids: the `first_tokens` that the tokenizer puts before every text,
    then `tokens`."""
    return [*tokenizer.first_tokens, *tokens]


def shown_first(tokenizer: Encoder) -> str:
    """Return the tokenizer's first tokens decoded, as one text in quotes, or `nothing` if it has
    none."""
    return repr(tokenizer.decode(tokenizer.first_tokens)) if tokenizer.first_tokens else "nothing"


def literal_tokens(tokenizer: Encoder, texts: Sequence[str]) -> Iterator[str]:
    """Yield a sentence for each special token whose spelling occurs in the texts: how often, and
    how it is read. The tokens are the tokenizer's `special_tokens`, a dict spelling → id, or else
    end-of-text alone. A special token of white space is left out."""
    known = getattr(
        tokenizer,
        "special_tokens",
        {tokenizer.decode([tokenizer.end_of_text]): tokenizer.end_of_text},
    )
    for literal, token in known.items():
        count = sum(text.count(literal) for text in texts)
        if count and literal.strip():
            is_token = token in tokenizer.encode(literal)
            how = "one token of its own" if is_token else "spelled in sub-words, as any other text"
            yield f"{literal} stands in it {count:,} times: each is {how}"


@dataclass(frozen=True)
class SourceText:
    """Description of a test's text, which a task carries into its result: the task's name, the
    text's title and digest, the reason (`note`) if it is not the text of the task that was
    requested, and remarks on the text's oddities."""

    task: str
    title: str
    digest: str
    note: str = ""
    """Reason why this is not the text of the task that was requested; empty if it is."""
    remarks: tuple[str, ...] = ()
    """Sentences on oddities of the text and how they are treated."""


class Task(ABC):
    """Base class of tasks: one protocol with its text and a tokenizer. A task has in `requests` the
    inputs to a model, and turns the model's scores into a result. A subclass sets `unit` and has
    the methods `text` and `result`; it may also set `with_memory` and `banned`, and override
    `correct`."""

    unit: str
    """Plural noun for this task's requests, such as `windows`."""
    with_memory = False
    """True if the requests are a text's segments in order, each scored with the memory of earlier
    ones."""
    banned: Tokens | None = None
    """Ids of tokens that do not count as predictions in the column `greedy_allowed` of the scores;
    None if all count."""

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
        """Numbers, counted from 0 in the whole test, of the requests in `requests`."""

    def limited(self, limit: int | None) -> Self:
        """Return a copy of this task, which must have the whole test, with at most `limit`
        requests, spread evenly over the test, or the first ones if the task uses a Transformer-XL's
        memory; with all requests if `limit` is None."""
        limited = copy.copy(self)
        chosen = evenly_spread(self.whole, limit)
        limited.chosen = range(len(chosen)) if self.with_memory else chosen
        limited.requests = [self.requests[number] for number in limited.chosen]
        return limited

    @property
    def is_partial(self) -> bool:
        """True if this task has fewer requests than the whole test, as the copy that `limited`
        returns may have."""
        return len(self.chosen) < self.whole

    @property
    def extent(self) -> str:
        """Ending of the protocol line for a partial test, such as `; only 10 of 60 windows`; empty
        for a whole one."""
        return f"; only {len(self.chosen)} of {self.whole} {self.unit}" if self.is_partial else ""

    def samples(self, scores: Scores) -> Iterator[Sample]:
        """Yield a Sample, a line of `--samples`, for each request in this task's `requests`: its
        number in the whole test, its text, its scored tokens, with the log-probability of each and
        whether it was the likeliest, and whether the request is right, None without a rule for
        that. `scores` has the scores of `requests`."""
        correct = self.correct(scores)
        for index, (number, request, start) in enumerate(
            zip(self.chosen, self.requests, scores.starts, strict=True)
        ):
            columns = slice(int(start), int(start) + request.num_scored)
            yield Sample(
                task=self.name,
                index=number,
                text=self.text(index),
                num_context_tokens=len(request.tokens) - request.num_scored,
                tokens=request.tokens[-request.num_scored :].tolist(),
                log_probabilities=scores.log_probabilities[columns].tolist(),
                greedy=scores.greedy[columns].tolist(),
                correct=None if correct is None else bool(correct[index]),
            )

    def correct(self, scores: Scores) -> Flags | None:
        """Return whether each request is right by the protocol's rule, as a boolean array
        [requests], or None if the protocol has no such rule. A task whose rule says what is right
        overrides this; here it is None."""
        return None

    @abstractmethod
    def text(self, index: int) -> str:
        """Return the string that people read in the Sample of a request, such as its whole passage
        or the words that are scored, given the request's index in this task's `requests`. `samples`
        calls it for each request; each kind of task has its own."""

    @abstractmethod
    def result(self, scores: Scores, provenance: Provenance) -> Result:
        """Return this task's Result, computed from `scores`, the scores of its `requests` in order,
        with the fields of `provenance`. Every kind of task implements this method itself. Raises
        IntegrityFailure for an implausible or not finite loss, as `perplexity` does."""

    def facts(self, scores: Scores, provenance: Provenance) -> dict[str, Any]:
        """Return a dict of the fields of a result that do not depend on its kind: the fields of
        `provenance`; `task`, this task's name; its `note`; `partial`, a bool; `num_scored_tokens`;
        the text's `data_digest`; its `data_repository`, empty if it is no known test set; and
        `warnings`, a list of sentences for oddities of the text and for a perplexity per sub-word
        of at least half the vocabulary's size. `scores` is the Scores, one object, of all of this
        task's `requests` in order.

        Raises IntegrityFailure if the mean loss of a sub-word is not finite or above
        LARGEST_EXPONENT.
        """
        num_scored = len(scores.log_probabilities)
        subword = perplexity(math.fsum(scores.nll), num_scored)
        literals = literal_tokens(self.tokenizer, self._texts)
        size = self.tokenizer.vocab_size
        misload = (
            f"perplexity per sub-word is {subword:,.0f} with {size:,} sub-words to choose from: "
            "the checkpoint is untrained or was loaded wrongly"
        )
        repositories = {
            file.sha256: f"{file.repository}/{file.subset}" for file in TEST_SETS.values()
        }
        return dict(provenance) | {
            "task": self.name,
            "partial": self.is_partial,
            "note": self.note,
            "num_scored_tokens": num_scored,
            "warnings": [
                *self.source.remarks,
                *(f"{self.source.title}: {sentence}" for sentence in literals),
                *([misload] if subword >= size / 2 else []),
            ],
            "data_digest": self.source.digest,
            "data_repository": repositories.get(self.source.digest, ""),
        }


def perplexity(nll: float, count: float) -> float:
    """Return exp(nll / count), where `nll` is a summed loss in nats and `count` the number of
    words, sub-words or examples to divide it by, not 0. Raises IntegrityFailure if the exponent is
    not finite or is above LARGEST_EXPONENT."""
    exponent = nll / count
    if not math.isfinite(exponent) or exponent > LARGEST_EXPONENT:
        loss = f"a loss of {exponent:.4g} nats"
        raise IntegrityFailure(
            f"the checkpoint gives {loss}: it diverged or its weights are damaged; evaluate an"
            " earlier checkpoint or an undamaged copy"
        )
    return math.exp(exponent)
