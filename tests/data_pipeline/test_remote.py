"""Corpora that lie elsewhere give the bytes of the same files on disk, also over connections that
break."""

import gzip
import json
from pathlib import Path

import pyarrow
import pytest
import zstandard
from pyarrow import parquet

from mlm_repro.data_pipeline.reading import remote
from mlm_repro.data_pipeline.reading.file_sources import FileSource
from mlm_repro.data_pipeline.reading.remote import Remote
from mlm_repro.lineage.errors import BadInput, Interrupted
from tests.commands import Command
from tests.data_pipeline.builds import (
    build,
    config_for,
    files_of,
    ledger_of,
    mixed_texts,
    write_mixed,
)
from tests.data_pipeline.conftest import sentences
from tests.data_pipeline.places import BUCKET, Faulty, http_server, s3_server

TEXTS = mixed_texts(120)
KINDS = {"jsonl": "lines", "parquet": "tables"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """JSON lines, plain and compressed in frames, and tables, with the datasets built from them on
    disk."""
    folder = tmp_path_factory.mktemp("remote")
    write_mixed(folder, 10)
    lines, tables = folder / "files/lines", folder / "files/tables"
    lines.mkdir(parents=True)
    tables.mkdir()
    rows = [
        json.dumps({"text": text, "url": f"u{number}"}).encode() + b"\n"
        for number, text in enumerate(TEXTS)
    ]
    (lines / "a.jsonl").write_bytes(b"".join(rows[:40]))
    (lines / "b.jsonl.gz").write_bytes(b"".join(gzip.compress(row, mtime=0) for row in rows[40:80]))
    (lines / "c.jsonl.zst").write_bytes(zstandard.compress(b"".join(rows[80:])))
    for name, part in (("train-a", TEXTS[:60]), ("train-b", TEXTS[60:]), ("test-a", TEXTS[:5])):
        parquet.write_table(
            pyarrow.table({"text": part}), tables / f"{name}.parquet", row_group_size=7
        )
    for kind, name in KINDS.items():
        build(folder, config_for(f"{kind}:{folder}/files/{name}"), f"local-{kind}")
    return folder


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No pauses, and nothing kept of what was read before."""
    monkeypatch.setattr(remote, "PAUSES_SECONDS", (0.0,) * 5)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def s3(folder: Path) -> "pytest.Generator[str]":
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (
            ("ACCESS_KEY_ID", "a"),
            ("SECRET_ACCESS_KEY", "b"),
            ("DEFAULT_REGION", "us-east-1"),
        ):
            patch.setenv(f"AWS_{name}", value)
        with s3_server(folder / "files") as url:
            patch.setenv("AWS_ENDPOINT_URL", url)
            yield f"s3://{BUCKET}"


def assert_same(folder: Path, made: Path, kind: str) -> None:
    local = folder / f"local-{kind}" / "small"
    assert files_of(made) | {"dataset.json": ""} == files_of(local) | {"dataset.json": ""}
    cards = [json.loads((each / "dataset.json").read_text()) for each in (made, local)]
    for ours, theirs in ((ledger_of(made), ledger_of(local)), cards):
        assert ours.pop("source") != theirs.pop("source"), "it says where the text was"
        assert ours == theirs


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("kind", KINDS)
def test_s3_gives_the_bytes_of_the_files(kind: str, folder: Path, s3: str) -> None:
    made = build(folder, config_for(f"{kind}:{s3}/{KINDS[kind]}", "workers=1"), f"s3-{kind}")
    assert_same(folder, made, kind)


@pytest.mark.usefixtures("quick")
def test_a_pattern_and_a_single_object_are_read_as_on_disk(folder: Path, s3: str) -> None:
    for path in ("lines/a.jsonl", "lines/*.jsonl*", "tables/train-*.parquet"):
        kind = "parquet" if "tables" in path else "jsonl"
        ours = FileSource(f"{kind}:{s3}/{path}")
        theirs = FileSource(f"{kind}:{folder}/files/{path}")
        assert [*ours.sample()] == [*theirs.sample()]
        assert ours.fingerprint() == theirs.fingerprint()
    with pytest.raises(BadInput, match="there is no such file"):
        print(FileSource(f"jsonl:{s3}/nowhere/a.jsonl").files)


def test_a_pattern_leaves_folders_out_as_on_disk(folder: Path, s3: str) -> None:
    """A folder that the pattern matched was read as an empty file."""
    assert Remote(f"{s3}/*").files() == []
    named = [name for name, _ in Remote(f"{s3}/l*/*").files()]
    assert named == ["lines/a.jsonl", "lines/b.jsonl.gz", "lines/c.jsonl.zst"]


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("kind", KINDS)
def test_connections_that_break_are_resumed(kind: str, folder: Path) -> None:
    with http_server(folder / "files", breaks_each=3) as url:
        made = build(
            folder, config_for(f"{kind}:{url}/{KINDS[kind]}/", "workers=2"), f"http-{kind}"
        )
    assert_same(folder, made, kind)
    assert Faulty.answers > 20


@pytest.mark.usefixtures("quick")
def test_a_connection_that_always_breaks_is_named_with_its_place(
    folder: Path, cli: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    with http_server(folder / "files", breaks_each=1) as url:
        file = Remote(f"{url}/lines/a.jsonl").open("rb", 0)
        file.seek(100)
        with pytest.raises(
            Interrupted, match=r"lines/a\.jsonl broke off at byte 100: .* after 6 attempts"
        ):
            file.read(200)
        outcome = cli("clean", f"jsonl:{url}/lines/a.jsonl", "out", "--workers", 1, ends=7)
        assert f"{url}/lines/a.jsonl broke off at byte 0" in outcome.error


@pytest.mark.usefixtures("quick")
def test_a_file_that_changes_while_it_is_read_is_named(folder: Path, tmp_path: Path) -> None:
    from mlm_repro.data_pipeline.reading.readers import read_pieces

    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n')
    with http_server(tmp_path) as url:
        pieces = [*FileSource(f"jsonl:{url}/a.jsonl").pieces(None, 1 << 20)]  # type: ignore[arg-type]
        (tmp_path / "a.jsonl").write_text('{"text": "one, two"}\n')
        with pytest.raises(Interrupted, match="was changed while it was read"):
            [*read_pieces(pieces)]


@pytest.mark.usefixtures("quick")
def test_a_table_comes_in_ranges(folder: Path, tmp_path: Path) -> None:
    from mlm_repro.data_pipeline.reading.readers import read_pieces

    random = iter(range(10**9))
    texts = [" ".join(str(next(random) ** 5) for _ in range(3000)) for _ in range(1000)]
    parquet.write_table(pyarrow.table({"text": texts}), tmp_path / "a.parquet", row_group_size=100)
    with http_server(tmp_path) as url:
        pieces = [*FileSource(f"parquet:{url}/a.parquet").pieces(None, 1)]  # type: ignore[arg-type]  # not written to
        Faulty.asked.clear()
        assert [item.text for item in read_pieces(pieces[5:6]) if item] == texts[500:600]  # type: ignore[union-attr]
        size = (tmp_path / "a.parquet").stat().st_size
        assert size > 24 << 20
        assert sum(end - start for start, end in Faulty.asked) < size / 2


@pytest.mark.usefixtures("quick")
def test_a_server_without_ranges_is_refused(folder: Path) -> None:
    with (
        http_server(folder / "files", has_ranges=False) as url,
        pytest.raises(Interrupted, match="broke off at byte 0: 53,769 bytes came for a range of"),
    ):
        FileSource(f"jsonl:{url}/lines/a.jsonl").fingerprint()


@pytest.mark.parametrize(
    ("source", "code", "said"),
    [
        ("s3://bucket/a.jsonl", 2, "did you mean 'jsonl:s3://bucket/a.jsonl'"),
        ("jsonl:nowhere://bucket/a.jsonl", 2, "is not an address that can be read"),
        ("jsonl:http://127.0.0.1:9/a.jsonl", 7, "http://127.0.0.1:9/a.jsonl does not answer"),
        ("documents:s3://bucket/dataset", 2, "takes a folder on this machine and no address"),
    ],
)
@pytest.mark.usefixtures("quick")
def test_a_place_that_cannot_be_read_is_one_sentence(
    source: str, code: int, said: str, cli: Command
) -> None:
    assert said in cli("clean", source, "out", ends=code).error


def test_a_missing_library_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(
        BadInput,
        match=r"a.jsonl needs a library that is not .*gs:// .* pip install 'mlm-repro\[remote\]'",
    ):
        print(FileSource("jsonl:gs://bucket/a.jsonl").files)


def frames_of(rows: list[bytes], ending: str) -> bytes:
    """Rows in frames that end anywhere, also inside of lines."""
    whole, step = b"".join(rows), 300_001
    compress = zstandard.compress if ending == ".zst" else gzip.compress
    return b"".join(compress(whole[start : start + step]) for start in range(0, len(whole), step))


@pytest.mark.parametrize("ending", [".gz", ".zst"])
def test_a_file_of_many_frames_is_many_tasks_and_the_same_documents(
    ending: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlm_repro.data_pipeline.reading import file_sources
    from mlm_repro.data_pipeline.reading.readers import read_pieces

    rows = [json.dumps({"text": sentences(40, seed)}).encode() + b"\n" for seed in range(2500)]
    rows[700:700] = [b"\n", b"not json\n", json.dumps({"text": "long " * 800_000}).encode() + b"\n"]
    plain, many, one = (
        tmp_path / name for name in ("a.jsonl", f"many/a.jsonl{ending}", f"one/a.jsonl{ending}")
    )
    plain.write_bytes(b"".join(rows))
    for path, content in (
        (many, frames_of(rows, ending)),
        (one, frames_of([plain.read_bytes()], ending)[:0]),
    ):
        path.parent.mkdir()
        path.write_bytes(
            content
            or (zstandard.compress if ending == ".zst" else gzip.compress)(plain.read_bytes())
        )
    expected = [*FileSource(f"jsonl:{plain}").sample()]
    pieces = [*FileSource(f"jsonl:{many}").pieces(None, 2 << 20)]  # type: ignore[arg-type]  # it is not written to
    assert len(pieces) >= 4
    assert sum(piece.bytes for piece in pieces) == plain.stat().st_size
    found = [*read_pieces(pieces)]
    assert [str(item).replace(f"a.jsonl{ending}", "a.jsonl") for item in found] == [
        *map(str, expected)
    ]
    assert "one frame" not in capsys.readouterr().err
    monkeypatch.setattr(file_sources, "SHARD_BYTES", 1000)
    assert len([*FileSource(f"jsonl:{one}").pieces(None, 2 << 20)]) == 1  # type: ignore[arg-type]
    assert "is one frame of compression, which one process reads" in capsys.readouterr().err


@pytest.mark.parametrize("ending", [".gz", ".zst"])
def test_a_damaged_frame_leaves_the_file_to_one_reader_which_names_it(
    ending: str, tmp_path: Path
) -> None:
    from mlm_repro.data_pipeline.reading.readers import Damaged, read_pieces

    rows = [json.dumps({"text": sentences(40, seed)}).encode() + b"\n" for seed in range(2500)]
    content = bytearray(frames_of(rows, ending))
    content[len(content) // 2] ^= 255
    path = tmp_path / f"a.jsonl{ending}"
    for damaged in (bytes(content), frames_of(rows, ending)[:-5]):
        path.write_bytes(damaged)
        pieces = [*FileSource(f"jsonl:{path}").pieces(None, 1 << 20)]  # type: ignore[arg-type]
        assert len(pieces) == 1
        with pytest.raises(Damaged, match="cannot be read"):
            [*read_pieces(pieces)]
