"""Exhibits of a reproduction, with captions and texts that are computed from its numbers."""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain, pairwise
from statistics import fmean

from lineage.records import Kind, Record
from reports import tables
from reports.curves import Curve, build_curves, model_order
from reports.evaluations import evaluations_data, evaluations_tables
from reports.exhibit import Exhibit, Table
from reports.figures.curves import draw_loss, draw_perplexity, mean_window
from reports.load import Reproduction
from reports.numbers import show

NAMES: dict[Kind, str] = {"scaled": "scaled twins"}
"""Names of kinds above a panel, where that is not the kind's own."""


def reproduction_exhibits(reproduction: Reproduction) -> dict[str, Exhibit]:
    """Exhibits by name; one without numbers is absent."""
    exhibits = chain(_curves(reproduction), _tables(reproduction), _data(reproduction))
    return {exhibit.name: exhibit for exhibit in exhibits}


def figure_6_curves(reproduction: Reproduction) -> list[Curve]:
    """Validation perplexity over training, published and ours."""
    records = reproduction.select("2019/figure-6", "validation_perplexity")
    return build_curves(records, model_order(reproduction))


def layers_of(curves: Sequence[Curve]) -> dict[str, list[Curve]]:
    """Curves by kind, published first."""
    kinds = dict.fromkeys(curve.kind for curve in curves)
    return {NAMES.get(kind, kind): [curve for curve in curves if curve.kind == kind] for kind in kinds}


def _curves(reproduction: Reproduction) -> Iterator[Exhibit]:
    if curves := figure_6_curves(reproduction):
        yield Exhibit(
            "2019-figure-6",
            "Validation perplexity against iterations",
            [*ordering_caption(curves), *_means(curves, ", bands their least and greatest")],
            tables.records_data(reproduction.select("2019/figure-6", "validation_perplexity")),
            reproduction.command("figure-6"),
            partial(draw_perplexity, layers_of(curves)),
            figure_6_alt(curves),
        )
    losses = reproduction.select("2019/training-loss", "training_loss")
    if curves := build_curves(losses, model_order(reproduction)):
        yield Exhibit(
            "training-loss",
            "Training loss against iterations",
            [training_loss_caption(curves), *_means(curves)],
            tables.records_data(losses),
            reproduction.command("training-loss"),
            partial(draw_loss, curves),
            training_loss_alt(curves),
        )


def _tables(reproduction: Reproduction) -> Iterator[Exhibit]:
    benchmarks = reproduction.select("2019/table-3")
    drawn = {("2019/figure-6", "validation_perplexity"), ("2019/training-loss", "training_loss")}
    further = [
        record
        for record in reproduction.records
        if record.experiment != "2019/table-3" and (record.experiment, record.quantity) not in drawn
    ]
    if benchmarks:
        data, command = tables.records_data(benchmarks), reproduction.command("table-3")
        shown = tables.comparison_tables(benchmarks, sizes=reproduction.sizes)
        yield Exhibit("2019-table-3", "WikiText-103 and LAMBADA", (), data, command, tables=shown)
    if scores := reproduction.scores:
        ours = [record for record in benchmarks if record.kind != "published"]
        data, command, shown = tables.records_data(ours), reproduction.command("table-3"), [bands_table(ours)]
        said = scores.sentences()
        yield Exhibit("2019-twins", "The twins on the same texts", said, data, command, tables=shown)
    if further:
        data, command = tables.records_data(further), reproduction.command("validation")
        yield Exhibit("further-numbers", "Further numbers", (), data, command, tables=(data,))
    if evaluations := reproduction.evaluations:
        data, command = evaluations_data(evaluations), reproduction.command("table-3")
        shown = evaluations_tables(evaluations, model_order(reproduction))
        yield Exhibit("evaluations", "Evaluations by convention", (), data, command, tables=shown)
    if models := reproduction.summary.models:
        kind, command = reproduction.own_kind, reproduction.command("models")
        data, shown = tables.models_data(models, kind), tables.models_tables(models, kind)
        yield Exhibit("models", "Published and trained shapes", (), data, command, tables=shown)


def _means(curves: Sequence[Curve], bands: str = "") -> list[str]:
    return [f"Lines are means of several seeds{bands}."] if any(curve.band for curve in curves) else []


def bands_table(records: Sequence[Record]) -> Table:
    """Mean, least and greatest of each model's seeds, for quantities without a published number."""
    values: dict[tuple[str, str], list[float]] = {}
    for record in records:
        if record.quantity.endswith(("bits_per_byte", "log_likelihood")) and record.seed is not None:
            quantity = f"{record.quantity.replace('_', ' ')} {record.unit}".strip()
            values.setdefault((quantity, record.series), []).append(record.value)
    rows = [(*which, band(mine)) for which, mine in values.items()]
    return Table(("quantity", "model", "mean (least to greatest of the seeds)"), rows, 2)


def band(values: Sequence[float], digits: int = 3) -> str:
    """Mean of several values, with the least and the greatest."""
    mean, low, high = (f"{value:,.{digits}f}" for value in (fmean(values), min(values), max(values)))
    return f"{mean} ({low} to {high})" if len(values) > 1 else mean


def _data(reproduction: Reproduction) -> Iterator[Exhibit]:
    if ledger := reproduction.ledger:
        data, shown = tables.ledger_data(ledger), [tables.attrition_table(ledger)]
        command = reproduction.command("data-ledger", "ledger")
        yield Exhibit("data-ledger", "What each stage kept and dropped", (), data, command, tables=shown)


SUBJECT: dict[Kind, str] = {
    "published": "the published curves",
    "scaled": "the scaled twins",
    "measured": "the models trained here",
    "computed": "the closed form",
    "simulated": "the simulation",
}


def ordering_caption(curves: Sequence[Curve]) -> list[str]:
    """A sentence on the order in which the models of each kind end, published first."""
    sentences = []
    for kind in dict.fromkeys(curve.kind for curve in curves):
        same = sorted((curve for curve in curves if curve.kind == kind), key=lambda curve: curve.rank)
        wrong = [
            f"{large.series} does not end below {small.series}"
            for small, large in pairwise(same) if large.final >= small.final
        ]  # fmt: skip
        ends = (" < ", ", ")[bool(wrong)].join(f"{curve.series} {show(curve.final)}" for curve in reversed(same))
        if len(same) > 1:
            sentences.append(f"In {SUBJECT[kind]} {' and '.join(wrong) or 'the larger model ends lower'}: {ends}.")
    return sentences


def seeds_sentence(records: Sequence[Record]) -> str:
    """A sentence on the number of seeds."""
    seeds = {record.seed for record in records if record.kind != "published" and record.seed is not None}
    if len(seeds) == 1:
        return f"One seed ({seeds.pop()}) for each model: how much this varies from run to run was not measured."
    return f"These are means over {len(seeds)} seeds." if seeds else ""


def scale_limits(reproduction: Reproduction) -> str:
    """Sentences on what the numbers of this mode can show."""
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
    return f"Line charts of validation perplexity over iterations, logarithmic. {layers}."


def training_loss_alt(curves: Sequence[Curve]) -> str:
    """Text alternative of the training loss."""
    ends = "; ".join(
        f"{c.series} {'falls' if c.final < c.y[0] else 'goes'} from {show(c.y[0])} to {show(c.final)}" for c in curves
    )
    return f"Line chart of training loss against iterations. {ends}."


def training_loss_caption(curves: Sequence[Curve]) -> str:
    """A sentence on the lines of the figure and the length of the running mean."""
    windows = sorted({mean_window(curve) for curve in curves if mean_window(curve) > 1})
    if not windows:
        return "Every recorded value is drawn."
    points = " or ".join(str(window) for window in windows)
    return f"Faint: every recorded value. Strong: mean of the last {points} values. Labels give the last mean."
