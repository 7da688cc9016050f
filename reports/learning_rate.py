"""The learning-rate finder's curve: loss against a rising learning rate."""

import shlex
from functools import partial

from lineage.files import LearningRate
from reports.exhibit import Exhibit, Table
from reports.figures import learning_rate
from reports.markup import folded
from reports.numbers import MISSING, exact, printable


def rate_curve_exhibit(name: str, result: LearningRate) -> Exhibit:
    """The curve, what it says of the learning rate, and a line of data for each iteration."""
    row = (printable(result.name), result.optimizer, str(result.global_batch_size), _rate(result.steepest_rate),
           _rate(result.lowest_rate), _rate(result.suggestion))  # fmt: skip
    lines = [tuple(map(exact, line)) for line in zip(result.rates, result.losses, result.smoothed, strict=True)]
    caption = _caption(result)
    return Exhibit(
        name,
        "Learning-rate finder",
        [*caption, result.environment.sentence],
        Table(("learning_rate", "loss", "smoothed_loss"), lines, 0),
        shlex.join(result.environment.argv),
        partial(learning_rate.draw, result),
        f"Loss over a rising learning rate, as it was and smoothed. {' '.join(caption)}",
        (Table(("run", "optimizer", "batch", "falls fastest at", "lowest at", "suggested"), [row], 2),),
        folded("How it was measured", result.notes),
    )


def _caption(result: LearningRate) -> list[str]:
    if result.suggestion is None:
        return ["The loss never fell below that of the first learning rate: nothing is suggested."]
    return [
        f"With {result.optimizer} the smoothed loss is lowest at {_rate(result.lowest_rate)}; a tenth of "
        f"that, {_rate(result.suggestion)}, is suggested.",
        f"The sweep reached {_rate(result.rates[-1])} in {len(result.rates)} iterations of batch "
        f"{result.global_batch_size}, seed {result.seed}.",
    ]


def _rate(value: float | None) -> str:
    return MISSING if value is None else f"{value:.3g}"
