"""The operating system's documentation as a source: what is read, from whom, and what hostile files come to."""

import gzip
import os
from pathlib import Path

import pytest

from data_pipeline.config import SourcesConfig
from data_pipeline.document import Document, Malformed
from data_pipeline.reading import os_docs
from data_pipeline.reading.extract import extract
from data_pipeline.reading.os_docs import OsDocs
from data_pipeline.reading.readers import Limits
from tests.commands import Command
from tests.data_pipeline.conftest import write_recipe
from tests.data_pipeline.test_sources import found_in

PAGE = """<!DOCTYPE html><html><head><title>Not shown</title><script>if (a < b) {}</script></head>
<body><nav><a href="x">Next</a></nav><h1>A &amp; B</h1><p>One <b>bold</b>
line.<p>Two.<ul><li>Item<br>more</ul><pre>code</pre></body></html>"""
FREE = "Format: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/\n\nFiles: *\nLicense: GPL-3+\n"


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A system with the folders of documentation, in which nothing is documented."""
    share = tmp_path / "usr" / "share"
    for name in ("doc", "info"):
        (share / name).mkdir(parents=True)
    monkeypatch.setattr(os_docs, "FOLDERS", (share / "doc", share / "info", tmp_path / "absent"))
    return share


def write(path: Path, text: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    content = text if isinstance(text, bytes) else text.encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def source(**limits: int) -> OsDocs:
    return OsDocs(SourcesConfig.model_validate({"names": ["os-docs"], **limits}), 1)


def test_handbooks_are_read_with_package_and_licence(system: Path, tmp_path: Path) -> None:
    doc = system / "doc"
    write(doc / "shell" / "copyright", FREE)
    write(doc / "shell" / "FAQ.gz", "Why?\n")
    write(doc / "shell" / "guide" / "page.html", PAGE)
    write(doc / "shell" / "notes.txt.gz", "Notes.")
    write(doc / "other" / "README.Debian", "Read me.")
    write(doc / "other" / "copyright", "It is free.\nLicense: as it says\n")
    write(system / "info" / "shell.info-1.gz", "Node.")
    for unread in ("changelog.gz", "NEWS.pdf", "changes.txt", "image.png", "LICENSE.md", "AUTHORS", "Makefile"):
        write(doc / "other" / unread, "not read")
    found = found_in(source(), tmp_path / "work")
    assert [item.id for item in found if isinstance(item, Document)] == [
        "other (unknown):other/README.Debian",
        "shell (GPL-3+):shell.info-1.gz",
        "shell (GPL-3+):shell/FAQ.gz",
        "shell (GPL-3+):shell/guide/page.html",
        "shell (GPL-3+):shell/notes.txt.gz",
    ]
    texts = [item.text for item in found if isinstance(item, Document)]
    assert texts[:3] == ["Read me.", "Node.", "Why?\n"]
    assert texts[3].split() == ["A", "&", "B", "One", "bold", "line.", "Two.", "Item", "more"]
    assert "One bold\nline.\n\nTwo." in texts[3]
    assert source().describe() == "os-docs: documentation of 2 packages of the operating system"


def test_links_are_followed_to_what_lies_beside_and_no_further(system: Path, tmp_path: Path) -> None:
    write(system / "handbook" / "one.txt", "beside")
    write(tmp_path / "etc" / "secret.txt", "outside")
    write(system / "doc" / "real" / "a.txt", "real")
    links = {
        "handbook": "../handbook",
        "out": "../../../etc",
        "up": "..",
        "loop": "loop",
        "again": "real",
        "none": "no",
    }
    for name, target in links.items():
        (system / "doc" / name).symlink_to(target)
    (system / "doc" / "real" / "secret.txt").symlink_to(tmp_path / "etc" / "secret.txt")
    os.mkfifo(system / "doc" / "real" / "pipe.txt")
    found = found_in(source(), tmp_path / "work")
    assert [item.text for item in found if isinstance(item, Document)] == ["real", "beside"]
    assert not any(isinstance(item, Malformed) for item in found)


def test_hostile_files_are_set_aside(system: Path) -> None:
    doc, limits = system / "doc", Limits(max_line_bytes=20 << 20, max_ratio=200)

    def reason(path: Path) -> str:
        (item,) = extract(("p", path.name, path), limits)
        assert isinstance(item, Malformed)
        return item.reason

    assert reason(write(doc / "bomb.txt.gz", b"a" * (18 << 20))) == "expands more than 200 times, the rest is not read"
    assert reason(write(doc / "huge.txt", b"a" * (21 << 20))) == "longer than 20,971,520 bytes"
    assert reason(write(doc / "latin.txt", b"caf\xe9")) == "invalid UTF-8 at byte 3"
    cut = write(doc / "cut.txt.gz", b"whole")
    cut.write_bytes(cut.read_bytes()[:-9])
    assert "end-of-stream marker" in reason(cut)
    cut.write_bytes(b"no gzip")
    assert "Not a gzipped file" in reason(cut)
    cut.unlink()
    assert reason(cut) == "cannot be read: No such file or directory"


def test_another_documentation_is_another_corpus(system: Path) -> None:
    path = write(system / "doc" / "p" / "a.txt", "one")
    before = source().fingerprint()
    assert source().fingerprint() == before
    write(path, "three")
    assert source().fingerprint() != before


def test_a_system_without_documentation_says_how_to_install_it(
    system: Path, cli: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(system / "doc" / "p" / "changelog.gz", "nothing to read")
    outcome = cli("run", write_recipe(Path("r.toml"), "os-docs"), ends=5)
    (error,) = (line for line in outcome.err.splitlines() if line.startswith("error: "))
    assert f"there is no documentation below {system / 'doc'}" in error
    assert "apt-get install debian-handbook" in error


def test_a_sample_is_within_its_limit(system: Path, tmp_path: Path) -> None:
    for number in range(30):
        write(system / "doc" / f"p{number}" / "a.txt", "ten bytes.")
    limited = source(max_bytes=105)
    found = found_in(limited, tmp_path / "work")
    assert len(found) == 10
    assert [item.id for item in found if isinstance(item, Document)] == sorted(
        item.id for item in found if isinstance(item, Document)
    )
    assert limited.describe().endswith(", a sample of 10 of 30 files")
