"""Hugging Face directories: the same model and ids both ways, whole or divided; wrong ones are
refused by name."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

from mlm_repro.data_pipeline.tokens.tokenizer import Tokenizer
from mlm_repro.engine.config import TwinScale
from mlm_repro.engine.formats import write_checkpoint
from mlm_repro.engine.formats.convert import (
    check_weights,
    export_checkpoint,
    import_checkpoint,
)
from mlm_repro.engine.formats.huggingface import Format, read_huggingface
from mlm_repro.engine.inference import load_for_inference
from mlm_repro.engine.model.gpt2 import GPT2
from mlm_repro.lineage.errors import BadInput, IntegrityFailure
from tests.engine.test_formats_checkpoint import (
    CONFIG,
    TOKENS,
    imported,
    real_logits,
    rough_model,
    write_rough,
)

HARD_TEXTS = [
    "The river sleeps; it's 1234  bright\n\n\tstones.",
    "é 漢字 🙂 ﬁ",
    "a literal <|endoftext|> in text<|endoftext|>",
    " ",
    "",
]


def their_model(seed: int = 0) -> GPT2LMHeadModel:
    """A random GPT-2 of the other library, every value visible."""
    config = GPT2Config(
        vocab_size=CONFIG.vocab_size, n_positions=12, n_embd=24, n_layer=4, n_head=4
    )
    model, generator = GPT2LMHeadModel(config).eval(), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.2, generator=generator)
    return model


def their_logits(model: GPT2LMHeadModel) -> torch.Tensor:
    with torch.no_grad():
        return model(TOKENS).logits.transpose(0, 1)


def test_export_gives_the_other_library_the_same_logits(tmp_path: Path) -> None:
    model = write_rough(tmp_path / "checkpoint")
    out = export_checkpoint(tmp_path / "checkpoint", tmp_path / "out")
    theirs, report = GPT2LMHeadModel.from_pretrained(out, output_loading_info=True)
    assert not any(report.values()), report
    assert theirs.config.vocab_size == CONFIG.vocab_size
    assert theirs.config.n_positions == CONFIG.seq_length
    torch.testing.assert_close(their_logits(theirs.eval()), real_logits(model), rtol=0, atol=1e-5)
    assert (
        theirs.generation_config.eos_token_id
        == Tokenizer.load(tmp_path / "checkpoint" / "tokenizer").end_of_text
    )


@pytest.mark.parametrize("shard", ["10MB", "20kB"], ids=["single", "sharded"])
def test_import_gives_the_other_library_s_logits(
    shard: str, exported: Path, tmp_path: Path
) -> None:
    theirs = their_model()
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size=shard)
    assert (tmp_path / "theirs" / "model.safetensors.index.json").exists() == (shard == "20kB")
    AutoTokenizer.from_pretrained(exported).save_pretrained(tmp_path / "theirs")
    loaded = load_for_inference(import_checkpoint(tmp_path / "theirs", tmp_path / "ours"))
    assert (loaded.config.vocab_size, loaded.config.padded_vocab_size) == (270, 384)
    torch.testing.assert_close(real_logits(loaded.model), their_logits(theirs), rtol=0, atol=1e-5)
    assert (tmp_path / "ours" / "origin.json").is_file()


def test_the_other_library_gives_the_same_ids(exported: Path, tmp_path: Path) -> None:
    ours, theirs = (
        Tokenizer.load(tmp_path / "checkpoint" / "tokenizer"),
        AutoTokenizer.from_pretrained(exported),
    )
    for text in HARD_TEXTS:
        assert theirs(text).input_ids == ours.encode(text), text
        assert theirs.decode(ours.encode(text), clean_up_tokenization_spaces=False) == text
    assert theirs.eos_token_id == ours.end_of_text
    assert len(theirs) == ours.vocab_size


def test_the_published_vocabulary_keeps_its_ids(published: Path, tmp_path: Path) -> None:
    model = rough_model(CONFIG.model_copy(update={"vocab_size": 50257, "padded_vocab_size": 50304}))
    ours = Tokenizer.from_gpt2_files(
        published / "gpt2-bpe" / "vocab.json", published / "gpt2-bpe" / "merges.txt"
    )
    write_checkpoint(tmp_path / "gpt2", dataclasses.replace(imported(model), tokenizer=ours))
    theirs = AutoTokenizer.from_pretrained(
        export_checkpoint(tmp_path / "gpt2", tmp_path / "gpt2-exported")
    )
    for text in HARD_TEXTS:
        assert theirs(text).input_ids == ours.encode(text)
    assert theirs("Hello world").input_ids == [15496, 995]


def test_a_vocabulary_of_words_keeps_its_ids(tmp_path: Path) -> None:
    words = Tokenizer.of_words([f"{text} the the river" for text in HARD_TEXTS], CONFIG.vocab_size)
    write_checkpoint(
        tmp_path / "words", dataclasses.replace(imported(rough_model(CONFIG)), tokenizer=words)
    )
    out = export_checkpoint(tmp_path / "words", tmp_path / "words-exported")
    theirs = AutoTokenizer.from_pretrained(out)
    for text in [*HARD_TEXTS, "the rivers of zebras"]:
        assert theirs(text).input_ids == words.encode(text), text
    assert theirs.eos_token_id == words.end_of_text
    back = Tokenizer.load(import_checkpoint(out, tmp_path / "back") / "tokenizer")
    assert (back.digest, back.is_of_words) == (words.digest, True)


def test_the_way_there_and_back_loses_nothing(exported: Path, tmp_path: Path) -> None:
    back = import_checkpoint(exported, tmp_path / "back")
    again = export_checkpoint(back, tmp_path / "again")
    first, second = (
        load_file(exported / "model.safetensors"),
        load_file(again / "model.safetensors"),
    )
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert tensor.equal(second[name]), name
    for name in (
        "tokenizer.json",
        "vocab.json",
        "merges.txt",
        "tokenizer_config.json",
        "generation_config.json",
    ):
        assert (exported / name).read_bytes() == (again / name).read_bytes()
    one, other = (
        json.loads((path / "config.json").read_text(encoding="utf-8")) for path in (exported, again)
    )
    del one["mlm_repro"]["checkpoint"], other["mlm_repro"]["checkpoint"]
    assert one == other
    original, returned = (load_for_inference(path) for path in (tmp_path / "checkpoint", back))
    assert returned.config == original.config
    real = slice(0, CONFIG.vocab_size)
    for name, tensor in original.model.named_parameters():
        assert tensor[real].equal(returned.model.get_parameter(name)[real]), name


def test_a_twin_stays_a_twin(tmp_path: Path) -> None:
    twin = TwinScale(hidden_size=32)
    digest = write_checkpoint(
        tmp_path / "twin", dataclasses.replace(imported(rough_model()), twin=twin)
    )
    card = ModelCard.load(export_checkpoint(tmp_path / "twin", tmp_path / "exported") / "README.md")
    assert (card.data.library_name, card.data.tags) == ("transformers", ["gpt2", "megatron-lm"])
    assert "# rough" in card.text
    assert digest in card.text
    assert "its numbers are scaled ones" in card.text
    import_checkpoint(tmp_path / "exported", tmp_path / "back")
    values = json.loads((tmp_path / "back" / "config.json").read_text(encoding="utf-8"))
    assert (values["name"], values["twin"]) == ("rough", twin.model_dump())


def change_weights(directory: Path, **changes: Any) -> None:
    tensors = load_file(directory / "model.safetensors")
    for name, value in changes.items():
        if value is None:
            del tensors[name]
        else:
            tensors[name] = value(tensors)
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, directory / "model.safetensors", metadata={"format": "pt"})


def change_config(directory: Path, **values: Any) -> None:
    path = directory / "config.json"
    path.write_text(
        json.dumps(json.loads(path.read_text(encoding="utf-8")) | values), encoding="utf-8"
    )


def test_other_names_masks_and_a_tied_head_are_accepted(exported: Path, tmp_path: Path) -> None:
    tensors = load_file(exported / "model.safetensors")
    old = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    for layer in range(4):
        old[f"h.{layer}.attn.bias"] = torch.ones(1, 1, 12, 12, dtype=torch.uint8)
        old[f"h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)
    old["lm_head.weight"] = old["wte.weight"].clone()
    save_file(old, exported / "model.safetensors")
    (exported / "tokenizer.json").unlink()  # vocab.json and merges.txt remain
    found = load_for_inference(import_checkpoint(exported, tmp_path / "back"))
    assert (
        Tokenizer.load(found.directory / "tokenizer").digest
        == Tokenizer.load(tmp_path / "checkpoint" / "tokenizer").digest
    )
    torch.testing.assert_close(real_logits(found.model), real_logits(rough_model()), rtol=0, atol=0)


WEIGHT = "transformer.h.1.attn.c_attn.weight"


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({WEIGHT: None}, r"'h.1.attn.c_attn.weight' is missing"),
        (
            {WEIGHT: lambda t: t[WEIGHT].T},
            r"'h.1.attn.c_attn.weight' has shape \[72, 24\], and a model .* has \[24, 72\]",
        ),
        ({"transformer.h.1.extra": lambda t: torch.zeros(1)}, "'h.1.extra' is unexpected"),
        ({"wte.weight": lambda t: torch.zeros(270, 24)}, "is there a second time"),
        (
            {"transformer.h.4.ln_1.bias": lambda t: torch.zeros(24)},
            "says 4 layers, the weights have 5",
        ),
        (
            {"transformer.ln_f.bias": lambda t: torch.zeros(24).long()},
            "'ln_f.bias' holds torch.int64",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    changes: dict[str, Any], sentence: str, exported: Path, tmp_path: Path
) -> None:
    change_weights(exported, **changes)
    with pytest.raises(IntegrityFailure, match=sentence):
        import_checkpoint(exported, tmp_path / "back")
    assert not (tmp_path / "back").exists()


@pytest.mark.parametrize(
    ("values", "error", "sentence"),
    [
        ({"model_type": "llama"}, BadInput, "model_type is 'llama'"),
        ({"model_type": ["gpt2"]}, BadInput, "model_type is .*gpt2"),
        ({"layer_norm_epsilon": 1e-6}, BadInput, "layer_norm_epsilon is 1e-06"),
        ({"n_inner": 7}, BadInput, "n_inner is 7"),
        ({"n_head": 5}, BadInput, "num_heads = 5"),
        ({"n_layer": 10**12}, BadInput, "num_layers: 1000000000000 should be less than"),
        ({"n_embd": 10**8}, IntegrityFailure, r"'wte.weight' has shape \[270, 24\]"),
        ({"n_positions": None}, IntegrityFailure, "n_positions is None"),
        ({"mlm_repro": {"twin": {"nonsense": 1}}}, BadInput, "unknown key 'nonsense'"),
    ],
)
def test_a_config_of_another_model_is_refused(
    values: dict[str, Any], error: type[Exception], sentence: str, exported: Path, tmp_path: Path
) -> None:
    change_config(exported, **values)
    with pytest.raises(error, match=sentence):
        import_checkpoint(exported, tmp_path / "back")


def test_an_untied_head_and_other_heads_are_refused(exported: Path, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="n_head is 4, and --heads or --set heads= says 3"):
        import_checkpoint(exported, tmp_path / "back", heads=3)
    change_weights(exported, **{"lm_head.weight": lambda t: t["transformer.wte.weight"] + 1})
    with pytest.raises(BadInput, match="only a model in which the two are equal"):
        import_checkpoint(exported, tmp_path / "back")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda content: content["model"].pop("merges"), "not a tokenizer that the library"),
        (lambda content: content["model"]["vocab"].update(the=5000), "have gaps"),
        (
            lambda content: content.update(added_tokens=[{"content": "<x>", "id": 270}]),
            "271 entries",
        ),
    ],
)
def test_a_damaged_tokenizer_is_refused(
    change: Any, sentence: str, exported: Path, tmp_path: Path
) -> None:
    path = exported / "tokenizer.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    change(content)
    path.write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises((BadInput, IntegrityFailure), match=sentence):
        import_checkpoint(exported, tmp_path / "back")
    for name in ("tokenizer.json", "vocab.json"):
        (exported / name).unlink()
    with pytest.raises(BadInput, match="name a directory that has the last two"):
        import_checkpoint(exported, tmp_path / "back")


@pytest.mark.parametrize(
    "name", ["../secret.safetensors", "/etc/secret.safetensors", "..", "a/b.safetensors", 3]
)
def test_an_index_cannot_name_what_is_outside(name: Any, exported: Path, tmp_path: Path) -> None:
    shutil.copy(exported / "model.safetensors", tmp_path / "secret.safetensors")
    names = load_file(exported / "model.safetensors")
    (exported / "model.safetensors").unlink()
    index = {"weight_map": dict.fromkeys(names, name)}
    (exported / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    with pytest.raises(IntegrityFailure, match="is not a plain name of a"):
        import_checkpoint(exported, tmp_path / "back")


def test_an_index_and_its_files_must_agree(exported: Path, tmp_path: Path) -> None:
    names = list(load_file(exported / "model.safetensors"))
    (exported / "model.safetensors").rename(exported / "a.safetensors")
    index = exported / "model.safetensors.index.json"
    for places, sentence in (
        (dict.fromkeys(names[1:], "a.safetensors"), "is in the file alone"),
        (dict.fromkeys([*names, "z"], "a.safetensors"), "tensor 'z' is in the index alone"),
        (dict.fromkeys(names, "b.safetensors"), "b.safetensors cannot be read"),
        ({}, "has no weight_map"),
    ):
        index.write_text(json.dumps({"weight_map": places}), encoding="utf-8")
        with pytest.raises(IntegrityFailure, match=sentence):
            import_checkpoint(exported, tmp_path / "back")


def ours(tmp_path: Path) -> GPT2:
    """This engine's model of the checkpoint that was exported."""
    model = load_for_inference(tmp_path / "checkpoint").model
    assert isinstance(model, GPT2)
    return model


def swapped(weight: torch.Tensor) -> torch.Tensor:
    """With queries in the place of keys."""
    queries, keys, values = weight.chunk(3, dim=-1)
    return torch.cat([keys, queries, values], dim=-1)


FAULTS = [
    (
        "transformer.h.2.attn.c_attn.weight",
        swapped,
        "layers.2.self_attention.query_key_value.weight",
    ),
    (
        "transformer.h.1.mlp.c_proj.weight",
        lambda weight: weight.flip(0),
        "layers.1.mlp.dense_4h_to_h.weight",
    ),
    (
        "transformer.wpe.weight",
        lambda rows: torch.cat([rows[:-1], -rows[-1:]]),
        "embedding.position_embeddings.weight",
    ),
    ("transformer.ln_f.bias", lambda bias: bias + 0.1, "final_layernorm.bias"),
]


@pytest.mark.parametrize(("name", "fault", "weight"), FAULTS, ids=[fault[2] for fault in FAULTS])
def test_the_first_weight_that_differs_is_named(
    exported: Path, tmp_path: Path, name: str, fault: Any, weight: str
) -> None:
    change_weights(exported, **{name: lambda tensors: fault(tensors[name])})
    with pytest.raises(IntegrityFailure, match=rf"its {weight} differs from the checkpoint's by "):
        check_weights(ours(tmp_path), read_huggingface(exported), exported)


def test_a_wrong_export_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_rough(tmp_path / "checkpoint")
    real = Format.split
    monkeypatch.setattr(
        Format,
        "split",
        lambda self, name, tensor, config: real(
            self, name, tensor.flip(0) if "layers.3.mlp" in name else tensor, config
        ),
    )
    with pytest.raises(
        IntegrityFailure,
        match=r"its layers\.3\.mlp\.dense_h_to_4h\.weight differs from the checkpoint's by",
    ):
        export_checkpoint(tmp_path / "checkpoint", tmp_path / "theirs")
    assert not (tmp_path / "theirs").exists()
