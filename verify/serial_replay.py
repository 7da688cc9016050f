"""A recorded run trained again on one rank, in any number format, as its settings say or with one known fault."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
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
from mlm_repro.engine.launch.mesh import local_device
from mlm_repro.engine.model.microbatch import PipelineInput
from mlm_repro.engine.optim.precision import LossScaler
from mlm_repro.engine.optim.schedule import clock, learning_rate
from mlm_repro.engine.parallel.mesh import serial_mesh
from mlm_repro.engine.rng import Dropout
from mlm_repro.engine.run.files import Step, Validation, read_metrics, steps_in, validations_in
from mlm_repro.engine.run.resolved import resolve_begun
from mlm_repro.engine.step import Gradient, build_step
from mlm_repro.lineage.chain import INDEX, complete_checkpoints, iteration_of, resolve_checkpoint
from mlm_repro.lineage.errors import BadInput
from mlm_repro.lineage.files import read_object
from mlm_repro.lineage.run import RunDirectory

Numbers = dict[str, float]
"""The numbers of an iteration, in the order in which they are computed."""
OF_A_STEP = ("batch_size", "samples", "learning_rate", "loss_scale", "loss", "gradient_norm", "skipped")
MASTER = "master"


class Start(NamedTuple):
    """What a training begins from: iterations done, and the checkpoint; random weights without one."""

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
        """Its iterations, from 0, the weights before the first, on; of a run that continues another, its own."""
        return range(self.begin.iteration + bool(self.begin.iteration), max(self.steps) + 1)

    @property
    def microbatches(self) -> int:
        """Microbatches of a whole batch on one data-parallel rank."""
        return self.config.train.global_batch_size // (self.config.train.microbatch_size * self.run.layout.dp)

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


class SerialReplay:
    """Iterations of a recorded run on one rank. Those that the run left out, by overflow or spike, are left out."""

    def __init__(
        self, recorded: RecordedRun, start: Start, precision: Precision = "fp64", is_moved: bool = False,
        like: "SerialReplay | None" = None,
    ) -> None:  # fmt: skip
        """With `is_moved`, master weights begin up to half a unit in their last place beside the true ones.

        The samples are those of `like`, another replay of the run, where they are the same.
        """
        run, config = recorded.run, recorded.config
        self.recorded, self.is_scaled = recorded, config.train.precision == "fp16"
        changed = {"precision": precision, **self.settings(config.train)}
        self.train: TrainConfig = config.train.model_copy(update=changed)
        self.config = config.model_copy(update={"train": self.train, "parallel": SERIAL})
        mesh = serial_mesh(local_device())
        model = config.model.model_copy(update={"vocab_size": self.predicted_words})
        self.model, self.step = build_step(model, self.train, SERIAL, mesh)
        self.schedule, tokens = BatchSchedule(self.train), run.data.token_files("train")
        if like and like.train.normalise == self.train.normalise and not like.inputs.streams.is_kept:
            self.inputs, self.validation = like.inputs, like.validation
        else:
            self.inputs = TrainingInputs(self.config, self.train.iterations, tokens, run.data.tokenizer, mesh)
            self.validation = ValidationSplit(self.config, run.data.token_files("valid"), mesh, run.data.tokenizer)
        state = self._load(start)
        known = state.updated_samples
        self.samples = self.schedule.samples_before(start.iteration) if known is None else known
        self.scaler = LossScaler(**state.loss_scaler or {"scale": self.train.initial_loss_scale})
        for group in self.step.optimizer.groups if is_moved else ():
            group.master.copy_(moved(group.master, str(group.weight_decay), 1))
            group.flat.copy_(group.master)
        self.prepare()

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
        return numbers | {_named(each): self.validate(each) for each in self.recorded.validations.get(iteration, ())}

    def _trained(self, step: Step) -> Numbers:
        number, train = step.iteration - 1, self.train
        size, rate = self.schedule.batch_size(number), learning_rate(train, self.time(step.iteration))
        if self.step.scaler:
            self.step.scaler.scale = step.loss_scale
        gradient = self.reduced(self.step.gradient(self.batch(number)), step)
        self.inputs.streams.commit()
        is_spike = train.skip_spikes and bool(step.spike)
        numbers: Numbers = {
            "batch_size": size, "samples": self.schedule.samples_before(step.iteration), "learning_rate": rate,
            "loss_scale": self.scaler.scale if self.is_scaled else 1.0, "loss": gradient.loss,
            "gradient_norm": gradient.norm, "skipped": step.gradient_norm is None or is_spike,
        }  # fmt: skip
        self.scaler.update(overflow=step.gradient_norm is None)
        self.step.update(self.clipped(gradient, step), rate, step.skipped)
        self.samples += size * (not step.skipped)
        return numbers

    def validate(self, recorded: Validation) -> float:
        """The loss of a recorded validation."""
        whole = recorded.kind == "final-validation"
        inputs = list(self.validation.inputs(self.validation.num_samples if whole else self.train.validation_samples))
        return float(self.model.evaluate(inputs).item()) / sum(len(each.tokens) for each in inputs)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Weights and moments, by name as those of a checkpoint."""
        state = {f"{what} of {p.name}": value for p, what, value in whole_state(self.step.optimizer)}
        weights = {f"updated {p.name}": state.pop(f"{MASTER} of {p.name}", p.local.data) for p in self.model.parameters}
        return state | weights

    # what a fault changes

    def settings(self, train: TrainConfig) -> dict[str, Any]:
        """Settings that are other than the run's."""
        return {}

    @property
    def predicted_words(self) -> int:
        """Rows of the embedding that are predicted."""
        return self.recorded.config.model.vocab_size

    def prepare(self) -> None:
        """Change what was built."""

    def time(self, iteration: int) -> float:
        """The clock of an iteration's learning rate."""
        return clock(self.train, self.step.optimizer.steps, self.samples)

    def batch(self, iteration: int) -> list[PipelineInput]:
        """The microbatches of an iteration, from 0."""
        return self.inputs.of(iteration)

    def reduced(self, gradient: Gradient, step: Step) -> Gradient:
        """The reduced gradient, which is reported and goes to the optimizer."""
        return gradient

    def clipped(self, gradient: Gradient, step: Step) -> Gradient:
        """The gradient with the norm by which it is clipped."""
        return gradient


class OtherSettings(SerialReplay):
    """Training with other settings than those that the run states."""

    def __init__(self, changed: dict[str, Any], *args: Any, **named: Any) -> None:
        self.changed = changed
        super().__init__(*args, **named)

    def settings(self, train: TrainConfig) -> dict[str, Any]:
        return self.changed


class InSamples(SerialReplay):
    """The rate follows the samples so far, perhaps those of the batch itself too, to an end that is in updates."""

    def __init__(self, is_ahead: bool, *args: Any, **named: Any) -> None:
        self.is_ahead = is_ahead
        super().__init__(*args, **named)

    def time(self, iteration: int) -> float:
        own = self.schedule.batch_size(iteration - 1) if self.is_ahead else 0
        return (self.samples + own) / self.train.global_batch_size


class BiasesDecayed(SerialReplay):
    """Weight decay of every parameter."""

    def prepare(self) -> None:
        for group in self.step.optimizer.groups:
            group.weight_decay = self.train.weight_decay


class ClippedWhileScaled(SerialReplay):
    """Clipping by the norm of the gradient that still has the loss scale, which the run reports or not."""

    def __init__(self, reports: bool, *args: Any, **named: Any) -> None:
        self.reports = reports
        super().__init__(*args, **named)

    def reduced(self, gradient: Gradient, step: Step) -> Gradient:
        return replace(gradient, norm=gradient.norm * step.loss_scale) if self.reports else gradient

    def clipped(self, gradient: Gradient, step: Step) -> Gradient:
        return gradient if self.reports else replace(gradient, norm=gradient.norm * step.loss_scale)


class GradientTimes(SerialReplay):
    """A gradient that is multiplied by a number."""

    def __init__(self, factor: float, *args: Any, **named: Any) -> None:
        self.factor = factor
        super().__init__(*args, **named)

    def reduced(self, gradient: Gradient, step: Step) -> Gradient:
        for group in self.step.optimizer.groups:
            group.main_gradient.mul_(self.factor)
        return replace(gradient, norm=gradient.norm * self.factor)


class PaddingPredicted(SerialReplay):
    """The embedding's padding rows take part in the softmax, and so have a gradient."""

    @property
    def predicted_words(self) -> int:
        return self.recorded.config.model.padded_vocab_size


class RowNotLookedUp(SerialReplay):
    """A row of the word embedding has no gradient where it is looked up, as by torch's `padding_idx`."""

    def __init__(self, row: int, *args: Any, **named: Any) -> None:
        self.row = row
        super().__init__(*args, **named)

    def prepare(self) -> None:
        def without_row(module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> None:
            if output.requires_grad:
                is_row = inputs[0].T.eq(self.row).unsqueeze(-1)
                output.register_hook(lambda gradient: gradient.masked_fill(is_row, 0.0))

        self.model.chunks[0].get_submodule("embedding.word_embeddings").register_forward_hook(without_row)


class OneLayer(Dropout):
    """Dropout with one mask for a place in every layer."""

    def mask(self, site: str, first_row: int = 0) -> Any:
        parts = site.split(".")
        return super().mask(".".join(["0" if part.isdigit() else part for part in parts]), first_row)


class MasksReused(SerialReplay):
    """Dropout masks that are used more than once."""

    def __init__(self, again: Callable[[Dropout], Dropout], *args: Any, **named: Any) -> None:
        self.again = again
        super().__init__(*args, **named)

    def batch(self, iteration: int) -> list[PipelineInput]:
        return [
            replace(each, dropout=self.again(each.dropout)) if each.dropout else each
            for each in self.inputs.of(iteration)
        ]


def _named(validation: Validation) -> str:
    return f"{validation.kind} of {validation.samples} sequences"


Hypothesis = tuple[str, Callable[..., SerialReplay]]
"""A fault in words, and what trains with it, of the arguments of a SerialReplay."""


def hypotheses(recorded: RecordedRun, row: int | None) -> list[Hypothesis]:
    """The known faults that this run can have; `row` is the row of the word embedding that is farthest off."""
    model, train, dp, count = (
        recorded.config.model, recorded.config.train, recorded.run.layout.dp, recorded.microbatches
    )  # fmt: skip
    other = "samples" if train.clock == "updates" else "updates"
    counts = f"the schedule counts {other}, not {train.clock}"
    found: list[Hypothesis] = [(counts, partial(OtherSettings, {"clock": other}))]
    if other == "samples":
        found += [(counts, partial(InSamples, is_ahead)) for is_ahead in (False, True)]
    if train.weight_decay:
        found.append(("biases and layer norms are decayed", BiasesDecayed))
    if model.padded_vocab_size > model.vocab_size:
        found.append(("the embedding's padding rows take part in the softmax", PaddingPredicted))
    if row is not None:
        said = f"row {row} of the word embedding has no gradient where it is looked up"
        found.append((said, partial(RowNotLookedUp, row)))
    if model.family == "bert":
        other = "batch" if train.normalise == "microbatch" else "microbatch"
        means = {"microbatch": "the loss is a mean of the microbatches' means, not of the batch",
                 "batch": "the loss is the mean of the batch, not of the microbatches' means"}  # fmt: skip
        found.append((means[other], partial(OtherSettings, {"normalise": other})))
    if train.precision == "fp16" and train.clip_gradient:
        clipped = "the gradient is clipped before the loss scale is taken out"
        found += [(clipped, partial(ClippedWhileScaled, reports)) for reports in (False, True)]
    if model.dropout:
        found += [(f"dropout masks are reused: {which}", partial(MasksReused, again))
                  for which, again in _reuses(recorded)]  # fmt: skip
    for size, what in {dp * count: f"the {dp * count} microbatches", count: f"a rank's {count} microbatches",
                       dp: f"the {dp} data-parallel ranks"}.items():  # fmt: skip
        if size > 1:
            found.append((f"the gradient is multiplied once too often by {what}", partial(GradientTimes, size)))
            found.append((f"the gradient is divided once too often by {what}", partial(GradientTimes, 1 / size)))
    return found


def _reuses(recorded: RecordedRun) -> Iterator[tuple[str, Callable[[Dropout], Dropout]]]:
    size, dp = recorded.config.train.global_batch_size, recorded.run.layout.dp
    yield "those of the first iteration in every one", lambda dropout: replace(dropout, iteration=0)
    first: Sequence[int] = range(recorded.config.train.microbatch_size)
    yield "those of the first microbatch in every one", lambda dropout: replace(dropout, samples=tuple(first))
    if dp > 1:
        ranked = lambda dropout: replace(dropout, samples=tuple(n % (size // dp) for n in dropout.samples))  # noqa: E731
        yield "those of the first data-parallel rank on every one", ranked
    yield "those of the first layer in every one", lambda dropout: OneLayer(**vars(dropout))
