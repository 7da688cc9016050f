"""Orderings and sentences are computed from the records."""

import pytest

from lineage.numbers import show, size_bytes
from lineage.records import Kind, Record
from reports.curves import Curve, build_curves, orderings
from reports.figures.curves import running_mean
from reports.figures.marks import _spread
from reports.numbers import accuracy, compact, exact
from reports.reproduced import ordering_caption


def _curves(finals: dict[str, float], kind: Kind = "scaled") -> list[Curve]:
    return [
        Curve(series, kind, rank, (0.0, 10.0), (100.0 - rank, final))
        for rank, (series, final) in enumerate(finals.items())
    ]


def test_curves_are_sorted_by_x_and_published_first() -> None:
    def point(series: str, kind: Kind, x: float | None, value: float) -> Record:
        return Record(experiment="e", series=series, quantity="q", value=value, kind=kind, source="s", x=x)

    curves = build_curves(
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
    assert curves[2].x == (10, 20)
    assert curves[2].share == (0.5, 1.0)
    assert curves[2].final == 5.0


@pytest.mark.parametrize(
    ("finals", "holds", "inversions"),
    [
        ({"355m": 30.0, "2.5b": 20.0, "8.3b": 10.0}, True, []),
        ({"355m": 30.0, "2.5b": 10.0, "8.3b": 20.0}, False, [("8.3b", "2.5b")]),
        ({"355m": 30.0, "2.5b": 20.0, "8.3b": 20.0}, False, [("8.3b", "2.5b")]),
        ({"355m": 30.0}, None, []),
    ],
)
def test_the_order_is_strict(finals: dict[str, float], holds: bool | None, inversions: list[object]) -> None:
    (found,) = orderings(_curves(finals))
    assert found.holds is holds
    assert found.inversions == inversions


def test_the_sentence_follows_the_numbers() -> None:
    (kept,) = ordering_caption(_curves({"355m": 30.0, "8.3b": 10.0}))
    assert kept.startswith("In the scaled twins the larger model ends lower: 8.3b 10.00 < 355m 30.00.")
    (lost,) = ordering_caption(_curves({"355m": 10.0, "8.3b": 30.0}))
    assert lost.startswith("In the scaled twins 8.3b does not end below 355m: 8.3b 30.00, 355m 10.00.")
    assert ordering_caption([]) == []


def test_labels_keep_their_distance_and_order() -> None:
    places = _spread([0.1, 0.11, 0.12, 0.9], 0.05)
    assert places == pytest.approx([0.06, 0.11, 0.16, 0.9])


def test_the_running_mean_looks_back() -> None:
    assert running_mean([1.0, 3.0, 5.0], 2) == [1.0, 2.0, 4.0]
    assert running_mean([1.0, 3.0], 1) == [1.0, 3.0]


def test_numbers_are_written_plainly() -> None:
    assert [show(value) for value in (9.266, 210.44, 1315.2, 3_000_000, 1e30, None)] == [
        "9.27",
        "210.4",
        "1,315",
        "3,000,000",
        "1e+30",
        "—",
    ]
    assert [exact(value) for value in (500.0, 9.27, None)] == ["500", "9.27", ""]
    assert [compact(value) for value in (1500.0, 300_000.0, 1.2e6, 0.0)] == ["1,500", "300k", "1.2M", "0"]
    assert accuracy(66.51, "%") == "66.51 %"
    assert accuracy(0.6651, "fraction") == "66.51 %"
    assert accuracy(0.5, "") == "0.50"
    assert size_bytes(8_400_000) == "8.40 MB"
