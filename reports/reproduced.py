"""Exhibits of a reproduction, with captions and texts that are computed from its numbers."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from statistics import fmean

from mlm_repro.data_pipeline.files import Ledger
from mlm_repro.evaluation.schema import Result
from mlm_repro.lineage.numbers import show
from mlm_repro.lineage.records import Kind, Record
from mlm_repro.reports import tables
from mlm_repro.reports.exhibit import Exhibit, Table
from mlm_repro.reports.figures import Layer, draw_loss, draw_perplexity, layers_of
from mlm_repro.reports.load import Reproduction

NAMES: dict[Kind, str] = {"scaled": "scaled twins"}
"""Names of kinds in figures and captions, where that is not the kind's own."""
VALIDATED = "Points are of a fixed part of the validation text; the page's first sentence is about all of it."


def reproduction_exhibits(reproduction: Reproduction) -> dict[str, Exhibit]:
    """Exhibits by name; one without numbers is absent."""
    return {exhibit.name: exhibit for exhibit in (*_curves(reproduction), *_tables(reproduction))}


def by_kind(curves: Sequence[Layer]) -> dict[str, list[Layer]]:
    """Curves by kind, published last."""
    kinds = dict.fromkeys(curve.kind for curve in reversed(curves))
    return {NAMES.get(kind, kind): [curve for curve in curves if curve.kind == kind] for kind in kinds}


def _curves(reproduction: Reproduction) -> Iterator[Exhibit]:
    perplexities = reproduction.select("2019/figure-6", "validation_perplexity")
    if curves := layers_of(perplexities, reproduction.order):
        yield Exhibit(
            "2019-figure-6", "Validation perplexity against iterations",
            [said := _ends(curves), VALIDATED, *_means(curves, ", bands their least and greatest")],
            tables.records_data(perplexities), reproduction.command("figure-6"),
            partial(draw_perplexity, by_kind(curves)),
            f"Line charts of validation perplexity over iterations, logarithmic. {said}",
        )  # fmt: skip
    losses = reproduction.select("2019/training-loss", "training_loss")
    if curves := layers_of(losses, reproduction.order):
        yield Exhibit(
            "training-loss", "Training loss against iterations", [said := _ends(curves), *_means(curves)],
            tables.records_data(losses), reproduction.command("training-loss"), partial(draw_loss, curves),
            f"Line chart of training loss against iterations. {said}",
        )  # fmt: skip


def _tables(reproduction: Reproduction) -> Iterator[Exhibit]:
    benchmarks = reproduction.select("2019/table-3")
    drawn = {("2019/figure-6", "validation_perplexity"), ("2019/training-loss", "training_loss")}
    further = [record for record in reproduction.records
               if record.experiment != "2019/table-3"
               and (record.experiment, record.quantity) not in drawn]  # fmt: skip
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
        yield evaluations_exhibit(evaluations, reproduction.order, reproduction.command("table-3"))
    if models := reproduction.summary.models:
        kind, command = reproduction.own_kind, reproduction.command("models")
        data, shown = tables.models_data(models, kind), tables.models_tables(models, kind)
        yield Exhibit("models", "Published and trained shapes", (), data, command, tables=shown)
    if ledger := reproduction.ledger:
        yield ledger_exhibit(ledger, reproduction.command("data-ledger", "ledger"))


def evaluations_exhibit(evaluations: Mapping[str, Result], order: Sequence[str], command: str = "") -> Exhibit:
    """Tables of results by protocol, the models in this order."""
    data, shown = tables.evaluations_data(evaluations), tables.evaluations_tables(evaluations, order)
    return Exhibit("evaluations", "Evaluations by convention", (), data, command, tables=shown)


def ledger_exhibit(ledger: Ledger, command: str = "") -> Exhibit:
    """The table of what each stage kept, and of why documents were dropped."""
    data, shown = tables.ledger_data(ledger), [tables.attrition_table(ledger)]
    return Exhibit("data-ledger", "What each stage kept and dropped", (), data, command, tables=shown)


def _ends(curves: Sequence[Layer]) -> str:
    ends = (f"{NAMES.get(curve.kind, curve.kind)} {curve.series} {show(curve.final)}" for curve in curves)
    return f"At the end: {'; '.join(ends)}."


def _means(curves: Sequence[Layer], bands: str = "") -> list[str]:
    return [f"Lines are means of several seeds{bands}."] if any(curve.repeats > 1 for curve in curves) else []


def bands_table(records: Sequence[Record]) -> Table:
    """Mean, least and greatest of each model's seeds, for quantities without a published number."""
    values: dict[tuple[str, str], list[float]] = {}
    for record in records:
        if record.quantity.endswith(("bits_per_byte", "log_likelihood")) and record.seed is not None:
            quantity = f"{record.quantity.replace('_', ' ')} {record.unit}".strip()
            values.setdefault((quantity, record.series), []).append(record.value)
    rows = []
    for which, mine in values.items():
        mean, low, high = (f"{value:,.3f}" for value in (fmean(mine), min(mine), max(mine)))
        rows.append((*which, f"{mean} ({low} to {high})" if len(mine) > 1 else mean))
    return Table(("quantity", "model", "mean (least to greatest of the seeds)"), rows, 2)
