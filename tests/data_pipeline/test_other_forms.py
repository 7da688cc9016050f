"""CSV tables and WARC archives, written here by their own libraries."""

import csv
import gzip
import io
from pathlib import Path

import pytest
from warcio.statusandheaders import StatusAndHeaders
from warcio.warcwriter import WARCWriter

from mlm_repro.data_pipeline.document import Document, Malformed
from mlm_repro.data_pipeline.reading.config import SourcesConfig
from mlm_repro.data_pipeline.reading.file_sources import FileSource
from mlm_repro.data_pipeline.reading.readers import Damaged

TEXTS = ["plain", 'with "quotes", commas\nand lines', "", "ünïcode ✓", "last"]


def read(source: str, **keys: object) -> list[Document | Malformed | None]:
    return [*FileSource(source, SourcesConfig.model_validate({"names": [source], **keys})).sample()]


@pytest.mark.parametrize(
    ("name", "delimiter"), [("a.csv", ","), ("a.tsv", "\t"), ("a.csv.gz", ",")]
)
def test_rows_of_csv_are_documents(name: str, delimiter: str, tmp_path: Path) -> None:
    written = io.StringIO()
    rows = csv.writer(written, delimiter=delimiter)
    rows.writerow(["id", "content", "year"])
    rows.writerows([[f"d{number}", text, 2000 + number] for number, text in enumerate(TEXTS)])
    content = written.getvalue().encode("utf-8-sig")
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    found = read(f"csv:{tmp_path}", text_key="content", id_key="id", metadata=["year"])
    assert [
        (each.id, each.text, each.metadata) for each in found if isinstance(each, Document)
    ] == [(f"d{number}", text, {"year": str(2000 + number)}) for number, text in enumerate(TEXTS)]


def test_the_name_of_a_folder_does_not_say_how_columns_are_cut(tmp_path: Path) -> None:
    (folder := tmp_path / "old.tsv").mkdir()
    (folder / "a.csv").write_text("text,year\na text,1\n", encoding="utf-8")
    (document,) = read(f"csv:{folder / 'a.csv'}")
    assert isinstance(document, Document)
    assert document.text == "a text"


def test_what_is_wrong_in_csv_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(b"text,year\nfine,1\nbad \xff byte,2\none,two,three\nfewer\n")
    first, second, third, fourth = read(f"csv:{path}")
    assert isinstance(first, Document)
    assert isinstance(fourth, Document)
    assert (first.text, fourth.text, first.id) == ("fine", "fewer", "a.csv:2")
    assert isinstance(second, Malformed)
    assert isinstance(third, Malformed)
    assert (second.line, second.reason) == (3, "invalid UTF-8 at byte 4")
    assert (third.line, third.reason) == (4, "more fields than there are columns")
    path.write_bytes(b'text\n"never closed\n')
    with pytest.raises(Damaged, match=r"a\.csv cannot be read as csv: unexpected end of data"):
        read(f"csv:{path}")
    (missing,) = (path.write_bytes(b"a,b\n1,2\n"), read(f"csv:{path}"))[1]
    assert isinstance(missing, Malformed)
    assert missing.reason == "no text, the key of the text, but a, b"


def write_archive(path: Path, is_compressed: bool) -> None:
    """An archive as Common Crawl's WET files are, with a page and a text of HTTP among the
    records."""
    with path.open("wb") as file:
        writer = WARCWriter(file, gzip=is_compressed)
        writer.write_record(writer.create_warcinfo_record("a.wet", {"software": "test"}))
        for number, text in enumerate(TEXTS):
            url, payload = f"http://example.org/{number}", io.BytesIO(text.encode())
            kind = {"warc_content_type": "text/plain"}
            writer.write_record(
                writer.create_warc_record(url, "conversion", payload=payload, **kind)
            )
        for kind in ("text/html", "text/plain; charset=utf-8"):
            headers = StatusAndHeaders("200 OK", [("Content-Type", kind)], protocol="HTTP/1.0")
            payload = io.BytesIO(b"<p>of HTTP")
            record = writer.create_warc_record(
                "http://example.org/p", "response", payload, http_headers=headers
            )
            writer.write_record(record)


@pytest.mark.parametrize("name", ["a.warc", "a.warc.wet.gz"])
def test_records_of_plain_text_are_documents(name: str, tmp_path: Path) -> None:
    write_archive(tmp_path / name, name.endswith(".gz"))
    found = read(f"warc:{tmp_path}", id_key="WARC-Target-URI", metadata=["WARC-Type"])
    documents = [each for each in found if isinstance(each, Document)]
    assert [each.text for each in documents] == [*TEXTS, "<p>of HTTP"]
    assert [each.id for each in documents[:2]] == ["http://example.org/0", "http://example.org/1"]
    assert documents[0].source == f"{name}:2"
    assert documents[0].metadata == {"WARC-Type": "conversion"}
    (page,) = (each for each in found if isinstance(each, Malformed))
    assert page.reason == "text/html, whose text is not read"


def test_a_damaged_archive_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.warc"
    path.write_bytes(b"this is no archive\r\n\r\n" * 9)
    with pytest.raises(Damaged, match=r"a\.warc cannot be read as warc"):
        read(f"warc:{path}")
    write_archive(tmp_path / "b.warc.gz", True)
    content = (tmp_path / "b.warc.gz").read_bytes()
    (tmp_path / "b.warc.gz").write_bytes(content[: len(content) // 2])
    with pytest.raises(Damaged, match=r"b\.warc\.gz"):
        read(f"warc:{tmp_path}/b.warc.gz")
