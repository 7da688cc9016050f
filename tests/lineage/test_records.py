"""Result records come back as they were written, and nothing else is read as one."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from mlm_repro.lineage.errors import BadInput
from mlm_repro.lineage.numbers import aligned, csv_cell
from mlm_repro.lineage.records import Record, read_records, write_records

TEXT = st.text(st.characters(codec="utf-8"))
FINITE = st.floats(allow_nan=False, allow_infinity=False)
RECORDS = st.builds(
    Record,
    experiment=TEXT,
    series=TEXT,
    quantity=TEXT,
    value=FINITE,
    kind=st.sampled_from(["measured", "scaled", "simulated", "published"]),
    source=TEXT,
    unit=TEXT,
    x=st.none() | FINITE,
    x_name=TEXT,
    digest=st.none() | TEXT,
    seed=st.none() | st.integers(-(2**63), 2**63 - 1),
    note=TEXT,
)
RECORD: dict[str, Any] = {
    "experiment": "2019/figure-6",
    "series": "355m",
    "quantity": "validation_perplexity",
    "value": 1.5,
    "kind": "scaled",
    "source": "run",
}


@given(st.lists(RECORDS, max_size=5))
def test_records_come_back(tmp_path_factory: pytest.TempPathFactory, records: list[Record]) -> None:
    path = tmp_path_factory.getbasetemp() / "records.jsonl"
    write_records(path, records)
    assert read_records(path) == records


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\x85", "\x0b", "\x1c", "\n", "\r\n"])
def test_a_line_separator_inside_a_text_does_not_end_the_record(
    tmp_path: Path, separator: str
) -> None:
    record = Record(**RECORD, note=f"before{separator}after")
    write_records(tmp_path / "records", [record, record])
    assert read_records(tmp_path / "records") == [record, record]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("field", ["value", "x"])
def test_a_number_that_is_none_is_not_a_result(field: str, value: float) -> None:
    with pytest.raises(ValidationError, match="finite"):
        Record(**(RECORD | {field: value}))


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("{", "is not JSON"),
        ("[1]", "dictionary"),
        (json.dumps(RECORD | {"kind": "guessed"}), "kind: "),
        (json.dumps(RECORD | {"valeu": 1}), "unknown key 'valeu'; did you mean 'value'?"),
        (json.dumps(RECORD | {"value": None}), "value: "),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, sentence: str) -> None:
    path = tmp_path / "records.jsonl"
    good = Record(**RECORD).model_dump_json()
    path.write_text(f"{good}\n{line}\n{good}\n", encoding="utf-8")
    with pytest.raises(BadInput) as caught:
        read_records(path)
    assert f"{path} line 2" in str(caught.value)
    assert sentence in str(caught.value)


def test_no_file_is_not_no_records(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="there are no result records"):
        read_records(tmp_path / "none.jsonl")
    write_records(tmp_path / "empty.jsonl", [])
    assert read_records(tmp_path / "empty.jsonl") == []


def test_cells_are_text() -> None:
    for formula in ("=1+1", "+cmd|' /C calc'!A0", "-2+3", "@SUM(1)", "\t=1", "\r=1"):
        assert csv_cell(formula) == f"'{formula}"
    for plain in ("-0.5", "+3", "-1e-9", "355m", "", "a=b"):
        assert csv_cell(plain) == plain


def test_columns_are_as_wide_as_their_longest_cell() -> None:
    assert aligned([("a", "b", "c"), ("long name", "1", "")]) == ["a          b  c", "long name  1"]
    assert aligned([]) == []
