"""The exhibits of a reproduction: whatever it has numbers for."""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain
from statistics import fmean

from lineage.records import Record
from reports import data_card, findings, tables
from reports.curves import Curve, build_curves, model_order
from reports.evaluations import evaluations_data, evaluations_tables
from reports.exhibit import Exhibit, Table
from reports.figures import figure_6
from reports.figures.curves import draw_loss
from reports.figures.data import draw_banding, draw_funnel
from reports.load import Reproduction


def reproduction_exhibits(reproduction: Reproduction) -> dict[str, Exhibit]:
    """Each exhibit by its name; what has no numbers is absent."""
    exhibits = chain(_curves(reproduction), _tables(reproduction), _data(reproduction))
    return {exhibit.name: exhibit for exhibit in exhibits}


def figure_6_curves(reproduction: Reproduction) -> list[Curve]:
    """Validation perplexity over training, published and ours."""
    records = reproduction.select("2019/figure-6", "validation_perplexity")
    return build_curves(records, model_order(reproduction))


def _curves(reproduction: Reproduction) -> Iterator[Exhibit]:
    if curves := figure_6_curves(reproduction):
        yield Exhibit(
            "2019-figure-6",
            "Validation perplexity against iterations",
            [*findings.ordering_caption(curves), *_means(curves, ", bands their least and greatest")],
            tables.records_data(reproduction.select("2019/figure-6", "validation_perplexity")),
            reproduction.command("figure-6"),
            partial(figure_6.draw, curves),
            findings.figure_6_alt(curves),
        )
    losses = reproduction.select("2019/training-loss", "training_loss")
    if curves := build_curves(losses, model_order(reproduction)):
        yield Exhibit(
            "training-loss",
            "Training loss against iterations",
            [findings.training_loss_caption(curves), *_means(curves)],
            tables.records_data(losses),
            reproduction.command("training-loss"),
            partial(draw_loss, curves),
            findings.training_loss_alt(curves),
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
        shown = tables.comparison_tables(benchmarks)
        yield Exhibit("2019-table-3", "WikiText-103 and LAMBADA", (), data, command, tables=shown)
    if scores := reproduction.scores:
        ours = [record for record in benchmarks if record.kind != "published"]
        data, command, shown = tables.records_data(ours), reproduction.command("table-3"), [bands_table(ours)]
        said = scores.sentences(ours)
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
    """Of each model the mean of its seeds with the least and the greatest, where no paper has such a number."""
    values: dict[tuple[str, str], list[float]] = {}
    for record in records:
        if record.quantity.endswith(("bits_per_byte", "log_likelihood")) and record.seed is not None:
            quantity = f"{record.quantity.replace('_', ' ')} {record.unit}".strip()
            values.setdefault((quantity, record.series), []).append(record.value)
    rows = [(*which, band(mine)) for which, mine in values.items()]
    return Table(("quantity", "model", "mean (least to greatest of the seeds)"), rows, 2)


def band(values: Sequence[float], digits: int = 3) -> str:
    """The mean of several seeds with the least and the greatest."""
    mean, low, high = (f"{value:,.{digits}f}" for value in (fmean(values), min(values), max(values)))
    return f"{mean} ({low} to {high})" if len(values) > 1 else mean


def _data(reproduction: Reproduction) -> Iterator[Exhibit]:
    ledger = reproduction.ledger
    if not ledger:
        return
    command = reproduction.command("data-ledger", "ledger")
    yield Exhibit(
        "data-ledger",
        "What each stage kept and dropped",
        ["Solid: kept after the stage. Hatched: dropped by the stage."],
        tables.ledger_data(ledger),
        command,
        partial(draw_funnel, ledger.stages),
        findings.funnel_alt(ledger),
        (tables.attrition_table(ledger),),
    )
    if banding := ledger.near_duplicates:
        yield Exhibit(
            "near-duplicates",
            "Near-duplicates: what the banding finds",
            data_card.banding_caption(banding),
            data_card.banding_data(banding),
            command,
            partial(draw_banding, banding),
            data_card.banding_alt(banding),
        )
