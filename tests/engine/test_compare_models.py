"""Two models as one: a Hugging Face directory with a fault is told by its first weight, window and tensor."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.checkpoint.checkpoint import load_for_inference
from engine.compare.models import (
    Agreement,
    ComparedModel,
    Window,
    build_model,
    compare_models,
    engine_model,
    random_windows,
    transformers_model,
)
from engine.formats import huggingface_gpt2
from engine.formats.convert import COMPARED, export_checkpoint, import_checkpoint
from engine.formats.huggingface import WEIGHTS, gpt2_weights, read_huggingface
from engine.model.gpt2 import GPT2
from lineage.errors import IntegrityFailure
from lineage.files import read_document
from tests.engine.test_formats_checkpoint import CONFIG, rough_model, write_rough

LENGTH = 12


def windows(count: int, lengths: dict[int, int] | None = None) -> list[Window]:
    """Random tokens; windows of other lengths by their number."""
    random = np.random.RandomState(3)
    rows = random.randint(CONFIG.vocab_size, size=(count, LENGTH + 1))
    return [(row[: (lengths or {}).get(number, 8) + 1], 6) for number, row in enumerate(rows)]


def ours(tmp_path: Path) -> ComparedModel:
    model = load_for_inference(tmp_path / "checkpoint").model
    assert isinstance(model, GPT2)
    return engine_model(model)


def compared(tmp_path: Path, walk: list[Window]) -> Agreement:
    theirs = transformers_model(tmp_path / "exported", CONFIG)
    assert theirs is not None
    return compare_models(ours(tmp_path), theirs, walk)


def change(directory: Path, name: str, to: object) -> None:
    weights = load_file(directory / WEIGHTS)
    with torch.no_grad():
        to(weights[name])  # type: ignore[operator]
    save_file(weights, directory / WEIGHTS, metadata={"format": "pt"})


def swap_queries_and_keys(weight: torch.Tensor) -> None:
    queries, keys, _ = (part.clone() for part in weight.chunk(3, dim=-1))
    weight[..., : queries.size(-1)], weight[..., queries.size(-1) : 2 * queries.size(-1)] = keys, queries


FAULTS = [
    ("transformer.h.2.attn.c_attn.weight", swap_queries_and_keys,
     "layers.2.self_attention.query_key_value.weight", "output of layers.2.self_attention.query_key_value in window 1"),
    ("transformer.h.1.mlp.c_proj.weight", lambda w: w.copy_(w.flip(0)),
     "layers.1.mlp.dense_4h_to_h.weight", "output of layers.1 in window 1"),
    ("transformer.wpe.weight", lambda rows: rows.copy_(rows.roll(1, 0)),
     "embedding.position_embeddings.weight", "output of embedding in window 1"),
    ("transformer.ln_f.bias", lambda b: b.add_(0.1), "final_layernorm.bias", "output of final_layernorm in window 1"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "fault", "weight", "tensor"), FAULTS, ids=[fault[2] for fault in FAULTS])
def test_the_first_weight_and_the_first_tensor_are_named(
    exported: Path, tmp_path: Path, name: str, fault: object, weight: str, tensor: str
) -> None:
    change(exported, name, fault)
    found = compared(tmp_path, windows(9))
    assert not found.is_one_model
    assert str(found.weight).startswith(f"{weight} differs by at most ")
    assert str(found.tensor).startswith(f"{tensor} differs from this engine by ")
    assert found.windows == 1


@pytest.mark.parametrize("number", [3, 8, 13])
def test_the_first_window_that_is_long_enough_for_the_wrong_row_is_named(
    exported: Path, tmp_path: Path, number: int
) -> None:
    change(exported, "transformer.wpe.weight", lambda rows: rows[LENGTH - 1].mul_(-1.5))
    found = compared(tmp_path, windows(15, {number: LENGTH}))
    assert str(found.tensor).startswith(f"output of embedding in window {number + 1} differs")
    assert found.windows == number + 1


def test_the_other_program_s_own_fault_is_found_where_all_weights_are_the_same(exported: Path, tmp_path: Path) -> None:
    theirs = transformers_model(exported, CONFIG)
    assert theirs is not None
    theirs.module.transformer.h[1].mlp.act = torch.nn.ReLU()  # type: ignore[union-attr, index]
    found = compare_models(ours(tmp_path), theirs, windows(8))
    assert found.weight is None
    assert str(found.tensor).startswith("output of layers.1 in window 1 differs from this engine")


def test_without_a_fault_rounding_raises_no_alarm(exported: Path, tmp_path: Path) -> None:
    for seed in range(10):
        torch.manual_seed(seed)
        weights = {name: torch.randn_like(weight).mul_(0.1).add_("layernorm.weight" in name)
                   for name, weight in rough_model().named_parameters()}  # fmt: skip
        save_file(gpt2_weights(weights, CONFIG), exported / WEIGHTS, metadata={"format": "pt"})
        theirs = transformers_model(exported, CONFIG)
        assert theirs is not None
        found = compare_models(build_model(CONFIG, weights), theirs, windows(12))
        assert found.is_one_model, found
        assert found.windows == 12
        assert 0 < found.largest <= found.tolerance < 1e-3


def test_an_export_keeps_what_came_of_the_comparison(exported: Path, tmp_path: Path) -> None:
    kept = read_document(exported / COMPARED, Agreement)
    assert kept.is_one_model
    assert kept.programs[1].startswith("transformers ")
    assert kept.windows == len(random_windows(CONFIG)) == 8
    import_checkpoint(exported, tmp_path / "back")
    origin = json.loads((tmp_path / "back" / "origin.json").read_text())
    assert origin["compared"]["programs"] == list(kept.programs)
    export_checkpoint(tmp_path / "checkpoint", tmp_path / "core", "torch-dist")
    assert read_document(tmp_path / "core" / COMPARED, Agreement).programs == ("this engine", "this engine")


@pytest.mark.parametrize("has_transformers", [True, False])
def test_a_wrong_export_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_transformers: bool) -> None:
    write_rough(tmp_path / "checkpoint")
    if not has_transformers:
        monkeypatch.setitem(sys.modules, "transformers", None)
    real = huggingface_gpt2.split
    monkeypatch.setattr(
        huggingface_gpt2, "split",
        lambda name, tensor, config: real(name, tensor.flip(0) if "layers.3.mlp" in name else tensor, config),
    )  # fmt: skip
    with pytest.raises(
        IntegrityFailure, match=r"different model according to .*: layers\.3\.mlp\.dense_h_to_4h\.weight differs"
    ):
        export_checkpoint(tmp_path / "checkpoint", tmp_path / "theirs")
    assert not (tmp_path / "theirs").exists()


def test_a_wrong_import_is_not_written(exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = huggingface_gpt2.join
    monkeypatch.setattr(
        huggingface_gpt2, "join",
        lambda name, parts, config: real(name, [part.neg() for part in parts], config)
        if name.endswith("dense.bias") else real(name, parts, config),
    )  # fmt: skip
    with pytest.raises(
        IntegrityFailure, match=r"different model according to transformers .*: layers\.0\.self_attention\.dense"
    ):
        import_checkpoint(exported, tmp_path / "back")
    assert not (tmp_path / "back").exists()
    assert read_huggingface(exported).model.num_layers == CONFIG.num_layers
