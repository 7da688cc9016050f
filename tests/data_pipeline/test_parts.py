"""Parts of an array agree before they work, wait for each other with words, and outlive none of
them for long."""

import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mlm_repro.data_pipeline.work import meeting as meetings
from mlm_repro.data_pipeline.work.meeting import Meeting, read_signs
from mlm_repro.lineage.errors import BadInput, Interrupted
from tests.data_pipeline.builds import files_of
from tests.data_pipeline.conftest import sentences, write_jsonl, write_recipe
from tests.data_pipeline.copies import change, copy_of_library, copy_of_package, run, start

ARRAY = "runs/.parts/small"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_jsonl(tmp_path / "a.jsonl", [sentences(40, seed) for seed in range(90)])
    write_recipe(
        tmp_path / "r.toml",
        "jsonl:a.jsonl",
        extra="shard_bytes = 65536\ndecontaminate.test_sets = []",
    )
    return tmp_path


@pytest.fixture(scope="module")
def edited(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for the path with a package whose filter is another."""
    copy = copy_of_package(tmp_path_factory.mktemp("edited"))
    change(
        copy / "data_pipeline/stages/length.py",
        "tokens >= self.min_tokens",
        "tokens > self.min_tokens",
    )
    return copy / "sources"


@pytest.fixture
def begin(folder: Path) -> Iterator[Callable[..., "subprocess.Popen[str]"]]:
    """Start parts that end with the test."""
    parts = []

    def begun(part: str, *words: object, **given: object) -> "subprocess.Popen[str]":
        parts.append(start("run", "r.toml", "--part", part, *words, folder=folder, **given))  # type: ignore[arg-type]
        return parts[-1]

    yield begun
    for part in parts:
        part.kill()
        part.communicate()


def until(happens: Callable[[], object], process: "subprocess.Popen[str] | None" = None) -> None:
    end = time.monotonic() + 120
    while not happens():
        assert time.monotonic() < end
        assert process is None or process.poll() is None, process.communicate()
        time.sleep(0.02)


def prepared(folder: Path) -> list[Path]:
    return list(folder.glob("runs/*/.work/prepare/*/DONE"))


def has_agreed(folder: Path, part: int) -> bool:
    return any(sign["facts"] for sign in read_signs(folder / ARRAY, part).values())


def test_parts_give_the_bytes_of_one_command_though_one_is_killed(
    folder: Path, begin: Callable[..., "subprocess.Popen[str]"], monkeypatch: pytest.MonkeyPatch
) -> None:
    # A part that ended is named before this test gives up.
    monkeypatch.setenv("MLM_JOIN_SECONDS", "100")
    parts = [begin(f"{number}/3") for number in (3, 2, 1)]
    until(lambda: list(folder.glob("runs/*/.work/prepare/00001/DONE")), parts[2])
    parts[1].send_signal(signal.SIGKILL)
    parts[1].wait(60)
    assert [parts[0].poll(), parts[2].poll()] == [None, None]
    parts[1] = begin("2/3")
    ends = [part.communicate(timeout=300) for part in parts]
    assert [part.returncode for part in parts] == [0, 0, 0], ends
    assert not (folder / "runs/.parts").exists()
    run("run", "r.toml", "--runs", "alone", folder=folder)
    assert files_of(folder / "runs/small") == files_of(folder / "alone/small")


def test_a_part_that_does_not_look_while_the_others_finish_ends_with_them(
    folder: Path, begin: Callable[..., "subprocess.Popen[str]"]
) -> None:
    """The last tasks are not its own, and they are removed with the work when the dataset is
    there."""
    parts = [begin(f"{number}/3") for number in (3, 2, 1)]
    until(lambda: list(folder.glob("runs/*/.work/select/00002/DONE")), parts[0])
    parts[0].send_signal(signal.SIGSTOP)
    assert [part.wait(120) for part in parts[1:]] == [0, 0]
    parts[0].send_signal(signal.SIGCONT)
    assert parts[0].wait(30) == 0
    assert not list(folder.glob("runs/*/.work"))


def test_a_part_that_differs_is_refused_at_once(
    folder: Path, begin: Callable[..., "subprocess.Popen[str]"], edited: Path, tmp_path: Path
) -> None:
    """Code, the version of a library, a setting, the number of parts; the array goes on."""
    first = begin("1/2")
    until(lambda: has_agreed(folder, 1), first)
    library = copy_of_library("ftfy", tmp_path / "libraries", "99.1")
    differing = [
        (("2/2",), [edited], "in code: parts need"),
        (("2/2",), [library], "in ftfy: parts need"),
        (("2/2", "--set", "split.train=5"), [], "in split.train: parts need"),
        (("2/3",), [], "in parts: parts need"),
    ]
    for words, places, said in differing:
        text = run("run", "r.toml", "--part", *words, folder=folder, places=places, ends=2)
        assert first.poll() is None, "it waits for part 2, which did not end with it"
        assert not list(folder.glob("runs/*/.work/prepare/00001/DONE")), "a task of part 2"
        assert "differs from part 1, which is at work, in " in sentence_of(text)
        assert said in sentence_of(text)
        assert "cost: " not in text, "nothing was read"
    assert run("run", "r.toml", "--part", "2/2", folder=folder)
    assert first.wait(120) == 0
    assert [path.name for path in (folder / "runs").glob("small-*")] == [
        os.readlink(folder / "runs/small")
    ]


def sentence_of(text: str) -> str:
    (line,) = (line for line in text.splitlines() if line.startswith("error: "))
    return line.removeprefix("error: ")


def test_parts_that_read_other_input_are_refused(
    folder: Path, begin: Callable[..., "subprocess.Popen[str]"]
) -> None:
    first = begin("1/2")
    until(lambda: len(prepared(folder)) == 2, first)
    write_jsonl(folder / "a.jsonl", [sentences(40, seed) for seed in range(91)])
    text = run("run", "r.toml", "--part", "2/2", folder=folder, ends=2)
    assert "in source 0 jsonl:a.jsonl: parts need" in sentence_of(text)


def test_a_killed_part_ends_the_wait_with_a_sentence(
    folder: Path, begin: Callable[..., "subprocess.Popen[str]"], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLM_JOIN_SECONDS", "7")
    second, first = begin("2/2"), begin("1/2")
    until(lambda: has_agreed(folder, 2), second)
    second.kill()
    second.wait(60)
    (sign,) = folder.glob(f"{ARRAY}/part-2-*.json")
    heard = sign.stat().st_mtime  # part 1 heard the last beat then or later
    _, err = first.communicate(timeout=120)
    assert first.returncode == 7, err
    assert time.time() - heard > 7
    waits = [line for line in err.splitlines() if line.startswith("waiting for part 2 of 2: ")]
    assert len(waits) == 1
    assert " tasks of prepare are done" in waits[0]
    assert "part 2 of 2 gave no sign of life for 7 seconds (MLM_JOIN_SECONDS" in sentence_of(err)
    monkeypatch.delenv("MLM_JOIN_SECONDS")
    both = [begin("1/2"), begin("2/2")]
    assert [part.wait(120) for part in both] == [0, 0]


def test_parts_that_never_start_are_awaited_for_a_stated_time(
    folder: Path, begin: Callable[..., "subprocess.Popen[str]"], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLM_JOIN_SECONDS", "1")
    third = begin("3/3")
    assert third.wait(60) == 7
    assert "part 1 of 3 gave no sign of life for 1 seconds" in sentence_of(third.communicate()[1])
    assert not prepared(folder), "the first part begins the work"
    first = begin("1/3")
    assert first.wait(60) == 7
    assert "part 2 of 3 gave no sign of life" in sentence_of(first.communicate()[1])


def test_a_part_that_fails_ends_the_others_with_its_words(
    folder: Path, begin: Callable[..., "subprocess.Popen[str]"]
) -> None:
    first = begin("1/2")
    until(lambda: prepared(folder), first)
    second = begin("2/2")
    until(lambda: has_agreed(folder, 2), second)
    second.send_signal(signal.SIGTERM)
    assert second.wait(60) == 7
    assert first.wait(60) == 7
    assert (
        "part 2 has ended: it was interrupted; give the commands of all parts again"
        in first.communicate()[1]
    )


def test_an_array_that_died_holds_nobody_up(
    folder: Path, begin: Callable[..., "subprocess.Popen[str]"], edited: Path
) -> None:
    first = begin("1/2")
    until(lambda: prepared(folder), first)
    first.kill()
    first.wait(60)
    assert read_signs(folder / ARRAY, 1)
    both = [begin("1/2", places=[edited]), begin("2/2", places=[edited])]
    assert [part.wait(120) for part in both] == [0, 0]
    assert not (folder / "runs/.parts").exists()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meetings, "BEAT_SECONDS", 0.02)
    monkeypatch.setattr(meetings, "ASK_SECONDS", 0.01)
    monkeypatch.setattr(meetings, "LOOK_SECONDS", 0.5)
    monkeypatch.setattr(meetings, "DEFAULT_JOIN_SECONDS", 1)
    monkeypatch.setattr(meetings, "SAID_AFTER_SECONDS", 0.1)


def test_a_part_is_held_to_those_that_live(
    tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    silence = meetings.LOOK_SECONDS
    # Who lives is seen long before that, also where its thread must wait for a processor.
    monkeypatch.setattr(meetings, "LOOK_SECONDS", 60)
    with Meeting(tmp_path / "m", 1, 3) as first:
        first.agree({"code": "a"})
        with Meeting(tmp_path / "m", 2, 3) as second:
            second.agree({"code": "a"})
        with (
            Meeting(tmp_path / "m", 3, 3) as third,
            pytest.raises(BadInput, match="part 1, which is at work, in c"),
        ):
            third.agree({"code": "b"})
        assert not read_signs(tmp_path / "m", 3), "who was refused ends nobody"
        dead = shutil.copytree(
            tmp_path / "m",
            tmp_path / "dead",
            ignore=shutil.ignore_patterns("*.new"),  # which part 1 renames at any moment
        )
    assert not (tmp_path / "m").exists()
    with Meeting(dead, 3, 3) as third:
        with monkeypatch.context() as patch:
            patch.setattr(meetings, "LOOK_SECONDS", silence)
            third.agree({"code": "b"})
        with (
            Meeting(dead, 2, 3) as second,
            pytest.raises(BadInput, match="differs from part 3, which is at work"),
        ):
            second.agree({"code": "a"})


def test_parts_that_differ_and_begin_together_end(tmp_path: Path, quick: None) -> None:
    """Whoever saw nobody when it began finds out while it waits, and takes no work of another
    recipe for its own."""
    ends: dict[int, str] = {}
    together = threading.Barrier(8)

    def join(part: int) -> None:
        try:
            with Meeting(tmp_path / "m", part, 9) as meeting:
                together.wait()
                meeting.agree({"code": f"new {part % 2}"})
                meeting.wait_for(lambda: None, 2 + (part + 1) % 8, lambda: "nothing is done")
        except (BadInput, Interrupted) as error:
            ends[part] = str(error)

    threads = [threading.Thread(target=join, args=(part,)) for part in range(2, 10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(ends) == 8
    assert any("which is at work, in code" in said for said in ends.values())


def fails(folder: Path, words: str) -> None:
    """Part 2 agrees and ends with an error."""
    with Meeting(folder, 2, 2) as second:
        second.agree({"code": "a"})
        raise BadInput(words)


class Clock:
    """Time of `meeting`, which goes on where a part sleeps and at no other moment."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def monotonic(self) -> float:
        return self.seconds

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(meetings, "monotonic", made.monotonic)
    monkeypatch.setattr(meetings, "sleep", made.sleep)
    return made


def test_a_sign_from_before_says_nothing_of_now(
    tmp_path: Path, quick: None, clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "m"
    with pytest.raises(BadInput):
        fails(folder, "the disk of yesterday")
    assert [sign["said"] for sign in read_signs(folder).values()] == ["the disk of yesterday"]
    with Meeting(folder, 1, 2) as first:
        first.agree({"code": "a"})
        with pytest.raises(Interrupted, match="part 2 of 2 gave no sign of life for 1 seconds"):
            first.wait_for(lambda: None, 2, lambda: "nothing is done")
        assert clock.seconds == pytest.approx(1, abs=2 * meetings.ASK_SECONDS)
        with pytest.raises(BadInput):
            fails(folder, "the disk of today")
        with pytest.raises(Interrupted, match="part 2 has ended: the disk of today"):
            first.wait_for(lambda: None, 2, lambda: "nothing is done")
    assert capsys.readouterr().err.count("waiting for part 2 of 2: nothing is done") == 2


def test_a_part_that_works_long_is_awaited(
    tmp_path: Path, quick: None, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From each of its signs for almost as long as a part without any."""

    def sleep(seconds: float) -> None:
        before = read_signs(tmp_path / "m", 2)
        until(lambda: read_signs(tmp_path / "m", 2) != before)
        clock.sleep(0.9)

    with Meeting(tmp_path / "m", 1, 2) as first, Meeting(tmp_path / "m", 2, 2) as second:
        first.agree({"code": "a"})
        second.agree({"code": "a"})
        monkeypatch.setattr(meetings, "sleep", sleep)
        assert first.wait_for(lambda: clock.seconds > 5 or None, 2, lambda: "so far") is True
