"""Curves of records, and the order of models by size."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

from lineage.records import Kind, Record
from reports.load import Reproduction

_SIZE = re.compile(r"(\d+(?:\.\d+)?)([kmbt])", re.IGNORECASE)
_FACTOR = {"k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}


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
    """Series of the summary and the records, by published size, then by name."""
    sizes = {
        model.series: model.published.parameters
        for model in reproduction.summary.models
        if model.published.parameters is not None
    }
    names = {model.series for model in reproduction.summary.models}
    names |= {record.series for record in reproduction.records}
    return sorted(names, key=lambda name: (sizes.get(name, _size_in_name(name)), name))


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


def _size_in_name(name: str) -> float:
    match = _SIZE.search(name)
    return float(match[1]) * _FACTOR[match[2].lower()] if match else float("inf")
