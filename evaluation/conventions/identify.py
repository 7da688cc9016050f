"""Finds the conventions of evaluation that give a claimed number, on the oracle's texts or on a
published test."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from itertools import pairwise, product

import numpy as np

from mlm_repro.evaluation.conventions.table import (
    ACCURACY,
    GPT2,
    LLAMA,
    UNITS,
    Convention,
    LastWords,
    ReadText,
    last_word_readings,
)
from mlm_repro.evaluation.models.places import Place
from mlm_repro.evaluation.settings import Settings
from mlm_repro.lineage.errors import BadInput

MOST_SHOWN = 10
NEAREST = 3
NO_CONVENTION = (
    "none of these, if the harness ran in float32 with the oracle's tokenizer; the nearest:"
)
NOISE = 1e-6
"""Assumed relative error of a perplexity, loss or share that a harness computes in float32."""
DIGITS = 5e-7
"""Rounding error of a loss, in nats, in the oracle's table."""
APART = 1e-4
"""Smallest difference, in nats, that tells two losses on one text apart."""
SENTENCES = {
    "text": "the text is {}",
    "documents": "documents are {}",
    "first": "the first sub-word is {}",
    "literal": "a special token in a text is {}",
    "windows": "windows are {}",
    "padding": "padding is {}",
    "weights": "weights are {}",
    "target": "the target is {}",
    "attention": "attention is {}",
    "softmax": "the softmax is over {}",
    "average": "the loss is averaged over {}",
}
USUAL = {
    "text": "as it stands",
    "padding": "not scored",
    "weights": "as stored",
    "attention": "in its window",
}
REAL_TEXTS = ("as it stands", "detokenised", "rows joined by blank lines", "without <unk>")
"""Values of the axis `text`, changes to the text, that the search tries on a published test."""
LONG = (
    "a 32nd apart",
    "overlapping by three quarters",
    "overlapping by three quarters, target inside",
)
"""Values of the axis `windows` that need a long pass over a published test. The search tries them
there only in the conventions of programs that use them."""


UNIT_SHARES = {"ppl": 0.6, "loss": 0.25, "bits-per-byte": 0.15, ACCURACY: 1.0}
"""Unit → assumed share of it among the reported numbers of a convention, whose numbers are either
losses, in one of three units, or shares of right answers."""
MISMATCHED = 0.05
"""Factor on a convention's weight if the claimed number is in bits per byte and its loss is not
divided by bytes, or the other way round."""
OUTSIDE = 0.5
"""Assumed share of numbers that no convention in the table gives."""
NAMED = 0.99
"""Smallest probability at which one convention is named as the answer."""
SPREADS = {0.1: 0.8, 1.5: 0.2}
"""Assumed spread of numbers that the table lacks, around the numbers in it, as a mixture of normal
distributions in ln of the number: standard deviation → share."""
NEIGHBOURHOOD = 0.25
"""Distance in ln up to which a number counts as near a convention's number, for the expected number
of accidental matches."""


@dataclass(frozen=True)
class Identified:
    """Answer to the text `claimed`, a number or several numbers of one program: in `matches` the
    conventions of evaluation that give it, likeliest first, each a dict of texts with its
    `probability`, and in `nearest` the three whose numbers lie nearest to it, matching or not, as
    dicts without one. `next_text` names the text to score next, if several match; the method
    `describe` returns the answer as a text for people."""

    claimed: str
    matches: list[dict[str, str]]
    """Conventions that give the number, likeliest first, each as a dict of texts: its value by
    axis, `average`, and under `on`, `unit`, `value` and `probability` the text, the unit, the
    computed number and its probability."""
    nearest: list[dict[str, str]]
    next_text: str | None
    """Name of the text on which the matching conventions differ most; None if there is at most
    one."""
    accidents: float
    """Expected number of the table's conventions that a nearby number with as many digits would
    match by accident."""

    @property
    def is_named(self) -> bool:
        """True if the likeliest matching convention has a probability of at least NAMED, so that it
        alone is named."""
        return bool(self.matches) and float(self.matches[0]["probability"]) >= NAMED

    def describe(self) -> str:
        """Return this answer as one text of several lines: the named convention, else the likeliest
        MOST_SHOWN matches with their probabilities and the text to run next, or the nearest
        conventions if none matches."""
        likely = [float(match["probability"]) for match in self.matches]
        accident = f"a nearby number matches {self.accidents:.2g} conventions by accident"
        head = f"not certain: one of these, or with {max(0.0, 1 - sum(likely)):.1%} none of them"
        shown = self.matches
        if self.is_named:
            head = f"this, with {likely[0]:.2%}"
            shown = self.matches[:1]
        lines = [f"{self.claimed}: {head} ({accident}):"]
        if not likely:
            lines = [f"{self.claimed}: {NO_CONVENTION}"]
            shown = self.nearest
        for row in shown[:MOST_SHOWN]:
            axes = [axis for axis in SENTENCES if axis in row and row[axis] != USUAL.get(axis)]
            says = "; ".join(SENTENCES[axis].format(row[axis]) for axis in axes)
            chance = f"{float(row['probability']):.1%}: " if likely and not self.is_named else ""
            lines.append(f"  {chance}{row['unit']} {row['value']} of {row['on']}: {says}")
        if len(shown) > MOST_SHOWN:
            lines.append(f"  and {len(likely) - MOST_SHOWN} more; give more digits")
        if self.next_text and not self.is_named:
            lines.append(
                f"  run {self.next_text} next, and give both numbers together, as in all=1.25"
                " prose=3.75"
            )
        return "\n".join(lines)


def _with_point(number: str) -> str:
    """Return the text of a number with a decimal point, and without commas between thousands:
    `1,234.5` becomes `1234.5`, `0,95` becomes `0.95`. Raises BadInput if a comma may separate
    thousands or decimals, as in `1,234`."""
    if re.fullmatch(r"[1-9]\d{0,2},\d{3}", number):
        raise BadInput(
            f"the claim {number} can be {number.replace(',', '')} or {number.replace(',', '.')}:"
            " write one of these"
        )
    if re.fullmatch(r"[1-9]\d{0,2}(,\d{3})+(\.\d+)?", number):
        return number.replace(",", "")
    return number.replace(",", ".")


def parse_claim(claimed: str) -> Decimal:
    """Return the claimed number, given as a text, as a Decimal with the digits that were printed; a
    percentage becomes a share, `12.5 %` 0.125. Raises BadInput unless it is a finite number of at
    least 0 whose comma has one meaning."""
    try:
        printed = Decimal(_with_point(claimed.rstrip(" %"))).scaleb(-2 * ("%" in claimed))
        number = float(printed)
    except (ArithmeticError, ValueError) as error:
        raise BadInput(f"the claim {claimed!r} is not a number") from error
    if not 0 <= number < math.inf:
        raise BadInput(f"the claim {claimed} is negative or not finite")
    return printed


def parse_claims(claimed: str) -> list[tuple[Decimal, str | None]]:
    """Return the numbers of a claim, given as a text, as a list of pairs (number, name of its
    text). `NUMBER` gives one pair with None as the name; `TEXT=NUMBER TEXT=NUMBER` gives several
    numbers, which come from one program.

    Raises BadInput for anything else, for a text that comes twice, and for a number that is
    negative, not finite or has an ambiguous comma.
    """
    if "=" not in claimed:
        return [(parse_claim(claimed), None)]
    pairs = [part.partition("=") for part in claimed.split()]
    if len({name for name, *_ in pairs}) < len(pairs):
        raise BadInput(
            f"{claimed!r} names a text twice: give one number for each text, as in all=1.25"
            " prose=3.75"
        )
    return [(parse_claim(number), name) for name, _, number in pairs]


def find(claimed: str, conventions: Sequence[Convention], unit: str | None = None) -> Identified:
    """Return an Identified: which of `conventions` give the claimed numbers within their rounding,
    likeliest first and each with its probability, the three with the nearest numbers, and the text
    to try next, on which the matching conventions differ most. `claimed` is one `NUMBER`, or
    numbers of one program for several texts with white space between, as in `all=1.25 prose=3.75`.
    `unit` is the numbers' unit, a key of `UNITS`; without `unit` every unit is tried.

    A convention is as likely as it is common. A number that no convention in the table gives may be
    any number nearby, so with more digits an accidental match is less likely. Raises BadInput for a
    claim of another form, a number that is negative, not finite or has an ambiguous comma, and a
    text that no convention has a value on.
    """
    known = sorted(set[str]().union(*(convention.values for convention in conventions)))
    claims = parse_claims(claimed)
    for _, name in claims:
        if name not in (None, *known):
            raise BadInput(
                f"the claim names the text {name}, which is unknown: name one of {', '.join(known)}"
            )
    numbers = np.array([float(printed) for printed, _ in claims])
    halves = np.array(
        [float(Decimal(1).scaleb(int(printed.as_tuple().exponent))) / 2 for printed, _ in claims]
    )
    shares = [convention.is_share for convention in conventions]
    weights = np.array([convention.weight for convention in conventions])
    weights *= (1 - OUTSIDE) / weights.sum()
    text_groups = (
        [[on] for on in known] if claims[0][1] is None else [[str(name) for _, name in claims]]
    )
    ranked = []
    outside = 0.0
    accidents = 0.0
    for on, name in product(text_groups, UNITS if unit is None else [unit]):
        indices = [
            i
            for i, convention in enumerate(conventions)
            if shares[i] == (name == ACCURACY) and convention.values.keys() >= {*on}
        ]
        if not indices:
            continue
        values = UNITS[name](
            np.array([[conventions[index].values[text] for text in on] for index in indices])
        )
        away = np.abs(values - numbers)
        digits = DIGITS * np.abs(np.log(np.maximum(values, 1e-9))) if name == "ppl" else DIGITS
        allowed = halves + numbers * (NOISE + digits)
        fits = (away <= allowed).all(1)
        prior = (UNIT_SHARES[name] if unit is None else 1) / len(text_groups)
        near = np.abs(np.log(np.maximum(values, 1e-9)) - np.log(np.maximum(numbers, 1e-9)))
        widths = 2 * allowed / np.maximum(numbers, halves)
        kernels = sum(
            fraction * np.exp(-((near / s) ** 2) / 2) / (s * math.sqrt(2 * math.pi))
            for s, fraction in SPREADS.items()
        )
        outside += OUTSIDE * prior * float((kernels * widths).mean(0).prod())
        inside = near < NEIGHBOURHOOD
        accidents += float((inside * widths / (2 * NEIGHBOURHOOD)).prod(1).sum())
        for i in {*np.flatnonzero(fits), *np.argsort(away.max(1), kind="stable")[:NEAREST]}:
            convention = conventions[indices[i]]
            shown = " ".join(f"{value:.6g}" for value in values[i])
            by_bytes = convention.axes["average"].startswith("bytes") == (name == "bits-per-byte")
            likely = (
                fits[i]
                * prior
                * weights[indices[i]]
                * (1 if by_bytes or name == ACCURACY else MISMATCHED)
            )
            axes = {**convention.axes, "unit": name, "on": " ".join(on), "value": shown}
            ranked.append((-likely, away[i].max(), indices[i], " ".join(on), name, axes))
    ranked.sort(key=lambda row: row[:-1])
    total = outside - sum(row[0] for row in ranked)
    matches = [{**row[-1], "probability": f"{-row[0] / total:.4f}"} for row in ranked if row[0]]
    fitting = [
        conventions[index].values for index in dict.fromkeys(row[2] for row in ranked if row[0])
    ]
    differing = {
        on: sum(b - a > APART for a, b in pairwise(sorted(values.get(on, 0) for values in fitting)))
        for on in known
    }
    next_text = max(known, key=lambda on: differing[on], default=None)
    nearest = [row[-1] for row in sorted(ranked, key=lambda row: row[1:-1])[:NEAREST]]
    return Identified(claimed, matches, nearest, next_text if len(fitting) > 1 else None, accidents)


def identify(place: Place, claimed: str, task: str, settings: Settings) -> Identified:
    """Score a checkpoint on the test `task`, `wikitext103` or `lambada`, and return as an
    Identified the conventions by which the checkpoint gives the number in the text `claimed`. Every
    rank of the settings' layout calls it.

    The checkpoint is scored on WikiText-103 by the readings of all programs and each of these with
    one axis changed, where the windows of `LONG` are tried only in the readings of programs that
    use them; on LAMBADA by every reading. Raises DataMissing if the test cannot be found or
    downloaded, BadInput for a checkpoint or settings that cannot be scored and, after scoring, for
    an unusable claim, IntegrityFailure for a damaged checkpoint or another file than the test's,
    and HardwareMissing if the memory of the GPU or of the machine does not suffice.
    """
    from mlm_repro.data_pipeline.contamination.testsets import find_test_set
    from mlm_repro.evaluation.checkpoints import open_checkpoint
    from mlm_repro.evaluation.evaluate import score_shared
    from mlm_repro.evaluation.tasks.documents import lm_eval_documents
    from mlm_repro.evaluation.tasks.lambada import openai_passages
    from mlm_repro.evaluation.tasks.wikitext103 import read_wikitext

    path = find_test_set(task)
    evaluated = open_checkpoint(place, settings)
    arguments = evaluated.tokenizer, evaluated.model.seq_length
    readings: list[tuple[dict[str, str], ReadText | LastWords]] = []

    usage = LLAMA if evaluated.tokenizer.first_tokens else GPT2
    if task == "wikitext103":
        whole = read_wikitext(task, path).text
        axes = {axis: usage.axes[axis] for axis in ("documents", "first", "literal")}
        axes |= {
            "text": REAL_TEXTS,
            "windows": [windows for windows in usage.axes["windows"] if windows not in LONG],
        }
        for reading in usage.readings(axes):
            readings.append(
                (reading, ReadText(reading, list(lm_eval_documents(whole)), whole, *arguments))
            )
            reading.pop("softmax", None)  # The softmax here is always over sub-words.
    else:
        readings.extend(
            (reading, LastWords(reading, openai_passages(path), *arguments))
            for reading in last_word_readings(usage)
        )
    scored = score_shared(
        evaluated, [read.requests for _, read in readings], settings, "identify", "windows"
    )
    conventions = []
    for (reading, read), scores in zip(readings, scored, strict=True):
        for average, value in read.averages(scores):
            named = reading | {"average": average}
            conventions.append(Convention(named, {task: value}, usage.weight(named)))
    return find(claimed, conventions)
