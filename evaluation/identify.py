"""Which convention gives a claimed number: a checkpoint's windows are scored once, and every convention is derived.

A combination is a text (rewriting, unknown words, joining, precision), windows over it and a divisor. One pass over a
text serves all windows that begin where its own do. Each text's passes cost; divisors are free. So one change from
Megatron-LM's text at a time is scored, what several changes give is predicted by adding the changes' effects on the
summed loss, and the passes nearest to the claim follow until the budget is spent. Only what was scored is an answer.
LAMBADA's texts are sampled in place of that. Costs are tokens through the model.
"""

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal, InvalidOperation
from itertools import product
from pathlib import Path

import numpy as np
import torch
from torch import nn

from data_pipeline.contamination.testsets import find_test_set
from engine.launch.mesh import build_mesh
from evaluation.checkpoints import EvaluatedCheckpoint, load_checkpoint, native_checkpoint
from evaluation.cloze import LAST_TOKEN, LM_EVAL, STRICT, ClozeRule, stop_word_tokens
from evaluation.documents import RunningText, lm_eval_documents
from evaluation.evaluate import Settings, share, take
from evaluation.harness import rolling_windows
from evaluation.inference import pack_weights
from evaluation.lambada import openai_passages, standard_passages
from evaluation.perplexity import UNCHANGED
from evaluation.protocol import LARGEST_EXPONENT, Request, Scores, Tokens
from evaluation.scoring import ScoringModel, score
from evaluation.uncertainty import mean_standard_error
from evaluation.wikitext103 import INVERTIBLE, MEGATRON, ROWS, read_wikitext103
from evaluation.windows import STRIDES_PER_WINDOW, Window, evenly_spread, sliding_windows
from lineage.errors import BadInput
from lineage.progress import Progress, announce

BUDGET = 1.5
"""Of the dearest protocol's cost."""
DOUBT = 0.01
"""How far a predicted summed loss may be off, as a share of it."""
CHANGE = 0.2
"""What each change from the published text adds to a prediction's distance, in doubts: simple answers come first."""
STANDARD_ERRORS = 4.0
SAMPLES = {"windows": 1 / 20, "passages": 1 / 10}
"""Shares that stand for all."""


@dataclass(frozen=True)
class Combination:
    """A convention and its number."""

    axes: dict[str, str]
    value: float
    changes: int
    """Of its text, from the published one."""
    doubt: float = 0.0
    """How far the value may be off; 0 for one that was scored."""
    step: float = 0.0
    """What the value is a multiple of; 0 for any number."""

    def may_give(self, claim: float, half: float) -> bool:
        """Whether it was not scored, and a value within its doubt is the claim within `half`."""
        possible = round(claim / self.step) * self.step if self.step else claim
        return self.doubt > 0 and abs(self.value - claim) <= self.doubt + half and abs(possible - claim) <= half


@dataclass
class Identified:
    """What `identify` found."""

    claimed: str
    matches: list[Combination]
    """Those scored that round to the claim, nearest first."""
    open: list[Combination]
    """Those not scored that may give it, nearest first."""
    nearest: list[Combination]
    """The scored ones nearest to it."""
    num_combinations: int
    """Whose answers differ."""
    num_scored: int
    tokens: int
    """Through the model."""
    dearest: int
    """The same of the dearest protocol alone."""

    @property
    def separates(self) -> list[str]:
        """Names of the axes in which the matches differ."""
        names = dict.fromkeys(name for match in self.matches for name in match.axes)
        return [name for name in names if len({match.axes.get(name) for match in self.matches}) > 1]


@dataclass
class Scorer:
    """A checkpoint in its own precision and in another, and the tokens that went through it."""

    evaluated: EvaluatedCheckpoint
    settings: Settings
    tokens: int = 0
    other: ScoringModel = field(init=False)

    def __post_init__(self) -> None:
        model = self.evaluated.model
        dtype = torch.bfloat16 if model.dtype == torch.float32 else torch.float32
        converted = {
            id(each): nn.Parameter(each.to_dense().to(dtype), requires_grad=False)
            for each in model.network.parameters()
        }
        self.other = replace(model, network=copy.deepcopy(model.network, converted), dtype=dtype)
        pack_weights(self.other.network)
        self.banned = stop_word_tokens(self.evaluated.tokenizer)

    @property
    def precisions(self) -> list[str]:
        """The checkpoint's own first."""
        return [str(model.dtype).removeprefix("torch.") for model in (self.evaluated.model, self.other)]

    def __call__(self, precision: str, lists: Sequence[Sequence[Request]], banned: bool = False) -> list[Scores]:
        """Score lists of requests, of which those of equal tokens are one."""
        shared, places = share(lists)
        self.tokens += cost(shared)
        model = self.evaluated.model if precision == self.precisions[0] else self.other
        with Progress("identify", len(shared), "windows", quiet=not model.mesh.is_first) as progress:
            scores = score(
                model, shared, self.settings.batch_size, self.settings.workers, progress.advance,
                self.banned if banned else None, self.evaluated.store, progress.start_at,
            )  # fmt: skip
        return [take(scores, mine, requests) for mine, requests in zip(places, lists, strict=True)]


def cost(requests: Sequence[Request]) -> int:
    """Tokens that go through the model."""
    return sum(len(request.tokens) - 1 for request in requests)


def identify(checkpoint: Path, claimed: str, task: str, settings: Settings, budget: float = BUDGET) -> Identified:
    """The conventions of `task` (wikitext103 or lambada) that give the claimed number within its rounding.

    Raises BadInput for a claim that is no positive number and DataMissing where the test file is nowhere.
    """
    try:
        claim, half = float(claimed), float(Decimal(1).scaleb(int(Decimal(claimed).as_tuple().exponent)) / 2)
    except (InvalidOperation, ValueError, TypeError) as error:
        raise BadInput(f"the claim {claimed!r} is not a number") from error
    if not 0 < claim < math.inf:
        raise BadInput(f"the claim {claimed} is not a positive number")
    with native_checkpoint(checkpoint, settings.vocab, settings.heads) as native:
        scorer = Scorer(load_checkpoint(native, build_mesh(settings.layout)), settings)
        space = _WikiText(scorer) if task == "wikitext103" else _Lambada(scorer)
        announce(f"at most {int(budget * space.dearest):,} tokens, {budget} times the dearest protocol's")
        space.screen()
        while True:
            found = list(space.combinations())
            near = (c for c in found if c.may_give(claim, half))
            open_ = sorted(near, key=lambda c: abs(c.value - claim) / c.doubt + CHANGE * c.changes)
            if not any(space.complete(c, int(budget * space.dearest) - scorer.tokens) for c in open_):
                break
    scored = sorted((c for c in found if not c.doubt), key=lambda c: (abs(c.value - claim), c.changes))
    matches = [c for c in scored if abs(c.value - claim) <= half + 1e-12 * claim]
    different = len({float(f"{c.value:.9g}") for c in found})
    return Identified(claimed, matches, open_, scored[:3], different, len(scored), scorer.tokens, space.dearest)


DETOKENIZERS = {each.name: each for each in (MEGATRON, UNCHANGED, INVERTIBLE, ROWS)}
UNKNOWN = {"as it stands": "<unk>", "left out": "", "the word unk": "unk", "end-of-text": "\0"}
"""What a text has for each `<unk>`."""
JOINED = {"one text": (False, False), "one text after end-of-text": (False, True),
          "by document": (True, False), "by document after end-of-text": (True, True)}  # fmt: skip
"""Whether documents are apart, and whether end-of-text comes before each."""
WINDOWS: dict[str, Callable[[int, int], Iterator[Window]]] = {
    "disjoint": lambda tokens, c: iter(sliding_windows(tokens, c, c)),
    "disjoint, the token after each not scored": lambda tokens, c: (
        replace(window, stop=min(window.stop, window.start + c)) for window in sliding_windows(tokens, c, c)
    ),
    "disjoint, the last extended to the left": rolling_windows,
    "disjoint, of half the context": lambda tokens, c: iter(sliding_windows(tokens, c // 2, c // 2)),
    "overlapping by half": lambda tokens, c: iter(sliding_windows(tokens, c, c // 2)),
    "overlapping by half, target inside": lambda tokens, c: iter(sliding_windows(tokens, c - 1, c // 2)),
    "a 32nd at a time": lambda tokens, c: iter(sliding_windows(tokens, c, _fine(c))),
    "a 32nd at a time, target inside": lambda tokens, c: iter(sliding_windows(tokens, c - 1, _fine(c))),
}
"""(sub-words of a document, context) → windows. In transformers' recipe a window's targets are inside the context."""
_NAMES = list(WINDOWS)
FIRST, COARSE, FINE = _NAMES[:3], [*_NAMES[3:6], *_NAMES[:3]], _NAMES[6:]
"""Windows that one pass serves: those that begin where windows of the context, of half of it, and of a 32nd do."""


def _fine(context: int) -> int:
    return max(1, context // STRIDES_PER_WINDOW)


@dataclass(frozen=True)
class _Sum:
    """What some windows over a text came to, in nats."""

    nll: float
    count: int
    labels: float
    """Mean loss of transformers' recipe, which weights windows by one target too few but for the first."""
    means: float
    """Mean of the windows' mean losses."""


@dataclass
class _Text:
    axes: dict[str, str]
    documents: list[Tokens]
    changes: int
    sums: dict[str, _Sum] = field(default_factory=dict)

    @property
    def num_targets(self) -> int:
        """Sub-words that have one before them in their document."""
        return sum(len(tokens) - 1 for tokens in self.documents)

    def windows(self, name: str, context: int) -> list[tuple[int, Window]]:
        """Those that score something, each with its document's number."""
        return [
            (number, window)
            for number, tokens in enumerate(self.documents)
            if len(tokens) > 1
            for window in WINDOWS[name](len(tokens), context)
            if window.num_scored > 0
        ]


class _WikiText:
    def __init__(self, scorer: Scorer) -> None:
        self._scorer, self._context = scorer, scorer.evaluated.model.seq_length
        text = read_wikitext103("wikitext103", find_test_set("wikitext103"))
        self._words = {
            "original tokens": text.num_original_tokens,
            "original tokens less one": text.num_original_tokens - 1,
            "lm-eval words": text.num_lm_eval_words,
            "words between white space": len(text.text.split()),
            "bytes": text.num_bytes,
        }
        self._texts = list(self._make_texts(text))
        self._first = self._texts[0]
        published = [t for t in self._texts if t.axes.items() >= (self._first.axes | {"text": t.axes["text"]}).items()]
        named = [text for text in published if text.axes["text"] != ROWS.name]
        self.dearest = max(sum(w.stop - w.start - 1 for _, w in text.windows(FINE[0], self._context)) for text in named)

    def screen(self) -> None:
        """Score the published text in coarse windows and in some fine ones, and each single change of it."""
        self._score(self._first, COARSE)
        for text in self._texts:
            if self._is_screened(text):
                self._score(text, FIRST)
        windows, tokens = self._first.windows(FINE[0], self._context), self._first.documents[0]
        chosen = [windows[i][1] for i in evenly_spread(len(windows), max(1, int(SAMPLES["windows"] * len(windows))))]
        (fine,) = self._scorer(self._first.axes["precision"], [[Request.of_window(tokens, w) for w in chosen]])
        half = sum(self._half[w.first_scored - 1 : w.stop - 1].sum() for w in chosen)
        coarse = self._first.sums["overlapping by half"]
        self._fine = replace(coarse, nll=coarse.nll * float(fine.log_probabilities.sum() / half))

    def _is_screened(self, text: _Text) -> bool:
        """Whether it has one change, and one that is no trifle."""
        same = text.axes["precision"] == self._first.axes["precision"]
        return text.changes == 1 and same and text.axes["joined"] != list(JOINED)[1]

    def complete(self, combination: Combination, tokens: int) -> bool:
        """Score what gives the combination, if that takes no more than so many tokens."""
        windows = combination.axes["windows"]
        text = next(text for text in self._texts if text.axes.items() <= combination.axes.items())
        names = FINE if windows in FINE else FIRST if windows in FIRST else COARSE
        step = {FINE[0]: _fine(self._context), COARSE[0]: self._context // 2}.get(names[0], self._context)
        most = (text.num_targets // step + 2 * len(text.documents)) * self._context
        kept = 0 if names == FINE or any(FINE[0] in text.sums for text in self._texts) else self.dearest
        return most <= tokens - kept and self._score(text, names)

    def combinations(self) -> Iterator[Combination]:
        """Every one, with the number that was scored or is predicted."""
        effects = {
            (axis, text.axes[axis]): text.sums[FIRST[0]].nll / self._first.sums[FIRST[0]].nll
            for text in self._texts if self._is_screened(text)
            for axis in text.axes if text.axes[axis] != self._first.axes[axis]
        }  # fmt: skip
        for text in self._texts:
            effect = math.prod(effects.get(axis, 1.0) for axis in text.axes.items())
            for name in WINDOWS:
                if (total := text.sums.get(name)) is None:
                    like = self._first.sums.get(name, self._fine)
                    nll, count = effect * like.nll, like.count * text.num_targets // self._first.num_targets
                    total, doubt = _Sum(nll, count, nll / count, nll / count), DOUBT
                else:
                    doubt = 0.0
                for divisor, exponent in self._exponents(total).items():
                    if abs(exponent) < LARGEST_EXPONENT:
                        plain = divisor in ("bits per byte", "loss per sub-word")
                        value = exponent if plain else math.exp(exponent)
                        off = value * (doubt if plain else math.expm1(doubt * abs(exponent)))
                        axes = text.axes | {"windows": name, "divided by": divisor}
                        yield Combination(axes, value, text.changes, off)

    def _make_texts(self, text: RunningText) -> Iterator[_Text]:
        tokenizer = self._scorer.evaluated.tokenizer
        seen: set[tuple[str, bytes]] = set()
        pieces = {False: [text.text], True: list(lm_eval_documents(text.text))}
        for rewriting, unknown, joined in product(DETOKENIZERS, UNKNOWN, JOINED):
            apart, begins = JOINED[joined]
            documents = []
            for piece in pieces[apart]:
                changed = DETOKENIZERS[rewriting].apply(piece.replace("<unk>", UNKNOWN[unknown]))
                parts = tokenizer.encode_batch(changed.split("\0"))
                ids = [id for part in parts for id in (tokenizer.end_of_text, *part)]
                documents.append(np.asarray(ids[not begins :], dtype=np.int64))
            for precision in self._scorer.precisions:
                key = precision, b"|".join(ids.tobytes() for ids in documents)
                if key not in seen:
                    seen.add(key)
                    axes = {"text": rewriting, "unknown": unknown, "joined": joined, "precision": precision}
                    if len(seen) == 1:
                        first = axes
                    yield _Text(axes, documents, sum(axes[axis] != first[axis] for axis in axes))

    def _score(self, text: _Text, names: Sequence[str]) -> bool:
        """Score, for each document and start, a window that sees and scores all that the named ones do."""
        merged: dict[tuple[int, int], Window] = {}
        for document, window in (each for name in names for each in text.windows(name, self._context)):
            known = merged.get(key := (document, window.start), window)
            first = min(known.first_scored, window.first_scored)
            merged[key] = Window(window.start, first, max(known.stop, window.stop))
        requests = [Request.of_window(text.documents[d], w) for (d, _), w in merged.items()]
        (scores,) = self._scorer(text.axes["precision"], [requests])
        places = dict(zip(merged, scores.starts, strict=True))
        for name in names:
            windows = text.windows(name, self._context)
            firsts = [places[d, w.start] + w.first_scored - merged[d, w.start].first_scored for d, w in windows]
            parts = [scores.log_probabilities[f : f + w.num_scored] for f, (_, w) in zip(firsts, windows, strict=True)]
            losses, counts = -np.array([part.sum() for part in parts]), np.array([len(part) for part in parts])
            weights = counts - (np.arange(len(counts)) > 0)
            labels = float((losses / counts * weights).sum() / max(1, weights.sum()))
            text.sums[name] = _Sum(math.fsum(losses), int(counts.sum()), labels, float((losses / counts).mean()))
            if text is self._first and name == "overlapping by half":
                self._half = np.concatenate(parts)
        return True

    def _exponents(self, total: _Sum) -> dict[str, float]:
        return {name: total.nll / count for name, count in self._words.items()} | {
            "sub-words": total.nll / total.count,
            "transformers labels": total.labels,
            "means of windows": total.means,
            "bits per byte": total.nll / math.log(2) / self._words["bytes"],
            "loss per sub-word": total.nll / total.count,
        }


RULES: dict[str, ClozeRule] = {"last word": STRICT, "after the last space": LM_EVAL, "last sub-word": LAST_TOKEN}
PASSAGES = {"lambada": openai_passages, "lambada-standard": standard_passages}


@dataclass
class _Passages:
    axes: dict[str, str]
    changes: int
    requests: dict[str, list[Request]]
    """By rule."""
    scores: dict[str, Scores] = field(default_factory=dict)
    chosen: list[int] = field(default_factory=list)
    """The examples scored."""
    complete: bool = False

    def tokens(self, indices: Sequence[int]) -> int:
        """Through the model, to score these examples by every rule."""
        return cost(share([[requests[i] for i in indices] for requests in self.requests.values()])[0])


class _Lambada:
    def __init__(self, scorer: Scorer) -> None:
        self._scorer = scorer
        tokenizer, context = scorer.evaluated.tokenizer, scorer.evaluated.model.seq_length
        self._texts: list[_Passages] = []
        for (name, read), begins, precision in product(PASSAGES.items(), (False, True), scorer.precisions):
            passages = read(find_test_set(name))
            before = [tokenizer.end_of_text] if begins else []
            requests = {
                title: [
                    Request(np.asarray([*before, *ids][-(context + 1) :], dtype=np.int64), count)
                    for ids, count in rule.encode(tokenizer, passages)
                ]
                for title, rule in RULES.items()
            }
            axes = {"text": name, "before": "end-of-text" if begins else "nothing", "precision": precision}
            changes = (name != "lambada") + 2 * begins + (precision != scorer.precisions[0])
            self._texts.append(_Passages(axes, changes, requests))
        self._all = range(len(passages))
        published = [text for text in self._texts if text.axes["before"] == "nothing"]
        self.dearest = max(cost(requests) for text in published for requests in text.requests.values())

    def screen(self) -> None:
        """Score a sample of every text."""
        for text, other in zip(self._texts[::2], self._texts[1::2], strict=True):
            self._score(text, evenly_spread(len(self._all), max(2, int(SAMPLES["passages"] * len(self._all)))))
            other.scores, other.chosen = text.scores, text.chosen  # until it is scored in its own precision

    def complete(self, combination: Combination, tokens: int) -> bool:
        """Score the whole of the combination's text, if that takes no more than so many tokens."""
        text = next(text for text in self._texts if text.axes.items() <= combination.axes.items())
        if text.tokens(self._all) > tokens:
            return False
        self._score(text, self._all)
        text.complete = True
        return True

    def combinations(self) -> Iterator[Combination]:
        """Every one, with the number that was scored or that the sample gives."""
        for text in self._texts:
            for rule, scores in text.scores.items():
                errors = 0.0 if text.complete else STANDARD_ERRORS
                spread = min(LARGEST_EXPONENT, errors * (mean_standard_error(scores.nll) or 0.0))
                for measure, weight in {"the target": len(scores.nll), "sub-words": len(scores.greedy)}.items():
                    value = math.exp(min(LARGEST_EXPONENT, float(scores.nll.sum()) / weight))
                    axes = text.axes | {"target": rule, "number": f"perplexity of {measure}"}
                    yield Combination(axes, value, text.changes, value * math.expm1(spread))
                banned = np.isin([r.tokens[-r.num_scored] for r in text.requests[rule]], self._scorer.banned)
                for filtered, ties in product((False, True), (False, True)):
                    right = (scores.among_best if ties else scores.greedy).copy()
                    if filtered:
                        tied = right[scores.starts] & ~banned[text.chosen]
                        right[scores.starts] = scores.greedy_allowed[scores.starts] | tied
                    correct = np.logical_and.reduceat(right, scores.starts).astype(np.float64)
                    doubt = errors * max(mean_standard_error(correct) or 0.0, 1 / len(correct))
                    axes = text.axes | {
                        "target": rule,
                        "stop words": "no answers" if filtered else "answers",
                        "ties": "right" if ties else "the first token is the answer",
                    }
                    for unit, factor in (("accuracy", 1), ("accuracy in %", 100)):
                        value, step = factor * float(correct.mean()), factor / len(self._all)
                        yield Combination(axes | {"number": unit}, value, text.changes, factor * doubt, step)

    def _score(self, text: _Passages, chosen: Sequence[int]) -> None:
        """Every rule's requests in one pass."""
        requests = [[requests[i] for i in chosen] for requests in text.requests.values()]
        scores = self._scorer(text.axes["precision"], requests, banned=True)
        text.chosen, text.scores = list(chosen), dict(zip(text.requests, scores, strict=True))
