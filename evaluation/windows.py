"""Sliding windows in which every target is scored exactly once.

Pure arithmetic on positions. Follows the overlapping evaluation of Megatron-LM's zero-shot tasks
(`--overlapping-eval 32` at sequence length 1024).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from mlm_repro.lineage.errors import BadInput

STRIDES_PER_WINDOW = 32
LONGEST_WINDOW = 1024


@dataclass(frozen=True, slots=True)
class Window:
    """Window over `tokens[start:stop]` of a text, which scores the targets
    `tokens[first_scored:stop]`. The last token is a target alone; the model is given the others."""

    start: int
    first_scored: int
    stop: int

    @property
    def num_scored(self) -> int:
        """Number of targets, in tokens, that this window scores."""
        return self.stop - self.first_scored


def check_stride(stride: int, seq_length: int) -> None:
    """Raise BadInput unless `stride` is from 1 to `seq_length`: windows of `seq_length` targets
    that begin further apart would skip some."""
    if not 1 <= stride <= seq_length:
        raise BadInput(
            f"a stride of {stride} is not from 1 to the window's {seq_length} tokens: a longer one"
            " would skip some, so change --stride or --window"
        )


def sliding_windows(num_tokens: int, seq_length: int, stride: int) -> list[Window]:
    """Return a list of windows over `num_tokens` tokens that score each target 1 .. num_tokens-1
    once and in order.

    Window i begins at token `i * stride` and sees `seq_length` inputs, or the rest of them at the
    text's end, and the token after them. Window 0 scores all its targets, a later one only its last
    `stride` target slots. Token 0 has no context and is never scored. Windows that would score
    nothing are left out. Raises BadInput unless `stride` is from 1 to `seq_length`, because a
    longer stride would skip targets, and if there is nothing to score.
    """
    check_stride(stride, seq_length)
    if num_tokens < 2:
        raise BadInput(
            f"a text of {num_tokens} tokens has nothing to score: the first is never scored, so"
            " give a longer text"
        )
    size = seq_length + 1

    def window(number: int) -> Window:
        start = number * stride
        return Window(start, start + size - stride if number else 1, min(start + size, num_tokens))

    return [window(number) for number in range(1 + math.ceil(max(num_tokens - size, 0) / stride))]


def rolling_windows(num_tokens: int, seq_length: int) -> Iterator[Window]:
    """Yield windows over a document of `num_tokens` tokens. Together they score every token exactly
    once and in order, except for the first token, which is not scored. Each window scores the next
    `seq_length` tokens, or the rest. Yields nothing for fewer than two tokens.

    Each window sees the token before its targets. The last of several is extended to the left to a
    full context.
    """
    for first in range(1, num_tokens, seq_length):
        stop = min(first + seq_length, num_tokens)
        yield Window(0 if first == 1 else stop - seq_length - 1, first, stop)


def whole_windows(num_tokens: int, size: int, first_scored: int = 1) -> list[Window]:
    """Return a list of the disjoint Windows of `size` tokens over a text of `num_tokens` tokens, in
    order. Each scores its tokens from the one with the number `first_scored`, counted from 0 in the
    window: by default all but the first. Empty for a text shorter than a window.

    Tokens after the last whole window are not scored.
    """
    return [
        Window(start, start + first_scored, start + size)
        for start in range(0, num_tokens - size + 1, size)
    ]


def megatron_windows(
    context: int, stride: int = LONGEST_WINDOW // STRIDES_PER_WINDOW
) -> tuple[int, int]:
    """Return a pair, the window and the stride of Megatron-LM's recipe in tokens, for a model's
    context. The `stride` that is given is for a window of 1024.

    A context beyond 1024 is not used; in a shorter one the stride is shortened in proportion, to 1
    at least.
    """
    window = min(LONGEST_WINDOW, context)
    return window, max(1, window * stride // LONGEST_WINDOW)


def evenly_spread(count: int, limit: int | None) -> list[int]:
    """Return a list of `limit` of the indices 0 .. count-1 in order, one from the middle of each of
    `limit` equal parts of this range; all indices without a limit, or if the limit is not below the
    count."""
    if limit is None or limit >= count:
        return list(range(count))
    return [(2 * part + 1) * count // (2 * limit) for part in range(limit)]
