"""Conventions by which programs make one number of a causal model and a text. Imports no torch.

A reading turns a text into requests: which text, how its documents meet, which windows. It names a value of every axis.
An average makes a loss of the scores: what is summed, and what divides it.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import numpy as np

from mlm_repro.evaluation.protocol import LARGEST_EXPONENT, Encoder, Request, Scores
from mlm_repro.evaluation.tasks.cloze import LAST_TOKEN, LM_EVAL, STRICT, Encoded, split_last_word
from mlm_repro.evaluation.tasks.detokenize import detokenize_wikitext
from mlm_repro.evaluation.tasks.documents import count_original_tokens, join_rows, lm_eval_words
from mlm_repro.evaluation.windows import Window, rolling_windows, sliding_windows

OWN = "scored after what the tokenizer puts before a text"
"""A first sub-word that the oracle's tokenizer does not have, and others do."""
END, LITERAL, ACCURACY = "\0", "<|endoftext|>", "accuracy"
TEXTS: dict[str, Callable[[str], str]] = {
    "as it stands": lambda text: text,
    "detokenised": detokenize_wikitext,
    "rows joined by blank lines": join_rows,
    "without <unk>": lambda text: text.replace("<unk>", ""),
    "lower case": str.lower,
    "with CRLF as a line end": lambda text: text.replace("\r\n", "\n"),
    "stripped": str.strip,
}
DOCUMENTS: dict[str, Callable[[Sequence[str], str], list[str]]] = {
    "one text": lambda documents, whole: [whole],
    "separate": lambda documents, whole: list(documents),
    "parted by end-of-text": lambda documents, whole: [END.join(documents)],
    "joined by nothing": lambda documents, whole: ["".join(documents)],
}
WINDOWS: dict[str, Callable[[int, int], Iterator[Window]]] = {
    "disjoint": lambda tokens, c: iter(sliding_windows(tokens, c, c)),
    "disjoint, the token after each not scored": lambda tokens, c: (
        replace(window, stop=min(window.stop, window.start + c)) for window in sliding_windows(tokens, c, c)
    ),
    "disjoint, the last extended to the left": rolling_windows,
    "disjoint, the second half of each scored": lambda tokens, c: (
        Window(start, start + c // 2 + 1, start + c) for start in range(0, tokens - c + 1, c)
    ),
    "of half the context": lambda tokens, c: iter(sliding_windows(tokens, c // 2, c // 2)),
    "overlapping by half": lambda tokens, c: iter(sliding_windows(tokens, c, c // 2)),
    "overlapping by half, target inside": lambda tokens, c: iter(sliding_windows(tokens, c - 1, c // 2)),
    "overlapping by half, scored twice": lambda tokens, c: (
        Window(start, start + 1, min(start + c, tokens)) for start in range(0, tokens - 1, c // 2)
    ),
    "a 32nd apart": lambda tokens, c: iter(sliding_windows(tokens, c, max(1, c // 32))),
    "cut at the right": lambda tokens, c: iter([Window(0, 1, min(tokens, c))]),
    "cut at the left": lambda tokens, c: iter([Window(max(0, tokens - c), max(0, tokens - c) + 1, tokens)]),
}
"""(sub-words of a piece, longest input) → windows."""
AXES: dict[str, Sequence[str]] = {
    "text": tuple(TEXTS), "documents": tuple(DOCUMENTS), "first": ("not scored", "scored after end-of-text"),
    "literal": ("spelled out", "a token"), "windows": tuple(WINDOWS), "padding": ("not scored", "scored"),
    "weights": ("as stored", "bfloat16"),
}  # fmt: skip
PROGRAMS = {
    "Megatron-LM": {"text": "detokenised", "windows": "a 32nd apart"},
    "lm-evaluation-harness": {
        "text": "detokenised", "documents": "separate", "first": "scored after end-of-text", "literal": "a token",
        "windows": "disjoint, the last extended to the left",
    },
    "transformers": {"literal": "a token", "windows": "overlapping by half, target inside"},
    "evaluate": {
        "documents": "separate", "first": "scored after end-of-text", "literal": "a token",
        "windows": "cut at the right",
    },
    "llama.cpp": {"windows": "disjoint, the second half of each scored"},
    "nanoGPT": {"documents": "parted by end-of-text"},
}  # fmt: skip
"""Readings of programs, without an axis's first value. The table has each, and each with one change."""
DIVISORS: dict[str, Callable[[str], int]] = {
    "words": lambda text: len(text.split()),
    "original tokens": count_original_tokens,
    "lm-eval words": lm_eval_words,
    "characters": len,
    "bytes": lambda text: len(text.encode()),
    "bytes, those outside ASCII as <0x..>": lambda text: sum(6 if byte > 127 else 1 for byte in text.encode()),
    "bytes of the vocabulary's spelling": lambda text: sum(1 if 32 < byte < 127 else 2 for byte in text.encode()),
}
UNITS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "ppl": lambda loss: np.exp(np.minimum(loss, LARGEST_EXPONENT)), "loss": lambda loss: loss,
    "bits-per-byte": lambda loss: loss / math.log(2), ACCURACY: lambda share: share,
}  # fmt: skip
"""Numbers of losses in nats, or of shares of right answers."""


COMMON = {
    "sub-words": 1.0, "targets": 1.0, ACCURACY: 1.0, "bytes": 0.5, "original tokens": 0.3, "lm-eval words": 0.3,
    "transformers' labels": 0.3, "words": 0.1, "means of windows": 0.1, "perplexities of documents": 0.1,
}  # fmt: skip
RARE = 0.02
"""How common averages are, and those that are not named; a guess from what programs print."""
CHANGED = 0.05
"""How common a program's reading with one change is, beside the program's own."""


class Convention(NamedTuple):
    """A reading and an average, with the loss in nats, or share of right answers, of each text."""

    axes: dict[str, str]
    values: dict[str, float]

    @property
    def weight(self) -> float:
        """How common the convention is, beside others."""
        return _weight(tuple(self.axes.items()))

    @property
    def is_share(self) -> bool:
        """True for a share of right answers."""
        return self.axes["average"].startswith(ACCURACY)


@cache
def _weight(axes: tuple[tuple[str, str], ...]) -> float:
    given = {axis: "not scored" if value == OWN else value for axis, value in axes}
    if "target" in given:
        changes = sum(given[axis] != values[0] for axis, values in LAST_WORD_AXES.items())
    else:
        usual = {axis: values[0] for axis, values in AXES.items()}
        changes = min(
            sum(given[axis] != value for axis, value in (usual | base).items() if axis in given)
            for base in PROGRAMS.values()
        )
    return CHANGED**changes * COMMON.get(given["average"], RARE)


def readings(axes: Mapping[str, Sequence[str]] = AXES) -> list[dict[str, str]]:
    """Every program's reading, and every one with one change. Padding is scored where documents are cut."""
    usual = {axis: values[0] for axis, values in AXES.items()}
    made = [usual | base for base in PROGRAMS.values()]
    made += [base | {axis: value} for base in made for axis, values in axes.items() for value in values]
    distinct = {tuple(each.values()): each for each in made}.values()
    cut = ("separate", "cut at the right")
    return [each for each in distinct if each["padding"] == "not scored" or (each["documents"], each["windows"]) == cut]


class ReadText:
    """A text by a reading: requests to score, and the averages of their scores."""

    def __init__(
        self, axes: Mapping[str, str], documents: Sequence[str], whole: str, tokenizer: Encoder, context: int
    ) -> None:
        self._tokenizer, end = tokenizer, tokenizer.end_of_text
        self.pieces = DOCUMENTS[axes["documents"]](documents, whole)
        begun = list(tokenizer.first_tokens) if axes["first"] == OWN else [end]
        ids = []
        for piece in self.pieces:
            parts = [TEXTS[axes["text"]](part) for part in piece.split(END)]
            if axes["literal"] == "a token":
                parts = END.join(parts).replace(LITERAL, END).split(END)
            joined = [token for part in tokenizer.encode_batch(parts) for token in (end, *part)]
            ids.append([*([] if axes["first"] == "not scored" else begun), *joined[1:]])
        if axes["padding"] == "scored":
            longest = max(len(each[:context]) for each in ids)
            ids = [each + [end] * (longest - len(each)) * (len(each) > 1) for each in ids]
        self.tokens = [np.asarray(each, dtype=np.int64) for each in ids]
        windows = [
            (piece, shown) for piece, tokens in enumerate(self.tokens) if len(tokens) > 1
            for window in WINDOWS[axes["windows"]](len(tokens), context)
            if (shown := replace(window, first_scored=max(window.first_scored, len(begun)))).num_scored > 0
        ]  # fmt: skip
        self._owners = np.array([piece for piece, _ in windows], dtype=np.int64)
        self.requests = [Request.of_window(self.tokens[piece], window) for piece, window in windows]

    def averages(self, scores: Scores) -> Iterator[tuple[str, float]]:
        """Every average of the scores: its name and a loss in nats."""
        nll, counts, owners = scores.nll, scores.num_scored, self._owners
        total, scored = math.fsum(nll), np.bincount(owners, counts)
        means = np.bincount(owners, nll)[scored > 0] / scored[scored > 0]
        labels = counts - np.r_[False, owners[1:] == owners[:-1]]
        yield "sub-words", total / int(counts.sum())
        yield "means of windows", float(np.mean(nll / counts))
        yield "means of documents", float(np.mean(means))
        yield "perplexities of documents", float(means.max() + np.log(np.mean(np.exp(means - means.max()))))
        yield "transformers' labels", float((nll / counts * labels).sum() / max(1, labels.sum()))
        for name, divisor in self.divisors().items():
            yield name, total / max(1, divisor)

    def divisors(self) -> dict[str, int]:
        """Counts that a summed loss is divided by, right ones and wrong ones; a torn sub-word is decoded as U+FFFD."""
        parts = [part for piece in self.pieces for part in piece.split(END)]
        counts = {name: sum(map(count, parts)) for name, count in DIVISORS.items()}
        ids = [token for tokens in self.tokens for token in tokens.tolist() if token != self._tokenizer.end_of_text]
        spelled = {token: self._tokenizer.decode([token]) for token in {*ids}}
        return counts | {
            "sub-words, those not scored too": sum(map(len, self.tokens)),
            "original tokens less one": counts["original tokens"] - 1,
            "bytes, three for each torn sub-word": sum(len(spelled[token].encode()) for token in ids),
            "bytes, the space before a word twice": counts["bytes"]
            + sum(spelled[token].startswith(" ") for token in ids),
        }


def _encode_without_space(tokenizer: Encoder, passages: Sequence[str]) -> Encoded:
    contexts, words = zip(*map(split_last_word, passages), strict=True)
    before, after = tokenizer.encode_batch([f"{each} " for each in contexts]), tokenizer.encode_batch([*words])
    return [([*context, *word], len(word)) for context, word in zip(before, after, strict=True)]


def _encode_first(tokenizer: Encoder, passages: Sequence[str]) -> Encoded:
    return [(tokens[: len(tokens) - count + 1], 1) for tokens, count in STRICT.encode(tokenizer, passages)]


TARGETS: dict[str, Callable[[Encoder, Sequence[str]], Encoded]] = {
    "the last word": STRICT.encode, "what follows the last space": LM_EVAL.encode,
    "the last sub-word": LAST_TOKEN.encode,
    "the last word without its space": _encode_without_space, "the first sub-word of the last word": _encode_first,
}  # fmt: skip
LAST_WORD_AXES: dict[str, Sequence[str]] = {
    "text": ("as it stands", "lower case"), "first": AXES["first"], "target": tuple(TARGETS)
}  # fmt: skip


class LastWords:
    """Passages by a reading for their last words."""

    def __init__(self, axes: Mapping[str, str], passages: Sequence[str], tokenizer: Encoder, context: int) -> None:
        texts = [TEXTS[axes["text"]](each) for each in passages]
        own = list(tokenizer.first_tokens) if axes["first"] == OWN else [tokenizer.end_of_text]
        before = [] if axes["first"] == "not scored" else own
        encoded = TARGETS[axes["target"]](tokenizer, texts)
        ids = [([*before, *tokens][-context - 1 :], count) for tokens, count in encoded]
        self.requests = [Request(np.asarray(tokens, dtype=np.int64), count) for tokens, count in ids]

    def averages(self, scores: Scores) -> Iterator[tuple[str, float]]:
        """Loss of a target and of its sub-words, and shares of right answers."""
        yield "targets", math.fsum(scores.nll) / len(scores.nll)
        yield "sub-words of targets", math.fsum(scores.nll) / len(scores.greedy)
        yield ACCURACY, float(scores.all_greedy.mean())
        yield f"{ACCURACY} of sub-words", float(scores.greedy.mean())
