"""`mlm-verify` in this process, whose forked ranks inherit what a test has planted."""

import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import experiments.verify.cli
from tests.commands import Command, Outcome

CONFIG = """
name = "tiny"
[model]
num_layers = 2
hidden_size = 32
num_heads = 4
seq_length = 16
vocab_size = 64
padded_vocab_size = 64
[train]
iterations = 100
global_batch_size = 4
microbatch_size = 2
learning_rate = 1e-2
warmup_iterations = 2
precision = "fp32"
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A model that trains in a moment."""
    path = tmp_path / "tiny.toml"
    path.write_text(CONFIG)
    return path


@pytest.fixture
def verify(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Iterator[Command]:
    """The command: how it ended and what it said."""

    def verify(*arguments: object) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["mlm-verify", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            experiments.verify.cli.main()
        return Outcome(int(end.value.code or 0), *capfd.readouterr())

    old = signal.getsignal(signal.SIGINT)
    yield verify
    signal.signal(signal.SIGINT, old)
