"""Tables and figures of the experiments catalogue, with a layer for each kind of number."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean
from typing import Any

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
    """Records and claims of an experiment."""

    experiment: Experiment
    records: Sequence[Record]
    claims: Sequence[Verdict]

    @cached_property
    def every(self) -> list[Record]:
        """The published numbers, then those made here."""
        name, claims = self.experiment.name, self.experiment.claims
        return [
            *(c.record(name, "" if c.x is None else self.x_name) for c in claims),
            *self.records,
        ]

    @property
    def texts(self) -> list[str]:
        """The printed digits of the published numbers, then the numbers made here with their
        intervals."""
        return [*(str(claim.value) for claim in self.experiment.claims), *map(_text, self.records)]

    @property
    def x_name(self) -> str:
        """Name of the position on the x axis."""
        names = (
            *(part.x for part in self.experiment.parts),
            *(record.x_name for record in self.records),
            "",
        )
        return next(filter(None, names), "")

    @property
    def x_label(self) -> str:
        """Label of the x axis."""
        return AXES["positions"].get(self.x_name, self.x_name.replace("_", " "))


def catalogue_exhibit(numbers: ExperimentNumbers) -> Exhibit:
    """The published table or figure, with simulated, computed and measured numbers over it."""
    experiment, quantity = numbers.experiment, _drawn(numbers)
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
    """The layers of a quantity; models have the same colours in every figure."""
    rows = [row for row in numbers.every if row.quantity == quantity and row.x is not None]
    series = dict.fromkeys(row.series for row in rows)
    models = () if {*MODELS}.isdisjoint(series) else MODELS
    return layers_of(rows, list(dict.fromkeys((*models, *series))))


def named(quantity: str) -> str:
    """Label of a quantity on an axis or a column."""
    return AXES["quantities"].get(quantity, quantity.replace("_", " "))


def _drawn(numbers: ExperimentNumbers) -> str:
    """The quantity to draw: a published one that has our numbers, then the one with most places;
    empty for a table."""
    drawn = dict.fromkeys(
        (row.quantity, row.series, row.x) for row in numbers.every if row.x is not None
    )
    places = Counter(quantity for quantity, _, _ in drawn)
    if numbers.experiment.chart == "table" or max(places.values(), default=0) < 2:
        return ""
    ours = {record.quantity for record in numbers.records}
    published = {claim.quantity for claim in numbers.experiment.claims}
    several = [quantity for quantity, count in places.items() if count > 1]
    return max(
        several, key=lambda quantity: (quantity in published, quantity in ours, places[quantity])
    )


def _table(numbers: ExperimentNumbers, without: str) -> Table:
    """A row for each series and place with a published number, a column for each quantity and
    kind."""
    wanted = list(
        dict.fromkeys(c.quantity for c in numbers.experiment.claims if c.quantity != without)
    )
    texts: dict[tuple[Any, ...], dict[str, None]] = defaultdict(dict)
    shown = [row for row in numbers.every if row.quantity in wanted]
    for row, text in zip(numbers.every, numbers.texts, strict=True):
        texts[row.series, row.x, row.quantity, row.kind][text] = None
    columns = sorted(
        dict.fromkeys((row.quantity, row.kind) for row in shown), key=lambda c: wanted.index(c[0])
    )
    places = dict.fromkeys((row.series, row.x) for row in shown if row.kind == "published")
    positioned = any(x is not None for _, x in places)
    rows = [
        [
            series,
            *[MISSING if x is None else f"{x:,g}"] * positioned,
            *("; ".join(texts[series, x, *column]) or MISSING for column in columns),
        ]
        for series, x in places
    ]
    kinds = (f"{named(quantity)} {KIND_GLYPHS[kind]} {kind}" for quantity, kind in columns)
    return Table(["", *[numbers.x_label] * positioned, *kinds], rows)


def _text(record: Record) -> str:
    interval = (
        ""
        if record.low is None or record.high is None
        else f" ({show(record.low)} to {show(record.high)})"
    )
    return f"{show(record.value)}{interval}"


def _repeats(layers: Iterable[Layer]) -> list[str]:
    """Sentences on the number of runs behind measured and scaled points."""
    said, counts = list[str](), defaultdict[str, set[int]](set)
    for layer in layers:
        counts[layer.kind] |= {point.count for point in layer.points}
    for kind in ("measured", "counted", "scaled"):
        if kind in counts:
            least = min(counts[kind])
            most = max(counts[kind])
            number = str(least) if least == most else f"{least} to {most}"
            spread = ", drawn as their mean with least and most" if most > 1 else ""
            said.append(f"{kind.capitalize()}: {number} at a place{spread}.")
    return said


def _arms(numbers: ExperimentNumbers) -> list[str]:
    """Sentences on an ablation: its question, its training, the end of each arm and the verdict on
    each effect."""
    ablation = numbers.experiment.ablation
    tried = [each for each in numbers.claims if each.scale == "reduced"]
    if ablation is None or not tried:
        return []
    ends = [
        f"{arm.name} {_end([each for each in numbers.records if each.series == arm.name])}"
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
