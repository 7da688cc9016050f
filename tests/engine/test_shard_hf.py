"""A Hugging Face model divided, run under tensor parallelism and merged: the same logits, then the same files."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from transformers import GPT2LMHeadModel
from typer.testing import CliRunner

from engine.checkpoint.checkpoint import load_for_inference
from engine.cli import app
from engine.formats.huggingface_shards import FOLDER, WRITTEN, merge_huggingface, shard_huggingface
from engine.launch.mesh import build_mesh
from engine.launch.threads import run_threads
from engine.parallel.layout import Layout
from lineage.chain import INDEX
from lineage.digest import seal
from lineage.errors import BadInput, IntegrityFailure
from tests.engine.test_formats_checkpoint import CONFIG, TOKENS
from tests.engine.test_formats_huggingface import change_config, their_logits, their_model


def write_theirs(directory: Path, dtype: torch.dtype = torch.float32, size: str = "5GB") -> GPT2LMHeadModel:
    model = their_model()
    model.to(dtype).save_pretrained(directory, max_shard_size=size)
    return model.float()


def logits_on(layout: Layout, checkpoint: Path) -> NDArray[np.float32]:
    mesh = build_mesh(layout)
    model = load_for_inference(checkpoint, mesh).model
    with torch.no_grad():
        return mesh.tp.all_gather(model.logits(model.hidden_states(TOKENS)), dim=2)[..., : CONFIG.vocab_size].numpy()


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_the_shards_run_as_the_model_does_and_merge_into_its_files(tp: int, tmp_path: Path) -> None:
    theirs = write_theirs(tmp_path / "theirs")
    checkpoint = shard_huggingface(tmp_path / "theirs", tmp_path / "shards", tp)
    assert len(list(checkpoint.glob("model-tp*.safetensors"))) == tp
    expected = their_logits(theirs)
    for logits in run_threads(logits_on, tp, Layout(tp=tp), checkpoint):
        np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-5)
    merged = merge_huggingface(checkpoint, tmp_path / "merged")
    assert sorted(path.name for path in merged.iterdir()) == sorted(p.name for p in (tmp_path / "theirs").iterdir())
    for path in merged.iterdir():
        assert path.read_bytes() == (tmp_path / "theirs" / path.name).read_bytes(), path.name


def test_a_rank_s_file_holds_its_part_alone(tmp_path: Path) -> None:
    write_theirs(tmp_path / "theirs")
    checkpoint = shard_huggingface(tmp_path / "theirs", tmp_path / "shards", 4)
    index = json.loads((checkpoint / INDEX).read_text(encoding="utf-8"))
    divided = 0
    for rank in range(4):
        for name, part in load_file(checkpoint / f"model-tp0{rank}-pp000.safetensors").items():
            whole, dim = index[name]["shape"], index[name]["dim"]
            divided += dim is not None
            assert list(part.shape) == [size // 4 if place == dim else size for place, size in enumerate(whole)]
    assert divided == 4 * (1 + CONFIG.num_layers * 6)  # word embedding, and six parts a layer


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_number_formats_file_divisions_tied_heads_and_masks_come_back(dtype: torch.dtype, tmp_path: Path) -> None:
    directory = tmp_path / "theirs"
    write_theirs(directory, dtype, size="30kB")
    one, *others = sorted(directory.glob("model-*.safetensors"))
    assert others
    tensors = load_file(one) | {"h.0.attn.bias": torch.ones(1, 1, 12, 12).tril().bool()}
    words = next(t for path in (one, *others) for n, t in load_file(path).items() if n == "transformer.wte.weight")
    save_file(tensors | {"lm_head.weight": words.clone()}, one, metadata={"made": "here"})
    index = json.loads((directory / "model.safetensors.index.json").read_text(encoding="utf-8"))
    index["weight_map"] |= {"h.0.attn.bias": one.name, "lm_head.weight": one.name}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    merged = merge_huggingface(shard_huggingface(directory, tmp_path / "shards", 2), tmp_path / "merged")
    for path in directory.iterdir():
        assert path.read_bytes() == (merged / path.name).read_bytes(), path.name


def test_the_commands(tmp_path: Path) -> None:
    write_theirs(tmp_path / "theirs")
    for arguments in (["shard-hf", "theirs", "--tp", "2", "shards"], ["export", "shards", "merged"]):
        paths = [str(tmp_path / word) if word in ("theirs", "shards", "merged") else word for word in arguments]
        done = CliRunner().invoke(app, paths)
        assert (done.exit_code, done.stdout) == (0, f"written: {paths[-1]}\n")
    name = "model.safetensors"
    assert (tmp_path / "merged" / name).read_bytes() == (tmp_path / "theirs" / name).read_bytes()


def test_a_file_outside_the_output_is_not_written(tmp_path: Path) -> None:
    write_theirs(tmp_path / "theirs")
    checkpoint = shard_huggingface(tmp_path / "theirs", tmp_path / "shards", 1)
    written = checkpoint / FOLDER / WRITTEN
    (content,) = json.loads(written.read_text(encoding="utf-8")).values()
    written.write_text(json.dumps({"../outside.safetensors": content}), encoding="utf-8")
    seal(checkpoint)
    with pytest.raises(IntegrityFailure, match=r"outside\.safetensors"):
        merge_huggingface(checkpoint, tmp_path / "merged")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["shards", "theirs"]


def test_ranks_that_do_not_divide_the_heads_are_refused(tmp_path: Path) -> None:
    write_theirs(tmp_path / "theirs")
    with pytest.raises(BadInput, match="tp = 3 does not divide the 4 attention heads"):
        shard_huggingface(tmp_path / "theirs", tmp_path / "shards", 3)
    assert not (tmp_path / "shards").exists()


@pytest.mark.parametrize(
    ("values", "error", "sentence"),
    [
        ({"model_type": "llama"}, BadInput, "model_type is 'llama'"),
        ({"n_embd": "24"}, IntegrityFailure, "n_embd is '24', not a number"),
        ({"vocab_size": 269}, IntegrityFailure, r"'wte.weight' has shape \[270, 24\], the model's is \[269, 24\]"),
        ({"n_layer": 2}, IntegrityFailure, "says 2 layers, the weights have 4"),
        ({"n_positions": 13}, IntegrityFailure, "'wpe.weight' has shape"),
    ],
)
def test_what_does_not_fit_is_refused_and_nothing_written(
    values: dict[str, object], error: type[Exception], sentence: str, tmp_path: Path
) -> None:
    write_theirs(tmp_path / "theirs")
    change_config(tmp_path / "theirs", **values)
    with pytest.raises(error, match=sentence):
        shard_huggingface(tmp_path / "theirs", tmp_path / "shards", 2)
    assert [path.name for path in tmp_path.iterdir()] == ["theirs"]


def test_a_changed_shard_is_not_merged(tmp_path: Path) -> None:
    write_theirs(tmp_path / "theirs")
    checkpoint = shard_huggingface(tmp_path / "theirs", tmp_path / "shards", 2)
    path = checkpoint / "model-tp01-pp000.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(IntegrityFailure, match="model-tp01-pp000"):
        merge_huggingface(checkpoint, tmp_path / "merged")
