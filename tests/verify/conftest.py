"""`mlm-verify` in this process, whose forked ranks inherit what a test has planted."""

from functools import partial
from pathlib import Path

import pytest

from mlm_repro.verify.cli import main
from tests.commands import Command
from tests.ranks import take_a_step

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


@pytest.fixture(scope="session", autouse=True)
def _ready() -> None:
    take_a_step()  # what libraries prepare at first use, once for all ranks


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A model that trains in a moment."""
    path = tmp_path / "tiny.toml"
    path.write_text(CONFIG)
    return path


@pytest.fixture
def verify(command: Command) -> Command:
    """The command in this process: how it ended and what it said."""
    return partial(command, main, "mlm-verify")
