"""What every import ends in: a sealed checkpoint of whole tensors, or a sentence; files from
elsewhere run nothing."""

import builtins
import dataclasses
import os
import runpy
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mlm_repro.data_pipeline.tokens.tokenizer import Tokenizer
from mlm_repro.engine.cli import main
from mlm_repro.engine.config import ModelConfig, TwinScale
from mlm_repro.engine.formats import Imported, write_checkpoint
from mlm_repro.engine.formats.megatron import read_megatron
from mlm_repro.engine.formats.torch_files import read_torch_file
from mlm_repro.engine.inference import load_for_inference
from mlm_repro.engine.model.gpt2 import GPT2
from mlm_repro.engine.parallel.mesh import serial_mesh
from mlm_repro.lineage.digest import check_seal, seal
from mlm_repro.lineage.errors import BadInput, IntegrityFailure
from tests.commands import Command
from tests.damage import TORCH

TEXTS = ["the river sleeps under the old house and the wind walks slowly over bright stone"] * 20
CONFIG = ModelConfig(
    num_layers=4, hidden_size=24, num_heads=4, seq_length=12, vocab_size=270, padded_vocab_size=384
)
TOKENS = torch.randint(
    0, CONFIG.vocab_size, (3, CONFIG.seq_length), generator=torch.Generator().manual_seed(1)
)


def rough_model(config: ModelConfig = CONFIG) -> GPT2:
    """Random values everywhere, so that no bias, layer norm or row order is invisible."""
    model = GPT2(config, serial_mesh()).eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "layernorm.weight" in name else 0.0, 0.2, generator=generator)
    return model


def real_logits(model: GPT2) -> torch.Tensor:
    """Logits [s, b, v] of the real vocabulary at `TOKENS`."""
    with torch.no_grad():
        return model.logits(model(TOKENS))[..., : model.config.vocab_size]


def trained_tokenizer() -> Tokenizer:
    return Tokenizer.train(TEXTS, CONFIG.vocab_size)


def imported(model: GPT2) -> Imported:
    tensors = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    return Imported("rough", model.config, tensors, trained_tokenizer(), {"format": "this test"})


def write_rough(out: Path) -> GPT2:
    """A checkpoint of `rough_model` at `out`, and the model."""
    model = rough_model()
    write_checkpoint(out, imported(model))
    return model


def test_what_is_written_is_loaded(tmp_path: Path) -> None:
    given = dataclasses.replace(imported(rough_model()), twin=TwinScale())
    digest = write_checkpoint(tmp_path / "out", given)
    loaded = load_for_inference(tmp_path / "out")
    assert (loaded.digest, loaded.config) == (digest, CONFIG)
    assert digest == check_seal(tmp_path / "out")
    assert Tokenizer.load(loaded.directory / "tokenizer").digest == given.tokenizer.digest
    for name, tensor in loaded.model.named_parameters():
        assert tensor.equal(given.tensors[name]), name


def test_nothing_is_replaced_and_no_sealed_directory_is_changed(tmp_path: Path) -> None:
    run, given = tmp_path / "run", imported(rough_model())
    run.mkdir()
    (run / "mine").write_text("text")
    seal(run)
    for out, sentence in ((run, "exists already"), (run / "a" / "b", "which is complete")):
        with pytest.raises(BadInput, match=sentence):
            write_checkpoint(out, given)
    check_seal(run)
    (tmp_path / "file").write_text("text")
    with pytest.raises(BadInput, match="cannot be written"):
        write_checkpoint(tmp_path / "file" / "out", given)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "run"]


class Payload:
    """Pickles as a call."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.call


def payloads(marker: Path) -> dict[str, Payload]:
    """Calls that would make `marker`, by the name that must be refused."""
    return {
        f"{os.system.__module__}.system": Payload(os.system, f"touch '{marker}'"),
        "builtins.eval": Payload(builtins.eval, f"open({str(marker)!r}, 'w').close()"),
        "builtins.exec": Payload(builtins.exec, f"open({str(marker)!r}, 'w').close()"),
        "runpy.run_path": Payload(runpy.run_path, str(marker.with_name("program.py"))),
        "builtins.getattr": Payload(getattr, Payload(Path, str(marker)), "touch"),
        "shutil.copyfile": Payload(shutil.copyfile, __file__, str(marker)),
    }


NAMES = list(payloads(Path("marker")))


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "before-1.6"])
@pytest.mark.parametrize("name", NAMES)
def test_a_call_in_a_file_is_not_run(name: str, zipped: bool, tmp_path: Path) -> None:
    marker, path = tmp_path / "marker", tmp_path / "file.pt"
    payload = payloads(marker)[name]
    (tmp_path / "program.py").write_text(f"open({str(marker)!r}, 'w').close()")
    content = {"model": {"a": torch.zeros(2)}, "optimizer": [payload]}
    torch.save(content, path, _use_new_zipfile_serialization=zipped)
    with pytest.raises(IntegrityFailure, match=rf"names {name}, which is not among what"):
        read_torch_file(path)
    assert not marker.exists()
    if name != "builtins.getattr":
        torch.load(path, weights_only=False)
        assert marker.exists()  # the payload works where it is let


@pytest.mark.parametrize(
    ("pickled", "end"),
    [(b"\x80\x02Q.", "pop from empty list"), (b"\x80\x02K\x01K\x02\x81.", "but got 1")],
)
def test_what_torch_says_is_given_without_its_advice(
    pickled: bytes, end: str, tmp_path: Path
) -> None:
    torch.save({"a": torch.zeros(10)}, tmp_path / "file.pt")
    (tmp_path / "file.pt").write_bytes(TORCH.close((tmp_path / "file.pt").read_bytes(), pickled))
    with pytest.raises(IntegrityFailure) as caught:
        read_torch_file(tmp_path / "file.pt")
    assert str(caught.value).endswith(end)
    assert "weights_only" not in str(caught.value)


def truncate(directory: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:5000])


def garble(directory: Path) -> None:
    (directory / "config.json").write_text("[" * 100_000)


def forget(directory: Path) -> None:
    for path in directory.iterdir():
        path.unlink()


@pytest.mark.parametrize(
    ("damage", "code", "words"),
    [
        (truncate, 6, "model.safetensors cannot be read"),
        (garble, 6, "config.json cannot be read"),
        (forget, 2, "is neither a Megatron-LM save directory"),
        (shutil.rmtree, 2, "there is no directory"),
    ],
)
def test_a_damaged_directory_gets_one_sentence(
    damage: Callable[[Path], None],
    code: int,
    words: str,
    exported: Path,
    tmp_path: Path,
    command: Command,
) -> None:
    damage(exported)
    before = sorted(tmp_path.iterdir())
    done = command(main, "mlm-train", "import", exported, tmp_path / "out")
    assert (done.code, done.out) == (code, "")
    assert words in done.error
    assert done.but_cost.count("\n") == 1
    assert sorted(tmp_path.iterdir()) == before


def test_export_explains_what_it_cannot_do(
    exported: Path, tmp_path: Path, command: Command
) -> None:
    weights = tmp_path / "checkpoint" / "model-tp00-pp000.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    for checkpoint, out, code, words in (
        (tmp_path / "nowhere", tmp_path / "out", 2, "there is no checkpoint directory"),
        (tmp_path / "checkpoint", exported, 2, "exists already"),
        (tmp_path / "checkpoint", tmp_path / "out", 6, "was changed"),
        (exported, tmp_path / "out", 6, "no COMPLETE file"),
    ):
        done = command(main, "mlm-train", "export", checkpoint, out)
        assert (done.code, done.but_cost.count("\n")) == (code, 1)
        assert words in done.but_cost


def test_a_compressed_file_is_refused(tmp_path: Path) -> None:
    """Its tensors would be read from the wrong places."""
    path = tmp_path / "file.pt"
    torch.save({"a": torch.zeros(1000)}, path)
    with zipfile.ZipFile(path) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in parts.items():
            archive.writestr(name, content)
    with pytest.raises(IntegrityFailure, match="it is compressed"):
        read_torch_file(path)


def test_a_tracker_that_is_no_text_is_refused(vocab: Path, tmp_path: Path) -> None:
    with (tmp_path / "latest_checkpointed_iteration.txt").open("wb") as file:
        file.truncate(100 << 30)
    with pytest.raises(IntegrityFailure, match="cannot be read"):
        read_megatron(tmp_path, vocab)
