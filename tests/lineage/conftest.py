"""A command of our own, to see how commands end."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

APPLICATION = """
import atexit
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from mlm_repro.lineage import progress
from mlm_repro.lineage import errors
from mlm_repro.lineage.command import CommandLine, run_command
from mlm_repro.lineage.environment import user_cache
from mlm_repro.lineage.lock import locked
from mlm_repro.lineage.progress import Progress, announce

progress.SHOWN_AFTER_SECONDS = 0.0
progress.monotonic = lambda: 0.0  # a pause on a busy machine draws no bar and takes no second

app = CommandLine()


@app.command()
def run(word: str, times: int = 1) -> None:
    print(" ".join([f"run {word}"] * times))


@app.command()
def warn(word: str) -> None:
    print(f"warn {word}", file=sys.stderr)


@app.command()
def fail(name: str) -> None:
    raise getattr(errors, name)("one clear sentence")


@app.command()
def fault(word: str) -> None:
    {}[word]


@app.command()
def exhaust(of: str) -> None:
    full = {"fork": OSError(12, "Cannot allocate memory"), "python": MemoryError()}
    raise full.get(of, RuntimeError("DefaultCPUAllocator: can't allocate memory"))


@app.command()
def refuse(word: str) -> None:
    raise errors.BadInput(f"{word} is not to be had")


@app.command()
def hold(directory: Path) -> None:
    with locked(directory):
        pass


@app.command()
def cache(name: str) -> None:
    print(user_cache(name))


@app.command()
def lines(count: int) -> None:
    for number in range(count):
        print("line", number)


class Ready:
    def __del__(self) -> None:
        print("ready", flush=True)
        time.sleep(30)


class Attribute:
    def __set_name__(self, owner: type, name: str) -> None:
        print("ready", flush=True)
        time.sleep(30)


@app.command()
def wait(swallow: bool = False, finalizer: bool = False, making_a_class: bool = False) -> None:
    if finalizer:
        Ready()
    if making_a_class:
        type("Made", (), {"attribute": Attribute()})
    print("ready", flush=True)
    try:
        time.sleep(30)
    except Exception:
        if not swallow:
            raise
    print("went on")


class Stopped:
    def __del__(self) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0)


@app.command()
def late() -> None:
    atexit.register(time.sleep, 0.2)
    Stopped()
    raise errors.BadInput("over before the stop is raised once more")


@app.command()
def count(total: int, fail: bool = False) -> None:
    announce(f"counts to {total}", "", "in no time")
    with Progress("title", total, "things") as progress:
        for number in range(total):
            progress.advance(message=f"at {number}")
            progress.note("warning: small") if number == 1 else None
            if fail:
                raise errors.BadInput("failed while counting")


@app.command()
def parent() -> None:
    subprocess.run([sys.executable, sys.argv[0], "count", "3"], check=True)


run_command(app, default="run")
"""

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture(scope="session")
def application(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with a typer application that `run_command` runs."""
    path = tmp_path_factory.mktemp("application") / "application.py"
    path.write_text(APPLICATION, encoding="utf-8")
    return path


@pytest.fixture
def start(application: Path) -> Start:
    """Start the application with buffered output, as a user's shell does."""

    def start(*arguments: object, **variables: str) -> "subprocess.Popen[str]":
        environment = {
            name: value
            for name, value in os.environ.items()
            if name not in ("PYTHONUNBUFFERED", "RANK")
        }
        return subprocess.Popen(
            [sys.executable, str(application), *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment | variables,
        )

    return start


def ended(process: "subprocess.Popen[str]") -> tuple[int, str, str]:
    """Exit code, standard output and standard error of a process that ends by itself."""
    out, err = process.communicate(timeout=600)
    return process.returncode, out, err
