"""Checkpoints hold the whole model whatever layout wrote them, and a damaged one is never used."""

import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from mlm_repro.engine.checkpoint.checkpoint import TrainingState, load_checkpoint, save_checkpoint
from mlm_repro.engine.compare.tensors import check_cover
from mlm_repro.engine.config import ModelConfig, RunConfig, TrainConfig
from mlm_repro.engine.inference import load_for_inference
from mlm_repro.engine.launch.mesh import build_mesh
from mlm_repro.engine.launch.threads import run_threads
from mlm_repro.engine.model.gpt2 import GPT2
from mlm_repro.engine.model.microbatch import PipelineInput
from mlm_repro.engine.optim.adam import FlatAdamW
from mlm_repro.engine.optim.gradients import GradientReducer
from mlm_repro.engine.optim.precision import DTYPES
from mlm_repro.engine.parallel.layout import Layout
from mlm_repro.engine.parallel.sharding import ShardedParameter, sharded_parameters
from mlm_repro.lineage.chain import resolve_checkpoint
from mlm_repro.lineage.digest import check_seal, seal
from mlm_repro.lineage.errors import BadInput, Diverged, IntegrityFailure

CONFIG = RunConfig(
    name="tiny",
    model=ModelConfig(
        num_layers=2,
        hidden_size=16,
        num_heads=4,
        seq_length=8,
        vocab_size=29,
        padded_vocab_size=32,
        dropout=0.0,
    ),
    train=TrainConfig(iterations=9, warmup_iterations=1, keep_checkpoints=2, clip_gradient=0.0),
)
TOKENS = torch.randint(0, 29, (3, 9), generator=torch.Generator().manual_seed(0))


def with_precision(precision: str) -> RunConfig:
    return CONFIG.model_copy(
        update={"train": CONFIG.train.model_copy(update={"precision": precision})}
    )


@dataclass
class Built:
    """A model on this rank with what trains it."""

    model: GPT2
    parameters: list[ShardedParameter]
    optimizer: FlatAdamW
    reducer: GradientReducer

    def step(self) -> None:
        self.reducer.begin()
        inputs, targets = TOKENS[:, :-1], TOKENS[:, 1:]
        self.model.batch_loss(self.model(inputs), PipelineInput(inputs, targets)).backward()
        self.reducer.finish(1)
        self.optimizer.step(1e-2, self.optimizer.gradient_norm())

    def save(self, run: Path, config: RunConfig, state: TrainingState, tokenizer: Path) -> None:
        save_checkpoint(
            run, config, state, self.parameters, self.optimizer, self.model.mesh, tokenizer
        )


def build(config: RunConfig, layout: Layout, shard: bool = False) -> Built:
    mesh = build_mesh(layout)
    model = GPT2(config.model, mesh).to(DTYPES[config.train.precision])
    model.initialize(1)
    parameters = sharded_parameters(model, mesh)
    optimizer = FlatAdamW(parameters, config.train, mesh, shard)
    return Built(model, parameters, optimizer, GradientReducer(optimizer.groups, mesh))


def logits(model: GPT2) -> Any:
    with torch.no_grad():
        local = model.logits(model(TOKENS[:, :-1]))
        return model.mesh.tp.all_gather(local, -1).double().numpy()


def train_and_save(
    layout: Layout, run: Path, tokenizer: Path, precision: str, shard: bool = False
) -> tuple[Any, Any]:
    """Logits after two steps, where the checkpoint is written, and after a third."""
    config = with_precision(precision)
    built = build(config, layout, shard)
    for _ in range(2):
        built.step()
    built.save(run, config, TrainingState(2, 2, 1.5), tokenizer)
    saved = logits(built.model)
    built.step()
    return saved, logits(built.model)


def load_and_step(
    layout: Layout, path: Path, precision: str, shard: bool = False
) -> tuple[TrainingState, Any]:
    built = build(with_precision(precision), layout, shard)
    state, _ = load_checkpoint(path, built.parameters, built.optimizer)
    built.step()
    return state, logits(built.model)


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    (folder / "tokenizer.json").write_text("{}", encoding="utf-8")
    return folder


@pytest.fixture
def run(tmp_path: Path, tokenizer: Path) -> Path:
    """A run directory with one checkpoint, written by two tensor-parallel ranks."""
    run_threads(train_and_save, 2, Layout(tp=2), tmp_path / "run", tokenizer, "fp32")
    return tmp_path / "run"


@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(tp=2, dp=2), Layout(tp=4)], ids=str)
def test_inference_on_one_rank_equals_the_model_that_was_saved(
    layout: Layout, tmp_path: Path, tokenizer: Path
) -> None:
    saved, _ = run_threads(
        train_and_save, layout.world_size, layout, tmp_path / "run", tokenizer, "fp32"
    )[0]
    loaded = load_for_inference(tmp_path / "run")
    assert not loaded.model.training
    assert loaded.config == CONFIG.model
    assert loaded.digest == check_seal(loaded.directory)
    assert (loaded.directory / "tokenizer" / "tokenizer.json").is_file()
    np.testing.assert_allclose(logits(loaded.model), saved, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 4), (4, 2)])
def test_training_goes_on_at_another_layout(
    before: int, after: int, tmp_path: Path, tokenizer: Path
) -> None:
    run = tmp_path / "run"
    _, expected = run_threads(train_and_save, before, Layout(tp=before), run, tokenizer, "fp64")[0]
    path = resolve_checkpoint(run)
    for state, found in run_threads(load_and_step, after, Layout(tp=after), path, "fp64"):
        assert replace(state, ancestors=()) == TrainingState(2, 2, 1.5)
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-10)


def state_held(shard: bool) -> int:
    groups = build(CONFIG, Layout(dp=2), shard).optimizer.groups
    return sum(group.exp_avg.numel() + group.exp_avg_sq.numel() for group in groups)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("shard", [True, False])
def test_a_divided_optimizer_holds_half_and_its_checkpoint_is_anybody_s(
    shard: bool, precision: str, tmp_path: Path, tokenizer: Path
) -> None:
    whole, half = (run_threads(state_held, 2, divided)[0] for divided in (False, True))
    assert whole / 2 <= half <= whole / 2 + 4
    layout = Layout(dp=2)
    _, expected = run_threads(
        train_and_save, 2, layout, tmp_path / "run", tokenizer, precision, shard
    )[0]
    for _, found in run_threads(
        load_and_step, 2, layout, resolve_checkpoint(tmp_path / "run"), precision, not shard
    ):
        np.testing.assert_array_equal(found, expected)


def test_the_index_says_where_the_parts_of_a_tensor_are(run: Path) -> None:
    path = resolve_checkpoint(run)
    files = [f"model-tp{rank:02d}-pp000.safetensors" for rank in range(2)]
    index = json.loads((path / "index.json").read_text(encoding="utf-8"))
    assert index["embedding.word_embeddings.weight"] == {
        "shape": [32, 16],
        "dim": 0,
        "files": files,
    }
    assert index["layers.1.self_attention.dense.weight"] == {
        "shape": [16, 16],
        "dim": 1,
        "files": files,
    }
    assert index["final_layernorm.bias"] == {"shape": [16], "dim": None, "files": files[:1]}
    parts = [
        load_file(path / file)["layers.1.self_attention.query_key_value.weight"] for file in files
    ]
    assert [list(part.shape) for part in parts] == [[24, 16], [24, 16]]


@pytest.mark.parametrize(
    "name",
    ["model-tp01-pp000.safetensors", "index.json", "config.json", "tokenizer/tokenizer.json"],
)
def test_a_changed_byte_is_noticed(name: str, run: Path) -> None:
    path = resolve_checkpoint(run) / name
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(IntegrityFailure, match=name) as caught:
        load_for_inference(run)
    assert caught.value.exit_code == 6


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"final_layernorm.bias": None}, "index.json has no tensor 'final_layernorm.bias'"),
        ({"layers.9.extra": {"dim": None}}, "'layers.9.extra', which the model does not have"),
        (
            {"embedding.position_embeddings.weight": {"shape": [16, 8]}},
            r"position_embeddings.weight' has shape \[16, 8\] in index.json, and the model"
            r" needs \[8, 16\]",
        ),
        (
            {"final_layernorm.bias": {"files": ["../../other.safetensors"]}},
            "which is not a plain name of a file",
        ),
        (
            {"final_layernorm.bias": {"files": ["optimizer-tp00-pp000.safetensors"]}},
            "cannot be read",
        ),
        (
            {"final_layernorm.bias": {"files": []}},
            "entry of tensor 'final_layernorm.bias' in index.json has no list of file names",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    change: dict[str, Any], sentence: str, run: Path
) -> None:
    path = resolve_checkpoint(run)
    index = json.loads((path / "index.json").read_text(encoding="utf-8"))
    index |= {
        name: entry and index.get(name, index["final_layernorm.bias"]) | entry
        for name, entry in change.items()
    }
    index = {name: entry for name, entry in index.items() if entry is not None}
    (path / "index.json").write_text(json.dumps(index), encoding="utf-8")
    seal(path)
    with pytest.raises(IntegrityFailure, match=sentence):
        load_for_inference(run)
    if "does not have" not in sentence:
        with pytest.raises(IntegrityFailure):
            load_and_step(Layout(), path, "fp32")


def test_resolve_takes_a_run_its_checkpoints_or_one_of_them(run: Path, tmp_path: Path) -> None:
    newest = run / "checkpoints" / "iter_0000002"
    (tmp_path / "link").symlink_to(run)
    for asked in (run, run / "checkpoints", newest, tmp_path / "link"):
        assert resolve_checkpoint(asked) == newest.resolve()
    shutil.copytree(newest, tmp_path / "alone")
    assert resolve_checkpoint(tmp_path / "alone") == tmp_path / "alone"


def test_resolve_refuses_what_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="there is no checkpoint directory"):
        resolve_checkpoint(tmp_path / "nowhere")
    (tmp_path / "folder").mkdir()
    with pytest.raises(IntegrityFailure, match="no COMPLETE file"):
        resolve_checkpoint(tmp_path / "folder")
    seal(tmp_path / "folder")
    with pytest.raises(BadInput, match=r"has no index\.json"):
        resolve_checkpoint(tmp_path / "folder")


def test_a_tensor_that_is_not_finite_is_not_saved(tmp_path: Path, tokenizer: Path) -> None:
    built = build(CONFIG, Layout())
    built.optimizer.groups[1].exp_avg[3] = torch.nan
    with pytest.raises(
        Diverged,
        match=r"exp_avg\..* holds 1 numbers that are not finite: this checkpoint is not written",
    ):
        built.save(tmp_path / "run", CONFIG, TrainingState(2, 2), tokenizer)
    assert list((tmp_path / "run" / "checkpoints").iterdir()) == []


def test_parts_of_a_number_without_dims_have_none() -> None:
    check_cover("w", [((), ())], ())
    with pytest.raises(IntegrityFailure, match="the parts of w have different numbers of dims"):
        check_cover("w", [((0,), (3,))], ())
