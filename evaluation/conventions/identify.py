"""The conventions of a number: on the oracle's texts, on a published test, or of a loss and bits per byte alone."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from itertools import pairwise, product
from pathlib import Path

import numpy as np

from mlm_repro.evaluation.conventions.table import (
    ACCURACY,
    AXES,
    LAST_WORD_AXES,
    UNITS,
    Convention,
    LastWords,
    ReadText,
    readings,
)
from mlm_repro.evaluation.models.places import Place
from mlm_repro.evaluation.settings import Settings
from mlm_repro.lineage.errors import BadInput

MOST_SHOWN, NEAREST = 10, 3
NOISE, DIGITS, APART = 1e-6, 5e-7, 1e-4
"""Relative error of a harness in float32, and of a loss in the table; distance of any two on one text at least."""
SENTENCES = {
    "text": "the text is {}", "documents": "documents are {}", "first": "the first sub-word is {}",
    "literal": "<|endoftext|> in a text is {}", "windows": "windows are {}", "padding": "padding is {}",
    "weights": "weights are {}", "target": "the target is {}", "average": "the loss is averaged over {}",
}  # fmt: skip
USUAL = {"text": "as it stands", "padding": "not scored", "weights": "as stored"}
REAL_TEXTS = ("as it stands", "detokenised", "rows joined by blank lines", "without <unk>")
"""Rewritings that are tried on a published text, where passes are long; few have windows a 32nd apart."""


@dataclass(frozen=True)
class Identified:
    """The conventions of a number."""

    claimed: str
    matches: list[dict[str, str]]
    """Axes of the conventions that give the number, with text, unit and value, nearest first."""
    nearest: list[dict[str, str]]
    next_text: str | None
    """Text on which most of the matches differ."""

    def describe(self) -> str:
        """A sentence for each match, or for the nearest ones."""
        count = len(self.matches)
        none = "none of these, if the harness ran in float32 with the oracle's tokenizer; the nearest:"
        lines = [f"{self.claimed}: {(none, 'this:')[count] if count < 2 else 'one of these:'}"]
        for each in (self.matches or self.nearest)[:MOST_SHOWN]:
            axes = [axis for axis in SENTENCES if axis in each and each[axis] != USUAL.get(axis)]
            says = "; ".join(SENTENCES[axis].format(each[axis]) for axis in axes)
            lines.append(f"  {each['unit']} {each['value']} of {each['on']}: {says}")
        if count > MOST_SHOWN:
            lines.append(f"  and {count - MOST_SHOWN} more; give more digits")
        if self.next_text and count > 1:
            lines.append(f"  run {self.next_text} next: most of them differ there")
        return "\n".join(lines)


def _with_point(number: str) -> str:
    if re.fullmatch(r"[1-9]\d{0,2},\d{3}", number):
        raise BadInput(
            f"the claim {number} can be {number.replace(',', '')} or {number.replace(',', '.')}: write it so"
        )
    if re.fullmatch(r"[1-9]\d{0,2}(,\d{3})+(\.\d+)?", number):
        return number.replace(",", "")
    return number.replace(",", ".")


def parse_claim(claimed: str) -> Decimal:
    """The claimed number, a percentage as a share. Raises BadInput unless it is one from zero on."""
    try:
        printed = Decimal(_with_point(claimed.rstrip(" %"))).scaleb(-2 * claimed.endswith("%"))
        number = float(printed)
    except (ArithmeticError, ValueError) as error:
        raise BadInput(f"the claim {claimed!r} is not a number") from error
    if not 0 <= number < math.inf:
        raise BadInput(f"the claim {claimed} is not a number from zero on")
    return printed


def find(claimed: str, conventions: Sequence[Convention], unit: str | None, text: str | None) -> Identified:
    """Find the conventions that give the number within its rounding. Raises BadInput unless it is one from zero on."""
    known = sorted(set[str]().union(*(each.values for each in conventions)))
    if text not in (None, *known):
        raise BadInput(f"there is no text {text}: give one of {', '.join(known)}")
    printed = parse_claim(claimed)
    number = float(printed)
    half = float(Decimal(1).scaleb(int(printed.as_tuple().exponent))) / 2
    shares, ranked = [each.is_share for each in conventions], []
    for on, name in product([text] if text else known, UNITS if unit is None else [unit]):
        places = [i for i, each in enumerate(conventions) if shares[i] == (name == ACCURACY) and on in each.values]
        values = UNITS[name](np.array([conventions[place].values[on] for place in places]))
        away = np.abs(values - number)
        digits = DIGITS * np.abs(np.log(np.maximum(values, 1e-9))) if name == "ppl" else DIGITS
        fits = away <= half + number * (NOISE + digits)
        for i in {*np.flatnonzero(fits), *np.argsort(away, kind="stable")[:NEAREST]}:
            axes = {**conventions[places[i]].axes, "unit": name, "on": on, "value": f"{values[i]:.6g}"}
            ranked.append((away[i], values[i], places[i], on, name, fits[i], axes))
    ranked.sort()
    matches = [axes for *_, fit, axes in ranked if fit]
    fitting = [conventions[place].values for place in dict.fromkeys(row[2] for row in ranked if row[5])]
    parted = {
        on: sum(b - a > APART * b for a, b in pairwise(sorted(each.get(on, 0) for each in fitting))) for on in known
    }  # fmt: skip
    next_text = max(known, key=lambda on: parted[on], default=None)
    return Identified(claimed, matches, [row[-1] for row in ranked[:NEAREST]], next_text)


def identify(place: Place, claimed: str, task: str, settings: Settings) -> Identified:
    """Find the conventions that give a number of a checkpoint on WikiText-103 or LAMBADA."""
    from mlm_repro.data_pipeline.contamination.testsets import find_test_set
    from mlm_repro.evaluation.checkpoints import open_checkpoint
    from mlm_repro.evaluation.evaluate import share
    from mlm_repro.evaluation.scoring.scores import score
    from mlm_repro.evaluation.tasks.documents import lm_eval_documents
    from mlm_repro.evaluation.tasks.lambada import openai_passages
    from mlm_repro.evaluation.tasks.wikitext103 import read_wikitext103
    from mlm_repro.lineage.progress import Progress, announce

    path = find_test_set(task)
    evaluated = open_checkpoint(place, settings)
    arguments = evaluated.tokenizer, evaluated.model.seq_length
    asked: list[tuple[dict[str, str], ReadText | LastWords]] = []
    if task == "wikitext103":
        whole = read_wikitext103(task, path).text
        axes = {axis: AXES[axis] for axis in ("documents", "first", "literal")}
        axes |= {"text": REAL_TEXTS, "windows": [each for each in AXES["windows"] if each != "a 32nd apart"]}
        for each in readings(axes):
            asked.append((each, ReadText(each, list(lm_eval_documents(whole)), whole, *arguments)))
    else:
        for values in product(*LAST_WORD_AXES.values()):
            each = dict(zip(LAST_WORD_AXES, values, strict=True))
            asked.append((each, LastWords(each, openai_passages(path), *arguments)))
    requests, places = share([read.requests for _, read in asked])
    announce(f"{sum(len(each.tokens) for each in requests):,} tokens", "less what earlier evaluations have kept")
    with Progress("identify", len(requests), "windows", quiet=not evaluated.model.mesh.is_first) as progress:
        scores = score(evaluated.model, requests, settings.batch_size, settings.workers, progress.advance,
                       store=evaluated.store, on_resumed=progress.start_at)  # fmt: skip
    conventions = [
        Convention(axes | {"average": average}, {task: value})
        for (axes, read), where in zip(asked, places, strict=True)
        for average, value in read.averages(scores.taken(where, read.requests))
    ]
    return find(claimed, conventions, None, None)


def explain_bytes(given: str) -> str:
    """Say which count of bytes lies between a loss per sub-word and bits per byte, from `name=value` pairs."""
    from mlm_repro.engine.formats.vocabulary import read_vocabulary

    values = dict(pair.partition("=")[::2] for pair in given.split(","))
    if values.keys() != {"loss", "bits_per_byte", "tokenizer", "text"}:
        raise BadInput(f"{given!r} is not loss=…,bits_per_byte=…,tokenizer=DIR,text=FILE")
    printed = [values["loss"], values["bits_per_byte"]]
    try:
        loss, bits = map(float, printed)
        text = Path(values["text"]).read_bytes().decode()
    except (OSError, ValueError) as error:
        raise BadInput(f"loss and bits_per_byte are numbers and text a file of UTF-8: {error}") from error
    if not (text and 0 < loss < math.inf and 0 < bits < math.inf):
        raise BadInput("loss and bits_per_byte are above zero, and the text is not empty")
    read = ReadText(readings({})[0] | USUAL, [text], text, read_vocabulary(Path(values["tokenizer"]))[0], 2)
    counts, scored = read.divisors(), len(read.tokens[0])
    slack = NOISE + sum(0.5 / 10 ** len(each.partition(".")[2]) / float(each) for each in printed)
    for num_tokens, (name, divisor) in product((scored, scored - 1), {"bytes": counts["bytes"], **counts}.items()):
        if abs(loss * num_tokens / math.log(2) / bits / divisor - 1) <= slack:
            verdict = "consistent" if name == "bytes" else f"not consistent: the text has {counts['bytes']:,} bytes"
            return f"{verdict}; {num_tokens:,} sub-words were divided by {name}, {divisor:,}"
    implied = f"{loss * scored / math.log(2) / bits:,.0f} follow from the numbers, which is no known count"
    return f"not consistent: the text has {counts['bytes']:,} bytes; {implied}"
