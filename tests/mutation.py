"""Could a verdict have failed? `python -m tests.mutation [--json verdicts.json]`.

Published numbers and effects are changed, faults are planted in the program, and every verdict is
given again. A verdict that stays the same would not have noticed it. Prints the score, and each
verdict that did not notice what it should. A program is measured again with a fault of its own
kind, as far as it can be here, and the cost model predicts with ten.
"""

import argparse
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from decimal import Decimal
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

from pydantic import Field

from mlm_repro.engine.launch.threads import RanksFailed
from mlm_repro.experiments.catalogue import Claim, Experiment, every_claim, load_experiments
from mlm_repro.experiments.runner import measure
from mlm_repro.experiments.scores import outcome_of
from mlm_repro.experiments.sealed import Line
from mlm_repro.experiments.verdicts import (
    COST_MODEL,
    Outcome,
    Results,
    Verdict,
    judge,
    load_results,
    skills,
)
from mlm_repro.experiments.worked_out import work_out
from mlm_repro.lineage.errors import DataMissing, UserError
from mlm_repro.lineage.files import FileSchema, Finite, write_document
from mlm_repro.lineage.progress import announce
from mlm_repro.lineage.records import Record
from tests.commands import ROOT

LAST_DIGIT, SIGN = "one unit of the last digit", "a reversed sign"
"""Changes that a score counts: of a published number, and of an effect."""


class MutatedVerdict(FileSchema):
    """A verdict on a claim, and what it would have noticed."""

    claim: str
    published: str
    tolerance: str
    outcome: str
    scale: str
    ours: Finite | None
    smallest_percent: Finite | None
    """The smallest change of our number that turns the verdict, in percent of it."""
    noticed: dict[str, bool]
    """True for each change of the published number, or of the effect, at which the verdict
    turns."""
    fault: str
    """Fault that was planted in the program; empty where none was."""
    fault_noticed: bool | None


class CostFault(FileSchema):
    """A fault that was planted in the cost model."""

    fault: str
    turned: list[str]
    """Claims on predictions whose verdict turns."""
    score: Finite
    """Mean interval score of the predictions under the fault, in percent; less is better."""


class Mutations(FileSchema):
    """verdicts.json: every verdict that follows from a number made here."""

    claims: dict[str, str]
    """Relation, number, unit and tolerance of every claim."""
    rows: list[MutatedVerdict]
    costs: list[CostFault] = Field(default_factory=list)
    """Faults of the cost model; the first is none."""
    sentence: str = ""
    """The score in words, which a page shows."""

    @property
    def score(self) -> str:
        """The score in words."""

        def turned(scales: tuple[str, ...], change: str) -> str:
            rows = [
                row.noticed[change]
                for row in self.rows
                if row.scale in scales and change in row.noticed
            ]
            return f"{sum(rows)} of {len(rows)}"

        planted = [row.fault_noticed for row in self.rows if row.fault_noticed is not None]
        same, checks, simulated = (
            turned((scale,), LAST_DIGIT) for scale in ("same", "arithmetic", "simulated")
        )
        costs = self.costs[1:]
        return (
            f"{same} verdicts at the same scale, {checks} on arithmetic and {simulated} on"
            f" predictions turn where the published number is changed by {LAST_DIGIT},"
            f" {turned(('reduced',), SIGN)} effects at {SIGN}, {sum(planted)} of {len(planted)}"
            f" verdicts under a fault planted in the program. Of {len(costs)} faults planted in the"
            f" cost model {sum(bool(cost.turned) for cost in costs)} turn a verdict."
        )


JUDGED = ("confirmed", "contradicted", "predicted", "missed", "undecided")
"""Outcomes of claims that were tried and that no fit has seen."""
STEPS: dict[str, Callable[[Decimal, Decimal, int], Decimal]] = {
    LAST_DIGIT: lambda value, unit, way: value + way * unit,
    "two units of it": lambda value, unit, way: value + 2 * way * unit,
    "a factor of two": lambda value, unit, way: value * Decimal(2) ** way,
}
"""Changes of a published number with its last printed digit, upward (1) or downward (-1)."""

MEASURED, SCHEDULE = "mlm_repro.experiments.measured", "mlm_repro.engine.pipeline.schedule"
SIMULATOR = "mlm_repro.experiments.simulator"
Planted = tuple[str, dict[str, Callable[[Any], Any]]]
"""A fault in words, and what makes a faulty part of the right one, by module and name."""
NOTHING: Callable[[Any], Any] = lambda measure_part: lambda *arguments: []  # noqa: E731
ORDER: Planted = (
    "a microbatch waits for the one before",
    {
        f"{SCHEDULE}:_warmup": lambda warmup: lambda pp, rank, chunks: 0,
        f"{SCHEDULE}:pass_orders": lambda orders: (
            lambda name, *sizes: orders("1f1b" if name == "gpipe" else name, *sizes)
        ),
        f"{MEASURED}.bubble:MOST_RANKS": lambda most: 4,
        f"{MEASURED}.bubble:SCHEDULES": lambda all_: {
            name: row for name, row in all_.items() if row[1] <= 4
        },
    },
)
TOO_MANY: Planted = (
    "an all-reduce too many",
    {
        "mlm_repro.engine.parallel.layers:leave_tensor_parallel": lambda leave: (
            lambda x, axis, divided: leave(leave(x, axis, divided), axis, divided)
        ),
        f"{MEASURED}.traffic:WIDTHS": lambda widths: (2,),
        f"{MEASURED}.huggingface:WIDTHS": lambda widths: (1, 2),
        **{
            f"{MEASURED}.traffic:{other}": NOTHING
            for other in ("_pipeline", "_interleaved", "_batches")
        },
    },
)
FAULTS: dict[str, Planted] = {
    "parameters": (
        "biases are missing",
        {
            f"{MEASURED}.counted:parameters_of": lambda parameters_of: (
                lambda config: [each for each in parameters_of(config) if each.role.value != "bias"]
            )
        },
    ),
    "words": (
        "a detokeniser's rule is missing",
        {
            f"{MEASURED}.counted:detokenize_wikitext": lambda detokenize: (
                lambda text: detokenize(text.replace(" @-@ ", " @_@ "))
            )
        },
    ),
    "schedules": ORDER,
    "bubble": ORDER,
    "peak-memory": (ORDER[0], ORDER[1] | {f"{MEASURED}.memory:_checkpoints": NOTHING}),
    "traffic": TOO_MANY,
    "tensor-parallel": TOO_MANY,
    "activations": (
        "masks of other bytes",
        {
            f"{MEASURED}.activations:_dropped": lambda dropped: (
                lambda x: x * (x != 0.5).to(x.dtype)
            ),
            f"{MEASURED}.activations:_flops": NOTHING,
            f"{MEASURED}.activations:_checkpoint": NOTHING,
        },
    ),
}
"""A fault of the program for each measurement. Fewer ranks are measured, and nothing that the fault
cannot reach."""


def _without_bubble(order: Any, forward: Any, backward: Any) -> Any:
    return (forward + backward).sum(1) * (order.shape[2] // 2) / forward.shape[1]


def _half_again(w: Any, walks: Any) -> Any:
    return replace(w, full=w.full / 2), walks


COSTS: dict[str, dict[str, Callable[[Any], Any]]] = {
    "an all-reduce inside a node sends half": {
        f"{SIMULATOR}.collectives:node_all_reduce_seconds": lambda seconds: (
            lambda machine, ranks, sent: seconds(machine, ranks, sent / 2)
        )
    },
    "products of the backward pass take 1.8 times those of the forward pass, not twice": {
        f"{SIMULATOR}.compute:BACKWARD_PRODUCTS": lambda twice: 1.8
    },
    "half of full recomputation is forgotten": {
        f"{SIMULATOR}.simulate:_prepared": lambda prepared: (
            lambda rows: _half_again(*prepared(rows))
        )
    },
    "the adapters that gradients use rise with the second, not the eighth power of the groups": {
        f"{SIMULATOR}.collectives:ADAPTERS_POWER": lambda power: 2
    },
    "the peak of matrix products is doubled": {
        f"{SIMULATOR}.compute:matmul_seconds": lambda seconds: (
            lambda *arguments: seconds(*arguments) / 2
        )
    },
    "the pipeline has no bubble": {
        f"{SIMULATOR}.simulate:makespan": lambda makespan: lambda: _without_bubble
    },
    "messages between stages are whole where tensor-parallel ranks share them": {
        f"{SIMULATOR}.collectives:stage_message_seconds": lambda seconds: (
            lambda machine, w: seconds(machine, w) / w.message_share
        )
    },
    "the optimizer's step takes no time": {
        f"{SIMULATOR}.compute:OPTIMIZER_BYTES": lambda moved: 0.0
    },
    "element-wise operations move half of their bytes": {
        f"{SIMULATOR}.compute:bytes_seconds": lambda seconds: (
            lambda machine, moved: seconds(machine, moved / 2)
        )
    },
    "ZeRO 3 sends nothing": {
        f"{SIMULATOR}.simulate:_sharded": lambda sharded: (
            lambda machine, w, layer: (layer, 0.0 * w.m)
        )
    },
}
"""Faults of the cost model, as those of programs."""


def judged(
    experiments: Sequence[Experiment], results: Results, step: str, way: int
) -> dict[str, Outcome]:
    """Outcomes by claim where every published number is raised (way 1) or lowered (way -1) by one
    of `STEPS`."""

    def change(claim: Claim) -> Claim:
        unit = Decimal(1).scaleb(int(claim.value.as_tuple().exponent))
        return claim.model_copy(update={"value": STEPS[step](claim.value, unit, way)})

    changed = [experiment.model_copy() for experiment in experiments]
    for experiment in changed:
        experiment.__dict__["claims"] = tuple(map(change, experiment.claims))
    return {verdict.claim.id: verdict.outcome for verdict in judge(changed, results)}


def given(results: Results) -> list[Verdict]:
    """The verdicts on claims that were tried and that no fit has seen."""
    return [
        verdict
        for verdict in judge(load_experiments().values(), results)
        if verdict.outcome in JUDGED
    ]


def mutate(
    results: Results,
    faults: Mapping[str, tuple[str, bool]] | None = None,
    costs: Sequence[CostFault] = (),
) -> Mutations:
    """Every verdict with the changes that it notices.

    A published number is noticed to be wrong if the verdict turns to whichever side the number is
    changed, of a bound to the stricter side. `faults` has by claim the fault that was planted in
    its program and whether the verdict turned, `costs` the faults of the cost model.
    """
    experiments = list(load_experiments().values())
    turned = {
        (step, way): judged(experiments, results, step, way) for step in STEPS for way in (1, -1)
    }
    rows = []
    for verdict in given(results):
        claim, record = verdict.claim, verdict.record
        noticed: dict[str, bool] = {}
        smallest: float | None = None
        if verdict.scale != "reduced" and record:
            ways = {"<=": (-1,), ">=": (1,)}.get(claim.relation, (1, -1))
            noticed = {
                step: all(turned[step, way][claim.id] != verdict.outcome for way in ways)
                for step in STEPS
            }
            ends = [
                abs(end - record.value)
                for end in claim.bounds(record.kind != "computed")
                if math.isfinite(end)
            ]
            smallest = 100 * min(ends) / abs(record.value) if record.value else None
        elif record and record.low is not None and record.high is not None:
            effect = results.findings[claim.id].effect
            as_is = outcome_of(effect, record.low, record.high)
            if None in (effect.above, effect.below) and as_is != "undecided":
                noticed = {SIGN: outcome_of(effect, -record.high, -record.low) != as_is}
        fault, is_noticed = (faults or {}).get(claim.id, ("", None))
        rows.append(
            MutatedVerdict(
                claim=claim.id,
                published=claim.published,
                tolerance=claim.allowed.tolerance,
                outcome=verdict.outcome,
                scale=verdict.scale,
                ours=record.value if record else None,
                smallest_percent=smallest,
                noticed=noticed,
                fault=fault,
                fault_noticed=is_noticed,
            )
        )
    made = Mutations(
        claims={claim.id: claim.asked for claim in every_claim()}, rows=rows, costs=list(costs)
    )
    return made.model_copy(update={"sentence": made.score})


@contextmanager
def planted(parts: Mapping[str, Callable[[Any], Any]]) -> Iterator[None]:
    """Replace parts of the program by faulty ones."""
    with ExitStack() as stack:
        for place, make in parts.items():
            module, name = place.split(":")
            room = import_module(module)
            stack.enter_context(patch.object(room, name, make(getattr(room, name))))
        yield


def cost_faults(results: Results) -> Iterator[CostFault]:
    """Verdicts on predictions that each fault of the cost model turns, after a line without a
    fault."""
    experiments = [
        each for each in load_experiments().values() if any(part.simulated for part in each.parts)
    ]
    right: dict[str, Outcome] = {}
    for words, parts in {"no fault": {}, **COSTS}.items():
        announce(f"the cost model: {words}")
        with planted(parts):
            verdicts = [
                each for each in judge(experiments, results, work_out) if each.scale == "simulated"
            ]
        right = right or {verdict.claim.id: verdict.outcome for verdict in verdicts}
        turned = [each.claim.id for each in verdicts if each.outcome != right[each.claim.id]]
        skill = skills(verdicts)
        score = skill[COST_MODEL].score if skill else 0.0
        yield CostFault(fault=words, turned=turned, score=score)


def program_faults(results: Results) -> Iterator[tuple[str, tuple[str, bool]]]:
    """The planted fault of each claim of a measurement, and whether the verdict turned or the
    program refused."""
    made = {
        each.claim.id: each.outcome for each in given(results) if each.record and each.record.source
    }
    for experiment in load_experiments().values():
        if experiment.measures not in FAULTS:
            continue
        words, parts = FAULTS[experiment.measures]
        announce(f"{experiment.name}: {words}")
        about: Line = {"experiment": experiment.name, "source": "a planted fault"}
        with planted(parts):
            try:
                wrong = tuple(Record(**about | line) for line in measure(experiment))
            except DataMissing:
                continue
            except (UserError, RanksFailed):
                wrong = ()
        for verdict in judge([experiment], replace(results, records=wrong)):
            if (name := verdict.claim.id) in made and (verdict.record in wrong or not wrong):
                yield name, (words, verdict.outcome != made[name])


def format_mutations(mutations: Mutations) -> str:
    """The score, then each verdict that did not notice what it should, with its tolerance."""
    lines = [mutations.score]
    for row in mutations.rows:
        missed = [
            words
            for words, is_noticed in row.noticed.items()
            if not is_noticed and words in (LAST_DIGIT, SIGN)
        ]
        if missed and row.outcome == "confirmed":
            lines.append(
                f"{row.claim}: {row.outcome} as before with {missed[0]} ({row.published},"
                f" {row.tolerance})"
            )
    lines += [
        f"{row.claim}: {row.outcome} as before though {row.fault}"
        for row in mutations.rows
        if row.fault_noticed is False
    ]
    lines += [
        f"interval score of the cost model as it is: {cost.score:.0f}"
        for cost in mutations.costs[:1]
    ]
    for cost in mutations.costs[1:]:
        noticed = (
            f"turns {', '.join(cost.turned)}" if cost.turned else "no verdict here would notice"
        )
        lines.append(f"{cost.fault}: {noticed}; interval score {cost.score:.0f}")
    return "\n".join(lines)


def mutate_all(results: Results) -> Mutations:
    """Every verdict with the changes and the planted faults that it notices."""
    return mutate(results, dict(program_faults(results)), list(cost_faults(results)))


def main() -> None:
    """Mutate the verdicts on the kept results."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__)
    parser.add_argument(
        "--json", type=Path, help="file for every verdict, such as results/ablations/verdicts.json"
    )
    parser.add_argument(
        "--results",
        type=Path,
        nargs="+",
        default=[ROOT / "results" / "ablations"],
        help="folders of run directories",
    )
    asked = parser.parse_args()
    mutations = mutate_all(load_results(asked.results))
    print(format_mutations(mutations))
    if asked.json:
        write_document(asked.json, mutations)


if __name__ == "__main__":
    main()
