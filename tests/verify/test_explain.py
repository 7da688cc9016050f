"""Faults that are planted in a training are named; trainings that differ by rounding alone are said
to."""

import shutil
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from mlm_repro.engine import inputs, trainer
from mlm_repro.engine.guard.guards import RecentIterations
from mlm_repro.engine.inputs import TrainingInputs
from mlm_repro.engine.launch.threads import run_threads
from mlm_repro.engine.model import gpt2
from mlm_repro.engine.optim.gradients import GradientReducer
from mlm_repro.engine.parallel.layers import VocabParallelEmbedding
from mlm_repro.engine.parallel.mesh import serial_mesh
from mlm_repro.engine.parallel.sharding import Role
from mlm_repro.engine.rng import Dropout
from mlm_repro.engine.run.files import Step, read_metrics, validations_in
from mlm_repro.engine.run.resolved import resolve, resolve_begun
from mlm_repro.engine.step import TrainingStep
from mlm_repro.lineage.errors import Interrupted
from mlm_repro.lineage.run import RunDirectory
from mlm_repro.verify.engines import with_samples
from mlm_repro.verify.parity import SERIAL, parse_layout
from mlm_repro.verify.serial_replay import SerialReplay
from tests.commands import Command
from tests.engine.conftest import write_dataset
from tests.engine.small_run import small_config, train
from tests.verify.transformers_engine import Transformers

MODEL: dict[str, Any] = {"hidden_size": 16, "num_heads": 2, "seq_length": 16, "dropout": 0.0}
RECIPE: dict[str, Any] = {
    "iterations": 10,
    "warmup_iterations": 2,
    "global_batch_size": 8,
    "microbatch_size": 2,
    "checkpoint_interval": 5,
    "keep_checkpoints": 9,
    "validation_interval": 5,
    "validation_samples": 8,
    "precision": "fp32",
    "learning_rate": 3e-3,
}
FP16 = {"precision": "fp16", "iterations": 5, "initial_loss_scale": 2.0**12}
RAMP = {"rampup_batch_size": (2, 2, 20)}
BERT = {"family": "bert", "seq_length": 32, "dropout": 0.0}
COMMON = 13
"""A row of the word embedding that is looked up often: the full stop."""

Patch = pytest.MonkeyPatch
Plant = Callable[[Patch], None]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dataset(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def whole(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recipe on one rank; not to be changed."""
    return trained(data, tmp_path_factory.mktemp("whole"))


def trained(
    data: Path,
    root: Path,
    model: dict[str, Any] | None = None,
    layout: str = "serial",
    plant: Plant | None = None,
    until: int | None = None,
    **recipe: Any,
) -> Path:
    """The run below `root` at a layout of threads, with a fault in the engine."""
    chosen = parse_layout(layout)
    config = chosen.configure(small_config(data, MODEL | (model or {}), **RECIPE | recipe))
    with Patch.context() as patch, suppress(Interrupted):
        if plant:
            plant(patch)
        if chosen.world_size == 1:
            return train(config, root, until).path
        run_threads(train, chosen.world_size, config, root, until)
    return resolve(config, chosen.world_size).begin(root).path


# -- faults
# --------------------------------------------------------------------------------------------------


def padding_predicted(patch: Patch) -> None:
    kernel = gpt2.kernel

    def of_every_row(name: str, tensor: torch.Tensor) -> Any:
        return lambda x, weight, targets, vocab_size, axis: kernel(name, tensor)(
            x, weight, targets, len(weight), axis
        )

    patch.setattr(gpt2, "kernel", of_every_row)


def padding_index(patch: Patch) -> None:
    def forward(self: VocabParallelEmbedding, tokens: torch.Tensor) -> torch.Tensor:
        return F.embedding(tokens.T, self.weight, padding_idx=COMMON)

    patch.setattr(VocabParallelEmbedding, "forward", forward)


def microbatch_means(patch: Patch) -> None:
    of = TrainingInputs.of
    patch.setattr(
        TrainingInputs,
        "of",
        lambda self, n: [replace(each, mean_targets=None) for each in of(self, n)],
    )


def by_samples(patch: Patch) -> None:
    patch.setattr(
        trainer, "clock", lambda train, updates, samples: samples / train.global_batch_size
    )


def by_samples_ahead(patch: Patch) -> None:
    def clock(train: Any, updates: int, samples: int) -> float:
        sizes = trainer.BatchSchedule(train)
        return (samples + sizes.batch_size(updates)) / train.global_batch_size

    patch.setattr(trainer, "clock", clock)


def decayed_biases(patch: Patch) -> None:
    patch.setattr(Role, "is_decayed", property(lambda self: True))


def clipped_while_scaled(patch: Patch) -> None:
    update = TrainingStep.update

    def clip_and_update(self: TrainingStep, gradient: Any, rate: float, skip: bool = False) -> bool:
        norm = gradient.norm * self.loss_scale
        for group in self.optimizer.groups:
            if norm > self.optimizer.train.clip_gradient:
                group.main_gradient.mul_(self.loss_scale)
                group.main_gradient.mul_(self.optimizer.train.clip_gradient / norm)
                group.main_gradient.div_(self.loss_scale)
        return update(self, replace(gradient, norm=min(gradient.norm, 0.5)), rate, skip)

    patch.setattr(TrainingStep, "update", clip_and_update)


def clipped_and_reported_scaled(patch: Patch) -> None:
    norm = TrainingStep.gradient
    patch.setattr(
        TrainingStep,
        "gradient",
        lambda self, *args, **named: replace(
            found := norm(self, *args, **named), norm=found.norm * self.loss_scale
        ),
    )


def masks_of_the_first_iteration(patch: Patch) -> None:
    patch.setattr(
        inputs, "Dropout", lambda share, seed, iteration, places: Dropout(share, seed, 0, places)
    )


def masks_of_the_first_microbatch(patch: Patch) -> None:
    def again(share: float, seed: int, iteration: int, places: tuple[int, ...]) -> Dropout:
        return Dropout(share, seed, iteration, tuple(range(len(places))))

    patch.setattr(inputs, "Dropout", again)


def summed_over_ranks(patch: Patch) -> None:
    finish = GradientReducer.finish
    patch.setattr(
        GradientReducer, "finish", lambda self, divisor: finish(self, divisor / self.mesh.dp.size)
    )


def not_divided_by_microbatches(patch: Patch) -> None:
    finish = GradientReducer.finish
    patch.setattr(GradientReducer, "finish", lambda self, divisor: finish(self, 1.0))


PLANTS: dict[str, tuple[Plant, str, dict[str, Any], dict[str, Any], str]] = {
    "padding predicted": (
        padding_predicted,
        "padding rows take part in the softmax",
        {},
        {},
        "serial",
    ),
    "padding index": (
        padding_index,
        f"row {COMMON} of the word embedding has no gradient where",
        {},
        {},
        "serial",
    ),
    "microbatch means": (
        microbatch_means,
        "mean of the microbatches' means, not of the batch",
        BERT,
        {"normalise": "batch"},
        "serial",
    ),
    "by samples": (by_samples, "the schedule counts samples, not updates", {}, RAMP, "serial"),
    "by samples, ahead": (
        by_samples_ahead,
        "the schedule counts samples, not updates",
        {},
        RAMP,
        "serial",
    ),
    "decayed biases": (decayed_biases, "biases and layer norms are decayed", {}, {}, "serial"),
    "clipped while scaled": (
        clipped_while_scaled,
        "clipped before the loss scale is taken out",
        {},
        FP16,
        "serial",
    ),
    "reported scaled": (
        clipped_and_reported_scaled,
        "clipped before the loss scale is taken out",
        {},
        FP16,
        "serial",
    ),
    "masks of the first iteration": (
        masks_of_the_first_iteration,
        "masks are reused in every iteration",
        {"dropout": 0.1},
        {},
        "serial",
    ),
    "masks of the first microbatch": (
        masks_of_the_first_microbatch,
        "masks are reused in every microbatch",
        {"dropout": 0.1},
        {},
        "serial",
    ),
    "summed over ranks": (
        summed_over_ranks,
        "multiplied once too often by the 2 data-parallel ranks",
        {},
        {},
        "dp2",
    ),
    "not divided": (not_divided_by_microbatches, "multiplied once too often by", {}, {}, "serial"),
}


@pytest.mark.parametrize("name", PLANTS)
def test_a_planted_fault_is_named(
    name: str, data: Path, whole: Path, tmp_path: Path, verify: Command
) -> None:
    plant, kind, model, recipe, layout = PLANTS[name]
    honest = whole if not (model or recipe) else trained(data, tmp_path / "honest", model, **recipe)
    faulty = trained(data, tmp_path / "faulty", model, layout, plant, **recipe)
    done = verify("explain", honest, faulty)
    assert done.code == 3, done.out
    assert f"no fault: {honest} is what its settings compute" in done.out
    (fault,) = (line for line in done.out.splitlines() if line.startswith("fault: "))
    assert str(faulty) in fault
    assert kind in fault.partition("; kind: ")[2]
    assert " or " not in fault.partition("; kind: ")[2], "one kind is named"


def test_a_fault_that_is_not_known_is_placed_and_not_named(
    data: Path, whole: Path, tmp_path: Path, verify: Command
) -> None:
    def doubled(patch: Patch) -> None:
        """The update of iteration 7 has twice its rate, which the metrics do not say."""
        update = TrainingStep.update

        def faulty_update(
            self: TrainingStep, gradient: Any, rate: float, skip: bool = False
        ) -> bool:
            return update(self, gradient, rate * (2 if self.optimizer.steps == 6 else 1), skip)

        patch.setattr(TrainingStep, "update", faulty_update)

    faulty = trained(data, tmp_path, plant=doubled)
    done = verify("explain", whole, faulty)
    assert done.code == 3
    assert "first other bits: loss of iteration 8" in done.out
    assert (
        "replay: from the checkpoint at 5, which has the same bits in both, on one rank" in done.out
    )
    (fault,) = (line for line in done.out.splitlines() if line.startswith("fault: "))
    assert f"{faulty}: loss of iteration 8 is " in fault
    assert "of the checkpoint, exp_avg of embedding.word_embeddings.weight of iteration 10" in fault
    assert fault.endswith("no known fault gives these numbers")


def test_a_fault_after_a_common_checkpoint(
    data: Path, whole: Path, tmp_path: Path, verify: Command
) -> None:
    trained(data, tmp_path, until=5)
    done = verify("explain", trained(data, tmp_path, plant=decayed_biases), whole)
    assert done.code == 3
    assert "replay: from the checkpoint at 5" in done.out
    assert "kind: biases and layer norms are decayed" in done.out


# -- no fault
# --------------------------------------------------------------------------------------------------

HEALTHY: dict[str, tuple[str, dict[str, Any], str]] = {
    "microbatches": ("serial", {"microbatch_size": 4}, "rounding: "),
    "tensor parallel": ("tp2-sp", {}, "rounding: "),
    "pipeline": ("pp2-gpipe", {}, "rounding: "),
    "data parallel": ("dp2-zero1", {}, "rounding: "),
    "recomputation": ("recompute", {}, "the same bits in all that both runs have"),
    "bf16": ("serial", {"precision": "bf16"}, "rounding: "),
    "fp16": ("serial", FP16 | {"iterations": 10}, "rounding: "),
    "fp64": ("serial", {"precision": "fp64"}, "rounding: "),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_pair_is_silent(
    name: str, data: Path, whole: Path, tmp_path: Path, verify: Command
) -> None:
    layout, recipe, verdict = HEALTHY[name]
    done = verify("explain", whole, trained(data, tmp_path, layout=layout, **recipe))
    assert done.code == 0, done.out
    assert done.out.splitlines()[-1].startswith(verdict), done.out
    assert not [line for line in done.out.splitlines() if line.startswith("fault")]


SHORT: dict[str, Any] = {"iterations": 4, "checkpoint_interval": 2, "validation_interval": 4}
LAYOUTS = "tp2", "tp2-sp", "pp2-gpipe", "dp2-zero1", "tp2-dp2", "selective"
OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "another seed": ({}, {"seed": 11}),
    "dropout": ({"dropout": 0.1}, {"seed": 12, "clip_gradient": 0.1}),
    "bf16": ({}, {"seed": 13, "precision": "bf16", "decay": "constant"}),
    "BERT": (BERT, {"seed": 14, "normalise": "batch"}),
    "growing batch": ({}, {"seed": 15, "rampup_batch_size": (4, 4, 8), "clock": "samples"}),
}


@pytest.fixture(scope="module")
def alone(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The short training of an option on one rank, made once; not to be changed."""

    @cache
    def run(option: str) -> Path:
        model, recipe = OPTIONS[option]
        return trained(data, tmp_path_factory.mktemp("alone"), model, **SHORT | recipe)

    return run


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("option", OPTIONS)
def test_thirty_more_healthy_pairs_are_silent(
    option: str,
    layout: str,
    data: Path,
    alone: Callable[[str], Path],
    tmp_path: Path,
    verify: Command,
) -> None:
    model, recipe = OPTIONS[option]
    done = verify(
        "explain", alone(option), trained(data, tmp_path, model, layout, **SHORT | recipe)
    )
    assert done.code == 0, done.out
    last = done.out.splitlines()[-1]
    assert last.startswith(("rounding: ", "the same bits in all that both runs have")), done.out
    assert not [line for line in done.out.splitlines() if line.startswith("fault")]


@pytest.mark.parametrize(
    ("scale", "verdict"),
    [(2.0**11, "rounding: "), (2.0**18, "overflow: iteration 1 made no update in one run")],
)
def test_loss_scales_that_differ(
    scale: float, verdict: str, data: Path, tmp_path: Path, verify: Command
) -> None:
    pair = [
        trained(data, tmp_path, **(FP16 | {"initial_loss_scale": each}))
        for each in (2.0**12, scale)
    ]
    done = verify("explain", *pair)
    assert (done.code, done.out.count("no fault: ")) == (0, 2), done.out
    assert done.out.splitlines()[-1].startswith(verdict), done.out


def test_a_resumed_run_beside_a_whole_one(
    data: Path, whole: Path, tmp_path: Path, verify: Command
) -> None:
    trained(data, tmp_path, until=7)
    done = verify("explain", whole, trained(data, tmp_path))
    assert (done.code, done.out.splitlines()[-1]) == (0, "the same bits in all that both runs have")


def test_settings_that_compute_something_else(
    data: Path, whole: Path, tmp_path: Path, verify: Command
) -> None:
    done = verify("explain", whole, trained(data, tmp_path, weight_decay=0.1))
    assert done.code == 0, done.out
    assert "settings: train.weight_decay: 0.01 → 0.1" in done.out
    assert done.out.splitlines()[-1].startswith("settings: float64 too gives loss ")
    assert done.out.count("is what its settings compute") == 2


# -- another program
# --------------------------------------------------------------------------------------------------


def trained_by_transformers(ours: Path, folder: Path, pads: bool) -> Path:
    """The training of transformers' GPT-2 in a plain loop with torch's AdamW, from our weights on
    our samples, in the form of a run: the manifest of ours, and a line of metrics for each
    iteration. With `pads` the softmax is over the padding rows of the vocabulary too."""
    config = resolve_begun(RunDirectory.open(ours, "training")).config
    built = gpt2.GPT2(config.model, serial_mesh())
    built.initialize(config.train.seed)
    weights = {name: parameter.detach() for name, parameter in built.named_parameters()}
    with with_samples(config, config.train.iterations) as work:
        rows = config.model.model_copy(update={"vocab_size": config.model.padded_vocab_size})
        config_with_rows = config.model_copy(update={"model": rows})
        theirs = Transformers(replace(work, config=config_with_rows), SERIAL)
        if not pads:
            theirs.module.get_submodule("lm_head").register_forward_hook(
                lambda module, inputs, output: output[..., : config.model.vocab_size]
            )
        theirs.load(weights)
        steps = theirs.run(None, 0)
    other = folder / ours.name
    other.mkdir(parents=True)
    shutil.copy(ours / "manifest.json", other)
    lines = [
        Step(
            kind="train",
            iteration=number,
            loss=step.loss,
            learning_rate=step.rate,
            gradient_norm=step.norm,
            seconds=0,
            tokens_per_second=0,
            model_tflops=0,
        ).to_line()
        for number, step in enumerate(steps, 1)
    ]
    (other / "metrics.jsonl").write_text("".join(lines))
    return other


@pytest.mark.parametrize("pads", [False, True])
def test_a_training_of_another_program_is_explained_as_a_run(
    pads: bool, data: Path, tmp_path: Path, verify: Command
) -> None:
    pytest.importorskip("transformers")
    # Without clipping, for torch clips by the norm plus 1e-6.
    ours = trained(data, tmp_path / "ours", clip_gradient=0.0)
    other = trained_by_transformers(ours, tmp_path / "theirs", pads)
    done = verify("explain", ours, other)
    assert f"no fault: {ours} is what its settings compute" in done.out, done.out
    if not pads:
        assert done.code == 0, done.out
        assert done.out.splitlines()[-1].startswith("rounding: "), done.out
        return
    (fault,) = (line for line in done.out.splitlines() if line.startswith("fault: "))
    assert done.code == 3
    assert str(other) in fault
    assert fault.endswith("kind: the embedding's padding rows take part in the softmax"), fault


SHARING: dict[str, tuple[dict[str, Any], dict[str, Any], str, dict[str, Any], int]] = {
    "microbatches": ({}, {}, "serial", {"microbatch_size": 4}, 1),
    "layout in bf16": ({}, {"precision": "bf16"}, "tp2", {}, 1),
    "microbatches in bf16": ({}, {"precision": "bf16"}, "serial", {"microbatch_size": 4}, 2),
    "microbatches of a BERT": (BERT, {}, "serial", {"microbatch_size": 4}, 2),
    "rate": ({}, {}, "serial", {"learning_rate": 1e-3}, 2),
}


@pytest.mark.parametrize("name", SHARING)
def test_replays_that_round_alike_are_made_once(
    name: str, data: Path, tmp_path: Path, verify: Command, monkeypatch: Patch
) -> None:
    """Each run is replayed in float64, with its validations, and each, or both together, in their
    own format without them: the work of the two trainings and that again, or half of it."""
    model, recipe, layout, change, own = SHARING[name]
    recipe = SHORT | recipe
    pair = (
        trained(data, tmp_path / "first", model, **recipe),
        trained(data, tmp_path / "second", model, layout, **recipe | change),
    )
    work = Counter[tuple[str, str]]()

    def count(what: str) -> None:
        original = getattr(SerialReplay, what)

        def counted(self: SerialReplay, *arguments: Any) -> Any:
            work[what, self.config.train.precision] += 1
            return original(self, *arguments)

        monkeypatch.setattr(SerialReplay, what, counted)

    count("iterate")
    count("_validate")
    verify("explain", *pair, ends=0)
    assert work == {
        ("iterate", "fp64"): 2 * SHORT["iterations"],
        ("iterate", recipe.get("precision", "fp32")): own * SHORT["iterations"],
        ("_validate", "fp64"): sum(len([*validations_in(read_metrics(run))]) for run in pair),
    }


def test_larger_microbatches_in_bf16_are_no_fault(
    data: Path, tmp_path: Path, verify: Command
) -> None:
    """A gradient that is summed within a microbatch is rounded otherwise than a sum of many."""
    size = {"num_layers": 2, "hidden_size": 32, "seq_length": 32}
    recipe: dict[str, Any] = {"precision": "bf16", "iterations": 12, "global_batch_size": 32}
    pair = [
        trained(data, tmp_path / f"of {microbatch}", size, microbatch_size=microbatch, **recipe)
        for microbatch in (1, 32)
    ]
    assert verify("explain", *pair, ends=0).out.splitlines()[-1].startswith("rounding: ")


def test_a_wrong_norm_after_an_overflow_is_a_fault(
    data: Path, tmp_path: Path, verify: Command
) -> None:
    def of_a_later_one(patch: Patch) -> None:
        gradient = TrainingStep.gradient

        def faulty_gradient(self: TrainingStep, *args: Any) -> Any:
            computed = gradient(self, *args)
            return replace(computed, norm=computed.norm * (1.5 if self.optimizer.steps > 2 else 1))

        patch.setattr(TrainingStep, "gradient", faulty_gradient)

    # Without clipping, which would carry the norm into the weights.
    recipe: dict[str, Any] = {"iterations": 8, "checkpoint_interval": 8, "clip_gradient": 0.0}
    recipe = FP16 | recipe | {"initial_loss_scale": 2.0**18}
    honest = trained(data, tmp_path / "honest", **recipe)
    faulty = trained(data, tmp_path / "faulty", plant=of_a_later_one, **recipe)
    assert '"skipped":true' in (faulty / "metrics.jsonl").read_text().replace(" ", "")
    done = verify("explain", honest, faulty, ends=3)
    assert "replay: from the beginning" in done.out, "with the overflow"
    assert f"fault: {faulty}: gradient norm of iteration " in done.out
    assert f"no fault: {honest} is what its settings compute" in done.out


def test_a_spike_that_one_run_skips_is_no_overflow(
    data: Path, tmp_path: Path, verify: Command
) -> None:
    def third(patch: Patch) -> None:
        add = RecentIterations.add

        def leap(self: RecentIterations, loss: float, gradient_norm: float) -> dict[str, float]:
            add(self, loss, gradient_norm)
            return {"loss": loss / 2} if len(self.seen) == 3 else {}

        patch.setattr(RecentIterations, "add", leap)

    pair = [
        trained(data, tmp_path, plant=third, skip_spikes=skips, **SHORT) for skips in (False, True)
    ]
    done = verify("explain", *pair, ends=0)
    assert done.out.splitlines()[-1].startswith("spike: iteration 3 made no update in one run")


def test_what_is_no_pair_of_trainings(
    data: Path, whole: Path, tmp_path: Path, verify: Command
) -> None:
    assert "are the same run: name two different runs" in verify("explain", whole, whole).error
    assert "is not a run directory" in verify("explain", whole, data).error
    trained(data, tmp_path, until=1)
    (run,) = tmp_path.glob("small-*")
    (run / "metrics.jsonl").write_text("")
    done = verify("explain", whole, run)
    assert (
        done.code,
        "its metrics.jsonl does not have a line for each iteration from 1 on" in done.error,
    ) == (
        2,
        True,
    )
