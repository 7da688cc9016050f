"""What must hold before any test imports anything, the published files, and made ones of the same shape."""

import os
import signal
import sys
from collections.abc import Callable
from multiprocessing import forkserver
from pathlib import Path

import pytest
from hypothesis import settings

from lineage.errors import KEEPS_NOTHING
from tests.commands import Command, Outcome

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported; a process with more does not fork well
os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton is imported; without effect where it is not

settings.register_profile("untimed", deadline=None)  # how long an example takes says nothing on a busy machine
settings.load_profile("untimed")

DEAREST = (
    "tests/chaos/test_chaos.py",
    "tests/engine/test_layouts.py",
    "tests/engine/test_resume_layouts.py",
    "tests/engine/test_failures.py",
    "tests/experiments/launch/test_slurm.py",
    "tests/verify/test_layouts.py",
    "tests/docs/test_examples.py",
    "tests/experiments/test_reproduce.py",
    "tests/evaluation/test_oracle.py",
    "tests/engine/test_memory.py",
    "tests/data_pipeline/test_memory.py",
)


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The files that take longest come first: a file is one worker's, and a long one at the end leaves others idle.

    Every test that uses the published files is marked `published`.
    """
    for item in items:
        if "published" in getattr(item, "fixturenames", ()):
            item.add_marker("published")
    places = {name: place for place, name in enumerate(DEAREST)}
    items.sort(key=lambda item: places.get(item.nodeid.partition("::")[0], len(DEAREST)))


def pytest_collection_finish(session: pytest.Session) -> None:
    """The process that commands are forked from starts before a test starts one of its own, which has imported less."""
    if len({item.path for item in session.items}) > 1:
        forkserver.ensure_running()


@pytest.fixture(scope="session")
def published() -> Path:
    """The directory of published files; a test that uses it is about those files and nothing else will do."""
    directory = os.environ.get("MLM_DATA_DIR")
    if not directory:
        pytest.skip(
            "this test is about the published files: name their directory in MLM_DATA_DIR and run `pytest -m published`"
        )
    return Path(directory).resolve()


@pytest.fixture(scope="session")
def reference(published: Path) -> Path:
    """The directory of the papers' numbers, which lies beside the published files."""
    folder = published.parent / "published"
    if not folder.is_dir():
        pytest.skip(f"there are no numbers of the papers at {folder}")
    return folder


@pytest.fixture(scope="session")
def made_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data directory with made files, not to be changed."""
    from tests.made_data import write_made_data

    return write_made_data(tmp_path_factory.mktemp("made-data"))


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Command:
    """Call the entry point of a command in this process, with the words of a command line.

    `ends` is the exit code it must have, where a test says one.
    """

    def call(main: Callable[[], object], *words: object, ends: int | None = None) -> Outcome:
        monkeypatch.setattr(sys, "argv", [*map(str, words)])
        capfd.readouterr()
        handler = signal.getsignal(signal.SIGINT)
        try:
            with pytest.raises(SystemExit) as ended:
                main()
        finally:
            signal.signal(signal.SIGINT, handler)
            os.environ.pop(KEEPS_NOTHING, None)  # a command sets it for its process
        out, err = capfd.readouterr()
        assert "Traceback" not in err
        code = int(ended.value.code or 0)
        assert ends in (None, code), err
        return Outcome(code, out, err)

    return call
