"""Megatron-LM checkpoints of other models, or whose files do not fit together, are refused by name."""

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.formats.convert import import_checkpoint
from lineage.errors import BadInput, IntegrityFailure
from tests.engine.test_formats_checkpoint import rough_model
from tests.engine.test_formats_megatron import arguments, save


@pytest.mark.parametrize(
    ("content", "error", "sentence"),
    [
        ({"args": arguments(bias_gelu_fusion=False, openai_gelu=False)}, BadInput, "exact GeLU"),
        ({"args": arguments(swiglu=True)}, BadInput, "swiglu is True"),
        ({"args": arguments(position_embedding_type="rope")}, BadInput, "position_embedding_type is 'rope'"),
        ({"args": arguments(layernorm_epsilon=1e-6)}, BadInput, "layernorm_epsilon is 1e-06"),
        ({"args": arguments(num_experts=8)}, BadInput, "num_experts is 8"),
        ({"args": arguments(num_layers=5)}, IntegrityFailure, "num_layers is 5 in its arguments, 4 in its tensors"),
        ({"args": arguments(num_attention_heads=5)}, BadInput, "num_heads = 5"),
        ({"args": {"num_layers": 4}}, IntegrityFailure, "not a namespace"),
        ({"args": None}, BadInput, "give --heads"),
        ({"checkpoint_version": 4.0}, BadInput, "checkpoint version 4.0"),
        ({"checkpoint_version": torch.zeros(2)}, BadInput, "checkpoint version"),
        ({"model": None}, IntegrityFailure, "does not hold a model"),
        ({"model": None, "model0": {}}, BadInput, "interleaved"),
        ({"model": [1]}, IntegrityFailure, "not a state dict"),
        ({"model": {"word_embeddings.weight": "text"}}, IntegrityFailure, "not a tensor with values"),
        ({"model": {"lm_head.dense.weight": torch.zeros(1)}}, IntegrityFailure, "'lm_head.dense.weight' is unexpected"),
        ({"model": {}}, IntegrityFailure, "word_embeddings.weight' is missing"),
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
        ("layers.1.mlp.dense_h_to_4h.bias", torch.zeros(96), r"has shape \[96\], the model's is \[48\]"),
        ("layers.1.mlp.gate.bias", torch.zeros(1), "'encoder.layers.1.mlp.gate.bias' is unexpected"),
        ("layers.1.input_norm.bias", torch.zeros(24), "is there twice"),
        ("final_layernorm.bias", torch.zeros(24, device="meta"), "not a tensor with values"),
    ],
)
def test_tensors_that_do_not_fit_are_named(name: str, value: Any, sentence: str, vocab: Path, tmp_path: Path) -> None:
    save(tmp_path / "save", rough_model(), 3, tp=2)
    change(tmp_path / "save" / "iter_0000070" / "mp_rank_01" / "model_optim_rng.pt", name, value)
    with pytest.raises(IntegrityFailure, match=f"mp_rank_01.*{sentence}"):
        import_checkpoint(tmp_path / "save", tmp_path / "out", vocab)


def test_directories_that_do_not_fit_together(vocab: Path, tmp_path: Path) -> None:
    saved = save(tmp_path / "save", rough_model(), 3, tp=2)
    newest = saved / "iter_0000070"
    with pytest.raises(BadInput, match="give --vocab"):
        import_checkpoint(saved, tmp_path / "out")
    with pytest.raises(BadInput, match="there is no vocab"):
        import_checkpoint(saved, tmp_path / "out", saved)
    with pytest.raises(BadInput, match="has 4 attention heads, but --heads says 2"):
        import_checkpoint(saved, tmp_path / "out", vocab, heads=2)
    save(tmp_path / "other", rough_model(), 1, tp=2)
    (newest / "mp_rank_01").rename(newest / "kept")
    (tmp_path / "other" / "iter_0000070" / "mp_rank_01").rename(newest / "mp_rank_01")
    with pytest.raises(IntegrityFailure, match="not of the same checkpoint"):
        import_checkpoint(saved, tmp_path / "out", vocab)
    (newest / "mp_rank_01").rename(newest / "mp_rank_02")
    with pytest.raises(IntegrityFailure, match="of tensor rank 1, pipeline stage 0"):
        import_checkpoint(saved, tmp_path / "out", vocab)
    for word, sentence in (("../70", "neither an iteration"), ("71", "iter_0000071, which does not exist")):
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
