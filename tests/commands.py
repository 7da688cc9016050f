"""A command in this process or in one of its own: how it ended and what it said."""

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Outcome:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def error(self) -> str:
        """Its last words, which must be one sentence."""
        sentence = self.err.strip().splitlines()[-1]
        assert sentence.startswith("error: "), self.err
        return sentence

    @property
    def but_cost(self) -> str:
        """What it said on standard error beside its cost."""
        return "".join(line for line in self.err.splitlines(keepends=True) if not line.startswith("cost: "))


Command = Callable[..., Outcome]


def program(name: str, *arguments: object) -> list[str]:
    """The command line of one of this package's commands."""
    return [str(Path(sys.executable).with_name(name)), *map(str, arguments)]


def call(
    environment: Mapping[str, str], name: str, *arguments: object, folder: Path = ROOT, ends: int | None = None
) -> "subprocess.CompletedProcess[str]":
    """Run one of this package's commands as a process of its own with more variables; it may show no traceback.

    `ends` is the exit code it must have, where a test says one.
    """
    done = subprocess.run(
        program(name, *arguments),
        env=os.environ | environment, cwd=folder, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert "Traceback" not in done.stderr
    assert ends in (None, done.returncode), done.stderr
    return done
