"""Paired differences between models, over articles and over seeds, and the verdicts that follow: on
an ablation's effects, and on the paper's claim that larger models end lower. Imports no torch."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from statistics import fmean
from typing import Literal, NamedTuple

import numpy as np
from scipy.special import stdtrit  # type: ignore[import-untyped]

from mlm_repro.evaluation.schema import PerplexityResult
from mlm_repro.evaluation.tasks.uncertainty import difference_standard_error
from mlm_repro.experiments.catalogue import Effect
from mlm_repro.experiments.files import Comparison, ReproductionScores, TextScore
from mlm_repro.lineage.atomic import JSON
from mlm_repro.lineage.records import Record

EXPERIMENT = "2019/size"
END = "final_validation_perplexity"
LEVEL = 0.95
Seen = Literal["confirmed", "contradicted", "undecided"]
UNITS = {"validation_loss": "nats", "bits_per_byte": "bits/byte"}
NORMAL = 1.645
"""Half the width of a normal distribution's 90 % interval, in standard errors."""


class Finding(NamedTuple):
    """A claimed effect between two arms of an ablation or two sizes of a model: the claim,
    `effect`; the measured mean difference with its interval, `record`; the verdict, `outcome`,
    which is "confirmed", "contradicted" or "undecided"; and a sentence on it. `is_number` is False
    if a training diverged, so that the difference means nothing."""

    effect: Effect
    record: Record
    """Mean difference with its paired interval. A training that diverged counts with the loss of
    the untrained model."""
    outcome: Seen
    sentence: str
    is_number: bool = True
    """False if a training of either arm diverged, so that the difference means nothing."""


def text_score(result: PerplexityResult) -> TextScore:
    """Return the TextScore of an evaluation's result: its bits per byte, and two lists, from which
    their error follows, with a number for each article that has a scored token, in order. `nll` has
    the article's loss in nats, summed over the scored tokens, to six digits, and `words` the
    article's number of words, multiplied by the share of its targets that was scored; targets are
    the tokens that the whole test scores."""
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
    """Return a Comparison: bits per byte of the larger model less the smaller's on a text, with a
    90 % interval.

    `scores[model][seed]` are the models' scores, on the same articles; `smaller` and `larger` are
    indices of models. The interval is over articles, resampled in pairs. With several seeds, the
    standard error of the mean seed difference is added in quadrature, and Student's t is used with
    the degrees of freedom of Welch and Satterthwaite.
    """
    pair = scores[larger], scores[smaller]
    words = np.array(pair[0][0].words)
    # Bits per byte for each nat per word: the resampled error is in nats per word.
    bits = pair[0][0].bits_per_byte / (np.array(pair[0][0].nll).sum() / words.sum())
    sums = [np.mean([score.nll for score in seeds], axis=0) for seeds in pair]
    error = difference_standard_error((sums[0], words), (sums[1], words)) or 0.0
    times = NORMAL
    differences = [
        larger.bits_per_byte - smaller.bits_per_byte for larger, smaller in zip(*pair, strict=True)
    ]
    freedom = len(differences) - 1
    # A single pair has no spread over seeds.
    of_seeds = np.std(differences, ddof=1) / math.sqrt(freedom + 1) / bits if freedom else 0.0
    if of_seeds:
        error = math.hypot(error, of_seeds)
        times = float(stdtrit(freedom * (error / of_seeds) ** 4, 0.95))
    difference = float(np.mean(differences))
    reach = times * error * bits
    return Comparison(
        text=text,
        smaller=smaller,
        larger=larger,
        difference=difference,
        low=difference - reach,
        high=difference + reach,
    )


def paired_reach(differences: Sequence[float], level: float) -> float:
    """Return half the width of the t interval around the mean of paired differences, of which there
    must be two or more. `level` is a fraction, such as 0.95."""
    count = len(differences)
    return float(
        stdtrit(count - 1, (1 + level) / 2) * np.std(differences, ddof=1) / math.sqrt(count)
    )


def found(effect: Effect, level: float, differences: Sequence[float], about: JSON) -> Finding:
    """Return the Finding on `effect`: the mean of the paired `differences`, one for each seed and
    at least two, with its t interval of the confidence `level`, a fraction, and the verdict on the
    effect's claim. A difference is the quantity of `effect.of`, an arm or a model, less the
    quantity of `effect.less`.

    `about` has the fields of the finding's record that name its experiment, run and kind.
    """
    middle = np.mean(differences)
    reach = paired_reach(differences, level)
    mean, low, high = (float(f"{end:.6g}") for end in (middle, middle - reach, middle + reach))
    outcome = outcome_of(effect, low, high)
    when = "" if effect.share == 1 else f" after {effect.share:.0%} of the tokens"
    series = f"{effect.of} less {effect.less}{when}"
    unit = UNITS[effect.quantity]
    sentence = (
        f"{series}: {mean:+.4g} {unit} ({low:+.4g} to {high:+.4g}, {level:.0%},"
        f" {len(differences)} seeds)"
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
    """Return the outcome of `effect`: "confirmed" if the interval from `low` to `high` lies inside
    its claimed range, "contradicted" if the interval lies wholly outside, else "undecided"."""
    above = -math.inf if effect.above is None else effect.above
    below = math.inf if effect.below is None else effect.below
    if above < low and high < below:
        return "confirmed"
    return "contradicted" if high <= above or below <= low else "undecided"


def order_findings(records: Iterable[Record]) -> list[Finding]:
    """Return a list with a Finding for each pair of models that are neighbours in size: the smaller
    model's final validation loss less the larger's, seed by seed, and the claim that this is above
    zero.

    The records of models must come smallest first; only final validation perplexities that were
    made here count. A pair is left out unless both models were trained with the same seeds, at
    least two.
    """
    findings = []
    for (small, smaller), (large, less) in pairwise(_by_model(records, END).items()):
        if len(smaller) > 1 and smaller.keys() == less.keys():
            effect = Effect(claim=f"{EXPERIMENT}/{large}", of=small, less=large, above=0.0)
            # The logarithm of a ratio of perplexities is a difference of losses in nats.
            differences = [
                math.log(record.value / less[seed].value) for seed, record in smaller.items()
            ]
            first = next(iter(less.values()))
            about = first.model_dump(include={"kind", "source", "digest"})
            about["experiment"] = EXPERIMENT
            findings.append(found(effect, LEVEL, differences, about))
    return findings


def order_verdict(
    records: Sequence[Record], scores: ReproductionScores | None, labels: Mapping[str, str]
) -> str:
    """Return a sentence on the order of the sizes: whether larger models end lower in validation
    perplexity and, with `scores`, in bits per byte too, in every seed and beyond chance; or that
    only one size was trained.

    The records of models must come smallest first; `labels` gives the names that the sentence uses.
    """
    quantities = {END: "validation perplexity"}
    if scores:
        quantities[scores.quantity] = f"bits per byte on {scores.text.removesuffix('-perplexity')}"
    checks = []
    phrases = list[str]()
    seeds = set[int]()
    for quantity, words in quantities.items():
        ends = _by_model(records, quantity)
        seeds.update(*ends.values())
        ordered = [
            of.keys() == less.keys()
            and all(record.value > less[seed].value for seed, record in of.items())
            for of, less in pairwise(ends.values())
        ]
        checks += ordered
        prefixes = {} if phrases else {name: f"{labels.get(name, name)} " for name in ends}
        means = [
            f"{prefixes.get(name, '')}{fmean(item.value for item in of.values()):.3g}"
            for name, of in ends.items()
        ]
        phrases.append(f"{(' > ' if all(ordered) else ', ').join(means)} in {words}")
    if not checks:
        return "One size was trained, which says nothing about larger models."
    findings = order_findings(records)
    checks += [finding.outcome == "confirmed" for finding in findings]
    checks += [item.high < 0 for item in scores.comparisons] if scores else []
    over = f"each of {len(seeds)} seeds" if len(seeds) > 1 else "one seed"
    if not all(checks):
        return f"The paper's order does not hold beyond chance in {over}: {'; '.join(phrases)}."
    apart = (
        "every paired interval excludes zero"
        if findings
        else "its intervals are over articles alone"
    )
    return f"Larger models end lower, as in the paper, in {over}: {'; '.join(phrases)}; {apart}."


def _by_model(records: Iterable[Record], quantity: str) -> dict[str, dict[int, Record]]:
    """Return the records of `quantity` that are not published and have a seed, as a dict by model
    of dicts of records by seed, models in the order of the records."""
    models = defaultdict[str, dict[int, Record]](dict)
    for record in records:
        is_ours = record.kind != "published" and record.quantity == quantity
        if is_ours and record.seed is not None:
            models[record.series][record.seed] = record
    return models
