"""Tables and figures of the experiments catalogue, with a layer for each kind of number."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean

from mlm_repro.experiments.catalogue import Experiment
from mlm_repro.experiments.reproduce.files import LADDER as MODELS
from mlm_repro.experiments.verdicts import Verdict
from mlm_repro.experiments.verdicts import named as named_outcome
from mlm_repro.lineage.numbers import MISSING, show
from mlm_repro.lineage.records import Record
from mlm_repro.reports.exhibit import Exhibit, Table
from mlm_repro.reports.figures import Layer, Panel, layers_of
from mlm_repro.reports.style import KIND_GLYPHS
from mlm_repro.reports.tables import AXES, records_data


@dataclass(frozen=True)
class ExperimentNumbers:
    """Experiment of the catalogue with the records of numbers made here and the verdicts on its
    claims."""

    experiment: Experiment
    records: Sequence[Record]
    claims: Sequence[Verdict]

    @cached_property
    def every(self) -> list[Record]:
        """List of Records: the published number of each claim of the experiment, in order, then the
        numbers made here, the attribute `records`, as they are."""
        experiment = self.experiment
        x_name = self.x_name
        return [
            *(
                claim.record(experiment.name, "" if claim.x is None else x_name)
                for claim in experiment.claims
            ),
            *self.records,
        ]

    @property
    def texts(self) -> list[str]:
        """List of strings, one for each record of this object's list `every`, in its order: a
        published number with its printed digits, and one made here with its interval in brackets,
        if it has both ends."""
        return [*(str(claim.value) for claim in self.experiment.claims), *map(_text, self.records)]

    @property
    def x_name(self) -> str:
        """Name of the quantity on the x axis, such as `gpus`: the first that a part of the
        experiment has or, if none has one, the first that a record has; empty without one."""
        names = (
            *(part.x for part in self.experiment.parts),
            *(record.x_name for record in self.records),
        )
        return next(filter(None, names), "")

    @property
    def x_label(self) -> str:
        """Label of the x axis: the one in axes.toml for `x_name`, else that name with spaces."""
        return AXES["positions"].get(self.x_name, self.x_name.replace("_", " "))


def catalogue_exhibit(numbers: ExperimentNumbers) -> Exhibit:
    """Return the Exhibit, for the page, of the experiment in `numbers`, an ExperimentNumbers: with
    data and command, a figure of one quantity, a table of the other published quantities, or both.
    It has the published numbers with ours over them, or ours alone if the experiment answers no
    claim."""
    experiment = numbers.experiment
    quantity = _drawn(numbers)
    command = f"mlm-experiment run {experiment.name}"
    if experiment.ablation:
        command = f"mlm-experiment ablate {experiment.name} --dataset DATASET"
    layers = drawn_layers(numbers, quantity)
    shows = f"As published: {experiment.shows}" if experiment.claims else experiment.shows
    caption = [shows, *_arms(numbers), *_repeats(layers)]
    table = _table(numbers, quantity)
    label = named(quantity)
    return Exhibit(
        experiment.name.replace("/", "-"),
        experiment.title,
        caption,
        records_data(numbers.every, numbers.texts[: len(experiment.claims)]),
        command,
        [Panel(layers, numbers.x_label, label)] if quantity else (),
        f"Chart of {label} against {numbers.x_label}. {' '.join(caption)}" if quantity else "",
        (table,) if table.rows or not quantity else (),
        column=bool(quantity),
    )


def drawn_layers(numbers: ExperimentNumbers, quantity: str) -> list[Layer]:
    """Return a list of chart Layers, one for each series and kind, of the numbers in
    `numbers.every` that are of `quantity` and have an x: first the published ones, then the others.
    In both groups the models of the 2019 paper come first, and then the other series in the
    numbers' order. The 2019 paper's models have the same colours in every figure. Several of our
    numbers at one x become their mean, with the least and the greatest of them as its interval; of
    several published ones the first counts. The list is empty without such numbers."""
    rows = [row for row in numbers.every if row.quantity == quantity and row.x is not None]
    series = dict.fromkeys(row.series for row in rows)
    models = () if {*MODELS}.isdisjoint(series) else MODELS
    return layers_of(rows, list(dict.fromkeys((*models, *series))))


def named(quantity: str) -> str:
    """Return the label of the quantity named `quantity` on an axis or a column: the one in
    axes.toml, else the name with spaces."""
    return AXES["quantities"].get(quantity, quantity.replace("_", " "))


def _drawn(numbers: ExperimentNumbers) -> str:
    """Return the name of the quantity to draw, among those with at least two points, which are
    pairs of a series and an x: a published one before others, then one that has our numbers, then
    the one with the most points. Empty if no quantity has two points, or if the experiment's
    exhibit is a table."""
    drawn = dict.fromkeys(
        (row.quantity, row.series, row.x) for row in numbers.every if row.x is not None
    )
    counts = Counter(quantity for quantity, _, _ in drawn)
    if numbers.experiment.chart == "table" or max(counts.values(), default=0) < 2:
        return ""
    ours = {record.quantity for record in numbers.records}
    published = {claim.quantity for claim in numbers.experiment.claims}
    several = [quantity for quantity, count in counts.items() if count > 1]
    return max(
        several, key=lambda quantity: (quantity in published, quantity in ours, counts[quantity])
    )


def _table(numbers: ExperimentNumbers, without: str) -> Table:
    """Return a Table of numbers, published and made here, of the quantities that the experiment
    has claims on, other than the one named `without`: a row for each series and x with a published
    number, and a column for each pair of a quantity and a kind of number. x has a column only if
    any row has one; several numbers of one cell are joined by semicolons."""
    quantities = [claim.quantity for claim in numbers.experiment.claims]
    texts = defaultdict(list)
    shown = [row for row in numbers.every if row.quantity in quantities and row.quantity != without]
    for row, text in zip(numbers.every, numbers.texts, strict=True):
        texts[row.series, row.x, row.quantity, row.kind].append(text)
    columns = sorted(
        dict.fromkeys((row.quantity, row.kind) for row in shown),
        key=lambda column: quantities.index(column[0]),
    )
    positions = dict.fromkeys((row.series, row.x) for row in shown if row.kind == "published")
    positioned = any(x is not None for _, x in positions)
    rows = [
        [
            series,
            *[MISSING if x is None else f"{x:,g}"] * positioned,
            *("; ".join(dict.fromkeys(texts[series, x, *column])) or MISSING for column in columns),
        ]
        for series, x in positions
    ]
    kinds = (f"{named(quantity)} {KIND_GLYPHS[kind]} {kind}" for quantity, kind in columns)
    return Table(["", *[numbers.x_label] * positioned, *kinds], rows)


def _text(record: Record) -> str:
    interval = f" ({show(record.low)} to {show(record.high)})"
    return show(record.value) + ("" if record.low is None or record.high is None else interval)


def _repeats(layers: Iterable[Layer]) -> list[str]:
    """Return a list of sentences, one for each of the kinds measured, counted and scaled that
    `layers` has: the number of our runs behind a point, or the least and the greatest number if
    points differ in it."""
    sentences = []
    counts = defaultdict[str, set[int]](set)
    for layer in layers:
        counts[layer.kind] |= {point.count for point in layer.points}
    for kind in ("measured", "counted", "scaled"):
        if kind in counts:
            least = min(counts[kind])
            most = max(counts[kind])
            number = str(least) if least == most else f"{least} to {most}"
            spread = ", drawn as their mean with least and most" if most > 1 else ""
            sentences.append(f"{kind.capitalize()}: {number} at a place{spread}.")
    return sentences


def _arms(numbers: ExperimentNumbers) -> list[str]:
    """Return a list of sentences on an ablation: its question; one sentence on all arms together,
    with each arm's final validation loss (mean, least and greatest), its learning rate and how many
    of its trainings diverged; and a sentence for the verdict on each effect. The list is empty if
    no effect was tried or the experiment is no ablation."""
    ablation = numbers.experiment.ablation
    tried = [item for item in numbers.claims if item.scale == "reduced"]
    if ablation is None or not tried:
        return []
    ends = [
        f"{arm.name} {_end([item for item in numbers.records if item.series == arm.name])}"
        for arm in ablation.arms
    ]
    trained = (
        f"{ablation.train['iterations']:,} iterations of batch"
        f" {ablation.train['global_batch_size']}"
    )
    return [
        ablation.question,
        f"Validation loss after {trained}, {ablation.seeds} seeds: {'; '.join(ends)}.",
        *(f"{named_outcome(verdict.outcome)}: {verdict.reason}." for verdict in tried),
    ]


def _end(arm: Sequence[Record]) -> str:
    losses, lost, rates = (
        [row.value for row in arm if row.quantity == quantity]
        for quantity in ("final_validation_loss", "diverged", "learning_rate")
    )
    ended = (
        f"{fmean(losses):.3f} ({min(losses):.3f} to {max(losses):.3f})" if losses else "no number"
    )
    ended += f", {sum(lost):g} of {len(lost)} diverged" if sum(lost) else ""
    return f"{ended} at the rate {rates[0]:g}"
