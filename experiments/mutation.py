"""Could a verdict have failed? Published numbers and effects are changed, and every verdict is given again.

A verdict that stays the same under a change would not have noticed it. `python -m tests.mutation` plants faults in the
program besides. Imports no torch.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal

from mlm_repro.experiments.catalogue import Claim, Experiment, every_claim, load_experiments
from mlm_repro.experiments.files import LAST_DIGIT, SIGN, CostFault, MutatedVerdict, Mutations
from mlm_repro.experiments.scores import outcome_of
from mlm_repro.experiments.verdicts import Outcome, Results, Verdict, judge

STEPS: dict[str, Callable[[Decimal, Decimal, int], Decimal]] = {
    LAST_DIGIT: lambda value, unit, way: value + way * unit,
    "two units of it": lambda value, unit, way: value + 2 * way * unit,
    "a factor of two": lambda value, unit, way: value * Decimal(2) ** way,
}
"""Changes of a published number with its last printed digit, upward (1) or downward (-1)."""


JUDGED: tuple[Outcome, ...] = ("confirmed", "contradicted", "predicted", "missed", "undecided")


def judged(experiments: Sequence[Experiment], results: Results, step: str, way: int) -> dict[str, Outcome]:
    """Outcomes by claim where every published number is raised (way 1) or lowered (way -1) by one of `STEPS`."""

    def change(claim: Claim) -> Claim:
        unit = Decimal(1).scaleb(int(claim.value.as_tuple().exponent))
        return claim.model_copy(update={"value": STEPS[step](claim.value, unit, way)})

    changed = [experiment.model_copy() for experiment in experiments]
    for experiment in changed:
        experiment.__dict__["claims"] = tuple(map(change, experiment.claims))
    return {verdict.claim.id: verdict.outcome for verdict in judge(changed, results)}


def given(results: Results) -> list[Verdict]:
    """The verdicts on claims that were tried and that no fit has seen."""
    return [verdict for verdict in judge(load_experiments().values(), results) if verdict.outcome in JUDGED]


def mutate(
    results: Results, faults: Mapping[str, tuple[str, bool]] | None = None, costs: Sequence[CostFault] = ()
) -> Mutations:
    """Every verdict with the changes that it notices.

    A published number is noticed to be wrong if the verdict turns to whichever side the number is changed, of a bound
    to the stricter side. `faults` has by claim the fault that was planted in its program and whether the verdict
    turned, `costs` the faults of the cost model.
    """
    experiments = list(load_experiments().values())
    turned = {(step, way): judged(experiments, results, step, way) for step in STEPS for way in (1, -1)}
    rows = []
    for verdict in given(results):
        claim, record = verdict.claim, verdict.record
        noticed: dict[str, bool] = {}
        smallest: float | None = None
        if verdict.scale != "reduced" and record:
            ways = {"<=": (-1,), ">=": (1,)}.get(claim.relation, (1, -1))
            noticed = {step: all(turned[step, way][claim.id] != verdict.outcome for way in ways) for step in STEPS}
            ends = [abs(end - record.value) for end in claim.bounds(record.kind != "computed") if math.isfinite(end)]
            smallest = 100 * min(ends) / abs(record.value) if record.value else None
        elif record and record.low is not None and record.high is not None:
            effect = results.findings[claim.id].effect
            as_is = outcome_of(effect, record.low, record.high)
            if None in (effect.above, effect.below) and as_is != "undecided":
                noticed = {SIGN: outcome_of(effect, -record.high, -record.low) != as_is}
        fault, is_noticed = (faults or {}).get(claim.id, ("", None))
        rows.append(MutatedVerdict(
            claim=claim.id, published=claim.published, tolerance=claim.allowed.tolerance, outcome=verdict.outcome,
            scale=verdict.scale, ours=record.value if record else None, smallest_percent=smallest, noticed=noticed,
            fault=fault, fault_noticed=is_noticed,
        ))  # fmt: skip
    asked = {claim.id: f"{claim.says} {claim.value} {claim.unit} {claim.allowed.tolerance} {claim.sentence}"
             for claim in every_claim()}  # fmt: skip
    return Mutations(claims=asked, rows=rows, costs=list(costs))
