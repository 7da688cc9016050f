"""Sliding windows in which every target is scored exactly once. Pure arithmetic on positions.

Follows the overlapping evaluation of Megatron-LM's zero-shot tasks (`--overlapping-eval 32` at sequence
length 1024).
"""

from dataclasses import dataclass

from lineage.errors import BadInput

STRIDES_PER_WINDOW = 32


@dataclass(frozen=True, slots=True)
class Window:
    """Sees `tokens[start:stop]` and scores the targets `tokens[first_scored:stop]`."""

    start: int
    first_scored: int
    stop: int

    @property
    def num_scored(self) -> int:
        """Targets the window scores."""
        return self.stop - self.first_scored


def sliding_windows(num_tokens: int, seq_length: int, stride: int) -> list[Window]:
    """Windows over `num_tokens` tokens that score each target 1 .. num_tokens-1 once and in order.

    Window i begins at token `i * stride` and sees `seq_length` inputs and the token after them. Window 0
    scores all its targets, a later one only its last `stride` target slots. Token 0 has no context and is
    never scored. Windows that would score nothing are left out. Raises BadInput if `stride` would skip
    targets or there is nothing to score.
    """
    if not 1 <= stride <= seq_length:
        raise BadInput(f"stride {stride} must be between 1 and the window's {seq_length} tokens")
    if num_tokens < 2:
        raise BadInput(f"a text of {num_tokens} tokens has nothing to score")
    windows = [Window(0, 1, min(seq_length + 1, num_tokens))]
    while (scored := windows[-1].stop) < num_tokens:
        start = len(windows) * stride
        windows.append(Window(start, scored, min(start + seq_length + 1, num_tokens)))
    return windows


def evenly_spread(count: int, limit: int | None) -> list[int]:
    """`limit` of `count` indices in order, one from the middle of each equal part; all without a limit."""
    if limit is None or limit >= count:
        return list(range(count))
    if limit < 1:
        raise BadInput(f"a limit of {limit} leaves nothing to score")
    return [(2 * part + 1) * count // (2 * limit) for part in range(limit)]
