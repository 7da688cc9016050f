"""Files and directories appear whole or not at all, whatever happens to the writer."""

import json
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from mlm_repro.lineage.atomic import new_directory, write_bytes, write_json, write_text

CONTENTS = (b"a" * 100_000, b"b" * 300_000)

WRITER = """
    import sys
    from pathlib import Path
    from mlm_repro.lineage.atomic import write_bytes
    path = Path(sys.argv[1])
    contents = [b"a" * 100_000, b"b" * 300_000]
    print("ready", flush=True)
    while True:
        for content in contents:
            write_bytes(path, content)
"""


def run_python(code: str, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_a_writer_killed_at_any_moment_leaves_the_old_content_or_the_new(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_bytes(path, CONTENTS[0])
    rng, seen = random.Random(0), set()
    for kills in range(1, 200):
        with run_python(WRITER, path) as process:
            assert process.stdout
            process.stdout.readline()
            # Ever longer: where a disk is slow, the second content is late.
            time.sleep(rng.uniform(0.0, 0.02 * 1.03**kills))
            process.send_signal(signal.SIGKILL)
        content = path.read_bytes()
        assert content in CONTENTS
        seen.add(content)
        if kills >= 12 and seen == set(CONTENTS):
            break
    assert seen == set(CONTENTS), "the writer was never caught writing"


def test_a_full_disk_leaves_the_old_content_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_text(path, "old")
    code = """
        import resource, signal, sys
        from pathlib import Path
        from mlm_repro.lineage.atomic import write_bytes
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
        try:
            write_bytes(Path(sys.argv[1]), b"n" * 100_000)
        except OSError as error:
            print(error.strerror)
    """
    with run_python(code, path) as process:
        out, _ = process.communicate()
    assert out.strip() == "File too large"
    assert path.read_text() == "old"
    assert names(tmp_path) == ["file"]


def test_of_two_who_write_first_one_does_even_where_the_other_s_work_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the two steps of a writer another comes, is first, and clears away what it takes for
    a dead one's."""
    path, sync = tmp_path / "file", os.fsync

    def sync_and_be_late(descriptor: int) -> None:
        sync(descriptor)
        monkeypatch.undo()
        for unfinished in tmp_path.iterdir():
            unfinished.unlink()
        assert write_bytes(path, b"theirs", replaces=False)

    monkeypatch.setattr(os, "fsync", sync_and_be_late)
    assert not write_bytes(path, b"ours", replaces=False)
    assert (names(tmp_path), path.read_bytes()) == (["file"], b"theirs")


def test_what_cannot_be_written_as_json_leaves_the_old_content(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    write_json(path, {"a": 1})
    for value in (float("nan"), object(), "\ud800"):
        with pytest.raises((ValueError, TypeError)):
            write_json(path, {"a": value})
    assert json.loads(path.read_text()) == {"a": 1}
    assert names(tmp_path) == ["file.json"]


def test_a_directory_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "directory"
    write_text(path / "old", "old")
    with new_directory(path) as temporary:
        assert names(temporary) == []
        write_text(temporary / "new", "new")
        assert names(path) == ["old"]
    assert names(path) == ["new"]
    assert names(tmp_path) == ["directory"]


@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt(), SystemExit(1)])
@pytest.mark.parametrize("existed", [False, True])
def test_an_error_leaves_nothing_new(tmp_path: Path, error: BaseException, existed: bool) -> None:
    path = tmp_path / "directory"
    if existed:
        write_text(path / "old", "old")

    def write_half() -> None:
        with new_directory(path) as temporary:
            write_text(temporary / "new", "new")
            raise error

    with pytest.raises(type(error)):
        write_half()
    assert names(tmp_path) == (["directory"] if existed else [])
    if existed:
        assert names(path) == ["old"]
