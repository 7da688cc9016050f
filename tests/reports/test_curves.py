"""Orderings and sentences are computed from the records."""

import math

from mlm_repro.lineage.numbers import compact, exact, show, size_bytes
from mlm_repro.lineage.records import Kind, Record
from mlm_repro.reports.figures import layers_of


def test_curves_are_sorted_by_x_and_published_first() -> None:
    def point(series: str, kind: Kind, x: float | None, value: float) -> Record:
        return Record(
            experiment="e", series=series, quantity="q", value=value, kind=kind, source="s", x=x
        )

    curves = layers_of(
        [
            point("8.3b", "scaled", 20, 5.0),
            point("8.3b", "scaled", 10, 6.0),
            point("8.3b", "scaled", None, 1.0),
            point("8.3b", "published", 300, 9.0),
            point("355m", "published", 300, 15.0),
        ],
        ["355m", "8.3b"],
    )
    assert [(curve.kind, curve.series) for curve in curves] == [
        ("published", "355m"),
        ("published", "8.3b"),
        ("scaled", "8.3b"),
    ]
    assert [point.x for point in curves[2].points] == [10, 20]
    assert curves[2].final == 5.0


def test_numbers_are_written_plainly() -> None:
    assert [show(value) for value in (9.266, 0.00456, 210.44, 1315.2, 3_000_000, 1e30, None)] == [
        "9.27",
        "0.00456",
        "210.4",
        "1,315",
        "3,000,000",
        "1e+30",
        "—",
    ]
    assert [exact(value) for value in (500.0, 9.27, None)] == ["500", "9.27", ""]
    assert [exact(value) for value in (math.inf, math.nan, 1e16)] == ["inf", "nan", "1e+16"]
    assert [compact(value) for value in (1500.0, 300_000.0, 1.2e6, 0.0)] == [
        "1,500",
        "300k",
        "1.2M",
        "0",
    ]
    assert size_bytes(8_400_000) == "8.40 MB"
