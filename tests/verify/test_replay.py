"""Segments of a run have the same bits when they are trained again at other layouts; what was forged is named."""

import json
import math
import shutil
from collections.abc import Callable
from contextlib import suppress
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import engine.trainer
from engine.config import RunConfig
from engine.inputs import TrainingInputs
from engine.launch.local import launch
from engine.launch.rendezvous import leave_ranks
from engine.run.directory import read_metrics
from engine.run.resolved import resolve
from lineage.digest import seal, sealed_files
from lineage.errors import Interrupted
from lineage.receipt import read_receipt
from lineage.run import RunDirectory
from tests.commands import Command
from tests.engine.conftest import write_dataset
from tests.engine.small_run import small_config, train
from verify.parity import parse_layout
from verify.replay import NOT_COMPUTED, chances, draw, replay

RECIPE: dict[str, Any] = {
    "iterations": 6, "warmup_iterations": 1, "global_batch_size": 4, "microbatch_size": 2, "checkpoint_interval": 2,
    "keep_checkpoints": 9, "validation_interval": 3, "validation_samples": 2, "invariant": 4,
}  # fmt: skip
LAYOUTS = (
    "serial", "mb1", "recompute-mb4", "tp2", "tp2-sp", "tp4-sp-selective", "pp2", "pp2-gpipe", "dp2-zero1", "tp2-dp2",
)  # fmt: skip
"""Ten."""


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    return small_config(write_dataset(tmp_path_factory.mktemp("dataset")), {"dropout": 0.1}, **RECIPE)


@pytest.fixture(scope="module")
def honest(config: RunConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on tp 2 × pp 2; not to be changed."""
    return trained(config, "tp2-pp2", tmp_path_factory.mktemp("honest"))


@pytest.fixture
def run(honest: Path, tmp_path: Path) -> Path:
    """A copy to change."""
    return shutil.copytree(honest, tmp_path / honest.name)


def trained(config: RunConfig, layout: str, root: Path, until: int | None = None) -> Path:
    """The run below `root`, on a layout to its end or until an iteration."""
    chosen = parse_layout(layout)
    config = chosen.configure(config)

    def work() -> None:
        with suppress(Interrupted):
            train(config, root, until)
        leave_ranks()

    assert launch(work, chosen.world_size) == 0
    return resolve(config).begin(root).path


def numbers(run: Path) -> list[dict[str, Any]]:
    """The metrics without what is measured."""
    return [{name: v for name, v in line.items() if name not in NOT_COMPUTED} for line in read_metrics(run)]


def edit_metrics(run: Path, iteration: int, edit: Callable[[dict[str, Any]], object]) -> None:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    edit(next(line for line in lines if (line["kind"], line["iteration"]) == ("train", iteration)))
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    seal(run)


# -- what is honest ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_honest_segment_has_the_same_bits_at_another_layout(honest: Path, layout: str) -> None:
    before = {path: path.stat().st_mtime_ns for path in honest.rglob("*")}
    audit = replay(honest, 1, layout)
    assert (audit.differs, audit.segments_in_all, len(audit.segments), audit.layout) == ([], 3, 1, layout)
    assert {path: path.stat().st_mtime_ns for path in honest.rglob("*")} == before


def test_a_run_that_changes_its_layout_three_times_ends_as_one_that_does_not(
    config: RunConfig, honest: Path, tmp_path: Path
) -> None:
    for layout, until in (("dp2-zero1", 1), ("tp2-sp", 3), ("pp2", 5)):
        trained(config, layout, tmp_path, until)
    run = trained(config, "tp2-pp2", tmp_path)
    assert numbers(run) == numbers(honest)
    files = [sealed_files(path / "checkpoints" / "iter_0000006") for path in (run, honest)]
    weights_and_moments = {name for name in files[1] if name.endswith(".safetensors")}
    assert len(weights_and_moments) == 8
    assert {name: files[0][name] for name in weights_and_moments} == {n: files[1][n] for n in weights_and_moments}
    assert [path.name for path in sorted((run / "checkpoints").iterdir())] == [
        f"iter_{iteration:07d}" for iteration in (1, 2, 3, 4, 5, 6)
    ]


# -- what is forged ------------------------------------------------------------------------------------------------


def test_a_bit_of_a_moment(run: Path, keys: tuple[Path, Path], verify: Command, tmp_path: Path) -> None:
    """The receipt says it too."""
    checkpoint = run / "checkpoints" / "iter_0000004"
    file = checkpoint / "optimizer-tp01-pp001.safetensors"
    tensors = load_file(file)
    name = "exp_avg_sq.layers.1.mlp.dense_h_to_4h.weight"
    tensors[name].view(torch.int32).flatten()[7] ^= 1
    save_file(tensors, file)
    seal(checkpoint)
    seal(run)
    receipt = tmp_path / "receipt.json"
    error = refused(verify("replay", run, "--receipt", receipt, "--key", keys[0]), 3)
    said = refused(verify("receipt", receipt, "--key", keys[1], run), 3)
    audit = read_receipt(receipt).audit
    assert audit.segments[0].differs == []
    (found,) = audit.segments[1].differs
    assert found in error
    assert found in said
    assert (audit.run, audit.layout, audit.segments_in_all) == (run.name, "serial", 3)
    assert audit.numerics == RunDirectory(run).manifest["environment"]["numerics"]
    assert draw(audit.seed, [(0, 2), (2, 4), (4, 6)], 3) == [(each.start, each.end) for each in audit.segments]
    assert f"at iteration 4 first differs in {name}, in 1 of {tensors[name].numel() * 2:,} numbers (1 of" in found


def test_a_sample_that_was_skipped(config: RunConfig, tmp_path: Path) -> None:
    def forge(inputs: TrainingInputs, iteration: int) -> Any:
        microbatches = of(inputs, iteration)
        if iteration == 3:
            first, second = microbatches[:2]
            second.tokens[0], second.targets[0] = first.tokens[0], first.targets[0]
        return microbatches

    of = TrainingInputs.of
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainingInputs, "of", forge)
        run = train(config, tmp_path).path
    metrics, tensors = replay(run, 3, "serial").segments[1].differs
    assert "first differ in loss of train at iteration 4" in metrics
    assert "at iteration 4 first differs in embedding.word_embeddings.weight" in tensors


@pytest.mark.parametrize("forged", [3, 4])
def test_an_iteration_at_another_rate(config: RunConfig, forged: int, tmp_path: Path) -> None:
    """It says the rate of the recipe. The validation after it shows it or, at a segment's end, the weights do."""
    rate, true = engine.trainer.learning_rate, []

    def forge(recipe: Any, step: int) -> float:
        true.append(rate(recipe, step))
        return true[-1] * (1.01 if step == forged else 1)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.trainer, "learning_rate", forge)
        run = train(config, tmp_path).path
    edit_metrics(run, forged, lambda line: line.update(learning_rate=true[forged - 1]))
    first, second, third = (segment.differs for segment in replay(run, 3, "serial").segments)
    assert first == []
    assert "at iteration 4 first differs in embedding.word_embeddings.weight" in second[-1]
    assert ["in loss of validation at iteration 3" in found for found in second] == [True, False][forged - 3 :]
    assert third == []  # it begins at what was forged


def test_a_line_of_the_metrics(run: Path) -> None:
    edit_metrics(run, 5, lambda line: line.update(loss=math.nextafter(line["loss"], 0)))
    segments = replay(run, 3, "dp2").segments
    assert [len(segment.differs) for segment in segments] == [0, 0, 1]
    assert "the metrics first differ in loss of train at iteration 5" in segments[2].differs[0]


def test_a_line_that_is_missing(run: Path) -> None:
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    kept = [line for line in lines if '"validation"' not in line or '"iteration": 3' not in line]
    assert len(kept) == len(lines) - 1
    (run / "metrics.jsonl").write_text("".join(kept))
    seal(run)
    assert "first differ in kind of validation at iteration 3" in replay(run, 3, "serial").segments[1].differs[0]


# -- what is drawn -------------------------------------------------------------------------------------------------


def test_the_chance_that_a_forgery_escapes() -> None:
    """Counted over every draw of 3 out of 12 segments."""
    drawn = list(combinations(range(12), 3))
    expected = [sum(min(each) >= forged for each in drawn) / len(drawn) for forged in (1, 2, 6)]
    assert [chance for _, chance in chances(12, 3)] == pytest.approx(expected)


def test_a_seed_draws_some_segments_and_another_others() -> None:
    segments = [(number, number + 1) for number in range(20)]
    assert draw("a", segments, 5) == draw("a", segments, 5) == sorted(draw("a", segments, 5))
    assert draw("a", segments, 5) != draw("b", segments, 5)
    counted = [draw(str(seed), segments, 5) for seed in range(200)]
    assert all(20 < sum(segment in each for each in counted) < 90 for segment in segments)  # 50 are expected


# -- what is refused -----------------------------------------------------------------------------------------------


def test_what_cannot_be_replayed(honest: Path, run: Path, verify: Command) -> None:
    assert "tp = 8" in refused(verify("replay", honest, "--layout", "tp8"), 2)
    assert "has 3 segments" in refused(verify("replay", honest, "--segments", "4"), 2)
    assert "is not a run directory" in refused(verify("replay", honest.parent), 2)
    for path in sorted((run / "checkpoints").iterdir()):
        probe = json.loads((path / "probe.json").read_text())
        probe["computed_on"]["torch"] = "2.0"
        (path / "probe.json").write_text(json.dumps(probe))
        seal(path)
    seal(run)
    assert "computed with the torch '2.0' and here" in refused(verify("replay", run), 4)
    shutil.rmtree(run / "checkpoints")
    seal(run)
    assert "has 0 segments" in refused(verify("replay", run), 2)
    (run / "metrics.jsonl").write_text("")
    assert "was changed" in refused(verify("replay", run), 6)


def test_an_ordinary_run_is_refused(config: RunConfig, tmp_path: Path, verify: Command) -> None:
    ordinary = config.model_copy(update={"train": config.train.model_copy(update={"invariant": 0, "iterations": 2})})
    error = refused(verify("replay", train(ordinary, tmp_path).path), 2)
    assert "train.invariant = 0" in error
    assert "`mlm-verify parallel`" in error


def refused(outcome: Any, code: int) -> str:
    assert outcome.code == code, outcome.err
    assert isinstance(outcome.error, str)
    return outcome.error
