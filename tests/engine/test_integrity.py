"""What training believes of its own files and of its other ranks: nothing that it has not
compared."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from mlm_repro.engine.checkpoint.statistics import check_written, measure, merge
from mlm_repro.engine.data.dataset import DatasetFacts
from mlm_repro.engine.guard import Guard, Iteration
from mlm_repro.engine.launch.mesh import build_mesh
from mlm_repro.engine.launch.threads import run_threads
from mlm_repro.engine.parallel.layout import Layout
from mlm_repro.engine.run.files import read_steps
from mlm_repro.engine.run.resolved import resolve
from mlm_repro.engine.train import begun_on_ranks
from mlm_repro.engine.trainer import Trainer
from mlm_repro.lineage.digest import MARKER, seal, sha256_file
from mlm_repro.lineage.errors import BadInput, IntegrityFailure, UserError
from mlm_repro.lineage.lock import LOCK, locked
from tests.engine.conftest import write_dataset
from tests.engine.small_run import (
    assert_same_training,
    mlm_train,
    resolved,
    small_config,
    train,
    write_toml,
)

MODEL, OPTIMIZER = "model-tp00-pp000.safetensors", "optimizer-tp00-pp000.safetensors"


@pytest.fixture
def stopped(copied: Path) -> Path:
    """A copy of the small run that still has its checkpoints and is not complete."""
    (copied / "COMPLETE").unlink()
    return copied


def change_tensors(file: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


def exchange(tensors: dict[str, torch.Tensor]) -> None:
    """Another layer's weights: every shape fits."""
    names = [f"layers.{layer}.mlp.dense_h_to_4h.weight" for layer in (0, 1)]
    tensors[names[0]], tensors[names[1]] = tensors[names[1]], tensors[names[0]]


def reverse(tensors: dict[str, torch.Tensor]) -> None:
    """The same numbers in another order, so that no statistic of the tensor changes."""
    name = "layers.0.mlp.dense_h_to_4h.weight"
    tensors[name] = tensors[name].flip(0).contiguous()


@pytest.mark.parametrize(
    ("file", "change", "sentence"),
    [
        (
            MODEL,
            exchange,
            "tensor 'layers.0.mlp.dense_h_to_4h.weight' is not what was saved: its norm is",
        ),
        (MODEL, reverse, "is not what was saved: single numbers of it changed"),
        (MODEL, reverse, "the model's loss on the samples in probe.json is"),
        (
            OPTIMIZER,
            lambda tensors: tensors["exp_avg.final_layernorm.bias"].mul_(2),
            "exp_avg.final_layernorm.bias",
        ),
        (OPTIMIZER, None, "is not what was saved: its norm is"),
    ],
    ids=["exchanged", "reversed", "reversed in an older one", "moment", "not sealed"],
)
def test_tensors_that_were_not_saved_are_not_trusted(
    file: str,
    change: Any,
    sentence: str,
    stopped: Path,
    uninterrupted: Path,
    dataset: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The checkpoint before it is taken, with a warning, and the run ends as it would have
    ended."""
    newest = stopped / "checkpoints" / "iter_0000060"
    if "samples" in sentence:  # checkpoints before had no checksums
        statistics = json.loads((newest / "statistics.json").read_text())
        older = {
            name: {key: n for key, n in numbers.items() if key != "checksum"}
            for name, numbers in statistics.items()
        }
        (newest / "statistics.json").write_text(json.dumps(older))
    if change:
        change_tensors(newest / file, change)
        seal(newest)
    else:
        (newest / file).write_bytes((newest / file).read_bytes()[:-1] + b"?")
    assert train(small_config(dataset), stopped.parent).path == stopped
    err = capsys.readouterr().err
    assert any(line.startswith("warning: ") and sentence in line for line in err.splitlines())
    assert "kept as .iter_0000060.damaged, and training goes on from iter_0000040" in err
    assert_same_training(stopped, uninterrupted)


def test_a_tensor_of_one_stage_sends_every_stage_to_the_older_checkpoint(
    stopped: Path, uninterrupted: Path, dataset: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    newest = stopped / "checkpoints" / "iter_0000060"
    name = "layers.1.mlp.dense_h_to_4h.weight"
    change_tensors(newest / MODEL, lambda tensors: tensors[name].mul_(2))
    seal(newest)
    config = small_config(dataset)
    config = config.model_copy(update={"parallel": config.parallel.model_copy(update={"pp": 2})})
    assert run_threads(lambda: train(config, stopped.parent).path, 2) == [stopped] * 2
    err = capsys.readouterr().err
    assert f"tensor '{name}' is not what was saved" in err
    assert "training goes on from iter_0000040" in err
    ours, theirs = ([step.loss for step in read_steps(run)] for run in (stopped, uninterrupted))
    assert ours == pytest.approx(theirs, rel=1e-5)


def test_without_a_checkpoint_in_order_nothing_is_begun_anew(stopped: Path, dataset: Path) -> None:
    for path in (stopped / "checkpoints").iterdir():
        (path / "index.json").write_text("{}")
    before = sorted(path.name for path in (stopped / "checkpoints").iterdir())
    with pytest.raises(IntegrityFailure, match=r"iter_0000060/index\.json was changed"):
        train(small_config(dataset), stopped.parent)
    assert sorted(path.name for path in (stopped / "checkpoints").iterdir()) == before


def wait_for_a_later_change(data: Path) -> None:
    """Return once a change of a file is later, on this file system's clock, than those of the
    dataset: by that time alone a change that keeps the size is told."""
    newest = max(path.stat().st_ctime_ns for path in data.rglob("*"))
    probe = data.with_name("probe")
    deadline = time.monotonic() + 60
    while not probe.exists() or probe.stat().st_ctime_ns <= newest:
        assert time.monotonic() < deadline
        probe.touch()


def test_a_changed_dataset_is_not_trained_on(tmp_path: Path) -> None:
    """Neither size nor time of modification gives it away; what was found in order is not read a
    second time."""
    data = write_dataset(tmp_path / "data")
    DatasetFacts.read(data).check()
    tokens = data / "train_text_document.bin"
    status, content = tokens.stat(), bytearray(tokens.read_bytes())
    content[7] ^= 1
    wait_for_a_later_change(data)
    with tokens.open("r+b") as file:
        file.write(content)
    os.utime(tokens, ns=(status.st_atime_ns, status.st_mtime_ns))
    with pytest.raises(IntegrityFailure, match=r"train_text_document\.bin was changed"):
        train(small_config(data), tmp_path / "runs")


def test_nothing_is_kept_of_a_training_whose_dataset_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, iterate = write_dataset(tmp_path / "data"), Trainer.iterate
    tokens = data / "train_text_document.bin"
    before = tokens.read_bytes()

    def change(trainer: Trainer, number: int) -> Any:
        if number == 2:
            wait_for_a_later_change(data)
            tokens.write_bytes(before[:-2] + b"\0\0")
        return iterate(trainer, number)

    monkeypatch.setattr(Trainer, "iterate", change)
    with pytest.raises(IntegrityFailure, match=r"train_text_document\.bin was changed"):
        train(small_config(data), tmp_path / "runs")
    assert not [*tmp_path.glob("runs/*/checkpoints/*")]


def test_a_dataset_in_order_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = write_dataset(tmp_path / "data")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    read: list[Path] = []
    monkeypatch.setattr(
        "mlm_repro.lineage.digest.sha256_file", lambda path: read.append(path) or sha256_file(path)
    )
    facts = DatasetFacts.read(data)
    files = sorted(path for path in data.rglob("*") if path.is_file() and path.name != MARKER)
    facts.check()
    assert read == files
    facts.check()
    assert read == files
    wait_for_a_later_change(data)
    (data / "dataset.json").touch()
    facts.check()
    assert read == files * 2


def test_a_run_is_trained_by_one_command_at_a_time(dataset: Path, tmp_path: Path) -> None:
    run = resolved(small_config(dataset)).begin(tmp_path)
    leftover = run.path / "checkpoints" / ".iter_0000020.partial"
    leftover.mkdir(parents=True)
    (leftover / MODEL).write_bytes(b"half")
    with locked(run.path), pytest.raises(BadInput, match="another process is at work in"):
        train(small_config(dataset), tmp_path)
    assert train(small_config(dataset, iterations=6, warmup_iterations=3), tmp_path).is_complete
    with begun_on_ranks(resolved(small_config(dataset)), tmp_path):
        assert not leftover.exists()
    assert list(run.path.glob(".*")) == []


def test_a_lock_that_a_kill_left_in_a_complete_run_is_removed(
    dataset: Path, uninterrupted: Path
) -> None:
    (uninterrupted / LOCK).touch()
    assert train(small_config(dataset), uninterrupted.parent).path == uninterrupted
    assert list(uninterrupted.glob(".*")) == []


def refused(function: Callable[..., Any], *arguments: Any) -> str:
    try:
        function(*arguments)
    except UserError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def drift(layout: Layout, rank: int, name: str, config: Any, root: Path) -> str:
    """Train; one rank's tensor changes by one bit after the third iteration."""
    run = resolve(config, layout.world_size)
    mesh = build_mesh(layout)
    trainer = Trainer(run, run.begin(root), mesh)

    class Drift(Guard):
        def after(self, iteration: Iteration) -> str:
            if (
                iteration.number == 2
                and mesh.layout.rank(mesh.tp.rank, mesh.pp.rank, mesh.dp.rank) == rank
            ):
                tensor = next(p.local.data for p in trainer.model.parameters if p.name == name)
                tensor.flatten()[3:4].view(torch.int32).bitwise_xor_(1)
            return ""

    trainer.guards.insert(0, Drift())
    trainer.prepare()
    return refused(trainer.run_to_end)


@pytest.mark.parametrize(
    ("layout", "rank", "name", "sentence"),
    [
        (
            Layout(tp=2),
            1,
            "layers.0.input_layernorm.weight",
            (
                "no longer the same on tensor-parallel ranks: rank 1 differs from rank 0; which of"
                " them is right cannot"
            ),
        ),
        (
            Layout(dp=3),
            1,
            "layers.1.mlp.dense_4h_to_h.weight",
            "data-parallel ranks: rank 1 differs from rank 0, 2;",
        ),
    ],
    ids=["tp", "dp"],
)
def test_replicas_that_drift_apart_are_found_before_a_checkpoint_has_them(
    layout: Layout,
    rank: int,
    name: str,
    sentence: str,
    dataset: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Found at the next comparison, here after the third iteration; the tensor and the ranks are
    named."""
    monkeypatch.setattr("mlm_repro.engine.guard.guards.INTERVAL", 3)
    config = small_config(
        dataset, iterations=6, warmup_iterations=3, global_batch_size=12, microbatch_size=2
    )
    config = config.model_copy(
        update={"parallel": config.parallel.model_copy(update={"tp": layout.tp})}
    )
    told = run_threads(drift, layout.world_size, layout, rank, name, config, tmp_path)
    assert told == [told[0]] * layout.world_size
    assert told[0].startswith(f"Diverged: {name} is ")
    assert sentence in told[0]
    (run,) = tmp_path.glob("small-*")
    assert list(run.glob("checkpoints/iter_*")) == []
    iterations = [
        json.loads(line)["iteration"] for line in (run / "metrics.jsonl").read_text().splitlines()
    ]
    assert max(iterations) == 3


def test_the_numbers_of_a_tensor_are_those_of_its_parts() -> None:
    assert measure(torch.tensor([3.0, -4.0, torch.nan]))[:4] == (25.0, -4.0, 3.0, 1)
    tensor = torch.randn(8, 6)
    parts = merge(measure(part) for part in tensor.chunk(4))
    assert parts[:4] == pytest.approx(measure(tensor)[:4], rel=1e-12)


def test_a_file_that_does_not_hold_what_was_in_memory_is_noticed(tmp_path: Path) -> None:
    """Sporadic garbage after a save, as in NVIDIA/Megatron-LM#1570: tiny numbers where the output
    layer was."""
    weights = {"output_layer.weight": torch.randn(8, 4), "bias": torch.zeros(4)}
    numbers = {name: measure(tensor) for name, tensor in weights.items()}
    save_file(weights | {"output_layer.weight": torch.full((8, 4), 1e-42)}, tmp_path / "file")
    with pytest.raises(
        IntegrityFailure,
        match=r"tensor 'output_layer\.weight', read back, is not what was in memory",
    ):
        check_written(tmp_path / "file", numbers, {})
    save_file(weights, tmp_path / "file")
    check_written(tmp_path / "file", numbers, {})


@pytest.mark.parametrize("split", ["train", "valid"])
def test_a_token_beyond_the_vocabulary_ends_training_at_any_layout(
    split: str, tmp_path: Path
) -> None:
    dataset = write_dataset(tmp_path / "data")
    tokens = np.memmap(dataset / f"{split}_text_document.bin", np.uint16, "r+")
    tokens[1::7] = 383  # a row of the padded embedding
    tokens.flush()
    (dataset / "COMPLETE").unlink()
    seal(dataset)
    with pytest.raises(
        IntegrityFailure, match="token id 383, outside of the model's vocabulary, which ends at 289"
    ):
        train(small_config(dataset), tmp_path / "serial")
    config = write_toml(tmp_path / "tp2.toml", dataset)
    code, _, err = mlm_train(
        config, "--set", "parallel.tp=2", "--ranks", 2, "--runs", tmp_path / "divided"
    )
    assert code == 6
    assert "have the token id 383" in err
    assert not list(tmp_path.glob("*/*/COMPLETE"))
