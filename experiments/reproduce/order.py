"""The paper's claim that larger models end lower, tried on the models of a reproduction. Imports no torch."""

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from statistics import fmean

from experiments.catalogue import Effect
from experiments.files import ReproductionScores
from experiments.scores import Finding, found
from lineage.records import Record

EXPERIMENT, END, LEVEL = "2019/size", "final_validation_perplexity", 0.95


def order_findings(records: Iterable[Record]) -> list[Finding]:
    """Paired differences of the final validation losses of neighbours in size over seeds; none for a single seed."""
    ends = _by_model([record for record in records if record.quantity == END])
    findings = []
    for (small, of), (large, less) in pairwise(ends.items()):
        if len(of) > 1 and of.keys() == less.keys():
            effect = Effect(claim=f"{EXPERIMENT}/{large}", of=small, less=large, above=0.0)
            differences = [math.log(record.value / less[seed].value) for seed, record in of.items()]
            first = next(iter(less.values()))
            about = {"experiment": EXPERIMENT, **first.model_dump(include={"kind", "source", "digest"})}
            findings.append(found(effect, LEVEL, differences, about))
    return findings


def order_verdict(records: Sequence[Record], scores: ReproductionScores | None) -> str:
    """A sentence on the order of the sizes: does it hold in both measures, in every seed and beyond chance?"""
    quantities = {END: "validation perplexity"}
    if scores:
        quantities[scores.quantity] = f"bits per byte on {scores.text.removesuffix('-perplexity')}"
    held, told, seeds = [], [], set[int]()
    for quantity, words in quantities.items():
        ends = _by_model([record for record in records if record.quantity == quantity])
        seeds |= {seed for of in ends.values() for seed in of}
        ordered = [
            of.keys() == less.keys() and all(record.value > less[seed].value for seed, record in of.items())
            for of, less in pairwise(ends.values())
        ]
        held += ordered
        means = [f"{name} {fmean(record.value for record in of.values()):.3g}" for name, of in ends.items()]
        told.append(f"{(' > ' if all(ordered) else ', ').join(means)} in {words}")
    if not held:
        return "One size was trained, which says nothing about larger models."
    findings = order_findings(records)
    held += [finding.outcome == "seen" for finding in findings]
    held += [each.high < 0 for each in scores.comparisons] if scores else []
    over = f"each of {len(seeds)} seeds" if len(seeds) > 1 else "one seed"
    if not all(held):
        return f"The paper's order does not hold beyond chance in {over}: {'; '.join(told)}."
    apart = "every paired interval excludes zero" if findings else "its intervals are over articles alone"
    return f"Larger models end lower, as in the paper, in {over}: {'; '.join(told)}; {apart}."


def _by_model(records: Iterable[Record]) -> dict[str, dict[int, Record]]:
    models: dict[str, dict[int, Record]] = {}
    for record in records:
        if record.seed is not None and record.kind != "published":
            models.setdefault(record.series, {})[record.seed] = record
    return models
