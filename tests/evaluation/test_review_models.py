"""Models of other programs that are not what they say: other layers than their weights, sizes that
no model has."""

import json
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlm_repro.engine.formats.convert import export_checkpoint
from tests.commands import Command
from tests.engine.test_formats_checkpoint import write_rough
from tests.evaluation.test_pretrained import TEXT, made, spoil_config

SECONDS = 20
"""Longest processor time until a model is refused."""
Refused = Callable[[Path], tuple[int, str]]


@pytest.fixture
def refused(tmp_path: Path, mlm_eval: Command) -> Refused:
    """Exit code and sentence of a score of a model."""
    (tmp_path / "text.txt").write_text(TEXT)

    def refused(directory: Path) -> tuple[int, str]:
        started = time.process_time()
        done = mlm_eval(
            "perplexity", tmp_path / "text.txt", "--ckpt", directory, "--set", "workers=1"
        )
        assert time.process_time() - started < SECONDS
        assert "perplexity" not in done.out
        assert len(done.error.strip().splitlines()) == 1
        return done.code, done.error

    return refused


@pytest.mark.parametrize("layers", [1, 0, -1, 3, 99_999_999_999])
@pytest.mark.parametrize("kind", ["LlamaConfig", "GPT2Config"])
def test_a_model_of_other_layers_than_its_weights_is_not_scored(
    kind: str, layers: int, tmp_path: Path, refused: Refused
) -> None:
    directory = made(tmp_path / "model", kind)
    spoil_config(**{"n_layer" if kind == "GPT2Config" else "num_hidden_layers": layers})(directory)
    assert refused(directory)[0] in (2, 4, 6)


@pytest.mark.parametrize("layers", [1, 0, -1, 3, 99_999_999_999])
def test_an_exported_model_of_other_layers_is_not_scored(
    layers: int, tmp_path: Path, refused: Refused
) -> None:
    """The engine refuses it, and no other program computes it in the engine's place."""
    write_rough(tmp_path / "ours")
    directory = Path(export_checkpoint(tmp_path / "ours", tmp_path / "theirs"))
    spoil_config(n_layer=layers)(directory)
    assert refused(directory)[0] in (2, 6)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("vocab_size", -1),
        ("vocab_size", 0),
        ("hidden_size", -8),
        ("hidden_size", 0),
        ("num_attention_heads", 0),
    ],
)
def test_a_size_that_no_model_has_is_refused(
    key: str, value: Any, tmp_path: Path, refused: Refused
) -> None:
    directory = made(tmp_path / "model", "LlamaConfig")
    spoil_config(**{key: value})(directory)
    assert refused(directory)[0] in (2, 4, 6)


def test_a_header_of_a_hundred_thousand_tensors_is_refused_in_time(
    tmp_path: Path, refused: Refused
) -> None:
    directory = made(tmp_path / "model", "LlamaConfig")
    entry = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    header = json.dumps({f"t{number}": entry for number in range(100_000)}).encode()
    (directory / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    assert refused(directory)[0] in (2, 6)
