"""Perplexity of a running text: from windows over its sub-words to every convention's number.

The protocol decides the scored windows (`Stream`); each divisor of the summed loss is a column of
the result.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import exp, fsum, log
from typing import Any, Literal

import numpy as np

from mlm_repro.evaluation.protocol import (
    LARGEST_EXPONENT,
    Encoder,
    Request,
    Scores,
    Task,
    perplexity,
    shown_first,
)
from mlm_repro.evaluation.schema import Block, PerplexityResult, Provenance
from mlm_repro.evaluation.tasks.documents import RunningText, count_original_tokens, cut_articles
from mlm_repro.evaluation.tasks.uncertainty import Floats, ratio_standard_error
from mlm_repro.evaluation.windows import sliding_windows
from mlm_repro.lineage.errors import BadInput

MEGATRON_LARGEST_EXPONENT = 20.0
FEW = 50
"""Number of sub-words: a text of fewer gets a warning that the first one is not scored, unless the
tokenizer puts a token before it."""
STRETCH = "sub-words "
"""Beginning of the title of a block that is a stretch of a text."""
MOST_STRETCHES = 1 << 14
"""Largest number of stretches in a text without articles; the bootstrap draws from all of them."""


@dataclass(frozen=True)
class Detokenizer:
    """Function `apply`, which takes a whole text and returns it rewritten, before it is tokenized,
    with the `name` that the protocol line gives it."""

    name: str
    apply: Callable[[str], str]


UNCHANGED = Detokenizer("none", lambda text: text)
First = Literal["once", "every"]
"""Position of the tokenizer's first tokens: before the text, or in every window."""
Divisor = Literal["original tokens", "lm-eval words", "sub-words", "transformers labels"]
"""Divisor of the summed loss. `transformers labels` is transformers' recipe, which counts one
target too few in every window but the first, and weights the window's mean loss accordingly."""


@dataclass(frozen=True)
class Stream:
    """A text as the requests of a perplexity task, with the text's blocks and, for the protocol
    line, the recipe of the requests. The requests score the text's targets in order, each target at
    most once. Some recipes leave targets out."""

    recipe: str
    """Recipe of the requests, for the protocol line."""
    num_tokens: int
    """Number of sub-words of the text. GPTQ, LLAMA_CPP and LM_EVAL_TWICE count the tokenizer's
    first tokens with it, NANOCHAT a token before each document."""
    requests: Sequence[Request]
    first_targets: Sequence[int]
    """Index, among the text's targets counted from 0, of each request's first scored target."""
    blocks: list[Block]
    """Consecutive parts of the text, taken as independent for the standard error."""
    window: int
    """Longest input of a request, in sub-words."""
    stride: int
    """Number of sub-words between the starts of windows."""


def sliding_stream(
    text: RunningText,
    detokenizer: Detokenizer,
    tokenizer: Encoder,
    seq_length: int,
    stride: int,
    first: First = "once",
) -> Stream:
    """Return the whole text, rewritten by the detokenizer and encoded, as a Stream of sliding
    windows of at most `seq_length` inputs.

    The tokenizer's first tokens come before the text if `first` is "once", the default, or in every
    window if it is "every", and are never scored. In every window they leave the text less room,
    and a stride longer than this room is shortened to it; the Stream has the stride that was taken.
    Without such tokens the text's first sub-word is not scored.

    Its blocks are its articles. A text without articles is cut into stretches of a window each, or
    longer ones so that there are at most MOST_STRETCHES. Raises BadInput if first tokens in every
    window fill it, if the stride is below 1 or, where it is not shortened, above `seq_length`, and
    if there is nothing to score.
    """
    detokenized = detokenizer.apply(text.text)
    tokens = np.array(tokenizer.encode(detokenized), np.int64)
    num_tokens = len(tokens)
    before = np.asarray(tokenizer.first_tokens, np.int64)
    tokens = np.concatenate([before, tokens])
    unscored = max(1, len(before))
    repeated = len(before) if first == "every" else 0
    if repeated >= seq_length:
        raise BadInput(
            f"a window of {seq_length} tokens has no room for {shown_first(tokenizer)} and a text:"
            " give a longer --window, or leave out --first every"
        )
    stride = min(stride, seq_length - repeated) if repeated else stride
    windows = sliding_windows(len(tokens), seq_length - repeated, stride)

    requests = [
        Request(
            np.concatenate(
                [before[: repeated * (window.start > 0)], tokens[window.start : window.stop]]
            ),
            window.stop - max(window.first_scored, unscored),
        )
        for window in windows
    ]
    num_targets = len(tokens) - unscored
    words = text.num_original_tokens
    if text.articles:
        encoded = tokenizer.encode_batch(cut_articles(text, detokenized))
        bounds = np.minimum(np.cumsum([0, *map(len, encoded)]), num_tokens)
        # A cut may have changed a sub-word or two; the last article takes the difference.
        bounds[-1] = num_tokens
        sizes = np.diff(bounds).tolist()
        # Without first tokens, token 0 is not a target.
        sizes[next(index for index, size in enumerate(sizes) if size)] -= not len(before)
        ends = [*(start for _, start in text.articles[1:]), None]
        blocks = [
            Block(
                title=title,
                num_targets=size,
                num_original_tokens=count_original_tokens(text.text[start:end]),
            )
            for (title, start), end, size in zip(text.articles, ends, sizes, strict=True)
        ]
    else:
        blocks = stretches(num_targets, words, seq_length)
    recipe = f"detokenizer {detokenizer.name}; window {seq_length}, stride {stride}"
    where = "in every window" if repeated else "before the text"
    recipe += f"; {shown_first(tokenizer)} {where}" if len(before) else ""
    firsts = [max(window.first_scored - unscored, 0) for window in windows]
    return Stream(recipe, num_tokens, requests, firsts, blocks, seq_length, stride)


def stretches(num_targets: int, num_words: int, window: int) -> list[Block]:
    """Return a list of the Blocks of a text that has no articles. It has `num_words` words, and
    `num_targets` of its sub-words are scored. The Blocks are stretches of `window` targets each, or
    longer ones so that there are at most MOST_STRETCHES; the last may be shorter. Each has words in
    proportion to its targets."""
    size = max(window, -(-num_targets // MOST_STRETCHES))
    blocks = []
    for at in range(0, num_targets, size):
        n = min(size, num_targets - at)
        blocks.append(
            Block(
                title=f"{STRETCH}{at + 1}-{at + n}",
                num_targets=n,
                num_original_tokens=num_words * n / num_targets,
            )
        )
    return blocks


def block_weights(blocks: Sequence[Block], normaliser: float, num_windows: int) -> Floats:
    """Return an array [blocks]: the share of `normaliser`, a result's divisor, that falls to each
    block. The shares add up to the divisor and are in proportion to the blocks' scored words, or to
    their scored sub-words if the divisor counts these. A divisor is taken to count them if it is
    their number in all `blocks`, or less by at most one for each of the `num_windows` windows. Each
    Block must have its `num_scored`, which is 0 by default.
    """
    scored = np.array([float(block.num_scored) for block in blocks])
    words = np.array(
        [block.num_original_tokens * block.num_scored / block.num_targets for block in blocks]
    )
    weights = scored if 0 <= scored.sum() - normaliser <= num_windows else words
    return weights * (normaliser / weights.sum())


class PerplexityTask(Task):
    """Task of measuring the perplexity of one text, whose requests are the ones of `stream`, a
    Stream. `divisor` names the number by which the summed loss is divided, by default the words of
    the original text. With `with_memory` each request is scored with the model's memory of earlier
    ones, so the stream must have disjoint windows in order."""

    unit = "windows"

    def __init__(
        self,
        text: RunningText,
        stream: Stream,
        tokenizer: Encoder,
        divisor: Divisor = "original tokens",
        with_memory: bool = False,
    ) -> None:
        super().__init__(text.source, tokenizer, stream.requests, [text.text])
        self.with_memory = with_memory
        self.stream = stream
        self.running_text = text
        self._divisor = divisor
        self._num_original_tokens = text.num_original_tokens

    @property
    def counts(self) -> dict[str, Any]:
        """Dict name of the result's field → number, of the fields that need no scores:
        `num_original_tokens` and `num_lm_eval_words`, the whole text's words by two rules, and
        `num_tokens`, its sub-words as `Stream.num_tokens` has them, in some recipes with tokens
        before the text."""
        words = self.running_text.num_lm_eval_words
        tokens = self.stream.num_tokens
        return {
            "num_original_tokens": self._num_original_tokens,
            "num_lm_eval_words": words,
            "num_tokens": tokens,
        }

    def text(self, index: int) -> str:
        """Return the decoded text of a window's scored tokens, given the window's index in this
        task's `requests`."""
        return self.tokenizer.decode(
            self.requests[index].tokens[-self.requests[index].num_scored :]
        )

    def result(self, scores: Scores, provenance: Provenance) -> PerplexityResult:
        """Return this task's PerplexityResult: the perplexity, exp(summed loss / the protocol's
        divisor), and beside it the number by every other convention. `scores` has a model's scores
        of this task's `requests`, in order; `provenance` states the model, program and machine, and
        its fields become the result's.

        For a text of too few words the numbers by words, except Megatron's own, are None, the
        perplexity too if its divisor is words, and one of the result's `warnings` says why. Raises
        IntegrityFailure for a loss that is not finite or too large for a perplexity.
        """
        facts = self.facts(scores, provenance)
        text = self.running_text
        stream = self.stream
        nll = fsum(scores.nll)
        num_scored = len(scores.log_probabilities)
        share = self._share(scores)
        loss = nll / num_scored
        targets = sum(block.num_targets for block in stream.blocks)
        words_less_one = self._num_original_tokens - 1
        token_ratio = targets / words_less_one if words_less_one else None
        divided, normaliser = self._divided(scores)
        blocks = self._scored_blocks(scores)
        sums = np.array([block.nll for block in blocks])
        weights = block_weights(blocks, normaliser, len(self.requests))
        words = self._num_original_tokens * share
        lm_eval_words = text.num_lm_eval_words * share
        too_few = words < 2 * share or nll > LARGEST_EXPONENT * min(words, lm_eval_words)
        if too_few:
            facts["warnings"].append(
                f"{text.source.title} has {self._num_original_tokens:,} words between spaces for"
                f" {stream.num_tokens:,} sub-words: it has no perplexity by words"
            )
        if stream.num_tokens < FEW and not self.tokenizer.first_tokens:
            facts["warnings"].append(
                f"{text.source.title} has {stream.num_tokens} sub-words; the first is not scored,"
                " but the words and bytes that losses are divided by include it"
            )

        def by(divisor: float, dividend: float = nll) -> float | None:
            return None if too_few else perplexity(dividend, divisor)

        by_subwords = self._divisor in ("sub-words", "transformers labels")
        megatron = {"avg loss": loss, "ppl": exp(min(MEGATRON_LARGEST_EXPONENT, loss))}
        if token_ratio is not None:
            adjusted = exp(min(MEGATRON_LARGEST_EXPONENT, loss * token_ratio))
            megatron |= {"adjusted ppl": adjusted, "token ratio": token_ratio}
        return PerplexityResult(
            **facts,
            **self.counts,
            protocol=self._describe(provenance.dtype),
            perplexity=perplexity(divided, normaliser) if by_subwords else by(normaliser, divided),
            log_perplexity_standard_error=ratio_standard_error(sums, weights),
            normaliser=normaliser,
            loss_per_token=loss,
            subword_perplexity=perplexity(nll, num_scored),
            original_token_perplexity=by(words),
            lm_eval_word_perplexity=by(lm_eval_words),
            token_ratio=token_ratio,
            megatron=megatron,
            bits_per_byte=nll / log(2) / (text.num_bytes * share),
            num_windows=len(self.requests),
            blocks=blocks,
            window=stream.window,
            stride=stream.stride,
        )

    def _divided(self, scores: Scores) -> tuple[float, float]:
        """Return a pair: the summed loss in nats and its divisor, both by this task's convention.
        Words are counted in proportion to the scored share of the text. `scores` has the scores of
        `requests`."""
        if self._divisor == "transformers labels":
            labels = scores.num_scored - np.array([index > 0 for index in self.chosen])
            return fsum(scores.nll / scores.num_scored * labels), float(labels.sum())
        if self._divisor == "sub-words":
            return fsum(scores.nll), float(len(scores.log_probabilities))
        words = (
            self.running_text.num_lm_eval_words
            if self._divisor == "lm-eval words"
            else self._num_original_tokens
        )
        return fsum(scores.nll), words * self._share(scores)

    def _share(self, scores: Scores) -> float:
        """Return the share of the whole text's targets that `scores` has, above 0 and at most 1."""
        return len(scores.log_probabilities) / sum(
            block.num_targets for block in self.stream.blocks
        )

    def _scored_blocks(self, scores: Scores) -> list[Block]:
        """Return a list of copies of the Blocks that have scored targets, in order, each with its
        summed loss in nats and its number of scored targets. `scores` has the scores of
        `requests`."""
        blocks = self.stream.blocks
        firsts = [self.stream.first_targets[index] for index in self.chosen]
        ranges = [
            np.arange(first, first + request.num_scored)
            for first, request in zip(firsts, self.requests, strict=True)
        ]
        owner = np.repeat(np.arange(len(blocks)), [block.num_targets for block in blocks])[
            np.concatenate(ranges)
        ]
        nll = -np.bincount(owner, weights=scores.log_probabilities, minlength=len(blocks))
        counts = np.bincount(owner, minlength=len(blocks))
        scored = [row for row in zip(blocks, nll.tolist(), counts.tolist(), strict=True) if row[2]]
        return [
            block.model_copy(update={"nll": loss, "num_scored": count})
            for block, loss, count in scored
        ]

    def _describe(self, dtype: str) -> str:
        """Return the result's protocol line as text: the text's title, the recipe, the divisor, the
        number format `dtype`, and the extent of a partial test."""
        divisor = {
            "original tokens": (
                f"{self._num_original_tokens} space-separated tokens of the original"
            ),
            "lm-eval words": (
                f"{self.running_text.num_lm_eval_words} words as lm-evaluation-harness counts them"
            ),
            "sub-words": "sub-words scored",
            "transformers labels": "sub-words scored, one too few in each window but the first",
        }[self._divisor]
        recipe = self.stream.recipe + (
            "; each window with the memory of those before" if self.with_memory else ""
        )
        part = f"{self.extent}, divisor pro rata" if self.is_partial else ""
        return (
            f"{self.source.title}; {recipe}; perplexity = exp(summed loss / {divisor});"
            f" {dtype}{part}"
        )
