"""ZeRO stage 3 trains as data parallelism does, holds a share of everything, and its checkpoints
are anybody's."""

from pathlib import Path
from typing import Any

import pytest

from mlm_repro.engine.config import ParallelConfig, Precision, RunConfig
from mlm_repro.engine.costs import written_bytes
from mlm_repro.engine.inference import load_for_inference
from mlm_repro.engine.launch.mesh import build_mesh
from mlm_repro.engine.optim.adam import build_optimizer
from mlm_repro.engine.optim.precision import DTYPES
from mlm_repro.engine.parallel.layout import Layout, layout_of
from mlm_repro.engine.pipeline.executor import partition
from mlm_repro.engine.run.files import read_metrics
from mlm_repro.engine.run.resolved import resolve_begun
from mlm_repro.lineage.errors import BadInput
from mlm_repro.lineage.run import RunDirectory
from tests.engine.small_run import assert_same_training, in_two_sessions, small_config, train
from tests.ranks import run_ranks

SHORT = {
    "iterations": 6,
    "microbatch_size": 2,
    "warmup_iterations": 1,
    "checkpoint_interval": 3,
    "validation_interval": 100,
    "seed": 3,
}


def config_of(dataset: Path, zero3: bool, **changed: Any) -> RunConfig:
    parallel = ParallelConfig(shard_parameters=zero3, recompute=changed.pop("recompute", "none"))
    model = {"dropout": 0.1, "seq_length": 16}
    return small_config(dataset, model, **(SHORT | changed)).model_copy(
        update={"parallel": parallel}
    )


def train_below(config: RunConfig, root: Path) -> Path:
    return train(config, root).path


def run_on_two(config: RunConfig, root: Path) -> Path:
    return run_ranks(train_below, 2, config, root)[0]


def losses(run: Path, kind: str) -> list[float]:
    return [line["loss"] for line in read_metrics(run) if line["kind"] == kind]


@pytest.mark.parametrize(
    ("precision", "optimizer", "recompute"),
    [("fp64", "adam", "none"), ("fp64", "lamb", "full"), ("bf16", "adam", "none")],
)
def test_it_trains_as_data_parallelism_does(
    precision: Precision, optimizer: str, recompute: str, dataset: Path, tmp_path: Path
) -> None:
    """Also in gradient norms, of which some are clipped, and with several microbatches to a
    rank."""
    changed = {"precision": precision, "optimizer": optimizer, "clip_gradient": 0.5}
    expected = run_on_two(config_of(dataset, False, **changed), tmp_path / "plain")
    found = run_on_two(config_of(dataset, True, recompute=recompute, **changed), tmp_path / "zero3")
    within = 1e-10 if precision == "fp64" else 2e-2
    for name in ("loss", "gradient_norm"):
        ours, theirs = (
            [line[name] for line in read_metrics(run) if name in line] for run in (found, expected)
        )
        assert ours == pytest.approx(theirs, abs=within)
    assert (
        max(line["gradient_norm"] for line in read_metrics(found) if line["kind"] == "train") > 0.5
    )


def test_a_stopped_run_goes_on_bit_for_bit_and_elsewhere(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(dataset, True, precision="bf16")
    whole = run_on_two(config, tmp_path / "whole")
    halves = run_ranks(stop_and_go_on, 2, config, tmp_path / "halves")[0]
    assert_same_training(halves, whole)
    files = sorted(path.name for path in (whole / "checkpoints" / "iter_0000006").glob("model-*"))
    assert files == ["model-tp00-pp000.safetensors", "model-tp01-pp000.safetensors"]
    # By its files a rank writes what a dry run says that it copies.
    folder = whole / "checkpoints" / "iter_0000006"
    sizes = [sum(path.stat().st_size for path in folder.glob(f"*-tp{n:02d}-*")) for n in range(2)]
    model = resolve_begun(RunDirectory.open(whole, "training")).config.model
    planned = written_bytes(model, "bf16", config.parallel, 2)
    assert max(sizes) == pytest.approx(planned, rel=0.25)
    assert sum(p.numel() for p in load_for_inference(whole).model.parameters()) > 0
    elsewhere = config.model_copy(update={"parallel": ParallelConfig(tp=2)})
    for path in (halves / "COMPLETE", halves / "summary.json"):
        path.unlink()
    for path in sorted((halves / "checkpoints" / "iter_0000006").iterdir()):
        if path.is_file():
            path.unlink()
    moved = run_on_two(elsewhere, tmp_path / "halves")
    assert moved == halves
    assert losses(moved, "train") == pytest.approx(losses(whole, "train"), abs=2e-2)


def stop_and_go_on(config: RunConfig, root: Path) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        return in_two_sessions(config, root, 3, patch)


def elements_held(config: RunConfig) -> tuple[int, int]:
    """Of parameters between iterations, and of the optimizer's state."""
    mesh = build_mesh(Layout(dp=2))
    model = partition(config.model, config.parallel, mesh, DTYPES["fp32"], 1)
    optimizer = build_optimizer(model.parameters, config.train, model.storage_mesh)
    model.reducer(optimizer.groups)
    own = [p.to_local() if hasattr(p, "to_local") else p for p in model.chunks[0].parameters()]
    return sum(p.numel() for p in own), sum(
        group.exp_avg.numel() + group.main_gradient.numel() for group in optimizer.groups
    )


def test_each_rank_holds_its_share(dataset: Path) -> None:
    whole, divided = (
        run_ranks(elements_held, 2, config_of(dataset, zero3)) for zero3 in (False, True)
    )
    assert divided == [(count // 2, state // 2) for count, state in whole]


@pytest.mark.parametrize(
    ("changed", "ranks", "sentence"),
    [
        ({"parallel": {"tp": 2}}, 2, "is only for a GPT-2 on data-parallel"),
        (
            {"parallel": {"shard_optimizer": True}},
            2,
            "is only for a GPT-2 on data-parallel",
        ),
        ({"model": {"family": "bert"}}, 2, "is only for a GPT-2 on data-parallel"),
        ({"model": {"seq_length": 18}}, 4, "cannot divide seq_length = 18 over 4 ranks"),
    ],
)
def test_what_it_cannot_divide_is_refused(
    changed: dict[str, Any], ranks: int, sentence: str
) -> None:
    shape = {"num_layers": 2, "hidden_size": 16, "num_heads": 4, "seq_length": 16}
    config = RunConfig(
        name="z",
        model=shape | changed.get("model", {}),
        train={"global_batch_size": 8, "microbatch_size": 1},
        parallel={"shard_parameters": True} | changed.get("parallel", {}),
    )
    with pytest.raises(BadInput, match=sentence):
        layout_of(config, ranks)
