"""Paired differences of models, over articles and over seeds, and what they say of a claim: of an
ablation's, and of the paper's, that larger models end lower, on the models of a reproduction.
Imports no torch.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from statistics import fmean
from typing import Any, Literal, NamedTuple

import numpy as np
from scipy.special import stdtrit  # type: ignore[import-untyped]

from mlm_repro.evaluation.schema import PerplexityResult
from mlm_repro.evaluation.tasks.uncertainty import difference_standard_error
from mlm_repro.experiments.catalogue import Effect
from mlm_repro.experiments.files import Comparison, ReproductionScores, TextScore
from mlm_repro.lineage.records import Record

EXPERIMENT = "2019/size"
END = "final_validation_perplexity"
LEVEL = 0.95
Seen = Literal["confirmed", "contradicted", "undecided"]
UNITS = {"validation_loss": "nats", "bits_per_byte": "bits/byte"}
NORMAL = 1.645
"""Standard errors on either side of nine tenths of a normal distribution."""


class Finding(NamedTuple):
    """The outcome of an effect."""

    effect: Effect
    record: Record
    """Mean difference with its paired interval; a training that diverged counts in it as the
    untrained model."""
    outcome: Seen
    sentence: str
    is_number: bool = True
    """False where an arm diverged: then the difference says nothing."""


def text_score(result: PerplexityResult) -> TextScore:
    """Bits per byte, with what their errors come from: six digits of the loss of each article, and
    its words."""
    scored = [block for block in result.blocks if block.num_scored]
    return TextScore(
        bits_per_byte=result.bits_per_byte,
        nll=[float(f"{block.nll:.6g}") for block in scored],
        words=[
            block.num_original_tokens * block.num_scored / block.num_targets for block in scored
        ],
    )


def compared(
    text: str, smaller: int, larger: int, scores: Sequence[Sequence[TextScore]]
) -> Comparison:
    """Two of some models, of each of which `scores` has one for each seed, with a 90 % interval.

    The interval is over articles, resampled in pairs. With several seeds the standard error of the
    mean of their differences is added in squares, and Student's t has the degrees of freedom of
    Welch and Satterthwaite.
    """
    pair = scores[larger], scores[smaller]
    words = np.array(pair[0][0].words)
    bits = pair[0][0].bits_per_byte / (np.array(pair[0][0].nll).sum() / words.sum())
    sums = [np.mean([score.nll for score in seeds], axis=0) for seeds in pair]
    error = difference_standard_error((sums[0], words), (sums[1], words)) or 0.0
    times = NORMAL
    differences = [
        larger.bits_per_byte - smaller.bits_per_byte for larger, smaller in zip(*pair, strict=True)
    ]
    if (more := len(differences) - 1) and (
        of_seeds := np.std(differences, ddof=1) / math.sqrt(more + 1) / bits
    ):
        error = math.hypot(error, of_seeds)
        times = float(stdtrit(more * (error / of_seeds) ** 4, 0.95))
    difference, reach = float(np.mean(differences)), times * error * bits
    return Comparison(
        text=text,
        smaller=smaller,
        larger=larger,
        difference=difference,
        low=difference - reach,
        high=difference + reach,
    )


def paired_reach(differences: Sequence[float], level: float) -> float:
    """Half the width of the t interval of the mean of paired differences, of which there are two at
    least."""
    count = len(differences)
    return float(
        stdtrit(count - 1, (1 + level) / 2) * np.std(differences, ddof=1) / math.sqrt(count)
    )


def found(
    effect: Effect, level: float, differences: Sequence[float], about: dict[str, Any]
) -> Finding:
    """The paired t interval of a difference for each seed, and its verdict on the claim."""
    count, mean = len(differences), float(np.mean(differences))
    reach = paired_reach(differences, level)
    mean, low, high = (float(f"{number:.6g}") for number in (mean, mean - reach, mean + reach))
    outcome = outcome_of(effect, low, high)
    when = "" if effect.share == 1 else f" after {effect.share:.0%} of the tokens"
    series = f"{effect.of} less {effect.less}{when}"
    unit = UNITS[effect.quantity]
    sentence = (
        f"{series}: {mean:+.4g} {unit} ({low:+.4g} to {high:+.4g}, {level:.0%}, {count} seeds)"
    )
    if outcome == "undecided":
        sentence += f"; an effect of {reach:.2g} would have shown"
    record = Record(
        **about,
        series=series,
        quantity=f"{effect.quantity}_difference",
        value=mean,
        low=low,
        high=high,
        unit=unit,
    )
    return Finding(effect, record, outcome, sentence)


def outcome_of(effect: Effect, low: float, high: float) -> Seen:
    """The verdict on an effect by where its interval lies."""
    above = -math.inf if effect.above is None else effect.above
    below = math.inf if effect.below is None else effect.below
    if above < low and high < below:
        return "confirmed"
    return "contradicted" if high <= above or below <= low else "undecided"


def order_findings(records: Iterable[Record]) -> list[Finding]:
    """Paired differences of the final validation losses of neighbours in size over seeds; none for
    a single seed."""
    ends = _by_model([record for record in records if record.quantity == END])
    findings = []
    for (small, of), (large, less) in pairwise(ends.items()):
        if len(of) > 1 and of.keys() == less.keys():
            effect = Effect(claim=f"{EXPERIMENT}/{large}", of=small, less=large, above=0.0)
            differences = [math.log(record.value / less[seed].value) for seed, record in of.items()]
            first = next(iter(less.values()))
            about = {
                "experiment": EXPERIMENT,
                **first.model_dump(include={"kind", "source", "digest"}),
            }
            findings.append(found(effect, LEVEL, differences, about))
    return findings


def order_verdict(
    records: Sequence[Record], scores: ReproductionScores | None, labels: Mapping[str, str]
) -> str:
    """A sentence on the order of the sizes, by their labels: does it hold in both measures, in
    every seed and beyond chance?"""
    quantities = {END: "validation perplexity"}
    if scores:
        quantities[scores.quantity] = f"bits per byte on {scores.text.removesuffix('-perplexity')}"
    held, told, seeds = [], list[str](), set[int]()
    for quantity, words in quantities.items():
        ends = _by_model([record for record in records if record.quantity == quantity])
        seeds |= {seed for of in ends.values() for seed in of}
        ordered = [
            of.keys() == less.keys()
            and all(record.value > less[seed].value for seed, record in of.items())
            for of, less in pairwise(ends.values())
        ]
        held += ordered
        shown = {} if told else {name: f"{labels.get(name, name)} " for name in ends}
        means = [
            f"{shown.get(name, '')}{fmean(each.value for each in of.values()):.3g}"
            for name, of in ends.items()
        ]
        told.append(f"{(' > ' if all(ordered) else ', ').join(means)} in {words}")
    if not held:
        return "One size was trained, which says nothing about larger models."
    findings = order_findings(records)
    held += [finding.outcome == "confirmed" for finding in findings]
    held += [each.high < 0 for each in scores.comparisons] if scores else []
    over = f"each of {len(seeds)} seeds" if len(seeds) > 1 else "one seed"
    if not all(held):
        return f"The paper's order does not hold beyond chance in {over}: {'; '.join(told)}."
    apart = (
        "every paired interval excludes zero"
        if findings
        else "its intervals are over articles alone"
    )
    return f"Larger models end lower, as in the paper, in {over}: {'; '.join(told)}; {apart}."


def _by_model(records: Iterable[Record]) -> dict[str, dict[int, Record]]:
    models: dict[str, dict[int, Record]] = {}
    for record in records:
        if record.seed is not None and record.kind != "published":
            models.setdefault(record.series, {})[record.seed] = record
    return models
