"""Megatron-LM checkpoints of every version, naming, tp and pp give the model that they were written from.

The files are written here from the documented layout, without the reader's tables.
"""

import argparse
import enum
import random
import sys
import types
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from data_pipeline.tokens.tokenizer import Tokenizer
from engine.checkpoint.checkpoint import load_for_inference
from engine.formats.convert import import_checkpoint
from engine.model.gpt2 import GPT2
from tests.engine.test_formats_checkpoint import CONFIG, real_logits, rough_model
from tests.engine.test_formats_huggingface import their_logits, their_model

HEADS, HEAD_DIM = CONFIG.num_heads, CONFIG.head_dim
STYLES = ("2019", "v1", "v2", "2023", "core", "core-te")


def rank_tensors(model: GPT2, rank: int, tp: int, version: int) -> dict[str, torch.Tensor]:
    """One rank's share by our names: the documented dims divided, query_key_value rows in the version's order."""
    share = {}
    for name, whole in model.state_dict().items():
        if "query_key_value" in name:
            heads = whole.reshape(HEADS, 3, HEAD_DIM, *whole.shape[1:]).chunk(tp)[rank]  # [n/t, 3, d, ...]
            order = {0: (1, 0, 2), 1: (0, 2, 1), 2: (0, 1, 2), 3: (0, 1, 2)}[version]
            share[name] = heads.permute(*order, *range(3, heads.dim())).reshape(-1, *whole.shape[1:])
        elif "word_embeddings" in name or "dense_h_to_4h" in name:
            share[name] = whole.chunk(tp, 0)[rank]
        elif name.endswith(("self_attention.dense.weight", "dense_4h_to_h.weight")):
            share[name] = whole.chunk(tp, 1)[rank]
        else:
            share[name] = whole
    return {name: tensor.clone().contiguous() for name, tensor in share.items()}


def stage_model(tensors: dict[str, torch.Tensor], style: str, stage: int, pp: int) -> dict[str, Any]:
    """The `model` entry of one file in a naming of the table."""
    per_stage = CONFIG.num_layers // pp
    block: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if name.startswith("layers."):
            _, number, rest = name.split(".", 2)
            if int(number) // per_stage == stage:
                block[f"layers.{int(number) % per_stage}.{rest}"] = tensor
        elif name.startswith("final_layernorm.") and stage == pp - 1:
            block[name] = tensor
    words = tensors["embedding.word_embeddings.weight"]
    positions = tensors["embedding.position_embeddings.weight"]
    if style == "2019":
        flat = {f"transformer.{name.replace('self_attention', 'attention')}": t for name, t in block.items()}
        return {"word_embeddings.weight": words, "position_embeddings.weight": positions, **flat}
    if style.startswith("core"):
        renamed = {f"decoder.{core_name(name, style)}": tensor for name, tensor in block.items()}
        ends = {"embedding.word_embeddings.weight": words, "embedding.position_embeddings.weight": positions}
        extra = {"decoder.layers.0.self_attention.linear_qkv._extra_state": torch.empty(0, dtype=torch.uint8)}
        head = {"output_layer.weight": words} if pp > 1 and stage == pp - 1 else {}
        return (ends if stage == 0 else {}) | renamed | extra | head
    if style == "v1":
        block = {name.replace("self_attention", "attention"): tensor for name, tensor in block.items()}
    if style == "2023":
        short = {"input_layernorm": "input_norm", "attention_layernorm": "attention_norm"}
        for old, new in (short | {"final_layernorm": "final_norm"}).items():
            block = {name.replace(old, new): tensor for name, tensor in block.items()}
    language_model: dict[str, Any] = {"transformer" if style == "v1" else "encoder": block}
    if stage == 0:
        embedding = {"word_embeddings": {"weight": words}, "position_embeddings": {"weight": positions}}
        language_model["embedding"] = embedding
    head = {"word_embeddings_for_head": {"weight": words}} if pp > 1 and stage == pp - 1 else {}
    return {"language_model": language_model, **head}


def core_name(name: str, style: str) -> str:
    names = {
        "self_attention.query_key_value": "self_attention.linear_qkv",
        "self_attention.dense": "self_attention.linear_proj",
        "post_attention_layernorm": "pre_mlp_layernorm",
        "mlp.dense_h_to_4h": "mlp.linear_fc1",
        "mlp.dense_4h_to_h": "mlp.linear_fc2",
    }
    if style == "core-te":
        name = name.replace("input_layernorm.", "self_attention.linear_qkv.layer_norm_")
        name = name.replace("post_attention_layernorm.", "mlp.linear_fc1.layer_norm_")
    for old, new in names.items():
        name = name.replace(old, new)
    return name


def arguments(**more: Any) -> argparse.Namespace:
    values = {
        "num_layers": CONFIG.num_layers, "hidden_size": CONFIG.hidden_size, "num_attention_heads": HEADS,
        "max_position_embeddings": CONFIG.seq_length, "padded_vocab_size": CONFIG.padded_vocab_size,
        "bias_gelu_fusion": True, "params_dtype": torch.float16, "layernorm_epsilon": 1e-5, "hidden_dropout": 0.2,
        "data_path": ["a", "b"],
    }  # fmt: skip
    return argparse.Namespace(**(values | more))


def save(
    directory: Path, source: GPT2, version: int, tp: int = 1, pp: int = 1, style: str = "v2", **content: Any
) -> Path:
    """A `--save` directory; `content` replaces or (None) removes entries of every file."""
    directory.mkdir()
    folder = "release" if version == 0 else "iter_0000070"
    (directory / "latest_checkpointed_iteration.txt").write_text("release" if version == 0 else "70\n")
    zipped = content.pop("zipped", True)
    for stage in range(pp):
        for rank in range(tp):
            everything = {
                "args": arguments(), "checkpoint_version": float(version), "iteration": 70,
                "model": stage_model(rank_tensors(source, rank, tp, version), style, stage, pp),
                "optimizer": {"fp32_from_fp16_params": [[torch.zeros(3)]]},
                "random_rng_state": random.getstate(), "np_rng_state": np.random.RandomState(1).get_state(),
                "torch_rng_state": torch.get_rng_state(), "rng_tracker_states": {"model": torch.get_rng_state()},
            } | content  # fmt: skip
            everything = {name: value for name, value in everything.items() if value is not None}
            place = directory / folder / (f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if pp > 1 else ""))
            place.mkdir(parents=True)
            torch.save(everything, place / "model_optim_rng.pt", _use_new_zipfile_serialization=zipped)
    return directory


def assert_same_model(out: Path, model: GPT2) -> None:
    loaded = load_for_inference(out)
    assert loaded.config.model_copy(update={"dropout": 0.1}) == CONFIG
    for name, tensor in model.named_parameters():
        assert tensor.equal(loaded.model.get_parameter(name)), name
    assert real_logits(loaded.model).equal(real_logits(model))
    assert Tokenizer.load(out / "tokenizer").vocab_size == CONFIG.vocab_size


@pytest.mark.parametrize(
    ("version", "tp", "zipped"), [*product((0, 1, 2, 3), (1, 2, 4), (True,)), (0, 2, False), (3, 1, False)]
)
def test_every_version_and_tp_gives_the_same_model(
    version: int, tp: int, zipped: bool, vocab: Path, tmp_path: Path
) -> None:
    model = rough_model()
    save(tmp_path / "save", model, version, tp, zipped=zipped)
    assert_same_model(import_checkpoint(tmp_path / "save", tmp_path / "out", vocab), model)
    assert load_for_inference(tmp_path / "out").config.dropout == 0.2


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("tp", [1, 2])
def test_every_naming_gives_the_same_model(style: str, tp: int, vocab: Path, tmp_path: Path) -> None:
    model, version = rough_model(), {"2019": 0, "v1": 0, "v2": 2}.get(style, 3)
    save(tmp_path / "save", model, version, tp, style=style)
    assert_same_model(import_checkpoint(tmp_path / "save", tmp_path / "out", vocab), model)


@pytest.mark.parametrize("style", ["v2", "2023", "core", "core-te"])
@pytest.mark.parametrize(("tp", "pp"), [(1, 2), (2, 2), (2, 4)])
def test_pipeline_stages_are_joined(style: str, tp: int, pp: int, vocab: Path, tmp_path: Path) -> None:
    model = rough_model()
    save(tmp_path / "save", model, 3, tp, pp, style)
    assert_same_model(import_checkpoint(tmp_path / "save", tmp_path / "out", vocab), model)


def test_version_0_has_the_other_library_s_order(vocab: Path, tmp_path: Path) -> None:
    """The released models: no arguments, no version, half precision, rows as in Hugging Face's c_attn."""
    theirs = their_model()
    weights = theirs.state_dict()
    words = torch.cat([weights["transformer.wte.weight"], torch.ones(CONFIG.padded_vocab_size - CONFIG.vocab_size, 24)])
    model = {"word_embeddings.weight": words, "position_embeddings.weight": weights["transformer.wpe.weight"]}
    pairs = {
        "input_layernorm": "ln_1", "attention.query_key_value": "attn.c_attn", "attention.dense": "attn.c_proj",
        "post_attention_layernorm": "ln_2", "mlp.dense_h_to_4h": "mlp.c_fc", "mlp.dense_4h_to_h": "mlp.c_proj",
    }  # fmt: skip
    for kind in ("weight", "bias"):
        model[f"transformer.final_layernorm.{kind}"] = weights[f"transformer.ln_f.{kind}"]
        for layer in range(4):
            for ours, name in pairs.items():
                tensor = weights[f"transformer.h.{layer}.{name}.{kind}"]
                model[f"transformer.layers.{layer}.{ours}.{kind}"] = tensor.T if tensor.dim() == 2 else tensor
    save(tmp_path / "save", rough_model(), 0, model=model, args=None, checkpoint_version=None)
    loaded = load_for_inference(import_checkpoint(tmp_path / "save", tmp_path / "out", vocab, heads=4))
    torch.testing.assert_close(real_logits(loaded.model), their_logits(theirs), rtol=0, atol=1e-5)


def test_half_precision_is_kept_exactly(vocab: Path, tmp_path: Path) -> None:
    model = rough_model().half().float()
    half = {name: tensor.half() for name, tensor in rank_tensors(model, 0, 1, 2).items()}
    save(tmp_path / "save", model, 2, model=stage_model(half, "v2", 0, 1))
    assert_same_model(import_checkpoint(tmp_path / "save", tmp_path / "out", vocab), model)


@pytest.mark.parametrize("zipped", [True, False])
def test_objects_of_absent_classes_are_not_needed(
    zipped: bool, vocab: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pickled loss scaler and an enum among the arguments, as real files have them."""
    for name in ("fp16", "fp16.loss_scaler", "megatron", "megatron.core", "megatron.core.enums"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    kind: Any = enum.Enum("ModelType", {"one": 1}, module="megatron.core.enums")
    scaler: Any = type("DynamicLossScaler", (), {"__module__": "fp16.loss_scaler"})
    setattr(sys.modules["megatron.core.enums"], "ModelType", kind)  # noqa: B010
    setattr(sys.modules["fp16.loss_scaler"], "DynamicLossScaler", scaler)  # noqa: B010
    value = scaler()
    value.cur_scale = 2.0
    model = rough_model()
    args, more = arguments(model_type=kind.one), {"loss_scaler": value, "number": np.float64(3)}
    save(tmp_path / "save", model, 3, args=args, optimizer=more, zipped=zipped)
    monkeypatch.undo()
    assert "fp16" not in sys.modules
    assert_same_model(import_checkpoint(tmp_path / "save", tmp_path / "out", vocab), model)
    assert "fp16" not in sys.modules


def test_what_other_libraries_allow_is_not_used(vocab: Path, tmp_path: Path) -> None:
    """As accelerate and transformers do, which then build random states that this one leaves unread."""
    before = torch.serialization.get_safe_globals()
    reconstruct: Any = np.zeros(0).__reduce__()[0]
    torch.serialization.add_safe_globals([reconstruct, np.ndarray, np.dtype])
    try:
        model = rough_model()
        save(tmp_path / "save", model, 3, optimizer={"number": np.float64(3), "state": np.arange(3)})
        assert_same_model(import_checkpoint(tmp_path / "save", tmp_path / "out", vocab), model)
        assert {reconstruct, np.ndarray, np.dtype} <= set(torch.serialization.get_safe_globals())
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(before)
