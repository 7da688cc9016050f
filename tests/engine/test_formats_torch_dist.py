"""Weights in torch's distributed checkpoints: ours go out and come back, torch reads them, damage is named."""

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as distributed
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import Metadata

from engine.checkpoint.checkpoint import load_for_inference
from engine.cli import main
from engine.formats.convert import import_checkpoint
from engine.model.gpt2 import GPT2
from tests.commands import Command
from tests.engine.test_formats_checkpoint import CONFIG, write_rough
from tests.engine.test_formats_hostile import NAMES, payloads


@pytest.fixture
def model(tmp_path: Path) -> GPT2:
    return write_rough(tmp_path / "ours")


@pytest.fixture
def exported(model: GPT2, tmp_path: Path, command: Command) -> Path:
    done = command(main, "mlm-train", "export", tmp_path / "ours", tmp_path / "theirs", "--format", "torch-dist")
    assert (done.code, done.out) == (0, f"written: {tmp_path / 'theirs'}\n")
    return tmp_path / "theirs"


@pytest.mark.parametrize("place", ["", "release"])
def test_weights_come_back_bit_for_bit(model: GPT2, exported: Path, place: str, tmp_path: Path) -> None:
    loaded = load_for_inference(import_checkpoint(exported / place, tmp_path / "back", exported))
    assert loaded.config == CONFIG
    back = dict(loaded.model.named_parameters())
    assert all(torch.equal(back[name], weight) for name, weight in model.named_parameters())


def test_torch_itself_reads_them(model: GPT2, exported: Path, tmp_path: Path) -> None:
    dcp_to_torch_save(exported / "release", tmp_path / "whole.pt")
    theirs = torch.load(tmp_path / "whole.pt", weights_only=True)
    ours = dict(model.named_parameters())
    for name, inner in (("linear_fc1.weight", "dense_h_to_4h.weight"), ("linear_fc2.bias", "dense_4h_to_h.bias")):
        stacked = theirs[f"decoder.layers.mlp.{name}"]
        assert all(torch.equal(layer, ours[f"layers.{at}.mlp.{inner}"]) for at, layer in enumerate(stacked))
    assert torch.equal(theirs["embedding.word_embeddings.weight"], ours["embedding.word_embeddings.weight"])


def change(metadata: Callable[[Metadata], object]) -> Callable[[Path], None]:
    """What rewrites the metadata of a checkpoint."""

    def changed(folder: Path) -> None:
        known = distributed.FileSystemReader(folder).read_metadata()
        metadata(known)
        (folder / ".metadata").write_bytes(pickle.dumps(known))

    return changed


def words(known: Metadata) -> Any:
    return known.state_dict_metadata["embedding.word_embeddings.weight"]


def half(known: Metadata) -> None:
    (chunk,) = words(known).chunks
    chunk.sizes = torch.Size([chunk.sizes[0] // 2, chunk.sizes[1]])


def repeat(known: Metadata) -> None:
    words(known).chunks *= 2


def shift(known: Metadata) -> None:
    words(known).chunks[0].offsets = torch.Size([1, 0])


def leave(known: Metadata) -> None:
    for info in known.storage_data.values():
        info.relative_path = "../" + info.relative_path


def empty(known: Metadata) -> None:
    words(known).chunks.clear()


def swell(known: Metadata) -> None:
    words(known).size = torch.Size([1 << 40, 24])


def forget(known: Metadata) -> None:
    del known.state_dict_metadata["decoder.layers.mlp.linear_fc1.bias"]


def truncate(folder: Path) -> None:
    (file,) = folder.glob("*.distcp")
    file.write_bytes(file.read_bytes()[:-5000])


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (change(half), "some are missing"),
        (change(repeat), "shards of tensor 'embedding.word_embeddings.weight' in"),
        (change(shift), "lies outside it"),
        (change(leave), "which is not a file of the directory"),
        (change(empty), "has no shards"),
        (change(swell), "some are missing"),
        (change(forget), "'layers.0.mlp.dense_h_to_4h.bias' is missing"),
        (change(lambda known: known.storage_data.clear()), "cannot be read"),
        (truncate, "cannot be read"),
        (lambda folder: (folder / ".metadata").write_bytes(b"nonsense"), ".metadata cannot be read"),
        (lambda folder: (folder / ".metadata").write_bytes(pickle.dumps({})), "it does not describe a checkpoint"),
    ],
)  # fmt: skip
def test_a_damaged_checkpoint_gets_one_sentence(
    damage: Callable[[Path], None], said: str, exported: Path, tmp_path: Path, command: Command
) -> None:
    damage(exported / "release")
    done = command(main, "mlm-train", "import", exported, tmp_path / "back")
    assert (done.code, done.out) == (6, "")
    assert said in done.error
    assert done.but_cost.count("\n") == 1
    assert not (tmp_path / "back").exists()


@pytest.mark.parametrize("name", NAMES)
def test_a_call_in_metadata_is_not_run(name: str, exported: Path, tmp_path: Path, command: Command) -> None:
    marker = tmp_path / "marker"
    (tmp_path / "program.py").write_text(f"open({str(marker)!r}, 'w').close()")
    (exported / "release" / ".metadata").write_bytes(pickle.dumps({"plan": payloads(marker)[name]}))
    done = command(main, "mlm-train", "import", exported, tmp_path / "back")
    assert done.code == 6
    assert f"asks to call {name}, which no checkpoint needs: nothing in it was run" in done.error
    assert not marker.exists()
