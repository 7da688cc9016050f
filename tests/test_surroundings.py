"""What surrounds a command changes no bit of what it makes: variables, the order of a folder,
or clocks that jump."""

import datetime
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlm_repro.engine.run.files import read_metrics
from mlm_repro.lineage import run as runs
from mlm_repro.lineage.digest import MARKER, sha256_file
from tests.commands import call
from tests.data_pipeline.conftest import sentences
from tests.engine.conftest import write_dataset
from tests.engine.small_run import small_config, train

BIN = Path(sys.executable).parent
WORDS = ("clean", "text:texts", "out", "--workers", "1")
TEN_YEARS = 315_576_000
ODD: dict[str, dict[str, str]] = {
    "without asserts": {"PYTHONOPTIMIZE": "2"},
    "in the language of C": {"LC_ALL": "C"},
    "in UTF-16": {"PYTHONIOENCODING": "utf-16"},
    "warnings, but of files that are closed late, are errors": {
        "PYTHONWARNINGS": "error,default::ResourceWarning"
    },
    "an odd terminal": {"TERM": "no-such-terminal", "COLUMNS": "0", "LINES": "-1"},
    "another time zone": {"TZ": "Pacific/Kiritimati"},
    "another order of sets": {"PYTHONHASHSEED": "7"},
}


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the folder `texts`, in whose names and texts there are letters of others."""
    folder = tmp_path_factory.mktemp("texts")
    (folder / "texts").mkdir()
    for number in range(12):
        name = f"{number * 7 % 12:02}{'äß'[number % 2]}.txt"
        (folder / "texts" / name).write_text(f"日本 é. {sentences(6, number)}", encoding="utf-8")
    return folder


def made_in(folder: Path) -> dict[str, str]:
    """Digests of the shards of a finished directory."""
    shards = {path.name: sha256_file(path) for path in sorted((folder / "out").glob("shard-*"))}
    assert shards
    assert (folder / "out" / MARKER).is_file()
    return shards


@pytest.fixture(scope="module")
def ordinary(texts: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What the command makes in ordinary surroundings."""
    return made_of(texts, tmp_path_factory.mktemp("ordinary"))


def made_of(texts: Path, place: Path, **variables: str) -> dict[str, str]:
    (place / "texts").symlink_to(texts / "texts")
    done = subprocess.run(
        [BIN / "mlm-data", *WORDS],
        cwd=place,
        env=os.environ | variables,
        capture_output=True,
        timeout=600,
    )
    said = (done.stdout + done.stderr).replace(b"\0", b"")
    assert done.returncode == 0, said
    assert b"Traceback" not in said
    return made_in(place)


@pytest.mark.parametrize("surroundings", ODD)
def test_variables_change_no_bit(
    surroundings: str, texts: Path, ordinary: dict[str, str], tmp_path: Path
) -> None:
    assert made_of(texts, tmp_path, **ODD[surroundings]) == ordinary


WITHOUT_UTF8 = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


@pytest.mark.parametrize("pattern", ["texts", "texts/*.txt"])
@pytest.mark.parametrize(
    ("name", "variables"), [(b"caf\xe9.txt", {}), ("日本.txt".encode(), WITHOUT_UTF8)]
)
def test_a_file_whose_name_is_no_text_is_refused_in_a_sentence(
    name: bytes, variables: dict[str, str], pattern: str, tmp_path: Path
) -> None:
    """Such as a name in Latin-1. It was a fault of the program."""
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("Some words of a text.", encoding="utf-8")
    Path(os.fsdecode(os.fsencode(tmp_path / "texts") + b"/" + name)).write_text("More words.")
    done = subprocess.run(
        [BIN / "mlm-data", "clean", f"text:{pattern}", "out", "--workers", "1"],
        cwd=tmp_path,
        env=os.environ | variables,
        capture_output=True,
        timeout=600,
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr.endswith(
        b" is not UTF-8 text: rename the file or folder, or type other text\n"
    )
    assert os.listdir(tmp_path) == ["texts"]


def backwards() -> None:
    """Make this process list every folder from its end."""
    list_names, scan = os.listdir, os.scandir

    class Reversed:
        def __init__(self, *place: Any) -> None:
            with scan(*place) as found:
                self.found = iter(sorted(found, key=lambda entry: entry.name, reverse=True))

        def __iter__(self) -> Any:
            return self.found

        def __next__(self) -> Any:
            return next(self.found)

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *error: object) -> None:
            pass

        def close(self) -> None:
            pass

    os.listdir = lambda *place: sorted(list_names(*place), reverse=True)  # type: ignore[assignment]
    os.scandir = Reversed  # type: ignore[assignment, misc]


def test_the_order_of_a_folder_changes_no_bit(
    texts: Path, ordinary: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "texts").symlink_to(texts / "texts")
    call({}, "mlm-data", *WORDS, folder=tmp_path, prepare=backwards, ends=0)
    assert made_in(tmp_path) == ordinary


def jumping() -> Callable[[], float]:
    """A clock of the day that leaps ten years, there or back, every seven calls."""
    calls, now = 0, time.time

    def clock() -> float:
        nonlocal calls
        calls += 1
        return now() + (calls // 7 % 3 - 1) * TEN_YEARS

    return clock


class Jumping(datetime.datetime):
    """The time of day by that clock."""

    clock = staticmethod(jumping())

    @classmethod
    def now(cls, tz: datetime.tzinfo | None = None) -> "Jumping":
        return cls.fromtimestamp(cls.clock(), tz)


def test_a_clock_that_jumps_changes_no_bit_of_a_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_config(write_dataset(tmp_path / "data"), iterations=20, checkpoint_interval=5)
    straight = train(config, tmp_path / "straight").path
    monkeypatch.setattr(time, "time", jumping())
    monkeypatch.setattr(runs, "datetime", Jumping)
    crooked = train(config, tmp_path / "crooked").path
    of_both = [
        [sha256_file(path) for path in sorted(run.rglob("*.safetensors"))]
        for run in (straight, crooked)
    ]
    assert len(of_both[0]) >= 2
    assert of_both[0] == of_both[1]
    times = [line.get("seconds", 0) for line in read_metrics(crooked)]
    assert min(times) >= 0
