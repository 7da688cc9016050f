"""Exhibits of a reproduction, with captions and texts that are computed from its numbers."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from mlm_repro.data_pipeline.files import Ledger
from mlm_repro.evaluation.schema import Result
from mlm_repro.experiments.scores import order_verdict
from mlm_repro.lineage.numbers import MISSING, show
from mlm_repro.lineage.records import Record
from mlm_repro.reports import tables
from mlm_repro.reports.exhibit import Exhibit, Table
from mlm_repro.reports.figures import Layer, Panel, layers_of
from mlm_repro.reports.load import Reproduction

TWINS = ("bits_per_byte", "accuracy", "log_likelihood")
"""Endings of the quantities that mean something for a model of any size."""


def reproduction_exhibits(reproduction: Reproduction) -> dict[str, Exhibit]:
    """Return a dict name → Exhibit of a reproduction's exhibits, in the order of the page: curves,
    comparisons, further numbers, evaluations, models and the data's ledger. An exhibit without
    numbers is left out."""
    return {exhibit.name: exhibit for exhibit in (*_curves(reproduction), *_tables(reproduction))}


def by_kind(curves: Sequence[Layer]) -> list[Panel]:
    """Return a list of Panels of validation perplexity over iterations, one for each value of the
    attribute `kind` in `curves`, a flat list of Layers: a Panel has the curves of its kind. The
    kind of the last curve comes first; `layers_of` puts published curves first, so that their panel
    is the last one."""
    kinds = dict.fromkeys(curve.kind for curve in reversed(curves))
    return [
        Panel(
            [curve for curve in curves if curve.kind == kind],
            "iteration",
            "validation perplexity (logarithmic)",
            "scaled twins" if kind == "scaled" else kind,
        )
        for kind in kinds
    ]


def _curves(reproduction: Reproduction) -> Iterator[Exhibit]:
    perplexities = reproduction.select("2019/figure-6", "validation_perplexity")
    if curves := _labelled(perplexities, reproduction):
        sentence = ends_of(curves)
        means = _means(curves, ", means of several seeds with the bands of all")
        yield Exhibit(
            "2019-figure-6",
            "Validation perplexity against iterations",
            [
                sentence,
                f"Points are of a fixed part of the validation text{means}; the numbers at the top"
                " are of all of it.",
            ],
            tables.records_data(perplexities),
            reproduction.command,
            by_kind(curves),
            f"Line charts of validation perplexity over iterations, logarithmic. {sentence}",
        )
    losses = reproduction.select("2019/training-loss", "training_loss")
    if curves := _labelled(losses, reproduction):
        sentence = ends_of(curves) + _means(curves, " Lines are means of several seeds.")
        yield Exhibit(
            "training-loss",
            "Training loss against iterations",
            [sentence],
            tables.records_data(losses),
            reproduction.command,
            [Panel(curves, "iteration", "training loss (nats per token)")],
            f"Line chart of training loss against iterations. {sentence}",
        )


def _tables(reproduction: Reproduction) -> Iterator[Exhibit]:
    def exhibit(
        name: str, title: str, data: Table, shown: Sequence[Table], caption: Sequence[str] = ()
    ) -> Exhibit:
        return Exhibit(name, title, caption, data, reproduction.command, tables=shown)

    benchmarks = reproduction.select("2019/table-3")
    drawn = {("2019/figure-6", "validation_perplexity"), ("2019/training-loss", "training_loss")}
    further = [
        record
        for record in reproduction.records
        if record.experiment != "2019/table-3" and (record.experiment, record.quantity) not in drawn
    ]
    if benchmarks:
        shown = tables.comparison_tables(benchmarks)
        yield exhibit(
            "2019-table-3", "WikiText-103 and LAMBADA", tables.records_data(benchmarks), shown
        )
    if ours := [record for record in benchmarks if record.kind != "published"]:
        scores = reproduction.scores
        yield exhibit(
            "2019-twins",
            "The models on the same texts",
            tables.records_data(ours),
            [twins_table(reproduction)],
            scores.sentences(reproduction.summary.labels) if scores else (),
        )
    if further:
        data = tables.records_data(further)
        yield exhibit("further-numbers", "Further numbers", data, [data])
    if evaluations := reproduction.evaluations:
        labels = {
            model.name: f"{model.label}, seed {model.seed}" for model in reproduction.summary.models
        }
        yield evaluations_exhibit(evaluations, reproduction.order, reproduction.command, labels)
    if models := reproduction.summary.models:
        shown = tables.models_tables(models, reproduction.own_kind)
        yield exhibit("models", "Published and trained shapes", tables.models_data(models), shown)
    yield ledger_exhibit(reproduction.ledger, reproduction.command)


def evaluations_exhibit(
    evaluations: Mapping[str, Result],
    order: Sequence[str],
    command: str = "",
    labels: Mapping[str, str] | None = None,
) -> Exhibit:
    """Return the Exhibit of `evaluations`, a dict file stem → result. The attribute `data` has a
    row for each result, in the dict's order; `tables` has a Table of perplexities and one of
    last-word tests, each left out if it has no results. The rows of both are sorted by protocol,
    then by the model's position in `order`; other models come last. A model stands there under its
    label in `labels`, by default its name, which is the stem without `-TASK` at its end. `command`
    is the command line that makes the results, empty if it is not known."""
    return Exhibit(
        "evaluations",
        "Evaluations by convention",
        (),
        tables.evaluations_data(evaluations),
        command,
        tables=tables.evaluations_tables(evaluations, order, labels or {}),
    )


def ledger_exhibit(ledger: Ledger, command: str = "") -> Exhibit:
    """Return the Exhibit of a dataset's `ledger`, tables without a figure: how many documents each
    stage of the data pipeline kept, and how many it dropped for which reason. `command` is the
    command line that makes these numbers, empty if it is not known."""
    return Exhibit(
        "data-ledger",
        "What each stage kept and dropped",
        (),
        tables.ledger_data(ledger),
        command,
        tables=[tables.attrition_table(ledger)],
    )


def _labelled(records: Sequence[Record], reproduction: Reproduction) -> list[Layer]:
    """Return a list of curves, a Layer for each pair of series and kind of number, from the ones of
    `records` that have a value on the x axis: published ones first, then in the order of the
    attribute `order` of `reproduction`. The name of a trained model is replaced by its label in the
    summary of `reproduction`, which includes its size; published series keep their names."""
    labels = reproduction.summary.labels
    return [
        layer
        if layer.kind == "published"
        else replace(layer, series=labels.get(layer.series, layer.series))
        for layer in layers_of(records, reproduction.order)
    ]


def ends_of(curves: Sequence[Layer]) -> str:
    """Return a sentence on the last value of each of the curves, Layers of a figure, in order and
    each with its series' name, such as `At the end: 345m: 3.10; published 8.3b: 2.90.` `curves`
    must not be empty."""
    ends = (
        f"{'published ' * (curve.kind == 'published')}{curve.series}: {show(curve.final)}"
        for curve in curves
    )
    return f"At the end: {'; '.join(ends)}."


def _means(curves: Sequence[Layer], sentence: str) -> str:
    return sentence if any(curve.repeats > 1 for curve in curves) else ""


def order_of(reproduction: Reproduction) -> str:
    """Return a sentence, from the attributes `records`, `scores` and `summary` of a Reproduction,
    on whether its larger models end lower in perplexity and, if it has scores, in bits per byte
    too, in every seed and beyond chance; or that it has one size alone."""
    return order_verdict(reproduction.records, reproduction.scores, reproduction.summary.labels)


def twins_table(reproduction: Reproduction) -> Table:
    """Return a Table of the quantities that can be compared between models of any size, bits per
    byte, accuracy and log-likelihood of each text, a column each, from the reproduction's own
    records of 2019/table-3: a row for each trained model that has one, and a last row for an even
    guess over the vocabulary, if its size is known.

    Several seeds are shown as their mean, minimum and maximum.
    """
    cells = defaultdict(list)
    units = {}
    series = {}
    labels = reproduction.summary.labels
    models = reproduction.summary.models
    for record in reproduction.select("2019/table-3"):
        if record.quantity.endswith(TWINS) and record.seed is not None:
            cells[record.series, record.quantity].append(record)
            units[record.quantity] = record.unit
            series[record.series] = labels.get(record.series, record.series)
    rows = [
        [
            label,
            *(tables.cell_of(cells[name, quantity], "{:,.3f}".format) for quantity in units),
        ]
        for name, label in series.items()
    ]
    if models and (vocab_size := models[0].trained.vocab_size):
        chances = dict[str, str]()
        for result in reproduction.evaluations.values():
            chances |= tables.chance(result, vocab_size)
        rows.append(["an even guess", *(chances.get(quantity, MISSING) for quantity in units)])
    heads = [f"{quantity.replace('_', ' ')} {unit}".strip() for quantity, unit in units.items()]
    return Table(("model", *heads), rows, 1, "What means something at this size")
