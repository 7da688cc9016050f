"""Conventions by which programs compute one number from a causal model and a text. Imports no
torch.

A reading turns a text into requests: it rewrites the text, joins its documents and cuts windows. It
has a value on every axis. An average turns the scores into a loss: it has a numerator and a
divisor.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, product
from math import fsum, log
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mlm_repro.evaluation.protocol import LARGEST_EXPONENT, Encoder, Request, Scores
from mlm_repro.evaluation.tasks.cloze import LAST_TOKEN, LM_EVAL, STRICT, Encoded, split_last_word
from mlm_repro.evaluation.tasks.detokenize import detokenize_wikitext
from mlm_repro.evaluation.tasks.documents import count_original_tokens, join_rows, lm_eval_words
from mlm_repro.evaluation.windows import Window, rolling_windows, sliding_windows, whole_windows
from mlm_repro.lineage.config import read_toml

NONE = "not scored"
AFTER_END = "scored after end-of-text"
OWN = "scored after what the tokenizer puts before a text"
TWICE = "what the tokenizer puts before a text, itself scored"
IN_EVERY, IN_PLACE = " in every window", " in place of each window's first"
"""Endings of a value on the axis `first`, if later windows begin with the tokenizer's first tokens
too: added to the window, or in place of its first token."""
END = "\0"
LITERAL = "<|endoftext|>"
ACCURACY = "accuracy"
TEXTS: dict[str, Callable[[str], str]] = {
    "as it stands": lambda text: text,
    "detokenised": detokenize_wikitext,
    "rows joined by blank lines": join_rows,
    "without <unk>": lambda text: text.replace("<unk>", ""),
    "lower case": str.lower,
    "with CRLF as a line end": lambda text: text.replace("\r\n", "\n"),
    "stripped": str.strip,
}
PARTED = "parted by end-of-text"
UNSCORED = "parted by a first token, which is not scored"
BEFORE_END = "each before end-of-text"
APPENDED = "sub-words appended"
DOCUMENTS: dict[str, Callable[[Sequence[str], str], list[str]]] = {
    "one text": lambda documents, whole: [whole],
    "separate": lambda documents, whole: list(documents),
    "joined by nothing": lambda documents, whole: ["".join(documents)],
    "lines apart": lambda documents, whole: [line for line in whole.split("\n") if line],
    **dict.fromkeys(
        (PARTED, UNSCORED, BEFORE_END, APPENDED), lambda documents, whole: [END.join(documents)]
    ),
}
WINDOWS: dict[str, Callable[[int, int], Iterable[Window]]] = {
    "disjoint": lambda tokens, c: sliding_windows(tokens, c, c),
    "disjoint, the token after each not scored": lambda tokens, c: (
        replace(window, stop=min(window.stop, window.start + c))
        for window in sliding_windows(tokens, c, c)
    ),
    "whole and disjoint, the first of each not scored": whole_windows,
    "disjoint, the last extended to the left": rolling_windows,
    "disjoint, the second half of each scored": lambda tokens, c: whole_windows(
        tokens, c, c // 2 + 1
    ),
    "of half the context": lambda tokens, c: sliding_windows(tokens, c // 2, c // 2),
    "overlapping by half": lambda tokens, c: sliding_windows(tokens, c, c // 2),
    "overlapping by half, target inside": lambda tokens, c: sliding_windows(tokens, c - 1, c // 2),
    "overlapping by half, scored twice": lambda tokens, c: (
        Window(start, start + 1, min(start + c, tokens)) for start in range(0, tokens - 1, c // 2)
    ),
    "overlapping by three quarters": lambda tokens, c: sliding_windows(tokens, c, max(1, c // 4)),
    "overlapping by three quarters, target inside": lambda tokens, c: sliding_windows(
        tokens, c - 1, max(1, c // 4)
    ),
    "a 32nd apart": lambda tokens, c: sliding_windows(tokens, c, max(1, c // 32)),
    "cut at the right": lambda tokens, c: [Window(0, 1, min(tokens, c))],
    "cut at the left": lambda tokens, c: [
        Window(max(0, tokens - c), max(0, tokens - c) + 1, tokens)
    ],
}
"""Name of a kind of windows → function from the number of a piece's sub-words and the longest
input, in this order, to the windows over the piece."""
Axes = dict[str, Sequence[str]]


class Usage(NamedTuple):
    """Conventions by which programs score one kind of model: `axes`, a dict axis → the values that
    it can have, the usual one first, and `programs`, a dict program → the values, by axis, in which
    it differs from the usual ones. The method `readings` returns readings made of them, each with a
    value on every axis, and `weight` returns how frequent a convention is: a reading and its
    average."""

    axes: Axes
    programs: dict[str, dict[str, str]]
    """Name of a program → value by axis, of the axes on which it differs from the usual values."""

    def readings(self, axes: Mapping[str, Sequence[str]]) -> list[dict[str, str]]:
        """Return a list of readings, each as a dict axis → value: every program's own, and each of
        these with one axis changed to a value in the argument `axes`, each reading once. A reading
        that scores padding is left out unless it cuts separate documents at the right: no other
        reading has padding."""
        usual = {axis: values[0] for axis, values in self.axes.items()}
        readings = [usual | base for base in self.programs.values()]
        changes = []
        for axis, values in axes.items():
            changes += [{axis: value} for value in values]
        readings += [base | change for base, change in product(readings, changes)]
        distinct = {tuple(reading.values()): reading for reading in readings}.values()
        cut = ("separate", "cut at the right")
        return [
            reading
            for reading in distinct
            if reading["padding"] == "not scored"
            or (reading["documents"], reading["windows"]) == cut
        ]

    def weight(self, axes: Mapping[str, str]) -> float:
        """Return the assumed frequency, relative to others, of a convention. `axes` has the value
        of each axis of its reading, and its average under `average`. The average's frequency in
        COMMON, or else RARE, is multiplied by CHANGED for each axis on which the reading differs
        from the nearest program's, or from the usual values if the convention predicts last
        words."""
        usual = {axis: values[0] for axis, values in (LAST_WORD_AXES | self.axes).items()}
        changes = min(
            sum((usual | base)[axis] != value for axis, value in axes.items() if axis in usual)
            for base in ([{}] if "target" in axes else self.programs.values())
        )
        return CHANGED**changes * COMMON.get(axes["average"], RARE)


PROGRAMS = read_toml(Path(__file__).with_name("programs.toml"))
GPT2 = Usage(
    {
        "text": tuple(TEXTS),
        "documents": tuple(DOCUMENTS),
        "first": (NONE, AFTER_END, AFTER_END + IN_EVERY, AFTER_END + IN_PLACE),
        "literal": ("spelled out", "a token"),
        "windows": tuple(WINDOWS),
        "padding": ("not scored", "scored"),
        "weights": ("as stored", "bfloat16"),
    },
    PROGRAMS["gpt2"],
)
"""Conventions for a model whose tokenizer adds nothing to a text."""
LLAMA = Usage(
    GPT2.axes
    | {
        "first": (OWN, NONE, TWICE, OWN + IN_EVERY, OWN + IN_PLACE, AFTER_END),
        "literal": ("a token", "spelled out"),
        "attention": ("in its window", "over all before"),
        "softmax": ("all rows", "sub-words alone"),
    },
    {
        name: {axis: value for axis, value in base.items() if axis != "first"}
        for name, base in GPT2.programs.items()
    }
    | PROGRAMS["llama"],
)
"""Conventions for a model whose tokenizer puts a token before a text, whose attention sees a
window, and whose output layer has padded rows."""
DIVISORS: dict[str, Callable[[str], int]] = {
    "words": lambda text: len(text.split()),
    "original tokens": count_original_tokens,
    "lm-eval words": lm_eval_words,
    "characters": len,
    "bytes": lambda text: len(text.encode()),
    "bytes, those outside ASCII as <0x..>": lambda text: sum(
        6 if byte > 127 else 1 for byte in text.encode()
    ),
    "bytes of the vocabulary's spelling": lambda text: sum(
        1 if 32 < byte < 127 else 2 for byte in text.encode()
    ),
}
UNITS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "ppl": lambda loss: np.exp(np.minimum(loss, LARGEST_EXPONENT)),
    "loss": lambda loss: loss,
    "bits-per-byte": lambda loss: loss / log(2),
    ACCURACY: lambda share: share,
}
"""Unit of a reported number → function that computes it from an array of losses in nats, or for
`accuracy` from shares of right answers."""


COMMON = {
    "sub-words": 1.0,
    "targets": 1.0,
    ACCURACY: 1.0,
    "bytes": 0.5,
    "original tokens": 0.3,
    "lm-eval words": 0.3,
    "transformers' labels": 0.3,
    "words": 0.1,
    "means of windows": 0.1,
    "perplexities of documents": 0.1,
}
RARE = 0.02
"""Assumed frequency of an average that COMMON lacks. COMMON and RARE are guesses from the numbers
that programs print."""
CHANGED = 0.05
"""Factor on a program's assumed frequency for each axis that a reading changes."""


class Convention(NamedTuple):
    """One way to get a number from a model and a text. `axes` is a dict axis → value, of the axes
    of its reading, by which the text becomes requests, and of `average`, by which their scores
    become one number. `values` is a dict from the name of a text to the number that results on it,
    a loss in nats or a share of right answers from 0 to 1, and `weight` is the assumed frequency of
    this way."""

    axes: dict[str, str]
    values: dict[str, float]
    weight: float = 1.0
    """Assumed frequency of the convention, relative to others."""

    @property
    def is_share(self) -> bool:
        """True if this convention's `values` are shares of right answers, False if they are losses
        in nats."""
        return self.axes["average"].startswith(ACCURACY)


class ReadText:
    """Text read by one convention. The constructor takes the convention as `axes`, axis → value,
    the text's `documents` and the `whole` text in one piece, one of which is read, as the axis
    `documents` decides; the tokenizer; and `context`, the model's longest input. The caller scores
    the attribute `requests`; the method `averages` turns their Scores into every average that
    programs print."""

    def __init__(
        self,
        axes: Mapping[str, str],
        documents: Sequence[str],
        whole: str,
        tokenizer: Encoder,
        context: int,
    ) -> None:
        self._tokenizer = tokenizer
        end = tokenizer.end_of_text
        first = axes["first"]
        self.pieces = DOCUMENTS[axes["documents"]](documents, whole)
        own = list(tokenizer.first_tokens)
        begun = {NONE: [], TWICE: [tokenizer.document_start]}.get(
            first, own if first.startswith(OWN) else [end]
        )
        before = [*begun, *own] if first == TWICE else begun
        apart = {UNSCORED: begun or [end], BEFORE_END: [end, *begun], APPENDED: begun}.get(
            axes["documents"], [end]
        )
        is_token = axes["literal"] == "a token"
        spell = getattr(tokenizer, "spell_batch", None)
        encode = spell if spell and not is_token else tokenizer.encode_batch

        def encoded(text: str) -> list[int]:
            parts = text.split(LITERAL) if is_token and not spell else [text]
            joined = []
            for part in encode(parts):
                joined += [end, *part]
            return joined[1:]

        ids = []
        for piece in self.pieces:
            parts = [encoded(TEXTS[axes["text"]](part)) for part in piece.split(END)]
            last = [end] * (axes["documents"] == BEFORE_END)
            ids.append(
                [
                    *before,
                    *parts[0],
                    *chain.from_iterable([*apart, *part] for part in parts[1:]),
                    *last,
                ]
            )
        if axes["padding"] == "scored":
            longest = max(len(piece[:context]) for piece in ids)
            ids = [piece + [end] * (longest - len(piece)) * (len(piece) > 1) for piece in ids]
        self.tokens = [np.asarray(piece, dtype=np.int64) for piece in ids]
        repeated = begun if first.endswith((IN_EVERY, IN_PLACE)) else []
        in_place = first.endswith(IN_PLACE)
        self.requests = list[Request]()
        owners = []
        for owner, tokens in enumerate(self.tokens):
            longest = context - (not in_place) * len(repeated)
            for window in WINDOWS[axes["windows"]](len(tokens), longest) if len(tokens) > 1 else ():
                later = repeated if window.start else []
                start = window.start + in_place * len(later)
                count = window.stop - max(window.first_scored, len(begun), start)
                if count > 0:
                    self.requests.append(
                        Request(np.asarray([*later, *tokens[start : window.stop]], np.int64), count)
                    )
                    owners.append(owner)
        self._owners = np.array(owners, dtype=np.int64)
        targets = np.concatenate(
            [request.tokens[-request.num_scored :] for request in self.requests]
        )
        self._counts = ~np.isin(targets, apart if axes["documents"] == UNSCORED else [])

    def averages(self, scores: Scores) -> Iterator[tuple[str, float]]:
        """Yield pairs of the name and the loss in nats of every average that programs print.
        `scores` has a model's scores of this object's `requests`, in order."""
        nll = -np.add.reduceat(scores.log_probabilities * self._counts, scores.starts)
        counts = np.add.reduceat(self._counts, scores.starts, dtype=np.int64)
        owners = self._owners
        nll, counts, owners = nll[counts > 0], counts[counts > 0], owners[counts > 0]
        total = fsum(nll)
        scored = np.bincount(owners, counts)
        means = np.bincount(owners, nll)[scored > 0] / scored[scored > 0]
        labels = counts - np.r_[False, owners[1:] == owners[:-1]]
        yield "sub-words", total / int(counts.sum())
        yield "means of windows", float(np.mean(nll / counts))
        yield "means of documents", float(np.mean(means))
        yield (
            "perplexities of documents",
            float(means.max() + np.log(np.mean(np.exp(means - means.max())))),
        )
        yield "transformers' labels", float((nll / counts * labels).sum() / max(1, labels.sum()))
        for name, divisor in self.divisors().items():
            yield name, total / max(1, divisor)

    def divisors(self) -> dict[str, int]:
        """Return a dict name, such as `bytes`, → count by which some program divides this text's
        summed loss: of words, characters, bytes or sub-words. Wrong counts are included, and one
        may be 0; the number of scored sub-words is not in the dict. A sub-word that is a part of a
        character is decoded as U+FFFD.

        Two counts of decoded sub-words are left out if the tokenizer decodes a sub-word without its
        space.
        """
        parts = list(chain.from_iterable(piece.split(END) for piece in self.pieces))
        counts = {name: sum(map(count, parts)) for name, count in DIVISORS.items()}
        counts |= {
            "sub-words, those not scored too": sum(map(len, self.tokens)),
            "original tokens less one": counts["original tokens"] - 1,
        }
        decode = self._tokenizer.decode
        special = {self._tokenizer.end_of_text, *self._tokenizer.first_tokens}
        # If a single sub-word is decoded without its space, the counts below would be wrong.
        if not decode(self._tokenizer.encode("a a")[1:]).startswith(" "):
            return counts
        every = chain.from_iterable(tokens.tolist() for tokens in self.tokens)
        ids = [token for token in every if token not in special]
        spelled = {token: decode([token]) for token in {*ids}}
        return counts | {
            "bytes, three for each torn sub-word": sum(
                len(spelled[token].encode()) for token in ids
            ),
            "bytes, the space before a word twice": counts["bytes"]
            + sum(spelled[token].startswith(" ") for token in ids),
        }


def _encode_without_space(tokenizer: Encoder, passages: Sequence[str]) -> Encoded:
    contexts, words = zip(*map(split_last_word, passages), strict=True)
    before = tokenizer.encode_batch([f"{context} " for context in contexts])
    after = tokenizer.encode_batch([*words])
    return [([*context, *word], len(word)) for context, word in zip(before, after, strict=True)]


def _encode_first(tokenizer: Encoder, passages: Sequence[str]) -> Encoded:
    return [
        (tokens[: len(tokens) - count + 1], 1)
        for tokens, count in STRICT.encode(tokenizer, passages)
    ]


TARGETS: dict[str, Callable[[Encoder, Sequence[str]], Encoded]] = {
    "the last word": STRICT.encode,
    "what follows the last space": LM_EVAL.encode,
    "the last sub-word": LAST_TOKEN.encode,
    "the last word without its space": _encode_without_space,
    "the first sub-word of the last word": _encode_first,
}
LAST_WORD_AXES: Axes = {
    "text": ("as it stands", "lower case"),
    "first": (OWN, NONE, AFTER_END),
    "target": tuple(TARGETS),
}


def last_word_readings(usage: Usage) -> list[dict[str, str]]:
    """Return a list of every reading of passages whose last words are predicted, each as a dict
    axis → value: all combinations of the values that the dict LAST_WORD_AXES has for each axis, but
    on the axis `first` only the values that `usage.axes` has too. The last axis changes fastest."""
    first = [value for value in LAST_WORD_AXES["first"] if value in usage.axes["first"]]
    axes = LAST_WORD_AXES | {"first": first}
    return [dict(zip(axes, values, strict=True)) for values in product(*axes.values())]


class LastWords:
    """Passages, given as texts, read for their last words by one convention, given as `axes`, a
    dict axis → value. The attribute `requests` is a list of a Request for each passage, in order,
    for a model to score; a passage longer than `context` inputs loses its beginning. The method
    `averages` takes their Scores and yields mean losses and shares of right answers, as pairs of
    name and value."""

    def __init__(
        self, axes: Mapping[str, str], passages: Sequence[str], tokenizer: Encoder, context: int
    ) -> None:
        texts = [TEXTS[axes["text"]](passage) for passage in passages]
        firsts = {NONE: (), OWN: tokenizer.first_tokens, AFTER_END: (tokenizer.end_of_text,)}
        before = firsts[axes["first"]]
        encoded = TARGETS[axes["target"]](tokenizer, texts)
        ids = [([*before, *tokens][-context - 1 :], count) for tokens, count in encoded]
        self.requests = [
            Request(np.asarray(tokens, dtype=np.int64), count) for tokens, count in ids
        ]

    def averages(self, scores: Scores) -> Iterator[tuple[str, float]]:
        """Yield a pair of name and value for each of four averages of `scores`, a model's scores of
        this object's `requests`: `targets`, the mean loss in nats of a target; `sub-words of
        targets`, the mean loss of one sub-word; `accuracy`, the share from 0 to 1 of right targets;
        `accuracy of sub-words`, the share of right sub-words."""
        yield "targets", fsum(scores.nll) / len(scores.nll)
        yield "sub-words of targets", fsum(scores.nll) / len(scores.greedy)
        yield ACCURACY, float(scores.all_greedy.mean())
        yield f"{ACCURACY} of sub-words", float(scores.greedy.mean())
