"""Prediction of a passage's last word, by rules that differ in what the last word is and when it is right."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from evaluation import harness
from evaluation.protocol import (
    ClozeResult,
    Encoder,
    Losses,
    Provenance,
    Request,
    Sample,
    Scores,
    SourceText,
    Tokens,
    misload_warnings,
    perplexity,
)
from evaluation.stop_words import stop_word_tokens
from evaluation.uncertainty import mean_standard_error
from evaluation.windows import evenly_spread
from lineage.errors import BadInput

Encoded = list[tuple[list[int], int]]
"""Sub-words of each passage and how many at its end are the target."""


def split_last_word(text: str) -> tuple[str, str]:
    """The stripped context and the last white-space word, as Megatron's `--strict-lambada` splits them.

    Whatever white space stood before the word is gone; the target is encoded as a space and the word.
    """
    last = text.split()[-1]
    return text[: text.rfind(last)].strip(), last


def encode_strictly(tokenizer: Encoder, passages: Sequence[str]) -> Encoded:
    """Context and ` word` encoded apart."""
    contexts, words = zip(*map(split_last_word, passages), strict=True)
    before = tokenizer.encode_batch(list(contexts))
    targets = tokenizer.encode_batch([f" {word}" for word in words])
    return [([*context, *target], len(target)) for context, target in zip(before, targets, strict=True)]


def encode_for_last_token(tokenizer: Encoder, passages: Sequence[str]) -> Encoded:
    """The whole passage encoded, its last sub-word the target: Megatron without `--strict-lambada`."""
    return [(tokens, 1) for tokens in tokenizer.encode_batch(list(passages))]


@dataclass(frozen=True)
class ClozeRule:
    """What is predicted and when it is right."""

    sentence: str
    encode: Callable[[Encoder, Sequence[str]], Encoded]
    filters_stop_words: bool = False


STRICT = ClozeRule(
    "last white-space word, correct only if the most likely token is right at each of its sub-words; teacher forcing, "
    "nothing before the passage, no stop-word filter",
    encode_strictly,
)
LAST_TOKEN = ClozeRule(
    "last sub-word only, correct if it is the most likely token; nothing before the passage, no stop-word filter",
    encode_for_last_token,
)
STOP_WORD_FILTER = ClozeRule(
    "last white-space word, correct only if the most likely token is right at each of its sub-words, the first among "
    "those that are no stop word; teacher forcing, nothing before the passage; perplexity without the filter",
    encode_strictly,
    filters_stop_words=True,
)
LM_EVAL = ClozeRule(
    "what follows the last space, newlines in it included, encoded with its context, correct only if the most likely "
    "token is right at each of its sub-words (lm-evaluation-harness); nothing before the passage, no stop-word filter",
    harness.encode_passages,
)


class ClozeTask:
    """The task for a list of passages and one rule."""

    unit = "examples"
    with_memory = False

    def __init__(
        self,
        source: SourceText,
        passages: Sequence[str],
        rule: ClozeRule,
        tokenizer: Encoder,
        seq_length: int,
        limit: int | None = None,
    ) -> None:
        """`limit` scores only that many passages, spread evenly over the list.

        A passage longer than `seq_length` inputs loses its beginning. Raises BadInput if a target alone is
        longer.
        """
        if not passages:
            raise BadInput(f"{source.title} has no passage to score")
        self._source, self._passages, self._rule = source, passages, rule
        self._vocab_size = tokenizer.vocab_size
        self.banned: Tokens | None = stop_word_tokens(tokenizer) if rule.filters_stop_words else None
        examples = rule.encode(tokenizer, passages)
        self._num_tokens = sum(len(tokens) for tokens, _ in examples)
        self._chosen = evenly_spread(len(examples), limit)
        if (longest := max(examples[index][1] for index in self._chosen)) > seq_length:
            raise BadInput(f"a target of {longest} sub-words does not fit the model's context of {seq_length}")
        self.requests = [
            Request(np.asarray(tokens[-(seq_length + 1) :], dtype=np.int64), num_scored)
            for tokens, num_scored in (examples[index] for index in self._chosen)
        ]
        self._num_truncated = sum(len(examples[index][0]) > seq_length + 1 for index in self._chosen)

    @property
    def name(self) -> str:
        return self._source.task

    @property
    def note(self) -> str:
        return self._source.note

    def losses(self, scores: Scores) -> Losses:
        """One element per example."""
        names = [str(index) for index in self._chosen]
        return Losses(names, scores.nll, np.ones(len(names)), self._correct(scores))

    def samples(self, scores: Scores) -> Iterator[Sample]:
        """One per example, with the rule's verdict; its text is the passage."""
        for index, request, start, correct in zip(
            self._chosen, self.requests, scores.starts, self._correct(scores), strict=True
        ):
            yield Sample.of(self.name, index, self._passages[index], request, scores, int(start), bool(correct))

    def result(self, scores: Scores, provenance: Provenance) -> ClozeResult:
        """Accuracy over examples; the perplexity is of the whole target."""
        losses = scores.nll
        nll = math.fsum(losses)
        num_examples = len(self._chosen)
        num_scored = len(scores.log_probabilities)
        num_correct = int(self._correct(scores).sum())
        accuracy = num_correct / num_examples
        target_perplexity = perplexity(nll, num_examples)
        spread = mean_standard_error(losses)
        partial = num_examples < len(self._passages)
        return ClozeResult(
            **provenance.model_dump(),
            task=self.name,
            protocol=self._describe(provenance.dtype, partial),
            partial=partial,
            note=self.note,
            warnings=misload_warnings(perplexity(nll, num_scored), self._vocab_size),
            data_digest=self._source.digest,
            perplexity=target_perplexity,
            perplexity_standard_error=None if spread is None else target_perplexity * spread,
            num_original_tokens=len(self._passages),
            num_tokens=self._num_tokens,
            num_scored_tokens=num_scored,
            accuracy=accuracy,
            standard_error=math.sqrt(accuracy * (1 - accuracy) / max(1, num_examples - 1)),
            num_examples=num_examples,
            num_correct=num_correct,
            num_truncated=self._num_truncated,
        )

    def _correct(self, scores: Scores) -> NDArray[np.bool_]:
        if not self._rule.filters_stop_words:
            return scores.all_greedy
        right = scores.greedy.copy()
        right[scores.starts] = scores.greedy_allowed[scores.starts]
        return np.logical_and.reduceat(right, scores.starts)

    def _describe(self, dtype: str, partial: bool) -> str:
        part = f"; only {len(self._chosen)} of {len(self._passages)} examples" if partial else ""
        cut = f"; {self._num_truncated} examples cut at the left to the model's context" if self._num_truncated else ""
        return f"{self._source.title}; {self._rule.sentence}; {dtype}{cut}{part}"
