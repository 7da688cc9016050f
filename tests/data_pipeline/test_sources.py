"""Files, the hub and the installed documentation as sources."""

import errno
import json
import sys
import threading
import types
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import distribution
from pathlib import Path

import pytest

from mlm_repro.data_pipeline.config import SourcesConfig
from mlm_repro.data_pipeline.document import Document, Malformed
from mlm_repro.data_pipeline.reading.file_sources import FileSource
from mlm_repro.data_pipeline.reading.hub import HubSource, asking_for, hub_is_reachable
from mlm_repro.data_pipeline.reading.installed_docs import (
    InstalledDocs,
    extract,
    run_time_distributions,
)
from mlm_repro.data_pipeline.reading.readers import Limit, read_pieces
from mlm_repro.data_pipeline.reading.sources import Source, open_sources
from mlm_repro.data_pipeline.work.executors.local import LocalExecutor
from mlm_repro.data_pipeline.work.workspace import Workspace
from mlm_repro.lineage.errors import DataMissing, Interrupted


def found_in(
    source: Source, folder: Path, workers: int = 1, shard_bytes: int = 1 << 26
) -> list[Document | Malformed]:
    """Everything in a source but blank lines; tasks leave their files in `folder`."""
    with LocalExecutor(workers) as executor:
        pieces = list(source.pieces(Workspace(folder, executor), shard_bytes))
    return [found for found in read_pieces(pieces) if found is not None]


def read(name: str) -> list[Document | Malformed]:
    return found_in(FileSource(name), Path("/nonexistent"))


def test_each_bad_line_costs_only_itself(tmp_path: Path) -> None:
    lines = [
        b'{"text": "first"}',
        b'{"text": "broken"',
        b'{"text": "bad byte \xff"}',
        b'["not", "an object"]',
        b'{"title": "no text"}',
        b'{"text": null}',
        b'{"text": 7}',
        b"",
        b'{"text": ""}',
        b'{"text": "half \\ud800 pair"}',
        b"[" * 100_000,
        '\ufeff{"text": "café"}'.encode(),
        b'{"text": "last, without a newline"}',
    ]
    path = tmp_path / "mixed.jsonl"
    path.write_bytes(b"\n".join(lines))
    found = read(f"jsonl:{path}")
    assert [(item.id, item.text) for item in found if isinstance(item, Document)] == [
        ("mixed.jsonl:1", "first"),
        ("mixed.jsonl:9", ""),
        ("mixed.jsonl:10", "half \ufffd pair"),
        ("mixed.jsonl:12", "café"),
        ("mixed.jsonl:13", "last, without a newline"),
    ]
    bad = [item for item in found if isinstance(item, Malformed)]
    assert [item.line for item in bad] == [2, 3, 4, 5, 6, 7, 11]
    assert all(
        item.source == "mixed.jsonl" and item.reason and len(item.excerpt) <= 300 for item in bad
    )
    assert "UTF-8" in bad[1].reason
    assert bad[2].reason == "not a JSON object"
    assert bad[2].excerpt == '["not", "an object"]'


def test_text_files_are_documents(tmp_path: Path) -> None:
    (tmp_path / "good.txt").write_text("whole\nfile\n")
    (tmp_path / "latin.txt").write_bytes(b"fine\ncaf\xe9")
    assert read(f"text:{tmp_path}") == [
        Document("good.txt", "whole\nfile\n"),
        Malformed("latin.txt", 2, "invalid UTF-8 at byte 8", "fine\ncaf\ufffd"),
    ]


def test_limit_admits_until_one_document_is_too_many() -> None:
    limit = Limit(2, None)
    assert [limit.admits(Document("", "x")) for _ in range(3)] == [True, True, False]
    limit = Limit(None, 5)
    bad = Malformed("a", 1, "not JSON", "")
    assert [limit.admits(item) for item in (Document("", "éé"), bad, None, Document("", "xx"))] == [
        True
    ] * 3 + [False]
    assert (limit.documents, limit.bytes, limit.reached) == (1, 4, True)


class Rows(list[dict[str, object]]):
    """What the hub's client gives, in two files."""

    num_shards = 2

    def shard(self, num_shards: int, index: int) -> "Rows":
        assert num_shards == 2
        return Rows(self[:2] if index == 0 else self[2:])


def test_hub_corpora_are_harvested_file_by_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def load_dataset(repository: str, subset: str | None, **options: object) -> dict[str, Rows]:
        asked.append((repository, subset, options["streaming"]))
        return {
            "train": Rows([{"text": "one"}, {"text": None}, {"text": "three"}]),
            "test": Rows([{"text": "held"}]),
        }

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    found = found_in(HubSource("wikipedia"), tmp_path)
    assert set(asked) == {("wikimedia/wikipedia", "20231101.en", True)}
    assert found == [
        Document("wikipedia/0:1", "one"),
        Malformed(
            "wikipedia/0", 2, "text is not a string, as the text of a document must be", "None"
        ),
        Document("wikipedia/1:1", "three"),
    ]


def test_only_run_time_dependencies_are_read() -> None:
    names = set(run_time_distributions("mlm-repro"))
    assert {"numpy", "ftfy", "wcwidth"} <= names
    assert not names & {"mlm-repro", "pytest", "hypothesis", "ruff", "mypy", "transformers"}
    with pytest.raises(DataMissing):
        run_time_distributions("no-such-distribution-here")


def test_python_file_gives_its_strings_and_comments(tmp_path: Path) -> None:
    path = tmp_path / "m.py"
    path.write_text(
        '# Copyright 2020 Somebody.\n\n"""Module."""\nimport does_not_exist\nx = "# none"  # nor'
        ' this\n# A comment\n# of two lines.\ny = \'"""\'\nclass C:\n    r"""Class.\n\n    More.\n '
        '   """\n    async def m(self):\n        """Method."""\n'
    )
    said = "\n\n".join(["Module.", "A comment\nof two lines.", "Class.", "More.", "Method."])
    assert extract(("dist", "m.py", path)) == [Document("dist:m.py", said)]
    path.write_text('def broken(:\n    """It need not be Python."""\n')
    assert extract(("dist", "m.py", path)) == [Document("dist:m.py", "It need not be Python.")]
    path.write_bytes(b'"""one"""\n# \xff')
    bad = Malformed("dist:m.py", 2, "invalid UTF-8 at byte 12", '"""one"""\n# \ufffd')
    assert extract(("dist", "m.py", path)) == [bad]


def test_package_description_and_topics(tmp_path: Path) -> None:
    metadata = tmp_path / "METADATA"
    metadata.write_text("Metadata-Version: 2.1\nName: x\n\n# About\n\nProse.\n")
    assert extract(("x", "x.dist-info/METADATA", metadata)) == [
        Document("x:x.dist-info/METADATA", "# About\n\nProse.\n")
    ]
    topics = tmp_path / "topics.py"
    topics.write_text("topics = {'b': 'second', 'a': 'first'}\n")
    found = extract(("python", "pydoc_data/topics.py", topics))
    assert [item.text for item in found if isinstance(item, Document)] == ["first", "second"]


def installed(folder: Path, workers: int = 1, seed: int = 1, **limits: int) -> list[Document]:
    source = InstalledDocs(
        SourcesConfig.model_validate({"names": ["installed-docs"], **limits}), seed
    )
    return [item for item in found_in(source, folder, workers) if isinstance(item, Document)]


def test_sample_of_installed_docs_is_spread_and_repeatable(tmp_path: Path) -> None:
    documents = installed(tmp_path / "one", max_bytes=400_000)
    size = sum(len(document.text.encode()) for document in documents)
    assert 300_000 < size <= 400_000
    owners = [document.id.partition(":")[0] for document in documents]
    assert len(set(owners)) > 5
    assert owners == sorted(owners, key=lambda owner: (owner == "python", owner))
    assert installed(tmp_path / "two", workers=2, max_bytes=400_000) == documents
    assert installed(tmp_path / "other", seed=2, max_bytes=400_000) != documents
    assert len(installed(tmp_path / "ten", max_documents=10)) == 10


def test_installation_is_recognised_by_its_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    def fingerprint() -> str:
        return InstalledDocs(SourcesConfig(names=("installed-docs",)), 1).fingerprint()

    before = fingerprint()
    assert fingerprint() == before
    monkeypatch.setattr(type(distribution("ftfy")), "version", "0.0.1")
    assert fingerprint() != before


def test_sources_are_read_in_the_order_given(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_text(
            "".join(json.dumps({"text": f"{name}{n}"}) + "\n" for n in range(3))
        )
    names = (f"jsonl:{tmp_path}/b.jsonl", f"jsonl:{tmp_path}/a.jsonl")
    opened = open_sources(SourcesConfig(names=names, max_documents=2), 1)
    with LocalExecutor(1) as executor:
        shards = opened.shards(Workspace(tmp_path / "work", executor), 1 << 20)
    found = read_pieces([piece for shard in shards for piece in shard])
    assert [item.text for item in found if isinstance(item, Document)] == ["b0", "b1", "a0", "a1"]
    assert "the first 2 documents" in opened.describe()


@pytest.mark.parametrize(
    ("answers", "is_reachable"),
    [
        ({"GET": 200, "HEAD": 403}, True),
        ({"GET": 206, "HEAD": 405}, True),
        ({"GET": 404, "HEAD": 404}, True),
        ({"GET": 403, "HEAD": 403}, False),
        ({"GET": 503, "HEAD": 503}, False),
    ],
)
def test_a_mirror_is_reachable_by_what_it_answers_a_download(
    answers: dict[str, int], is_reachable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some refuse HEAD, and some have no start page; a 403 to GET is a proxy's."""
    asked = []

    class Mirror(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append((self.command, self.headers.get("Range")))
            self.send_response(answers[self.command])
            self.end_headers()

        def do_HEAD(self) -> None:
            self.do_GET()

        def log_message(self, *args: object) -> None:
            """Nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Mirror)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    try:
        assert hub_is_reachable.__wrapped__() is is_reachable
    finally:
        server.shutdown()
        server.server_close()
    assert asked == [("GET", "bytes=0-0")]
    assert hub_is_reachable.__wrapped__() is False  # no server is there any more


def test_what_the_hub_s_clients_raise_is_told_apart() -> None:
    from huggingface_hub import errors

    def raised(error: Exception, within: Exception | None) -> Exception:
        try:
            with asking_for("a corpus"):
                try:
                    if within:
                        raise within
                finally:
                    raise error
        except Exception as told:  # whatever it became
            return told

    absent = errors.EntryNotFoundError("no .huggingface.yaml")
    full = raised(OSError(errno.ENOSPC, "no space left"), absent)
    assert isinstance(full, OSError)
    assert full.errno == errno.ENOSPC
    cut = raised(errors.LocalEntryNotFoundError("not in the cache"), ConnectionError("reset"))
    assert isinstance(cut, Interrupted)
    assert isinstance(raised(errors.EntryNotFoundError("none"), None), DataMissing)
