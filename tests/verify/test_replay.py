"""Segments of a run have the same bits when they are trained again at their own layout; a forgery
is named."""

import json
import math
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mlm_repro.engine import trainer
from mlm_repro.engine.config import RunConfig
from mlm_repro.engine.inputs import TrainingInputs
from mlm_repro.engine.launch.local import launch
from mlm_repro.engine.launch.mesh import leave_ranks
from mlm_repro.engine.run.resolved import resolve
from mlm_repro.lineage.digest import seal
from mlm_repro.lineage.errors import Interrupted
from mlm_repro.verify.parity import parse_layout
from tests.commands import Command
from tests.engine.conftest import write_dataset
from tests.engine.small_run import small_config, train

RECIPE: dict[str, Any] = {
    "iterations": 6,
    "warmup_iterations": 1,
    "global_batch_size": 4,
    "microbatch_size": 2,
    "checkpoint_interval": 2,
    "keep_checkpoints": 9,
    "validation_interval": 3,
    "validation_samples": 2,
    "precision": "fp32",
}
SEGMENTS = ("iterations 1 to 2", "iterations 3 to 4", "iterations 5 to 6")


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    return small_config(
        write_dataset(tmp_path_factory.mktemp("dataset")), {"dropout": 0.1}, **RECIPE
    )


@pytest.fixture(scope="module")
def honest(config: RunConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on tp 2 × pp 2; not to be changed."""
    return trained(config, "tp2-pp2", tmp_path_factory.mktemp("honest"))


@pytest.fixture
def run(honest: Path, tmp_path: Path) -> Path:
    """A copy to change."""
    return shutil.copytree(honest, tmp_path / honest.name)


def trained(config: RunConfig, layout: str, root: Path, until: int | None = None) -> Path:
    """The run below `root`, trained at a layout to its end or until an iteration."""
    chosen = parse_layout(layout)
    config = chosen.configure(config)

    def work() -> None:
        with suppress(Interrupted):
            train(config, root, until)
        leave_ranks()

    assert launch(work, chosen.world_size) == 0
    return resolve(config).begin(root).path


def replayed(verify: Command, run: Path, code: int, *options: object) -> tuple[list[str], str]:
    """What `mlm-verify replay` prints of each of the three segments, and its error."""
    done = verify("replay", run, "--segments", 3, *options)
    assert done.code == code, done.err
    said = dict(
        line.split(": ", 1) for line in done.out.splitlines() if line.startswith("iterations")
    )
    return [said[segment] for segment in SEGMENTS], done.err


def refused(outcome: Any, code: int) -> str:
    assert outcome.code == code, outcome.err
    assert isinstance(outcome.error, str)
    return outcome.error


def edit_metrics(run: Path, iteration: int, edit: Callable[[dict[str, Any]], object]) -> None:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    edit(next(line for line in lines if (line["kind"], line["iteration"]) == ("train", iteration)))
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    seal(run)


def flip_a_bit(run: Path, iteration: int, file: str, name: str) -> int:
    """Change the lowest bit of the tensor's seventh number in a checkpoint, seal all anew; the
    tensor's size."""
    checkpoint = run / "checkpoints" / f"iter_{iteration:07d}"
    tensors = load_file(checkpoint / file)
    tensors[name].view(torch.int32).flatten()[7] ^= 1
    save_file(tensors, checkpoint / file)
    seal(checkpoint)
    seal(run)
    return tensors[name].numel()


# -- honest runs
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "layout", ["serial", "tp2-sp", "pp2-gpipe", "dp2-zero1", "recompute", "tp2-dp2"]
)
def test_an_ordinary_run_has_the_same_bits(
    config: RunConfig, layout: str, tmp_path: Path, verify: Command
) -> None:
    run = trained(config, layout, tmp_path)
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    assert replayed(verify, run, 0)[0] == ["the same bits"] * 3
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before


def test_at_most_three_segments_are_drawn(honest: Path, verify: Command) -> None:
    done = verify("replay", honest)
    assert (done.code, done.out.splitlines()[-1]) == (0, "ok 3 of 3 segments have the same bits")
    done = verify("replay", honest, "--segments", 1)
    assert "draws 1 of 3 segments; misses a single forged one with probability 0.667" in done.out
    assert done.out.count("the same bits") == 2


def test_each_segment_is_trained_at_its_own_layout(
    config: RunConfig, tmp_path: Path, verify: Command
) -> None:
    trained(config, "dp2-zero1", tmp_path, 2)
    trained(config, "tp2-sp", tmp_path, 4)
    run = trained(config, "pp2-gpipe", tmp_path)
    assert replayed(verify, run, 0)[0] == ["the same bits"] * 3


def test_a_run_of_several_threads(config: RunConfig, tmp_path: Path, verify: Command) -> None:
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        run = train(config, tmp_path).path
        probe = json.loads((run / "checkpoints" / "iter_0000002" / "probe.json").read_text())
        assert probe["computed_on"]["threads"] == 2
        torch.set_num_threads(1)
        assert verify("replay", run, "--segments", 1).code == 0
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)


# -- forged runs
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("optimizer-tp01-pp001.safetensors", "exp_avg_sq.layers.1.mlp.dense_h_to_4h.weight"),
        ("model-tp00-pp000.safetensors", "layers.0.self_attention.query_key_value.weight"),
    ],
)
def test_a_flipped_bit_is_named(file: str, name: str, run: Path, verify: Command) -> None:
    numbers = 2 * flip_a_bit(run, 4, file, name)  # of two tensor-parallel ranks
    segments, error = replayed(verify, run, 3)
    assert segments[0] == "the same bits"
    assert (
        f"at iteration 4 first differs in {name}, in 1 of {numbers:,} numbers (1 of" in segments[1]
    )
    assert segments[1] in error


def test_a_checkpoint_from_which_training_cannot_go_on(run: Path, verify: Command) -> None:
    checkpoint = run / "checkpoints" / "iter_0000004"
    file = checkpoint / "model-tp00-pp000.safetensors"
    tensors = load_file(file)
    tensors["layers.0.self_attention.query_key_value.weight"][0] *= 1000
    save_file(tensors, file)
    seal(checkpoint)
    seal(run)
    segments, _ = replayed(verify, run, 3)
    assert (
        "at iteration 4 first differs in layers.0.self_attention.query_key_value.weight"
        in segments[1]
    )
    assert segments[2].startswith("training cannot go on from the checkpoint at iteration 4: ")


def test_a_sample_that_was_skipped(config: RunConfig, tmp_path: Path, verify: Command) -> None:
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
    segments, _ = replayed(verify, run, 3)
    assert "first differ in loss of train at iteration 4" in segments[1]
    assert "at iteration 4 first differs in embedding.word_embeddings.weight" in segments[1]


@pytest.mark.parametrize("forged", [3, 4])
def test_an_iteration_at_another_rate(
    config: RunConfig, forged: int, tmp_path: Path, verify: Command
) -> None:
    """The forged metrics say the recipe's rate. The next validation or, at a segment's end, the
    weights show it."""
    rate, true = trainer.learning_rate, []

    def forge(recipe: Any, step: int) -> float:
        true.append(rate(recipe, step))
        return true[-1] * (1.01 if step == forged else 1)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "learning_rate", forge)
        run = train(config, tmp_path).path
    edit_metrics(run, forged, lambda line: line.update(learning_rate=true[forged - 1]))
    segments, _ = replayed(verify, run, 3)
    assert segments[0] == "the same bits"
    assert "at iteration 4 first differs in embedding.word_embeddings.weight" in segments[1]
    assert ("in loss of validation at iteration 3" in segments[1]) == (forged == 3)
    assert segments[2] == "the same bits"  # it begins at the forged checkpoint


def test_a_line_of_the_metrics(run: Path, verify: Command) -> None:
    edit_metrics(run, 5, lambda line: line.update(loss=math.nextafter(line["loss"], 0)))
    segments, _ = replayed(verify, run, 3)
    assert segments[:2] == ["the same bits"] * 2
    assert "the metrics first differ in loss of train at iteration 5" in segments[2]


def test_a_line_that_is_missing(run: Path, verify: Command) -> None:
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    others = [line for line in lines if '"validation"' not in line or '"iteration": 3' not in line]
    assert len(others) == len(lines) - 1
    (run / "metrics.jsonl").write_text("".join(others))
    seal(run)
    assert "first differ in kind of validation at iteration 3" in replayed(verify, run, 3)[0][1]


# -- refusals
# --------------------------------------------------------------------------------------------------


def test_runs_that_cannot_be_replayed(honest: Path, run: Path, verify: Command) -> None:
    assert "has 3 segments" in refused(verify("replay", honest, "--segments", "4"), 2)
    assert "is not a run directory" in refused(verify("replay", honest.parent), 2)
    for path in sorted((run / "checkpoints").iterdir()):
        probe = json.loads((path / "probe.json").read_text())
        probe["computed_on"]["torch"] = "2.0"
        (path / "probe.json").write_text(json.dumps(probe))
        seal(path)
    seal(run)
    assert "records the torch '2.0', and here it is" in refused(verify("replay", run), 4)
    shutil.rmtree(run / "checkpoints")
    seal(run)
    assert "has 0 segments" in refused(verify("replay", run), 2)
    (run / "metrics.jsonl").write_text("")
    assert "was changed" in refused(verify("replay", run), 6)
