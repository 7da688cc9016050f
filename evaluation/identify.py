"""Conventions that give a claimed number, found from a checkpoint's scores.

A convention of WikiText-103 is a text (rewriting, unknown words, joining), windows over it and a divisor. A pass over a
text serves all windows that begin where its own do. Every text gets the cheapest pass, texts of one change from
Megatron-LM's the second, and texts of another rewriting alone the dearest.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from decimal import Decimal, InvalidOperation
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from data_pipeline.contamination.testsets import find_test_set
from engine.launch.mesh import build_mesh
from evaluation.checkpoints import EvaluatedCheckpoint, load_checkpoint, native_checkpoint
from evaluation.cloze import LAST_TOKEN, LM_EVAL, STRICT, stop_word_tokens
from evaluation.documents import lm_eval_documents
from evaluation.evaluate import Settings, share, take
from evaluation.harness import rolling_windows
from evaluation.lambada import openai_passages, standard_passages
from evaluation.perplexity import UNCHANGED
from evaluation.protocol import LARGEST_EXPONENT, Request, Scores, Tokens
from evaluation.scoring import score
from evaluation.wikitext103 import MEGATRON, ROWS, read_wikitext103
from evaluation.windows import Window, sliding_windows
from lineage.errors import BadInput
from lineage.progress import Progress, announce

DETOKENIZERS = {each.name: each for each in (MEGATRON, UNCHANGED, ROWS)}
UNKNOWN = {"as it stands": "<unk>", "left out": "", "the word unk": "unk", "end-of-text": "\0"}
"""Replacement of each `<unk>`."""
JOINED = {"one text": (False, False), "one text after end-of-text": (False, True),
          "by document": (True, False), "by document after end-of-text": (True, True)}  # fmt: skip
"""Two flags: documents are apart, end-of-text comes before each."""
WINDOWS: dict[str, Callable[[int, int], Iterator[Window]]] = {
    "disjoint": lambda tokens, c: iter(sliding_windows(tokens, c, c)),
    "disjoint, the token after each not scored": lambda tokens, c: (
        replace(window, stop=min(window.stop, window.start + c)) for window in sliding_windows(tokens, c, c)
    ),
    "disjoint, the last extended to the left": rolling_windows,
    "disjoint, of half the context": lambda tokens, c: iter(sliding_windows(tokens, c // 2, c // 2)),
    "overlapping by half": lambda tokens, c: iter(sliding_windows(tokens, c, c // 2)),
    "overlapping by half, target inside": lambda tokens, c: iter(sliding_windows(tokens, c - 1, c // 2)),
    "a 32nd at a time": lambda tokens, c: iter(sliding_windows(tokens, c, max(1, c // 32))),
    "a 32nd at a time, target inside": lambda tokens, c: iter(sliding_windows(tokens, c - 1, max(1, c // 32))),
}
"""(sub-words of a document, context) → windows. In transformers' recipe a window's targets are inside the context."""
PASSES = (tuple(WINDOWS)[:3], tuple(WINDOWS)[3:6], tuple(WINDOWS)[6:])
"""Windows that a pass serves, the cheapest pass first."""
RULES = {"last word": STRICT, "after the last space": LM_EVAL, "last sub-word": LAST_TOKEN}
PASSAGES = {"lambada": openai_passages, "lambada-standard": standard_passages}


@dataclass(frozen=True)
class Combination:
    """A convention and its number."""

    axes: dict[str, str]
    value: float


@dataclass(frozen=True)
class Identified:
    """Result of `identify`."""

    claimed: str
    matches: list[Combination]
    """Conventions whose number rounds to the claim, nearest first."""
    nearest: list[Combination]
    num_conventions: int


def identify(checkpoint: Path, claimed: str, task: str, settings: Settings) -> Identified:
    """Find the conventions that give the claimed number within its rounding. Raises BadInput unless it is positive."""
    try:
        number = Decimal(claimed)
    except InvalidOperation as error:
        raise BadInput(f"the claim {claimed!r} is not a number") from error
    if not number.is_finite() or number <= 0:
        raise BadInput(f"the claim {claimed} is not a positive number")
    claim, half = float(number), float(Decimal(1).scaleb(int(number.as_tuple().exponent)) / 2)
    with native_checkpoint(checkpoint, settings.vocab, settings.heads) as native:
        evaluated = load_checkpoint(native, build_mesh(settings.layout))
        asked = list(_lambada(evaluated) if task == "lambada" else _wikitext103(evaluated))
        requests, places = share([mine for mine, _ in asked])
        tokens, banned = sum(len(request.tokens) - 1 for request in requests), stop_word_tokens(evaluated.tokenizer)
        announce(f"{tokens:,} tokens", "less what earlier evaluations have kept")
        with Progress("identify", len(requests), "windows", quiet=not evaluated.model.mesh.is_first) as progress:
            scores = score(
                evaluated.model, requests, settings.batch_size, settings.workers, progress.advance, banned,
                evaluated.store, progress.start_at,
            )  # fmt: skip
    passes = zip(asked, places, strict=True)
    conventions = [each for (mine, numbers), where in passes for each in numbers(take(scores, where, mine))]
    conventions.sort(key=lambda each: abs(each.value - claim))
    matches = [each for each in conventions if abs(each.value - claim) <= half + 1e-12 * claim]
    return Identified(claimed, matches, conventions[:3], len(conventions))


def _wikitext103(evaluated: EvaluatedCheckpoint) -> Iterator[tuple[list[Request], Any]]:
    source, context = read_wikitext103("wikitext103", find_test_set("wikitext103")), evaluated.context
    words = {
        "original tokens": source.num_original_tokens,
        "original tokens less one": source.num_original_tokens - 1,
        "lm-eval words": source.num_lm_eval_words,
        "words between white space": len(source.text.split()),
        "bytes": source.num_bytes,
    }
    tokenizer, pieces = evaluated.tokenizer, {False: [source.text], True: list(lm_eval_documents(source.text))}
    seen: dict[bytes, dict[str, str]] = {}
    for rewriting, unknown, joined in product(DETOKENIZERS, UNKNOWN, JOINED):
        apart, begins = JOINED[joined]
        documents: list[Tokens] = []
        for piece in pieces[apart]:
            text = DETOKENIZERS[rewriting].apply(piece.replace("<unk>", UNKNOWN[unknown]))
            ids = [i for part in tokenizer.encode_batch(text.split("\0")) for i in (tokenizer.end_of_text, *part)]
            documents.append(np.asarray(ids[not begins :], dtype=np.int64))
        axes = {"text": rewriting, "unknown": unknown, "joined": joined}
        if seen.setdefault(b"|".join(ids.tobytes() for ids in documents), axes) is not axes:
            continue
        changed = [axis for axis, value in axes.items() if value != next(iter(seen.values()))[axis]]
        for names in PASSES[: 3 if changed in ([], ["text"]) else 2 if len(changed) == 1 else 1]:
            windows = {
                name: [
                    (number, window)
                    for number, ids in enumerate(documents) if len(ids) > 1
                    for window in WINDOWS[name](len(ids), context) if window.num_scored > 0
                ]
                for name in names
            }  # fmt: skip
            merged: dict[tuple[int, int], Window] = {}
            for number, window in (each for many in windows.values() for each in many):
                known = merged.get(key := (number, window.start), window)
                first = min(known.first_scored, window.first_scored)
                merged[key] = Window(window.start, first, max(known.stop, window.stop))
            requests = [Request.of_window(documents[number], window) for (number, _), window in merged.items()]
            yield requests, partial(_perplexities, axes, windows, merged, words)


def _perplexities(
    axes: dict[str, str], windows: dict[str, list[tuple[int, Window]]], merged: dict[tuple[int, int], Window],
    words: dict[str, int], scores: Scores,
) -> Iterator[Combination]:  # fmt: skip
    places = dict(zip(merged, scores.starts, strict=True))
    for name, many in windows.items():
        firsts = [places[d, w.start] + w.first_scored - merged[d, w.start].first_scored for d, w in many]
        counts = np.array([window.num_scored for _, window in many])
        parts = zip(firsts, counts, strict=True)
        losses = -np.array([scores.log_probabilities[start : start + count].sum() for start, count in parts])
        labels, nll, means = counts - (np.arange(len(counts)) > 0), math.fsum(losses), losses / counts
        exponents = {divisor: nll / count for divisor, count in words.items()} | {
            "sub-words": nll / int(counts.sum()),
            "transformers labels": float((means * labels).sum() / max(1, labels.sum())),
            "means of windows": float(means.mean()),
        }
        values = {divisor: math.exp(e) for divisor, e in exponents.items() if abs(e) < LARGEST_EXPONENT}
        values |= {"bits per byte": exponents["bytes"] / math.log(2), "loss per sub-word": exponents["sub-words"]}
        for divisor, value in values.items():
            yield Combination(axes | {"windows": name, "divided by": divisor}, value)


def _lambada(evaluated: EvaluatedCheckpoint) -> Iterator[tuple[list[Request], Any]]:
    tokenizer, longest = evaluated.tokenizer, evaluated.context + 1
    for (name, read), begins, (target, rule) in product(PASSAGES.items(), (False, True), RULES.items()):
        before = [tokenizer.end_of_text] * begins
        requests = [
            Request(np.asarray([*before, *ids][-longest:], dtype=np.int64), count)
            for ids, count in rule.encode(tokenizer, read(find_test_set(name)))
        ]
        axes = {"text": name, "before": "end-of-text" if begins else "nothing", "target": target}
        yield requests, partial(_last_words, axes)


def _last_words(axes: dict[str, str], scores: Scores) -> Iterator[Combination]:
    for measure, weight in {"the target": len(scores.nll), "sub-words": len(scores.greedy)}.items():
        exponent = min(LARGEST_EXPONENT, float(scores.nll.sum()) / weight)
        yield Combination(axes | {"number": f"perplexity of {measure}"}, math.exp(exponent))
    filtered = scores.greedy.copy()
    filtered[scores.starts] = scores.greedy_allowed[scores.starts]
    for answers, right in {"answers": scores.greedy, "no answers": filtered}.items():
        accuracy = float(np.logical_and.reduceat(right, scores.starts).mean())
        for unit, factor in (("accuracy", 1), ("accuracy in %", 100)):
            yield Combination(axes | {"stop words": answers, "number": unit}, factor * accuracy)


def describe(identified: Identified) -> str:
    """The conventions that give the claim, or the nearest ones."""
    matches = identified.matches
    lines = [f"{identified.claimed}: given by {len(matches) or 'none'} of {identified.num_conventions:,} conventions"]
    for each in matches or identified.nearest:
        axes = "; ".join(f"{axis}: {value}" for axis, value in each.axes.items())
        lines.append(f"{'' if matches else 'nearest: '}{each.value:.6g}  {axes}")
    return "\n".join(lines)
