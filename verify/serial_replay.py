"""A recorded run trained again on one rank, in any number format, as its settings say or with one known fault."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from mlm_repro.engine.batch_schedule import BatchSchedule
from mlm_repro.engine.checkpoint.checkpoint import TrainingState, load_checkpoint, start_from
from mlm_repro.engine.checkpoint.shards import read_into
from mlm_repro.engine.compare.recorder import moved, whole_state
from mlm_repro.engine.compare.tensors import computation_order
from mlm_repro.engine.config import SERIAL, Precision, TrainConfig
from mlm_repro.engine.inference import read_whole
from mlm_repro.engine.inputs import TrainingInputs, ValidationSplit
from mlm_repro.engine.kernels.dropout import DropoutMask
from mlm_repro.engine.launch.mesh import local_device
from mlm_repro.engine.optim.precision import LossScaler
from mlm_repro.engine.optim.schedule import clock, learning_rate
from mlm_repro.engine.parallel.mesh import serial_mesh
from mlm_repro.engine.rng import Dropout
from mlm_repro.engine.run.files import Step, Validation, read_metrics, steps_in, validations_in
from mlm_repro.engine.run.resolved import resolve_begun
from mlm_repro.engine.step import build_step
from mlm_repro.lineage.chain import INDEX, complete_checkpoints, iteration_of, resolve_checkpoint
from mlm_repro.lineage.errors import BadInput
from mlm_repro.lineage.files import read_object
from mlm_repro.lineage.run import RunDirectory

Numbers = dict[str, float]
"""The numbers of an iteration, in the order in which they are computed."""
OF_A_STEP = ("batch_size", "samples", "learning_rate", "loss_scale", "loss", "gradient_norm", "skipped")
MASTER = "master"


class Start(NamedTuple):
    """The place where a training begins: iterations done, and a checkpoint; random weights without one."""

    iteration: int = 0
    place: Path | None = None
    digest: str = ""
    is_whole: bool = False
    """True if the optimizer's state is taken over too."""


class RecordedRun:
    """A training as its directory records it, complete or not."""

    def __init__(self, path: Path) -> None:
        """Raises BadInput for a directory that is no training or has no iteration yet."""
        directory = RunDirectory.open(path, "training")
        self.path, self.run = directory.path, resolve_begun(directory)
        self.name, self.config, lines = str(path), self.run.config, read_metrics(self.path)
        self.validations: dict[int, list[Validation]] = {}
        for validation in validations_in(lines):
            self.validations.setdefault(validation.iteration, []).append(validation)
        self.checkpoints = {iteration_of(each): each for each in complete_checkpoints(self.path)}
        self.begin, seam = Start(), self.config.train.continues
        if origin := self.run.origin:
            place = resolve_checkpoint(origin.place)
            self.begin = Start(seam.iteration if seam else 0, place, origin.digest, bool(seam))
            if seam:
                self.checkpoints[seam.iteration] = place
        self.steps = {step.iteration: step for step in steps_in(lines) if step.iteration > self.begin.iteration}
        first = self.begin.iteration + 1
        if list(self.steps) != list(range(first, first + len(self.steps))) or not self.steps:
            raise BadInput(f"{path} does not have a line for each iteration from {first} on")

    @property
    def iterations(self) -> range:
        """Iterations of this run, and 0 for the weights before the first."""
        return range(self.begin.iteration + bool(self.begin.iteration), max(self.steps) + 1)

    def numbers(self, iteration: int) -> Numbers:
        """The recorded numbers of an iteration; a norm that was not finite is left out."""
        step = self.steps.get(iteration)
        numbers = {name: getattr(step, name) for name in OF_A_STEP} if step else {}
        numbers |= {_named(each): each.loss for each in self.validations.get(iteration, ())}
        return {name: float(number) for name, number in numbers.items() if number is not None}

    def tensors(self, iteration: int) -> Iterator[tuple[str, torch.Tensor]]:
        """Whole tensors of the checkpoint of an iteration by name, in the order of computation."""
        place = self.checkpoints[iteration]
        index = read_object(place / INDEX)
        weights = [name for name in index if not name.startswith(("exp_avg", MASTER))]
        files = {f"updated {name}": f"{MASTER}.{name}" if f"{MASTER}.{name}" in index else name for name in weights}
        files |= {f"{kind} of {name}": f"{kind}.{name}" for kind in ("exp_avg", "exp_avg_sq") for name in weights}
        for tensor in computation_order(files):
            yield tensor, read_whole(place, index, files[tensor])


class OneLayer(Dropout):
    """Dropout with one mask for a place in every layer."""

    def mask(self, site: str, first_row: int = 0) -> DropoutMask:
        """The mask of the same place in the first layer."""
        return super().mask(re.sub(r"\d+", "0", site), first_row)


@dataclass(frozen=True)
class Hypothesis:
    """A known fault, by what it changes in a training; nothing without arguments."""

    kind: str = ""
    """The fault in words."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Keys of `train` that have other values than the run's."""
    time: Callable[[int, int], float] | None = None
    """(samples of all updates before, samples of the batch) → the clock of the rate."""
    factor: float = 1.0
    """Factor of the reduced gradient."""
    clips_scaled: bool = False
    """True if the gradient is clipped by its norm while it still has the loss scale."""
    reports_scaled: bool = False
    """True if that norm is reported too."""
    predicts_padding: bool = False
    """True if the embedding's padding rows take part in the softmax, and so have a gradient."""
    decays_all: bool = False
    """True if every parameter is decayed."""
    row: int | None = None
    """Row of the word embedding without a gradient where it is looked up, as by torch's `padding_idx`."""
    again: Callable[[Dropout], Dropout] | None = None
    """Dropout of a microbatch → the dropout that it has in its place."""


NO_FAULT = Hypothesis()


class SerialReplay:
    """Iterations of a recorded run on one rank. Those that the run left out, by overflow or spike, are left out."""

    def __init__(
        self, recorded: RecordedRun, start: Start, precision: Precision = "fp64", is_moved: bool = False,
        fault: Hypothesis = NO_FAULT,
    ) -> None:  # fmt: skip
        """Build the model at its start; `is_moved` moves master weights by up to half a unit in their last place."""
        config, mesh = recorded.config, serial_mesh(local_device())
        self.recorded, self.fault = recorded, fault
        self.train: TrainConfig = config.train.model_copy(update={"precision": precision, **fault.settings})
        self.config = config.model_copy(update={"train": self.train, "parallel": SERIAL})
        rows = config.model.padded_vocab_size if fault.predicts_padding else config.model.vocab_size
        model = config.model.model_copy(update={"vocab_size": rows})
        self.model, self.step = build_step(model, self.train, SERIAL, mesh)
        self.schedule = BatchSchedule(self.train)
        data = recorded.run.data
        self.inputs = TrainingInputs(
            self.config, self.train.iterations, data.token_files("train"), data.tokenizer, mesh
        )
        self.validation = ValidationSplit(self.config, data.token_files("valid"), mesh, data.tokenizer)
        state = self._load(start)
        updated = state.updated_samples
        self.samples = self.schedule.samples_before(start.iteration) if updated is None else updated
        self.scaler = LossScaler(**state.loss_scaler or {"scale": self.train.initial_loss_scale})
        for group in self.step.optimizer.groups:
            if is_moved:
                group.master.copy_(moved(group.master, str(group.weight_decay), 1))
                group.flat.copy_(group.master)
            if fault.decays_all:
                group.weight_decay = self.train.weight_decay
        if fault.row is not None:
            words = self.model.chunks[0].get_submodule("embedding.word_embeddings")
            words.register_forward_hook(self._leave_out_row)

    def _leave_out_row(self, module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> None:
        """Hook: take the gradient of a row's lookups away."""
        if output.requires_grad:
            is_row = inputs[0].T.eq(self.fault.row).unsqueeze(-1)
            output.register_hook(lambda gradient: gradient.masked_fill(is_row, 0.0))

    def _load(self, start: Start) -> TrainingState:
        own = self.model.parameters, self.step.optimizer
        if not start.place or not start.is_whole:
            return start_from(start.place, start.digest, *own, is_whole=False) if start.place else TrainingState()
        state, _ = load_checkpoint(start.place, *own)
        index = read_object(start.place / INDEX)
        if self.train.precision == "fp64":  # a mixed run's weights are those of its optimizer
            masters = [(f"{MASTER}.{p.name}", p, 0, p.local.data) for p in own[0] if f"{MASTER}.{p.name}" in index]
            with torch.no_grad():
                read_into(start.place, index, masters)
        return state

    def iterate(self, iteration: int) -> Numbers:
        """Train a recorded iteration, of 0 nothing; the numbers that it computes, validations among them."""
        step = self.recorded.steps.get(iteration)
        numbers = self._trained(step) if step else {}
        return numbers | {_named(each): self._validated(each) for each in self.recorded.validations.get(iteration, ())}

    def _trained(self, step: Step) -> Numbers:
        number, train, fault = step.iteration - 1, self.train, self.fault
        size = self.schedule.batch_size(number)
        time = fault.time(self.samples, size) if fault.time else clock(train, self.step.optimizer.steps, self.samples)
        rate = learning_rate(train, time)
        if self.step.scaler:
            self.step.scaler.scale = step.loss_scale
        batch = self.inputs.of(number)
        if again := fault.again:
            batch = [replace(each, dropout=again(each.dropout)) if each.dropout else each for each in batch]
        gradient = self.step.gradient(batch)
        self.inputs.streams.commit()
        for group in self.step.optimizer.groups if fault.factor != 1 else ():
            group.main_gradient.mul_(fault.factor)
        gradient = replace(gradient, norm=gradient.norm * fault.factor)
        scaled = replace(gradient, norm=gradient.norm * step.loss_scale)
        numbers: Numbers = {
            "batch_size": size, "samples": self.schedule.samples_before(step.iteration), "learning_rate": rate,
            "loss_scale": self.scaler.scale if self.recorded.config.train.precision == "fp16" else 1.0,
            "loss": gradient.loss, "gradient_norm": (scaled if fault.reports_scaled else gradient).norm,
            "skipped": step.gradient_norm is None or (train.skip_spikes and bool(step.spike)),
        }  # fmt: skip
        self.scaler.update(overflow=step.gradient_norm is None)
        self.step.update(scaled if fault.clips_scaled else gradient, rate, step.skipped)
        self.samples += size * (not step.skipped)
        return numbers

    def _validated(self, recorded: Validation) -> float:
        whole = recorded.kind == "final-validation"
        inputs = list(self.validation.inputs(self.validation.num_samples if whole else self.train.validation_samples))
        return float(self.model.evaluate(inputs).item()) / sum(len(each.tokens) for each in inputs)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Weights and moments, by name as those of a checkpoint."""
        state = {f"{what} of {p.name}": value for p, what, value in whole_state(self.step.optimizer)}
        weights = {f"updated {p.name}": state.pop(f"{MASTER} of {p.name}", p.local.data) for p in self.model.parameters}
        return state | weights


def _named(validation: Validation) -> str:
    return f"{validation.kind} of {validation.samples} sequences"


def hypotheses(recorded: RecordedRun, row: int | None) -> list[Hypothesis]:
    """The known faults that this run can have; `row` is the row of the word embedding that is farthest off."""
    model, train, dp = recorded.config.model, recorded.config.train, recorded.run.layout.dp
    batch, count = train.global_batch_size, train.global_batch_size // (train.microbatch_size * dp)
    other = "samples" if train.clock == "updates" else "updates"
    counts = f"the schedule counts {other}, not {train.clock}"
    known = [Hypothesis(counts, {"clock": other})]
    if other == "samples":  # by an end that is in updates, without the batch's own samples or with them
        known += [Hypothesis(counts, time=lambda before, own: before / batch),
                  Hypothesis(counts, time=lambda before, own: (before + own) / batch)]  # fmt: skip
    if train.weight_decay:
        known.append(Hypothesis("biases and layer norms are decayed", decays_all=True))
    if model.padded_vocab_size > model.vocab_size:
        known.append(Hypothesis("the embedding's padding rows take part in the softmax", predicts_padding=True))
    if row is not None:
        looked_up = f"row {row} of the word embedding has no gradient where it is looked up"
        known.append(Hypothesis(looked_up, row=row))
    if model.family == "bert" and train.normalise == "batch":
        means = "the loss is a mean of the microbatches' means, not of the batch"
        known.append(Hypothesis(means, {"normalise": "microbatch"}))
    elif model.family == "bert":
        known.append(
            Hypothesis("the loss is the mean of the batch, not of microbatches' means", {"normalise": "batch"})
        )
    if train.precision == "fp16" and train.clip_gradient:
        clipped = "the gradient is clipped before the loss scale is taken out"
        known += [Hypothesis(clipped, clips_scaled=True, reports_scaled=reports) for reports in (False, True)]
    if model.dropout:
        first, each = tuple(range(train.microbatch_size)), batch // dp
        reuses: dict[str, Callable[[Dropout], Dropout]] = {
            "iteration in every one": lambda dropout: replace(dropout, iteration=0),
            "microbatch in every one": lambda dropout: replace(dropout, samples=first),
            "layer in every one": lambda dropout: OneLayer(**vars(dropout)),
        }
        if dp > 1:
            reuses["data-parallel rank on every one"] = lambda dropout: replace(
                dropout, samples=tuple(place % each for place in dropout.samples)
            )
        known += [Hypothesis(f"dropout masks are reused: those of the first {of}", again=reuses[of]) for of in reuses]
    sizes = {dp * count: f"all {dp * count} microbatches", count: f"a rank's {count} microbatches",
             dp: f"the {dp} data-parallel ranks"}  # fmt: skip
    for size in [size for size in sizes if size > 1]:
        known += [Hypothesis(f"the gradient is multiplied once too often by {sizes[size]}", factor=size),
                  Hypothesis(f"the gradient is divided once too often by {sizes[size]}", factor=1 / size)]  # fmt: skip
    return known
