"""Checkpoints made to do harm: refused with one sentence, and nothing in them is run or followed.

A seal only says that files are as they were sealed, so every damage here is sealed again.
"""

import json
import shutil
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mlm_repro.lineage.digest import seal
from tests.commands import Command
from tests.evaluation.standins import SENTENCE

WEIGHTS = "model-tp00-pp000.safetensors"
DELETE = {"type": "Replace", "pattern": {"Regex": "[^e]"}, "content": ""}
FIRST = "embedding.word_embeddings.weight"


Refused = Callable[[Path], tuple[int, str]]


@pytest.fixture
def refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mlm_eval: Command) -> Refused:
    """Exit code and sentence of `mlm-eval cloze` with a checkpoint; anything but a sentence would
    be raised."""
    monkeypatch.chdir(tmp_path)
    Path("passages.txt").write_text(SENTENCE)

    def refused(path: Path) -> tuple[int, str]:
        started = time.monotonic()
        done = mlm_eval("cloze", "passages.txt", "--ckpt", path, "--limit", 2, "--set", "workers=1")
        assert time.monotonic() - started < 60
        return done.code, done.error

    return refused


@pytest.fixture
def checkpoint(run: Path, tmp_path: Path) -> Path:
    """A checkpoint that may be damaged."""
    return Path(
        shutil.copytree(run / "checkpoints" / "iter_0000010", tmp_path / "deep" / "checkpoint")
    )


def edit(path: Path, change: Callable[[Any], Any]) -> None:
    content = json.loads(path.read_text())
    path.write_text(json.dumps(change(content) or content))


def set_probe(checkpoint: Path, tokens: list[list[int]]) -> None:
    probe = {"tokens": tokens, "loss": 1.0, "precision": "fp32", "computed_on": {}}
    (checkpoint / "probe.json").write_text(json.dumps(probe))


def rewrite(checkpoint: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(checkpoint / WEIGHTS)
    change(tensors)
    save_file(tensors, checkpoint / WEIGHTS)


def set_entry(**values: Any) -> Callable[[Path], None]:
    return lambda c: edit(c / "index.json", lambda index: index[FIRST].update(values))


def set_model(**values: Any) -> Callable[[Path], None]:
    return lambda c: edit(c / "config.json", lambda config: config["model"].update(values))


def set_weights(content: bytes) -> Callable[[Path], None]:
    def damage(checkpoint: Path) -> None:
        (checkpoint / WEIGHTS).write_bytes(content)

    return damage


def link_weights(checkpoint: Path) -> None:
    outside = checkpoint.parent.parent / "outside.safetensors"
    (checkpoint / WEIGHTS).rename(outside)
    (checkpoint / WEIGHTS).symlink_to(outside)


HEADER = json.dumps(
    {FIRST: {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}}
).encode()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (set_weights(struct.pack("<Q", 2**62) + b"{}"), "cannot be read"),
        (set_weights(struct.pack("<Q", len(HEADER)) + HEADER), "cannot be read"),
        (lambda c: rewrite(c, lambda t: t.update({FIRST: t[FIRST][:7].clone()})), "shape"),
        (lambda c: rewrite(c, lambda t: t.update({FIRST: t[FIRST].long()})), "holds I64 numbers"),
        (lambda c: rewrite(c, lambda t: t[FIRST].fill_(float("nan"))), "is not what was saved"),
        (set_entry(files="abc"), FIRST),
        (set_entry(dim=7), FIRST),
        (set_entry(shape="no"), "has no list of sizes"),
        (lambda c: edit(c / "index.json", lambda i: list(i)), "index.json"),
        (lambda c: (c / "config.json").write_text("[" * 100_000), "config.json cannot be read"),
        (set_model(num_layers=10**8), "fewer than the 100000000 layers"),
        (set_model(hidden_size=4 * 10**7), "shape"),
        (set_model(hidden_size=2**40), "should be less than or equal to"),
        (set_model(padded_vocab_size=10**30), "more than 63 bits"),
        (
            lambda c: edit(
                c / "tokenizer" / "tokenizer.json", lambda t: t | {"normalizer": DELETE}
            ),
            "does not restore every text",
        ),
        (lambda c: set_probe(c, [[1] * 5_000_000]), "must all have one length"),
        (lambda c: set_probe(c, [[1, 2]] * 1_000_000), "at most 8"),
        (link_weights, "symbolic link"),
    ],
)
def test_a_damaged_checkpoint_of_ours_is_refused(
    damage: Callable[[Path], Any], words: str, checkpoint: Path, refused: Refused
) -> None:
    damage(checkpoint)
    if not any(path.is_symlink() for path in checkpoint.iterdir()):
        seal(checkpoint)
    code, sentence = refused(checkpoint)
    assert code in (2, 6)
    assert words in sentence


def test_what_is_no_checkpoint_is_named(
    tmp_path: Path, nothing_published: Path, monkeypatch: pytest.MonkeyPatch, refused: Refused
) -> None:
    monkeypatch.setattr("mlm_repro.data_pipeline.reading.hub.hub_is_reachable", lambda: False)
    for path, words in (
        (tmp_path, "is neither"),
        (tmp_path / "no", "there is no"),
        (Path("openai/none"), "there is no"),
    ):
        code, sentence = refused(path)
        assert (code, words in sentence) == (2, True)
