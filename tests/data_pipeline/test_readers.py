"""Input that was not made for us: every line is a document, blank, or in quarantine with a reason."""

import gzip
import json
import random
import sys
from collections import Counter
from pathlib import Path

import pyarrow
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from data_pipeline.document import Document, Malformed
from data_pipeline.passes.prepare import prepare
from data_pipeline.reading.file_sources import FileSource
from data_pipeline.reading.pieces import Piece, cut_lines
from data_pipeline.reading.readers import Limits, read_pieces
from lineage.errors import BadInput
from tests.commands import call

VALID = b'{"text": "a fine text"}'


def piece_of(path: Path, kind: str = "jsonl", **values: int) -> Piece:
    return Piece(kind, path.name, str(path), "", path.stat().st_size, **values)


def read(path: Path, limits: Limits | None = None, kind: str = "jsonl") -> list[Document | Malformed | None]:
    return list(read_pieces([piece_of(path, kind)], limits or Limits()))


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
    pieces = [piece.to_json() for piece in cut_lines(piece_of(path), 1 << 20)]
    limits = {"max_line_bytes": 2000, "max_ratio": 200}
    filters = [("clean", {"normalization": "NFC"})]
    counts = prepare({"pieces": pieces, "limits": limits, "filters": filters}, [], tmp_path / "out")
    (source, clean) = counts["stages"]
    assert counts["blank"] == sum(not line.strip() for line in lines)
    assert source["documents_out"] + counts["malformed"] + counts["blank"] == len(lines)
    assert source["documents_out"] == clean["documents_out"] + clean["dropped"]["empty"]["documents"]
    quarantined = [json.loads(line) for line in (tmp_path / "out" / "quarantine.jsonl").open("rb")]
    assert len(quarantined) == counts["malformed"]
    assert all(item["reason"] and len(item["excerpt"]) <= 300 for item in quarantined)
    reasons = Counter(item["reason"].split(" at ")[0].split(":")[0] for item in quarantined)
    assert {"invalid UTF-8", "not JSON", "no text", "text is not a string", "not a JSON object"} <= set(reasons)
    assert reasons["longer than 2,000 bytes"] == sum(len(line) > 2000 for line in lines)
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
    limits = Limits(max_line_bytes=150_000)
    assert list(read_pieces(pieces, limits)) == read(path, limits)
    assert len(read(path, limits)) == len(path.read_bytes().splitlines())


@pytest.mark.parametrize("ending", [".gz", ".zst"])
def test_a_bomb_is_not_unpacked(tmp_path: Path, ending: str) -> None:
    content = VALID + b"\n" + b" " * (100 << 20) + b"\n" + VALID + b"\n"
    path = tmp_path / f"bomb.jsonl{ending}"
    path.write_bytes(gzip.compress(content, 9) if ending == ".gz" else zstandard.compress(content, 9))
    assert path.stat().st_size < len(content) / 500
    found = read(path, Limits(max_line_bytes=1 << 20))
    assert found[0] == Document(f"{path.name}:1", "a fine text")
    assert isinstance(found[-1], Malformed)
    assert "expands more than 200 times" in found[-1].reason
    assert len(found) <= 3


@pytest.mark.parametrize("repeated", [True, False])
def test_a_table_is_not_unpacked_without_end(tmp_path: Path, repeated: bool) -> None:
    path = tmp_path / "bomb.parquet"
    texts = ["a b " * (1 << 20)] * 250
    parquet.write_table(pyarrow.table({"text": texts}), path, compression="zstd", use_dictionary=repeated)
    assert path.stat().st_size < 4 * len(texts) * (1 << 20) / 500
    pieces = FileSource(f"parquet:{path}").pieces(None, 1 << 20)  # type: ignore[arg-type]  # it is not written to
    *found, last = read_pieces(pieces, Limits())
    assert isinstance(last, Malformed)
    assert "expands more than 200 times" in last.reason
    assert all(isinstance(each, Document) for each in found)
    assert len(found) < 100


@pytest.mark.skipif(sys.platform != "linux", reason="memory is bounded by what /proc says")
def test_a_page_is_not_larger_than_its_table_says(tmp_path: Path) -> None:
    path = tmp_path / "bomb.parquet"
    table = pyarrow.table({"text": ["a b " * (1 << 20)] * 80})
    parquet.write_table(
        table, path, compression="zstd", use_dictionary=False, write_statistics=False, data_page_size=1 << 30
    )
    size = varint(parquet.ParquetFile(path).metadata.row_group(0).total_byte_size)
    content = path.read_bytes()
    assert content.count(size) == 2  # of the row group and of its column
    path.write_bytes(content.replace(size, varint(1 << 20, len(size))))
    done = call({}, "mlm-data", "clean", f"parquet:{path}", tmp_path / "out", "--workers", 1, ends=2)
    assert done.error == f"error: {path} needs more memory than its table says"


def varint(number: int, length: int = 1) -> bytes:
    """A number as Parquet's metadata have it, in `length` bytes at least."""
    digits = [2 * number >> shift & 127 for shift in range(0, max(7 * length, (2 * number).bit_length()), 7)]
    return bytes([*(digit | 128 for digit in digits[:-1]), digits[-1]])


def test_a_table_of_many_row_groups_is_read_whole(tmp_path: Path) -> None:
    path, texts = tmp_path / "small.parquet", [f"text {number}" for number in range(1000)]
    texts[7] *= 1000
    parquet.write_table(pyarrow.table({"text": texts}), path, row_group_size=10)
    pieces = FileSource(f"parquet:{path}").pieces(None, 1)  # type: ignore[arg-type]  # it is not written to
    assert [each.text for each in read_pieces(pieces, Limits()) if isinstance(each, Document)] == texts


def test_ordinary_compression_is_read_whole(tmp_path: Path) -> None:
    content = (VALID + b"\n") * 100_000
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(content))
    assert len(read(tmp_path / "a.jsonl.gz")) == 100_000
    (tmp_path / "a.jsonl.zst").write_bytes(b"".join(zstandard.compress(content) for _ in range(2)))
    assert len(read(tmp_path / "a.jsonl.zst", Limits(max_ratio=1e9))) == 200_000


@pytest.mark.parametrize("ending", [".gz", ".zst"])
def test_a_damaged_archive_is_said(tmp_path: Path, ending: str) -> None:
    rng = random.Random(1)
    content = b"".join(json.dumps({"text": str(rng.random())}).encode() + b"\n" for _ in range(5000))
    packed = gzip.compress(content) if ending == ".gz" else zstandard.compress(content)
    for damaged in (packed[: len(packed) // 2], packed + b"rest", b"nonsense" * 9):
        path = tmp_path / f"a.jsonl{ending}"
        path.write_bytes(damaged)
        with pytest.raises(BadInput, match="cannot be read"):
            read(path)


def test_a_long_text_file_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"x" * 5000)
    (found,) = read(tmp_path / "a.txt", Limits(max_line_bytes=4000), "text")
    assert isinstance(found, Malformed)
    assert found.reason == "longer than 4,000 bytes"
