"""What every import ends in: a sealed checkpoint of whole tensors, or nothing at all and a sentence."""

import dataclasses
from pathlib import Path

import pytest
import torch

from data_pipeline.tokens.tokenizer import Tokenizer
from engine.checkpoint.checkpoint import load_for_inference
from engine.config import ModelConfig, TwinScale
from engine.formats import Imported, write_checkpoint
from engine.model.gpt2 import GPT2
from engine.parallel.mesh import serial_mesh
from lineage.digest import check_seal, seal
from lineage.errors import BadInput

TEXTS = ["the river sleeps under the old house and the wind walks slowly over bright stone"] * 20
CONFIG = ModelConfig(num_layers=4, hidden_size=24, num_heads=4, seq_length=12, vocab_size=270, padded_vocab_size=384)
TOKENS = torch.randint(0, CONFIG.vocab_size, (3, CONFIG.seq_length), generator=torch.Generator().manual_seed(1))


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
        return model.logits(model.hidden_states(TOKENS))[..., : model.config.vocab_size]


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
