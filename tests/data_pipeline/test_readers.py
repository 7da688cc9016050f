"""Input that was not made for us: every line is a document, blank, or in quarantine with a reason."""

import json
import random
import re
from collections import Counter
from pathlib import Path

import pyarrow
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from mlm_repro.data_pipeline.document import Document, Malformed
from mlm_repro.data_pipeline.passes.prepare import prepare
from mlm_repro.data_pipeline.reading.file_sources import FileSource
from mlm_repro.data_pipeline.reading.pieces import Piece, cut_lines
from mlm_repro.data_pipeline.reading.readers import MAX_LINE_BYTES, read_pieces

VALID = b'{"text": "a fine text"}'


def piece_of(path: Path, kind: str = "jsonl", **values: int) -> Piece:
    return Piece(kind, path.name, str(path), "", path.stat().st_size, **values)


def read(path: Path, longest: int = MAX_LINE_BYTES, kind: str = "jsonl") -> list[Document | Malformed | None]:
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
        return json.dumps({"text": rng.choice([None, 7, 1.5, True, [], {}, ["x"], {"text": "x"}])}).encode()
    if kind == 4:
        return rng.choice([b"null", b"0", b'"text"', b"[]", b"NaN", b"1e999", b"-", b"\xef\xbb\xbf", b"\x00", b"\xff"])
    if kind == 5:
        return b'{"text": "' + rng.choice([b"\\ud800", b"\\udfff\\ud800", b"\\u0000", b"\\x", b"\x00", b"\x1f"]) + b'"}'
    if kind == 6:
        return b'{"text": "' + bytes(rng.choices(range(128, 256), k=5)) + b'"}'
    if kind == 7:
        return b'{"text": "' + "".join(chr(rng.randrange(0xE000, 0x10FFFF)) for _ in range(9)).encode() + b'"}'
    if kind == 8:
        return b'{"text": "first", "text": ' + rng.choice([b"7", b'"second"']) + b"}"
    if kind == 9:
        return b'{"text": ' + b"9" * rng.randrange(1, 6000) + b"}"
    if kind == 10:
        return b'{"text": "' + b"x" * rng.randrange(3000) + b'"' + rng.choice([b"}", b"", b"}}", b",}"])
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
        {"pieces": pieces, "max_line_bytes": 2000, "filters": filters, "goes_on": False}, [], tmp_path / "out"
    )
    (source, clean) = counts["stages"]
    assert counts["blank"] == sum(not line.strip() for line in lines)
    assert source["documents_out"] + counts["malformed"] + counts["blank"] == len(lines)
    assert source["documents_out"] == clean["documents_out"] + clean["dropped"]["empty"]["documents"]
    quarantined = [json.loads(line) for line in (tmp_path / "out" / "quarantine.jsonl").open("rb")]
    assert len(quarantined) == counts["malformed"]
    assert all(item["reason"] and len(item["excerpt"]) <= 300 for item in quarantined)
    reasons = Counter(re.split(" at |[:,]", item["reason"])[0] for item in quarantined)
    assert {"invalid UTF-8", "not JSON", "no text", "text is not a string", "not a JSON object"} <= set(reasons)
    assert reasons["longer than 2"] == sum(len(line) > 2000 for line in lines)
    kept = [json.loads(line) for line in (tmp_path / "out" / "documents.jsonl").open("rb")]
    assert len(kept) == counts["documents"]


@settings(max_examples=60)
@given(
    lines=st.lists(st.sampled_from([VALID, b"", b"broken", b"x" * 90_000, b'{"text": "' + b"y" * 200_000 + b'"}'])),
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
