"""Perplexity of a running text: from windows over its sub-words to every convention's number.

The protocol decides the scored windows (`Stream`); each divisor of the summed loss is a column of the result.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from mlm_repro.evaluation.protocol import (
    LARGEST_EXPONENT,
    Encoder,
    Losses,
    Request,
    Scores,
    Task,
    perplexity,
    shown_first,
)
from mlm_repro.evaluation.schema import Block, PerplexityResult, Provenance
from mlm_repro.evaluation.tasks.documents import RunningText, count_original_tokens, cut_articles
from mlm_repro.evaluation.tasks.uncertainty import Floats, ratio_standard_error
from mlm_repro.evaluation.windows import Lazy, sliding_windows

MEGATRON_LARGEST_EXPONENT = 20.0
FEW = 50
"""Sub-words of a text whose first one counts."""
MOST_STRETCHES = 1 << 14
"""Most stretches of a text without articles; the bootstrap draws from all of them."""


@dataclass(frozen=True)
class Detokenizer:
    """A rewriting of the text before tokenization, with its name in the protocol line."""

    name: str
    apply: Callable[[str], str]


UNCHANGED = Detokenizer("none", lambda text: text)
Divisor = Literal["original tokens", "lm-eval words", "transformers labels"]
"""Divisor of the summed loss. The last is transformers' recipe, which counts one target too few in every window but the
first, and weights the window's mean loss accordingly."""


@dataclass(frozen=True)
class Stream:
    """A text as requests that score each of its targets once and in order."""

    recipe: str
    """Recipe of the requests, for the protocol line."""
    num_tokens: int
    """Sub-words of the text."""
    requests: Sequence[Request]
    first_targets: Sequence[int]
    """Number of each request's first scored target, from 0."""
    blocks: list[Block]
    """Consecutive parts of the text, taken as independent for the standard error."""


def sliding_stream(
    text: RunningText, detokenizer: Detokenizer, tokenizer: Encoder, seq_length: int, stride: int
) -> Stream:
    """The whole text in one stream by sliding windows: nothing between documents, token 0 not scored.

    Token 0 is the one that the tokenizer puts before every text, otherwise the text's first sub-word.

    Its blocks are its articles. A text without any has stretches, of one window or as many as make MOST_STRETCHES.
    """
    detokenized = detokenizer.apply(text.text)
    tokens = tokenizer.encode_ids(detokenized).astype(np.int64)
    num_tokens, has_first = len(tokens), tokenizer.first_token is not None
    if has_first:
        tokens = np.concatenate([[tokenizer.first_token], tokens])
    windows = sliding_windows(len(tokens), seq_length, stride)

    def request(number: int) -> Request:
        return Request.of_window(tokens, windows[number])

    num_targets, words = len(tokens) - 1, text.num_original_tokens
    if text.articles:
        encoded = tokenizer.encode_batch(cut_articles(text, detokenized))
        bounds = np.minimum(np.cumsum([0, *map(len, encoded)]), num_tokens)
        bounds[-1] = num_tokens  # should a cut have changed a sub-word or two
        sizes = np.diff(bounds).tolist()
        sizes[next(index for index, size in enumerate(sizes) if size)] -= not has_first  # token 0
        ends = [*(start for _, start in text.articles[1:]), None]
        blocks = [
            Block(title=title, num_targets=size, num_original_tokens=count_original_tokens(text.text[start:end]))
            for (title, start), end, size in zip(text.articles, ends, sizes, strict=True)
        ]
    else:
        size = max(seq_length, -(-num_targets // MOST_STRETCHES))
        stretches = [(start, min(size, num_targets - start)) for start in range(0, num_targets, size)]
        blocks = [
            Block(title=f"sub-words {at + 1}-{at + n}", num_targets=n, num_original_tokens=words * n / num_targets)
            for at, n in stretches
        ]
    recipe = f"detokenizer {detokenizer.name}; window {seq_length}, stride {stride}"
    recipe += f"; {shown_first(tokenizer)} before the text" if has_first else ""
    firsts = Lazy(len(windows), lambda number: windows[number].first_scored - 1)
    return Stream(recipe, num_tokens, Lazy(len(windows), request), firsts, blocks)


def columns(
    nll: float, num_scored: int, num_targets: int, num_original_tokens: int, num_lm_eval_words: int, num_bytes: int
) -> dict[str, Any]:
    """What a result says by each convention, from the summed loss and from the counts of the whole text.

    The perplexity is per original token; it and those per word are None where there are too few words for a number.
    """
    share, loss = num_scored / num_targets, nll / num_scored
    words, lm_eval_words, others = num_original_tokens * share, num_lm_eval_words * share, num_original_tokens - 1
    too_few = words < 2 * share or nll > LARGEST_EXPONENT * min(words, lm_eval_words)
    token_ratio = num_targets / others if others else None
    megatron = {"avg loss": loss, "ppl": math.exp(min(MEGATRON_LARGEST_EXPONENT, loss))}
    if token_ratio is not None:
        adjusted = math.exp(min(MEGATRON_LARGEST_EXPONENT, loss * token_ratio))
        megatron |= {"adjusted ppl": adjusted, "token ratio": token_ratio}
    by_words = None if too_few else perplexity(nll, words)
    return {
        "perplexity": by_words, "normaliser": words, "loss_per_token": loss, "token_ratio": token_ratio,
        "subword_perplexity": perplexity(nll, num_scored), "original_token_perplexity": by_words,
        "lm_eval_word_perplexity": None if too_few else perplexity(nll, lm_eval_words), "megatron": megatron,
        "bits_per_byte": nll / math.log(2) / (num_bytes * share),
    }  # fmt: skip


class PerplexityTask(Task):
    """The task for one text and one stream of it."""

    unit = "windows"

    def __init__(
        self, text: RunningText, stream: Stream, tokenizer: Encoder, divisor: Divisor = "original tokens",
        with_memory: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(text.source, tokenizer, stream.requests)
        self.with_memory, self.stream = with_memory, stream
        self.running_text, self._divisor, self._num_original_tokens = text, divisor, text.num_original_tokens

    def losses(self, scores: Scores) -> Losses:
        """An element for each block with scored targets; all weights add up to the divisor."""
        blocks = self.scored_blocks(scores.log_probabilities)
        if self._divisor == "transformers labels":
            weight = np.array([float(block.num_scored) for block in blocks])
        else:
            weight = np.array([block.num_original_tokens * block.num_scored / block.num_targets for block in blocks])
        nll, weight = np.array([block.nll for block in blocks]), weight * (self._divided(scores)[1] / weight.sum())
        return Losses([block.title for block in blocks], nll, weight)

    @property
    def counts(self) -> dict[str, Any]:
        """Counts of the result that need no scores."""
        words, tokens = self.running_text.num_lm_eval_words, self.stream.num_tokens
        return {"num_original_tokens": self._num_original_tokens, "num_lm_eval_words": words, "num_tokens": tokens}

    def text(self, place: int) -> str:
        """The scored part of a window."""
        return self.tokenizer.decode(self.requests[place].tokens[-self.requests[place].num_scored :])

    def result(self, scores: Scores, provenance: Provenance) -> PerplexityResult:
        """Perplexity = exp(summed loss / words), with the columns of every convention beside it.

        A text of too few words has no number by words, and a warning says why.
        """
        facts = self.facts(scores, provenance)
        text, stream = self.running_text, self.stream
        divided, normaliser = self._divided(scores)
        losses = self.losses(scores)
        targets = sum(block.num_targets for block in stream.blocks)
        numbers = columns(
            math.fsum(scores.nll), len(scores.log_probabilities), targets, self._num_original_tokens,
            text.num_lm_eval_words, text.num_bytes,
        )  # fmt: skip
        by_subwords = self._divisor == "transformers labels"
        if numbers["original_token_perplexity"] is None:
            facts["warnings"].append(
                f"{text.source.title} has {self._num_original_tokens:,} words between spaces for {stream.num_tokens:,} "
                "sub-words: its perplexity by words is no number"
            )
        if by_subwords or numbers["original_token_perplexity"] is not None:
            numbers |= {"perplexity": perplexity(divided, normaliser)}
        if stream.num_tokens < FEW and self.tokenizer.first_token is None:
            facts["warnings"].append(
                f"{text.source.title} has {stream.num_tokens} sub-words; the first is not scored, but the words and "
                "bytes that losses are divided by include it"
            )
        return PerplexityResult(
            **facts | self.counts | numbers | {"normaliser": normaliser}, protocol=self._describe(provenance.dtype),
            log_perplexity_standard_error=ratio_standard_error(losses.nll, losses.weight),
            num_windows=len(self.requests), blocks=self.scored_blocks(scores.log_probabilities),
        )  # fmt: skip

    def _divided(self, scores: Scores) -> tuple[float, float]:
        if self._divisor == "transformers labels":
            labels = scores.num_scored - np.array([index > 0 for index in self.chosen])
            return math.fsum(scores.nll / scores.num_scored * labels), float(labels.sum())
        words = self.running_text.num_lm_eval_words if self._divisor == "lm-eval words" else self._num_original_tokens
        return math.fsum(scores.nll), words * self._share(scores)

    def _share(self, scores: Scores) -> float:
        """Scored share of all targets."""
        return len(scores.log_probabilities) / sum(block.num_targets for block in self.stream.blocks)

    def scored_blocks(self, log_probabilities: Floats) -> list[Block]:
        """The blocks with scored targets, which have these log-probabilities in order."""
        blocks = self.stream.blocks
        firsts = [self.stream.first_targets[index] for index in self.chosen]
        ranges = [np.arange(first, first + each.num_scored) for first, each in zip(firsts, self.requests, strict=True)]
        owner = np.repeat(np.arange(len(blocks)), [block.num_targets for block in blocks])[np.concatenate(ranges)]
        nll = -np.bincount(owner, weights=log_probabilities, minlength=len(blocks))
        counts = np.bincount(owner, minlength=len(blocks))
        scored = [row for row in zip(blocks, nll.tolist(), counts.tolist(), strict=True) if row[2]]
        return [block.model_copy(update={"nll": loss, "num_scored": count}) for block, loss, count in scored]

    def _describe(self, dtype: str) -> str:
        divisor = {
            "original tokens": f"{self._num_original_tokens} space-separated tokens of the original",
            "lm-eval words": f"{self.running_text.num_lm_eval_words} words as lm-evaluation-harness counts them",
            "transformers labels": "sub-words scored, one too few in each window but the first",
        }[self._divisor]
        recipe = self.stream.recipe + ("; each window with the memory of those before" if self.with_memory else "")
        part = f"{self.extent}, divisor pro rata" if self.is_partial else ""
        return f"{self.source.title}; {recipe}; perplexity = exp(summed loss / {divisor}); {dtype}{part}"
