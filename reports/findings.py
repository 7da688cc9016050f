"""What the numbers say, in sentences computed from them."""

from collections.abc import Sequence

from data_pipeline.files import Ledger
from experiments.files import order_sentence
from lineage.records import Kind, Record
from reports.curves import Curve, Ordering, orderings
from reports.figures.curves import mean_window
from reports.load import Reproduction
from reports.numbers import show

SUBJECT: dict[Kind, str] = {
    "published": "the published curves",
    "scaled": "the scaled twins",
    "measured": "the models trained here",
    "computed": "the closed form",
    "simulated": "the simulation",
}


def ordering_caption(curves: Sequence[Curve]) -> list[str]:
    """A sentence on the order within each kind, published first."""
    return [_ordering_sentence(ordering) for ordering in orderings(curves) if ordering.holds is not None]


def seeds_sentence(records: Sequence[Record]) -> str:
    """How many seeds stand behind what was run here, if recorded, and in how many of them the order holds."""
    ours = [record for record in records if record.kind != "published" and record.seed is not None]
    seeds = {record.seed for record in ours}
    if len(seeds) == 1:
        return f"One seed ({seeds.pop()}) for each model: how much this varies from run to run was not measured."
    return f"These are means over {len(seeds)} seeds. {order_sentence(ours[0].quantity, ours)}" if seeds else ""


def scale_limits(reproduction: Reproduction) -> str:
    """What the numbers of this mode can and cannot show."""
    if reproduction.summary.mode == "full":
        return (
            "The models were trained at their published configuration. "
            "Their numbers are marked measured and may be set against the published ones."
        )
    return (
        "Twins can show that data, training and test protocols work from end to end, and whether larger models still "
        "end lower than smaller ones. They cannot show that the published values are reached: shape, data, vocabulary "
        "and length of training differ, so a scaled perplexity and a published one do not measure the same thing."
    )


def figure_6_alt(curves: Sequence[Curve]) -> str:
    """Text alternative of Figure 6."""
    layers = "; ".join(f"{curve.kind} {curve.series} ends at {show(curve.final)}" for curve in curves)
    return f"Line chart of validation perplexity over the share of training, logarithmic. {layers}."


def training_loss_alt(curves: Sequence[Curve]) -> str:
    """Text alternative of the training loss."""
    ends = "; ".join(
        f"{c.series} {'falls' if c.final < c.y[0] else 'goes'} from {show(c.y[0])} to {show(c.final)}" for c in curves
    )
    return f"Line chart of training loss against iterations. {ends}."


def training_loss_caption(curves: Sequence[Curve]) -> str:
    """What is drawn, and over how many points the running mean is taken."""
    windows = sorted({mean_window(curve) for curve in curves if mean_window(curve) > 1})
    if not windows:
        return "Every recorded value is drawn."
    points = " or ".join(str(window) for window in windows)
    return f"Faint: every recorded value. Strong: mean of the last {points} values. Labels give the last mean."


def funnel_alt(ledger: Ledger) -> str:
    """Text alternative of the funnel."""
    steps = "; ".join(f"{stage.name} keeps {stage.documents_out:,} documents" for stage in ledger.stages)
    return f"Bar chart of what each stage of the data pipeline keeps. {steps}."


def _ordering_sentence(ordering: Ordering) -> str:
    ends = " < ".join(f"{name} {show(value)}" for name, value in reversed(ordering.finals))
    points = ""
    if ordering.common_points > 1:
        points = f" The whole order holds at {ordering.points_in_order} of {ordering.common_points} common iterations."
    if ordering.holds:
        return f"In {SUBJECT[ordering.kind]} the larger model ends lower: {ends}.{points}"
    ends = ", ".join(f"{name} {show(value)}" for name, value in reversed(ordering.finals))
    wrong = " and ".join(f"{large} does not end below {small}" for large, small in ordering.inversions)
    return f"In {SUBJECT[ordering.kind]} {wrong}: {ends}.{points}"
