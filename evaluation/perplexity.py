"""Word-normalised perplexity of a running text by sliding windows."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from evaluation.protocol import (
    Encoder,
    PerplexityResult,
    Provenance,
    Request,
    Scores,
    SourceText,
    Tokens,
    misload_warnings,
    perplexity,
)
from evaluation.windows import STRIDES_PER_WINDOW, Window, evenly_spread, sliding_windows
from lineage.errors import BadInput

MEGATRON_LARGEST_EXPONENT = 20.0


@dataclass(frozen=True)
class Detokenizer:
    """A rewriting of the text before tokenization, with the name the protocol line gives it."""

    name: str
    apply: Callable[[str], str]


UNCHANGED = Detokenizer("none", lambda text: text)


def count_original_tokens(text: str) -> int:
    """Space-separated tokens of the text as published, T_o; a newline between spaces counts as one."""
    return len(text.strip().split(" "))


class SlidingPerplexity:
    """The task for one text: one stream, nothing put before or between documents, token 0 not scored."""

    unit = "windows"

    def __init__(
        self,
        source: SourceText,
        text: str,
        detokenizer: Detokenizer,
        tokenizer: Encoder,
        seq_length: int,
        limit: int | None = None,
    ) -> None:
        """`limit` scores only that many windows, spread evenly over the text."""
        self._source, self._detokenizer = source, detokenizer
        self._vocab_size = tokenizer.vocab_size
        self._num_original_tokens = count_original_tokens(text)
        if self._num_original_tokens < 2:
            raise BadInput(f"{source.title} is too short to measure a perplexity on")
        self._num_bytes = len(text.encode("utf-8"))
        self.tokens: Tokens = np.asarray(tokenizer.encode(detokenizer.apply(text)), dtype=np.int64)
        self._window = seq_length
        self._stride = max(1, seq_length // STRIDES_PER_WINDOW)
        windows = sliding_windows(len(self.tokens), self._window, self._stride)
        self.windows: list[Window] = [windows[index] for index in evenly_spread(len(windows), limit)]
        self._num_all_windows = len(windows)

    @property
    def name(self) -> str:
        return self._source.task

    @property
    def note(self) -> str:
        return self._source.note

    @property
    def requests(self) -> list[Request]:
        return [Request(self.tokens[window.start : window.stop], window.num_scored) for window in self.windows]

    def result(self, scores: Scores, provenance: Provenance) -> PerplexityResult:
        """Perplexity = exp(summed loss / original tokens)."""
        nll = math.fsum(scores.nll)
        num_targets = len(self.tokens) - 1
        num_scored = sum(window.num_scored for window in self.windows)
        share = num_scored / num_targets
        partial = len(self.windows) < self._num_all_windows
        loss = nll / num_scored
        subword = perplexity(nll, num_scored)
        token_ratio = num_targets / (self._num_original_tokens - 1)
        return PerplexityResult(
            **provenance.model_dump(),
            task=self.name,
            protocol=self._describe(provenance.dtype, partial),
            partial=partial,
            note=self.note,
            warnings=misload_warnings(subword, self._vocab_size),
            data_digest=self._source.digest,
            perplexity=perplexity(nll, self._num_original_tokens * share),
            num_original_tokens=self._num_original_tokens,
            num_tokens=len(self.tokens),
            num_scored_tokens=num_scored,
            normaliser=self._num_original_tokens * share,
            loss_per_token=loss,
            subword_perplexity=subword,
            bits_per_byte=nll / math.log(2) / (self._num_bytes * share),
            token_ratio=token_ratio,
            num_windows=len(self.windows),
            megatron={
                "avg loss": loss,
                "ppl": math.exp(min(MEGATRON_LARGEST_EXPONENT, loss)),
                "adjusted ppl": math.exp(min(MEGATRON_LARGEST_EXPONENT, loss * token_ratio)),
                "token ratio": token_ratio,
            },
        )

    def _describe(self, dtype: str, partial: bool) -> str:
        part = f"; only {len(self.windows)} of {self._num_all_windows} windows, divisor pro rata" if partial else ""
        return (
            f"{self._source.title}; detokenizer {self._detokenizer.name}; window {self._window}, "
            f"stride {self._stride}; perplexity = exp(summed loss / {self._num_original_tokens} "
            f"space-separated tokens of the original); {dtype}{part}"
        )
