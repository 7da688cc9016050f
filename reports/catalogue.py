"""Tables and figures of the experiments catalogue, with a layer for each kind of number."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from statistics import fmean

from mlm_repro.experiments.catalogue import Experiment
from mlm_repro.experiments.reproduce.files import LADDER as MODELS
from mlm_repro.experiments.verdicts import Verdict
from mlm_repro.experiments.verdicts import named as named_outcome
from mlm_repro.lineage.numbers import MISSING, show
from mlm_repro.lineage.records import Kind, Record
from mlm_repro.reports.exhibit import Exhibit, Table
from mlm_repro.reports.figures import Layer, NumberRow, draw_curves, layers_of
from mlm_repro.reports.style import KIND_GLYPHS
from mlm_repro.reports.tables import AXES, RECORD_FIELDS, records_data


@dataclass(frozen=True)
class ExperimentNumbers:
    """Records and claims of an experiment."""

    experiment: Experiment
    records: Sequence[Record]
    claims: Sequence[Verdict]

    @cached_property
    def rows(self) -> list[NumberRow]:
        """A row for each published number with its printed digits, then a row for each number made here."""
        claims = self.experiment.claims
        return [
            *(NumberRow(c.quantity, c.series, "published", c.x, float(c.value), str(c.value)) for c in claims),
            *(NumberRow(r.quantity, r.series, r.kind, r.x, r.value, _text(r), r.low, r.high) for r in self.records),
        ]

    @property
    def x_name(self) -> str:
        """Name of the position on the x axis."""
        names = [part.x for part in self.experiment.parts] + [record.x_name for record in self.records]
        return next((name for name in names if name), "")

    @property
    def x_label(self) -> str:
        """Label of the x axis."""
        return AXES["positions"].get(self.x_name, self.x_name.replace("_", " "))


def catalogue_exhibit(numbers: ExperimentNumbers) -> Exhibit:
    """The published table or figure, with simulated, computed and measured numbers over it."""
    experiment = numbers.experiment
    quantity = _drawn(numbers)
    command = f"mlm-experiment run {experiment.name}{'' if experiment.measures else ' --mode simulate'}"
    if experiment.ablation:
        command = f"mlm-experiment ablate {experiment.name} --dataset DATASET"
    name = experiment.name.replace("/", "-")
    data = _data(numbers)
    layers = drawn_layers(numbers, quantity)
    shows = f"As published: {experiment.shows}" if experiment.claims else experiment.shows
    caption = [shows, *_arms(numbers), *_repeats(layers)]
    table = _table(numbers, quantity)
    if not quantity:
        return Exhibit(name, experiment.title, caption, data, command, tables=(table,))
    draw = partial(draw_curves, layers, numbers.x_label, named(quantity))
    alt = f"Chart of {named(quantity)} against {numbers.x_label}. {' '.join(caption)}"
    tables = (table,) if table.rows else ()
    return Exhibit(name, experiment.title, caption, data, command, draw, alt, tables, column=True)


def drawn_layers(numbers: ExperimentNumbers, quantity: str) -> list[Layer]:
    """The layers of a quantity; models have the same colours in every figure."""
    rows = [row for row in numbers.rows if row.quantity == quantity and row.x is not None]
    series = list(dict.fromkeys(row.series for row in rows))
    if not {*MODELS}.isdisjoint(series):
        series = [*MODELS, *(name for name in series if name not in MODELS)]
    return layers_of(rows, series)


def named(quantity: str) -> str:
    """Label of a quantity on an axis or a column."""
    return AXES["quantities"].get(quantity, quantity.replace("_", " "))


def _drawn(numbers: ExperimentNumbers) -> str:
    """The quantity to draw: a published one that has our numbers, then the one with most places; empty for a table."""
    drawn = dict.fromkeys((row.quantity, row.series, row.x) for row in numbers.rows if row.x is not None)
    places = {quantity: count for quantity, count in Counter(place[0] for place in drawn).items() if count > 1}
    if numbers.experiment.chart == "table" or not places:
        return ""
    ours = {record.quantity for record in numbers.records}
    published = {claim.quantity for claim in numbers.experiment.claims}
    return max(places, key=lambda quantity: (quantity in published, quantity in ours, places[quantity]))


def _data(numbers: ExperimentNumbers) -> Table:
    """Published numbers with their printed digits, then our numbers as recorded."""
    name, claims = numbers.experiment.name, numbers.experiment.claims
    published = [claim.record(name, "" if claim.x is None else numbers.x_name) for claim in claims]
    value = RECORD_FIELDS.index("value")
    rows = [[*row[:value], str(claim.value), *row[value + 1 :]]
            for row, claim in zip(records_data(published).rows, claims, strict=True)]  # fmt: skip
    return Table(RECORD_FIELDS, [*rows, *records_data(numbers.records).rows], 4)


def _table(numbers: ExperimentNumbers, without: str) -> Table:
    """A row for each series and place with a published number, a column for each quantity and kind."""
    wanted = list(dict.fromkeys(c.quantity for c in numbers.experiment.claims if c.quantity != without))
    shown = [row for row in numbers.rows if row.quantity in wanted]
    columns = sorted(dict.fromkeys((row.quantity, row.kind) for row in shown), key=lambda c: wanted.index(c[0]))
    positioned = any(row.x is not None for row in shown if row.kind == "published")
    places: dict[tuple[str, float | None], list[NumberRow]] = {}
    for row in shown:
        places.setdefault((row.series, row.x), []).append(row)
    rows = []
    for (series, x), at in places.items():
        if any(row.kind == "published" for row in at):
            texts: dict[tuple[str, Kind], dict[str, None]] = {}
            for row in at:
                texts.setdefault((row.quantity, row.kind), {})[row.text] = None
            position = [MISSING if x is None else f"{x:,g}"] if positioned else []
            rows.append([series, *position, *("; ".join(texts.get(column, [MISSING])) for column in columns)])
    heads = [
        "",
        *([numbers.x_label] if positioned else []),
        *(f"{named(quantity)} {KIND_GLYPHS[kind]} {kind}" for quantity, kind in columns),
    ]
    return Table(heads, rows)


def _text(record: Record) -> str:
    interval = "" if record.low is None or record.high is None else f" ({show(record.low)} to {show(record.high)})"
    return f"{show(record.value)}{interval}"


def _repeats(layers: Iterable[Layer]) -> list[str]:
    """Sentences on the number of runs behind measured and scaled points."""
    said = []
    for kind in ("measured", "counted", "scaled"):
        counts = {point.count for layer in layers if layer.kind == kind for point in layer.points}
        if counts:
            number = str(min(counts)) if len(counts) == 1 else f"{min(counts)} to {max(counts)}"
            spread = ", drawn as their mean with least and most" if max(counts) > 1 else ""
            said.append(f"{kind.capitalize()}: {number} at a place{spread}.")
    return said


def _arms(numbers: ExperimentNumbers) -> list[str]:
    """Sentences on an ablation: its question, its training, the end of each arm and the verdict on each effect."""
    ablation = numbers.experiment.ablation
    tried = [each for each in numbers.claims if each.scale == "reduced"]
    if ablation is None or not tried:
        return []
    ends = [f"{arm.name} {_end([row for row in numbers.rows if row.series == arm.name])}" for arm in ablation.arms]
    trained = f"{ablation.train['iterations']:,} iterations of batch {ablation.train['global_batch_size']}"
    return [
        ablation.question,
        f"Validation loss after {trained}, {ablation.seeds} seeds: {'; '.join(ends)}.",
        *(f"{named_outcome(verdict.outcome)}: {verdict.reason}." for verdict in tried),
    ]


def _end(arm: Sequence[NumberRow]) -> str:
    losses, lost, rates = (
        [row.value for row in arm if row.quantity == quantity]
        for quantity in ("final_validation_loss", "diverged", "learning_rate")
    )
    ended = f"{fmean(losses):.3f} ({min(losses):.3f} to {max(losses):.3f})" if losses else "no number"
    ended += f", {sum(lost):g} of {len(lost)} diverged" if sum(lost) else ""
    return f"{ended} at the rate {rates[0]:g}"
