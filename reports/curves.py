"""Curves of records, and the order of models by size."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

from lineage.records import Kind, Record
from reports.load import Reproduction


@dataclass(frozen=True)
class Curve:
    """One series of one kind, by ascending x."""

    series: str
    kind: Kind
    rank: int
    """Place among the models by size, 0 for the smallest. It decides colour and marker."""
    x: tuple[float, ...]
    y: tuple[float, ...]
    """Mean over seeds."""
    band: tuple[tuple[float, float], ...] = ()
    """Least and greatest value of several seeds."""

    @property
    def final(self) -> float:
        """Last y."""
        return self.y[-1]


def model_order(reproduction: Reproduction) -> list[str]:
    """Series of the summary, smallest first, then the others of the records by name."""
    named = dict.fromkeys(model.series for model in reproduction.summary.models)
    return list(named | dict.fromkeys(sorted(record.series for record in reproduction.records)))


def build_curves(records: Iterable[Record], order: Sequence[str]) -> list[Curve]:
    """One curve for each kind and series with positions on the x axis, published first, then by size."""
    points: dict[tuple[Kind, str], dict[float, list[float]]] = {}
    for record in records:
        if record.x is not None:
            points.setdefault((record.kind, record.series), {}).setdefault(record.x, []).append(record.value)
    curves = []
    for (kind, series), pairs in points.items():
        xs, ys = zip(*sorted(pairs.items()), strict=True)
        band = tuple((min(y), max(y)) for y in ys) if max(map(len, ys)) > 1 else ()
        curves.append(Curve(series, kind, order.index(series), xs, tuple(map(fmean, ys)), band))
    return sorted(curves, key=lambda curve: (curve.kind != "published", curve.kind, curve.rank))
