"""Megatron-LM checkpoints of every version, naming, tp and pp give the model that they were written
from.

The files are written here from the documented layout, without the reader's tables. Those of other
models are refused.
"""

import argparse
import enum
import pickle
import random
import re
import sys
import types
import warnings
from collections import defaultdict
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as distributed
from torch.distributed.checkpoint.metadata import Metadata

from mlm_repro.data_pipeline.tokens.tokenizer import Tokenizer
from mlm_repro.engine.cli import main
from mlm_repro.engine.formats.convert import import_checkpoint
from mlm_repro.engine.inference import load_for_inference
from mlm_repro.engine.model.gpt2 import GPT2
from mlm_repro.lineage.errors import BadInput, IntegrityFailure
from tests.commands import Command
from tests.engine.test_formats_checkpoint import CONFIG, NAMES, payloads, real_logits, rough_model
from tests.engine.test_formats_huggingface import their_logits, their_model

HEADS, HEAD_DIM = CONFIG.num_heads, CONFIG.head_dim
STYLES = ("2019", "v1", "v2", "2023", "core", "core-te")


def rank_tensors(model: GPT2, rank: int, tp: int, version: int) -> dict[str, torch.Tensor]:
    """One rank's share by our names: the documented dims divided, query_key_value rows in the
    version's order."""
    share = {}
    for name, whole in model.state_dict().items():
        if "query_key_value" in name:
            heads = whole.reshape(HEADS, 3, HEAD_DIM, *whole.shape[1:]).chunk(tp)[
                rank
            ]  # [n/t, 3, d, ...]
            order = {0: (1, 0, 2), 1: (0, 2, 1), 2: (0, 1, 2), 3: (0, 1, 2)}[version]
            share[name] = heads.permute(*order, *range(3, heads.dim())).reshape(
                -1, *whole.shape[1:]
            )
        elif "word_embeddings" in name or "dense_h_to_4h" in name:
            share[name] = whole.chunk(tp, 0)[rank]
        elif name.endswith(("self_attention.dense.weight", "dense_4h_to_h.weight")):
            share[name] = whole.chunk(tp, 1)[rank]
        else:
            share[name] = whole
    return {name: tensor.clone().contiguous() for name, tensor in share.items()}


def stage_model(
    tensors: dict[str, torch.Tensor], style: str, stage: int, pp: int
) -> dict[str, Any]:
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
        flat = {
            f"transformer.{name.replace('self_attention', 'attention')}": t
            for name, t in block.items()
        }
        return {"word_embeddings.weight": words, "position_embeddings.weight": positions, **flat}
    if style.startswith("core"):
        renamed = {f"decoder.{core_name(name, style)}": tensor for name, tensor in block.items()}
        ends = {
            "embedding.word_embeddings.weight": words,
            "embedding.position_embeddings.weight": positions,
        }
        extra = {
            "decoder.layers.0.self_attention.linear_qkv._extra_state": torch.empty(
                0, dtype=torch.uint8
            )
        }
        head = {"output_layer.weight": words} if pp > 1 and stage == pp - 1 else {}
        return (ends if stage == 0 else {}) | renamed | extra | head
    if style == "v1":
        block = {
            name.replace("self_attention", "attention"): tensor for name, tensor in block.items()
        }
    if style == "2023":
        short = {"input_layernorm": "input_norm", "attention_layernorm": "attention_norm"}
        for old, new in (short | {"final_layernorm": "final_norm"}).items():
            block = {name.replace(old, new): tensor for name, tensor in block.items()}
    language_model: dict[str, Any] = {"transformer" if style == "v1" else "encoder": block}
    if stage == 0:
        embedding = {
            "word_embeddings": {"weight": words},
            "position_embeddings": {"weight": positions},
        }
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
        "num_layers": CONFIG.num_layers,
        "hidden_size": CONFIG.hidden_size,
        "num_attention_heads": HEADS,
        "max_position_embeddings": CONFIG.seq_length,
        "padded_vocab_size": CONFIG.padded_vocab_size,
        "bias_gelu_fusion": True,
        "params_dtype": torch.float16,
        "layernorm_epsilon": 1e-5,
        "hidden_dropout": 0.2,
        "data_path": ["a", "b"],
    }
    return argparse.Namespace(**(values | more))


def save(
    directory: Path,
    source: GPT2,
    version: int,
    tp: int = 1,
    pp: int = 1,
    style: str = "v2",
    **content: Any,
) -> Path:
    """A `--save` directory; `content` replaces or (None) removes entries of every file."""
    directory.mkdir()
    folder = "release" if version == 0 else "iter_0000070"
    (directory / "latest_checkpointed_iteration.txt").write_text(
        "release" if version == 0 else "70\n"
    )
    zipped = content.pop("zipped", True)
    for stage in range(pp):
        for rank in range(tp):
            everything = {
                "args": arguments(),
                "checkpoint_version": float(version),
                "iteration": 70,
                "model": stage_model(rank_tensors(source, rank, tp, version), style, stage, pp),
                "optimizer": {"fp32_from_fp16_params": [[torch.zeros(3)]]},
                "random_rng_state": random.getstate(),
                "np_rng_state": np.random.RandomState(1).get_state(),
                "torch_rng_state": torch.get_rng_state(),
                "rng_tracker_states": {"model": torch.get_rng_state()},
            } | content
            everything = {name: value for name, value in everything.items() if value is not None}
            place = (
                directory / folder / (f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if pp > 1 else ""))
            )
            place.mkdir(parents=True)
            torch.save(
                everything, place / "model_optim_rng.pt", _use_new_zipfile_serialization=zipped
            )
    return directory


def assert_same_model(out: Path, model: GPT2) -> None:
    loaded = load_for_inference(out)
    assert loaded.config.model_copy(update={"dropout": 0.1}) == CONFIG
    for name, tensor in model.named_parameters():
        assert tensor.equal(loaded.model.get_parameter(name)), name
    assert real_logits(loaded.model).equal(real_logits(model))
    assert Tokenizer.load(out / "tokenizer").vocab_size == CONFIG.vocab_size


SAVED = dict.fromkeys(
    [
        *((version, tp, 1, "v2", True) for version, tp in product((0, 1, 2, 3), (1, 2, 4))),
        (0, 2, 1, "v2", False),
        (3, 1, 1, "v2", False),
        *(
            ({"2019": 0, "v1": 0, "v2": 2}.get(style, 3), tp, 1, style, True)
            for style, tp in product(STYLES, (1, 2))
        ),
        *(
            (3, *sizes, style, True)
            for style, sizes in product(STYLES[2:], ((1, 2), (2, 2), (2, 4)))
        ),
    ]
)


@pytest.mark.parametrize(("version", "tp", "pp", "style", "zipped"), SAVED)
def test_every_version_naming_and_layout_gives_the_same_model(
    version: int, tp: int, pp: int, style: str, zipped: bool, vocab: Path, tmp_path: Path
) -> None:
    model = rough_model()
    save(tmp_path / "save", model, version, tp, pp, style, zipped=zipped)
    assert_same_model(import_checkpoint(tmp_path / "save", tmp_path / "out", vocab), model)
    assert load_for_inference(tmp_path / "out").config.dropout == 0.2


def test_version_0_has_the_other_library_s_order(vocab: Path, tmp_path: Path) -> None:
    """The released models: no arguments, no version, half precision, rows as in Hugging Face's
    c_attn."""
    theirs = their_model()
    weights = theirs.state_dict()
    words = torch.cat(
        [
            weights["transformer.wte.weight"],
            torch.ones(CONFIG.padded_vocab_size - CONFIG.vocab_size, 24),
        ]
    )
    model = {
        "word_embeddings.weight": words,
        "position_embeddings.weight": weights["transformer.wpe.weight"],
    }
    pairs = {
        "input_layernorm": "ln_1",
        "attention.query_key_value": "attn.c_attn",
        "attention.dense": "attn.c_proj",
        "post_attention_layernorm": "ln_2",
        "mlp.dense_h_to_4h": "mlp.c_fc",
        "mlp.dense_4h_to_h": "mlp.c_proj",
    }
    for kind in ("weight", "bias"):
        model[f"transformer.final_layernorm.{kind}"] = weights[f"transformer.ln_f.{kind}"]
        for layer in range(4):
            for ours, name in pairs.items():
                tensor = weights[f"transformer.h.{layer}.{name}.{kind}"]
                model[f"transformer.layers.{layer}.{ours}.{kind}"] = (
                    tensor.T if tensor.dim() == 2 else tensor
                )
    save(tmp_path / "save", rough_model(), 0, model=model, args=None, checkpoint_version=None)
    loaded = load_for_inference(
        import_checkpoint(tmp_path / "save", tmp_path / "out", vocab, heads=4)
    )
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
    """As accelerate and transformers do, which then build random states that this one leaves
    unread."""
    before = torch.serialization.get_safe_globals()
    reconstruct: Any = np.zeros(0).__reduce__()[0]
    torch.serialization.add_safe_globals([reconstruct, np.ndarray, np.dtype])
    try:
        model = rough_model()
        save(
            tmp_path / "save", model, 3, optimizer={"number": np.float64(3), "state": np.arange(3)}
        )
        assert_same_model(import_checkpoint(tmp_path / "save", tmp_path / "out", vocab), model)
        assert {reconstruct, np.ndarray, np.dtype} <= set(torch.serialization.get_safe_globals())
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(before)


@pytest.mark.parametrize(
    ("content", "error", "sentence"),
    [
        ({"args": arguments(bias_gelu_fusion=False, openai_gelu=False)}, BadInput, "exact GeLU"),
        (
            {"args": arguments(position_embedding_type="rope")},
            BadInput,
            "position_embedding_type is 'rope'",
        ),
        ({"args": arguments(num_experts=8)}, BadInput, "num_experts is 8"),
        (
            {"args": arguments(num_layers=5)},
            IntegrityFailure,
            "num_layers is 5 in the arguments that Megatron-LM stored, and 4 in the tensors",
        ),
        ({"args": arguments(num_attention_heads=5)}, BadInput, "num_heads = 5"),
        ({"args": {"num_layers": 4}}, IntegrityFailure, "is not an argparse.Namespace"),
        ({"args": None}, BadInput, "give the number"),
        ({"checkpoint_version": 4.0}, BadInput, "checkpoint version 4.0"),
        ({"model": None}, IntegrityFailure, "has no entry 'model'"),
        ({"model": None, "model0": {}}, BadInput, "interleaved"),
        ({"model": [1]}, IntegrityFailure, "is not a dict of tensors"),
    ],
)
def test_another_model_is_refused(
    content: dict[str, Any], error: type[Exception], sentence: str, vocab: Path, tmp_path: Path
) -> None:
    save(tmp_path / "save", rough_model(), 3, **content)
    with pytest.raises(error, match=sentence):
        import_checkpoint(tmp_path / "save", tmp_path / "out", vocab)
    assert not (tmp_path / "out").exists()


def change(path: Path, name: str, value: Any) -> None:
    """Replace or (None) remove a block tensor of one file."""
    content = torch.load(path, weights_only=False)
    block = content["model"]["language_model"]["encoder"]
    block[name] = value
    if value is None:
        del block[name]
    torch.save(content, path)


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("layers.1.mlp.dense_h_to_4h.bias", None, "'layers.1.mlp.dense_h_to_4h.bias' is missing"),
        (
            "layers.1.mlp.dense_h_to_4h.bias",
            torch.zeros(96),
            r"has shape \[96\], and a model .* has \[48\]",
        ),
        (
            "layers.1.mlp.gate.bias",
            torch.zeros(1),
            "'encoder.layers.1.mlp.gate.bias' is not one of Megatron-LM's GPT-2",
        ),
        ("layers.1.input_norm.bias", torch.zeros(24), "is there a second time"),
        ("final_layernorm.bias", torch.zeros(24, device="meta"), "not a dense tensor with values"),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    name: str, value: Any, sentence: str, vocab: Path, tmp_path: Path
) -> None:
    save(tmp_path / "save", rough_model(), 3, tp=2)
    change(tmp_path / "save" / "iter_0000070" / "mp_rank_01" / "model_optim_rng.pt", name, value)
    with pytest.raises(IntegrityFailure, match=f"mp_rank_01.*{sentence}"):
        import_checkpoint(tmp_path / "save", tmp_path / "out", vocab)


def test_directories_that_do_not_fit_together(vocab: Path, tmp_path: Path) -> None:
    saved = save(tmp_path / "save", rough_model(), 3, tp=2)
    newest = saved / "iter_0000070"
    with pytest.raises(BadInput, match="name a directory with vocab"):
        import_checkpoint(saved, tmp_path / "out")
    with pytest.raises(BadInput, match="has no vocab"):
        import_checkpoint(saved, tmp_path / "out", saved)
    with pytest.raises(BadInput, match="has 4 attention heads, and --heads or --set heads= says 2"):
        import_checkpoint(saved, tmp_path / "out", vocab, heads=2)
    save(tmp_path / "other", rough_model(), 1, tp=2)
    (newest / "mp_rank_01").rename(newest / "kept")
    (tmp_path / "other" / "iter_0000070" / "mp_rank_01").rename(newest / "mp_rank_01")
    with pytest.raises(IntegrityFailure, match="are not of one checkpoint"):
        import_checkpoint(saved, tmp_path / "out", vocab)
    (newest / "mp_rank_01").rename(newest / "mp_rank_02")
    with pytest.raises(IntegrityFailure, match="of tensor-parallel rank 1, pipeline stage 0"):
        import_checkpoint(saved, tmp_path / "out", vocab)
    for word, sentence in (
        ("../70", "and not the number of an iteration"),
        ("71", "iter_0000071, which is not a directory"),
    ):
        (saved / "latest_checkpointed_iteration.txt").write_text(word)
        with pytest.raises(IntegrityFailure, match=sentence):
            import_checkpoint(saved, tmp_path / "out", vocab)


def test_an_untied_last_stage_is_refused(vocab: Path, tmp_path: Path) -> None:
    saved = save(tmp_path / "save", rough_model(), 3, pp=2)
    path = saved / "iter_0000070" / "mp_rank_00_001" / "model_optim_rng.pt"
    content = torch.load(path, weights_only=False)
    content["model"]["word_embeddings_for_head"]["weight"] += 1
    torch.save(content, path)
    with pytest.raises(BadInput, match="its output layer is not the word embedding"):
        import_checkpoint(saved, tmp_path / "out", vocab)


def save_core(folder: Path, model: GPT2) -> Path:
    """Megatron-Core's directory, whose weights of all layers are one tensor."""
    layers: dict[str, list[torch.Tensor]] = defaultdict(list)
    for name, tensor in stage_model(dict(model.state_dict()), "core-te", 0, 1).items():
        layers[re.sub(r"\.layers\.\d+\.", ".layers.", name)].append(tensor)
    state: dict[str, Any] = {
        name: torch.stack(each) if ".layers." in name else each[0] for name, each in layers.items()
    }
    state["optimizer.state.exp_avg.decoder.final_layernorm.bias"] = torch.ones(3)
    folder.mkdir()
    with warnings.catch_warnings(action="ignore"):
        distributed.save(state, storage_writer=distributed.FileSystemWriter(folder), no_dist=True)
    torch.save(
        {"args": arguments(), "checkpoint_version": 3.0, "iteration": 70}, folder / "common.pt"
    )
    return folder


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    folder = tmp_path / "save" / "iter_0000070"
    folder.parent.mkdir()
    (folder.parent / "latest_checkpointed_iteration.txt").write_text("70\n")
    return save_core(folder, rough_model())


@pytest.mark.parametrize("place", [".", ".."], ids=["directory", "save"])
def test_weights_are_read_bit_for_bit(saved: Path, place: str, vocab: Path, tmp_path: Path) -> None:
    assert_same_model(import_checkpoint(saved / place, tmp_path / "back", vocab), rough_model())


def rewritten(metadata: Callable[[Metadata], object]) -> Callable[[Path], None]:
    """What rewrites the metadata of a checkpoint."""

    def changed(folder: Path) -> None:
        known = distributed.FileSystemReader(folder).read_metadata()
        metadata(known)
        (folder / ".metadata").write_bytes(pickle.dumps(known))

    return changed


def words(known: Metadata) -> Any:
    return known.state_dict_metadata["embedding.word_embeddings.weight"]


def leave(known: Metadata) -> None:
    for info in known.storage_data.values():
        info.relative_path = "../" + info.relative_path


def truncate(folder: Path) -> None:
    (file,) = folder.glob("*.distcp")
    file.write_bytes(file.read_bytes()[:-5000])


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (
            rewritten(
                lambda known: vars(words(known).chunks[0]).update(sizes=torch.Size([192, 24]))
            ),
            "some are missing",
        ),
        (
            rewritten(lambda known: words(known).chunks.extend(words(known).chunks)),
            "parts of tensor 'embedding.word_embeddings.weight' in",
        ),
        (
            rewritten(
                lambda known: vars(words(known).chunks[0]).update(offsets=torch.Size([1, 0]))
            ),
            "lies outside the whole tensor",
        ),
        (rewritten(leave), "which is not a plain name of a file"),
        (rewritten(lambda known: words(known).chunks.clear()), "no part of tensor"),
        (
            rewritten(lambda known: vars(words(known)).update(size=torch.Size([1 << 40, 24]))),
            "some are missing",
        ),
        (
            rewritten(
                lambda known: known.state_dict_metadata.pop("decoder.layers.mlp.linear_fc1.bias")
            ),
            "'layers.0.mlp.dense_h_to_4h.bias' is missing",
        ),
        (rewritten(lambda known: known.storage_data.clear()), "cannot be read"),
        (truncate, "cannot be read"),
        (
            lambda folder: (folder / ".metadata").write_bytes(b"nonsense"),
            ".metadata cannot be read",
        ),
        (
            lambda folder: (folder / ".metadata").write_bytes(pickle.dumps({})),
            "is not the metadata of a distributed checkpoint",
        ),
    ],
)
def test_a_damaged_checkpoint_gets_one_sentence(
    damage: Callable[[Path], None],
    said: str,
    saved: Path,
    vocab: Path,
    tmp_path: Path,
    command: Command,
) -> None:
    damage(saved)
    done = command(main, "mlm-train", "import", saved, tmp_path / "back", "--vocab", vocab)
    assert (done.code, done.out) == (6, "")
    assert said in done.error
    assert done.but_cost.count("\n") == 1
    assert not (tmp_path / "back").exists()


@pytest.mark.parametrize("name", NAMES)
def test_a_call_in_metadata_is_not_run(
    name: str, saved: Path, vocab: Path, tmp_path: Path, command: Command
) -> None:
    marker = tmp_path / "marker"
    (tmp_path / "program.py").write_text(f"open({str(marker)!r}, 'w').close()")
    (saved / ".metadata").write_bytes(pickle.dumps({"plan": payloads(marker)[name]}))
    done = command(main, "mlm-train", "import", saved, tmp_path / "back", "--vocab", vocab)
    assert done.code == 6
    assert f"names {name}, which is not among what a checkpoint may load" in done.error
    assert done.error.endswith("nothing in it was run")
    assert not marker.exists()
