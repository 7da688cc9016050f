"""This engine beside another one: how far their trainings are apart, and how far rounding may take them."""

import shlex
from functools import partial

from lineage.files import Against
from reports.exhibit import Exhibit, Table
from reports.figures import against
from reports.markup import folded
from reports.numbers import exact, printable

HEADS = ("iteration", "quantity", "ours", "theirs", "difference", "tolerance")
QUANTITIES = {"loss": "loss", "norm": "gradient norm", "rate": "learning rate"}


def against_exhibit(name: str, result: Against) -> Exhibit:
    """The differences over the iterations under their tolerance, where they come closest, and every number."""
    caption = [printable(sentence) for sentence in (*summary(result), result.environment.sentence)]
    lines = [
        (str(at), QUANTITIES[curve.quantity], *map(exact, numbers))
        for curve in result.curves
        for at, numbers in enumerate(
            zip(curve.ours, curve.theirs, curve.differences, curve.tolerance, strict=True), 1
        )
    ]  # fmt: skip
    return Exhibit(
        name,
        f"{printable(result.engine)} beside this engine: {printable(result.name)}, {result.layout}, {result.precision}",
        caption,
        Table(HEADS, lines, 2),
        shlex.join(result.environment.argv),
        partial(against.draw, result),
        f"Differences of loss and gradient norm in each iteration, under the tolerance. {' '.join(caption)}",
        (closest(result),),
        folded("How it was measured", [printable(sentence) for sentence in measured(result)]),
    )


def summary(result: Against) -> list[str]:
    """What came of it, a sentence each."""
    number = len(result.curves[0].ours)
    beyond = result.beyond
    loss = next(curve for curve in result.curves if curve.quantity == "loss")
    verdict = (
        f"Beyond the tolerance: {beyond[0]} ({len(beyond)} such numbers)."
        if beyond
        else ("Every loss, gradient norm and learning rate, and every weight at the end, is within the tolerance.")
    )
    return [
        f"{number} iterations of {result.name} on {result.layout} in {result.precision}, from the same weights on the "
        f"same samples; the losses are at most {max(loss.differences):.1e} apart.",
        verdict,
    ]


def closest(result: Against) -> Table:
    """Of each quantity where it comes closest to its tolerance, and the tensor that does at the end."""
    rows: list[tuple[str, ...]] = []
    for curve in result.curves:
        at, distance, allowed = curve.largest
        rows.append((QUANTITIES[curve.quantity], f"iteration {at}", f"{distance:.1e}", f"{allowed:.1e}"))
    tensor = max(result.weights, key=lambda name: result.weights[name][0] / (result.weights[name][1] or 1e-300))
    rows.append(("weights at the end", tensor, *(f"{number:.1e}" for number in result.weights[tensor])))
    return Table(("quantity", "closest at", "difference", "tolerance"), rows, 2, "closest to the tolerance")


def measured(result: Against) -> list[str]:
    """The tolerance and what was changed in the other engine, a sentence each."""
    return [
        f"Tolerance {result.formula}, the factor being {result.factor:.1f}: S is how far {result.draws} runs of "
        f"{result.engine} come from its first when every weight is moved by up to a unit round-off before every "
        "iteration (experiments/verify/tolerance.py).",
        *[f"Changed in {result.engine} to run on CPUs: {patch}." for patch in result.patches],
    ]
