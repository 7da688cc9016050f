"""Input that was not made for us: every line is a document, blank, or in quarantine with a
reason."""

import gzip
import json
import random
import re
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from mlm_repro.data_pipeline.document import Document, Malformed
from mlm_repro.data_pipeline.passes.prepare import prepare
from mlm_repro.data_pipeline.reading import file_sources
from mlm_repro.data_pipeline.reading.file_sources import FileSource
from mlm_repro.data_pipeline.reading.pieces import Piece, cut_lines
from mlm_repro.data_pipeline.reading.readers import MAX_LINE_BYTES, read_pieces
from mlm_repro.lineage.errors import BadInput
from mlm_repro.lineage.progress import Progress
from tests.data_pipeline.conftest import write_jsonl

VALID = b'{"text": "a fine text"}'


def piece_of(path: Path, kind: str = "jsonl", **values: int) -> Piece:
    return Piece(kind, path.name, str(path), "", path.stat().st_size, **values)


def read(
    path: Path, longest: int = MAX_LINE_BYTES, kind: str = "jsonl"
) -> list[Document | Malformed | None]:
    return list(read_pieces([piece_of(path, kind)], longest))


def hostile_line(rng: random.Random) -> bytes:
    """A line that somebody made to break a reader, or that something broke."""
    kind = rng.randrange(14)
    if kind == 0:
        return bytes(rng.choices([*range(10), *range(11, 256)], k=rng.randrange(60)))
    if kind == 1:
        return b"[" * rng.randrange(5000) + b"{" * rng.randrange(3)
    if kind == 2:
        return b'{"a":' * rng.randrange(2000) + b"1" + b"}" * rng.randrange(2000)
    if kind == 3:
        return json.dumps(
            {"text": rng.choice([None, 7, 1.5, True, [], {}, ["x"], {"text": "x"}])}
        ).encode()
    if kind == 4:
        return rng.choice(
            [
                b"null",
                b"0",
                b'"text"',
                b"[]",
                b"NaN",
                b"1e999",
                b"-",
                b"\xef\xbb\xbf",
                b"\x00",
                b"\xff",
            ]
        )
    if kind == 5:
        return (
            b'{"text": "'
            + rng.choice([b"\\ud800", b"\\udfff\\ud800", b"\\u0000", b"\\x", b"\x00", b"\x1f"])
            + b'"}'
        )
    if kind == 6:
        return b'{"text": "' + bytes(rng.choices(range(128, 256), k=5)) + b'"}'
    if kind == 7:
        return (
            b'{"text": "'
            + "".join(chr(rng.randrange(0xE000, 0x10FFFF)) for _ in range(9)).encode()
            + b'"}'
        )
    if kind == 8:
        return b'{"text": "first", "text": ' + rng.choice([b"7", b'"second"']) + b"}"
    if kind == 9:
        return b'{"text": ' + b"9" * rng.randrange(1, 6000) + b"}"
    if kind == 10:
        return (
            b'{"text": "'
            + b"x" * rng.randrange(3000)
            + b'"'
            + rng.choice([b"}", b"", b"}}", b",}"])
        )
    if kind == 11:
        return rng.choice([b"", b" ", b"\t\r", b"\x0b\x0c"])
    line = bytearray(VALID)
    for _ in range(rng.randrange(3)):
        line[rng.randrange(len(line))] = rng.choice([*range(10), *range(11, 256)])
    return bytes(line)


def test_of_a_hundred_thousand_hostile_lines_none_is_lost(tmp_path: Path) -> None:
    rng = random.Random(5)
    lines = [hostile_line(rng) for _ in range(100_000)]
    path = tmp_path / "fuzz.jsonl"
    path.write_bytes(b"\n".join(lines) + b"\n")
    (tmp_path / "out").mkdir()
    pieces = list(cut_lines(piece_of(path), 1 << 20))
    filters = [("clean", {"normalization": "NFC"})]
    counts = prepare(
        {"pieces": pieces, "max_line_bytes": 2000, "filters": filters, "goes_on": False},
        [],
        tmp_path / "out",
    )
    source, clean = counts["stages"]
    assert counts["blank"] == sum(not line.strip() for line in lines)
    assert source["documents_out"] + counts["malformed"] + counts["blank"] == len(lines)
    assert (
        source["documents_out"] == clean["documents_out"] + clean["dropped"]["empty"]["documents"]
    )
    quarantined = [json.loads(line) for line in (tmp_path / "out" / "quarantine.jsonl").open("rb")]
    assert len(quarantined) == counts["malformed"]
    assert all(item["reason"] and len(item["excerpt"]) <= 300 for item in quarantined)
    reasons = Counter(re.split(" at |[:,]", item["reason"])[0] for item in quarantined)
    assert {
        "invalid UTF-8",
        "not JSON",
        "no text",
        "text is not a string",
        "not a JSON object",
    } <= set(reasons)
    assert reasons["longer than 2"] == sum(len(line) > 2000 for line in lines)
    kept = [json.loads(line) for line in (tmp_path / "out" / "documents.jsonl").open("rb")]
    assert len(kept) == counts["documents"]


@settings(max_examples=60)
@given(
    lines=st.lists(
        st.sampled_from(
            [VALID, b"", b"broken", b"x" * 90_000, b'{"text": "' + b"y" * 200_000 + b'"}']
        )
    ),
    end=st.booleans(),
    shard_bytes=st.sampled_from([1 << 16, 1 << 17, 1 << 20]),
)
def test_a_file_cut_anywhere_is_the_same_lines(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes], end: bool, shard_bytes: int
) -> None:
    path = tmp_path_factory.mktemp("cut") / "a.jsonl"
    path.write_bytes(b"\n".join(lines) + (b"\n" if end and lines else b""))
    source = FileSource(f"jsonl:{path}")
    pieces = list(source.pieces(None, shard_bytes))  # type: ignore[arg-type]  # it is not written to
    assert list(read_pieces(pieces, 150_000)) == read(path, 150_000)
    assert len(read(path, 150_000)) == len(path.read_bytes().splitlines())


def test_a_table_of_many_row_groups_is_read_whole(tmp_path: Path) -> None:
    path, texts = tmp_path / "small.parquet", [f"text {number}" for number in range(1000)]
    texts[7] *= 1000
    parquet.write_table(pyarrow.table({"text": texts}), path, row_group_size=10)
    pieces = FileSource(f"parquet:{path}").pieces(None, 1)  # type: ignore[arg-type]  # it is not written to
    assert [each.text for each in read_pieces(pieces) if isinstance(each, Document)] == texts


def test_a_long_text_file_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"x" * 5000)
    (found,) = read(tmp_path / "a.txt", 4000, "text")
    assert isinstance(found, Malformed)
    assert found.reason == "longer than 4,000 bytes"


def kept_of(tmp_path: Path, lines: bytes, **settings: object) -> list[Document | Malformed]:
    (tmp_path / "a.jsonl").write_bytes(lines)
    piece = Piece("jsonl", "a.jsonl", str(tmp_path / "a.jsonl"), "", len(lines), **settings)
    return [item for item in read_pieces([piece]) if item is not None]


def test_no_digit_of_a_number_is_lost(tmp_path: Path) -> None:
    """Whole numbers beyond 64 bits become their digits, in metadata as in an id; a fraction is an
    id too."""
    large = "1180591620717411303453"
    lines = (
        f'{{"text": "x", "n": {large}, "m": [{2**64 - 1}, -{2**63}, 1e30]}}\n{{"text": "y", "n":'
        " 2.5}\n"
    )
    one, other = kept_of(tmp_path, lines.encode(), id_key="n", keep=("n", "m"))
    assert isinstance(one, Document)
    assert isinstance(other, Document)
    assert (one.id, other.id) == (large, "2.5")
    assert one.metadata == {"n": large, "m": [2**64 - 1, -(2**63), 1e30]}


@pytest.mark.parametrize("depth", [200, 260, 900])
def test_metadata_nested_too_deep_to_be_written_is_no_document(tmp_path: Path, depth: int) -> None:
    line = b'{"text": "x", "m": ' + b"[" * depth + b"]" * depth + b"}\n"
    (tmp_path / "deep.jsonl").write_bytes(line + b'{"text": "y"}\n')
    piece = Piece(
        "jsonl", "deep.jsonl", str(tmp_path / "deep.jsonl"), "", len(line) + 14, keep=("m",)
    )
    settings_ = {"pieces": [piece], "max_line_bytes": 1 << 20, "goes_on": False, "filters": []}
    counts = prepare(settings_, [], tmp_path)
    assert (counts["documents"], counts["malformed"]) == ((2, 0) if depth == 200 else (1, 1))
    if depth > 240:
        assert (
            "metadata is nested deeper than 240 levels"
            in (tmp_path / "quarantine.jsonl").read_text()
        )


def test_bytes_beside_a_text_are_text_or_a_data_url(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    parquet.write_table(pyarrow.table({"text": ["a", "b"], "b": ["é".encode(), b"\xff\0"]}), path)
    piece = Piece("parquet", "t", str(path), "", 1, end=1, keep=("b",))
    found = [item.metadata for item in read_pieces([piece]) if isinstance(item, Document)]
    assert found == [{"b": "é"}, {"b": "data:;base64,/wA="}]


def test_a_text_of_a_table_is_as_long_as_its_bytes(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    parquet.write_table(pyarrow.table({"text": ["é" * 20, "e" * 20]}), path)
    piece = Piece("parquet", "t", str(path), "", 1, end=1)
    long, short = read_pieces([piece], 30)
    assert isinstance(long, Malformed)
    assert long.reason == "longer than 30 bytes"
    assert isinstance(short, Document)


def test_an_empty_file_of_any_ending_is_empty(tmp_path: Path) -> None:
    for ending in ("", ".gz", ".zst", ".bz2", ".xz"):
        (tmp_path / f"a.jsonl{ending}").touch()
        assert read(tmp_path / f"a.jsonl{ending}") == []


def test_as_many_files_as_cores_are_hashed_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two are begun before either ends; their digests are those of one after the other."""
    write_jsonl(tmp_path / "a.jsonl", ["one", "two"])
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(b'{"text": "three"}\n' * 1000))
    one, two = (FileSource(f"jsonl:{tmp_path}") for _ in range(2))
    monkeypatch.setattr(file_sources, "available_cores", lambda: 1)
    rows = one._surveyed
    monkeypatch.setattr(file_sources, "available_cores", lambda: 2)
    both = threading.Barrier(2, timeout=60)
    survey = two._survey

    def begin_together(name: str, path: Path, progress: Progress) -> Any:
        both.wait()
        return survey(name, path, progress)

    monkeypatch.setattr(two, "_survey", begin_together)
    assert two.fingerprint() == one.fingerprint()
    assert two._surveyed == rows


def test_a_link_that_leads_nowhere_is_called_that(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").symlink_to("gone.jsonl")
    with pytest.raises(BadInput, match=r"a link to gone\.jsonl, which is not there"):
        assert FileSource(f"jsonl:{tmp_path}").files
