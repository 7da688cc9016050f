"""What must hold before any test imports anything, the published files, and made ones of the same
shape."""

import gc
import os
import signal
import sys
from collections.abc import Callable, Iterator
from multiprocessing import forkserver
from pathlib import Path

import pytest
from hypothesis import settings

from mlm_repro.lineage.errors import KEEPS_NOTHING, STOPS
from tests.commands import Command, Outcome, silence_end

# Read when torch is imported; a process with more does not fork well.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Read when Triton is imported; without effect where it is not.
os.environ.setdefault("TRITON_INTERPRET", "1")

# How long an example takes says nothing on a busy machine.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


LONG = [
    f"tests/{name}.py"
    for name in Path(__file__).with_name("long.txt").read_text(encoding="utf-8").split()
]
"""The files that take longest, dearest first. `make test` leaves them to `make test-all`, and does
not import them."""


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The files that take longest come first: a file is one worker's, and a long one at the end
    leaves others idle.

    Every test that uses the published files is marked `published`.
    """
    places = {name: place for place, name in enumerate(LONG)}
    for item in items:
        if "published" in getattr(item, "fixturenames", ()):
            item.add_marker("published")
    items.sort(key=lambda item: places.get(item.nodeid.partition("::")[0], len(LONG)))


def pytest_collection_finish(session: pytest.Session) -> None:
    """The process that commands are forked from starts before a test starts one of its own, which
    has imported less.

    What is imported stays: no collection of garbage, of which every training has one, here or in a
    fork, looks at it.
    """
    gc.collect()
    gc.freeze()
    if len({item.path for item in session.items}) > 1:
        forkserver.ensure_running()


@pytest.fixture(scope="session")
def published() -> Path:
    """The directory of published files; a test that uses it is about those files and nothing else
    will do."""
    directory = os.environ.get("MLM_DATA_DIR")
    if not directory:
        pytest.skip(
            "this test is about the published files: name their directory in MLM_DATA_DIR and run"
            " `pytest -m published`"
        )
    return Path(directory).resolve()


OF_A_COMMAND = "PYTHONSAFEPATH", "MLM_HOLDER", KEEPS_NOTHING
"""Variables that a command sets in its process, here the tests' own, where a fixture calls it. By
the second, two programs that a test starts would take each other's unfinished files for their
own."""


@pytest.fixture(autouse=True)
def stops_are_heard() -> Iterator[None]:
    """A test that leaves a stop ignored would have later commands, which inherit that, ignore it
    too.

    Handlers of libraries are taken back: torch's elastic launcher leaves its own.
    """
    before = {number: signal.getsignal(number) for number in STOPS}
    for name in OF_A_COMMAND:
        os.environ.pop(name, None)
    yield
    for name in OF_A_COMMAND:
        os.environ.pop(name, None)
    after = {number: signal.getsignal(number) for number in STOPS}
    for number, handler in before.items():
        signal.signal(number, handler)
    assert [n for n in STOPS if after[n] == signal.SIG_IGN != before[n]] == []


@pytest.fixture
def plain_git(monkeypatch: pytest.MonkeyPatch) -> None:
    """Git commits without the user's own settings, such as hooks and signatures, and speaks
    English."""
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")
    monkeypatch.setenv("LC_ALL", "C.UTF-8")
    monkeypatch.delenv("LANGUAGE", raising=False)


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

    def call(
        main: Callable[[], object], *words: object, ends: int | None = None, traces: bool = False
    ) -> Outcome:
        monkeypatch.setattr(sys, "argv", [*map(str, words)])
        capfd.readouterr()
        handlers = {number: signal.getsignal(number) for number in STOPS}
        try:
            with pytest.raises(SystemExit) as ended:
                main()
        finally:
            # A command that has ended ignores them, and so would its children.
            for (
                number,
                handler,
            ) in handlers.items():
                signal.signal(number, handler)
            # A command sets it for its process, and a test may have several.
            os.environ.pop(KEEPS_NOTHING, None)
        out, err = capfd.readouterr()
        assert traces or "Traceback" not in err, err
        code = int(ended.value.code or 0)
        assert ends in (None, code), err
        return Outcome(code, out, err)

    return call


def pytest_unconfigure() -> None:
    """Silence what Triton's bindings list at the end of this process: what they still hold."""
    if "triton" in sys.modules:
        silence_end()
