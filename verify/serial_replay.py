"""A recorded run, trained again by the engine's own trainer on one rank, in any number format, by
its settings or with one known fault."""

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from mlm_repro.engine.checkpoint.checkpoint import start_from
from mlm_repro.engine.compare.recorder import moved, whole_state
from mlm_repro.engine.compare.tensors import computation_order
from mlm_repro.engine.config import SERIAL, Precision
from mlm_repro.engine.guard import Guard, Iteration
from mlm_repro.engine.kernels.dropout import DropoutMask
from mlm_repro.engine.launch.mesh import local_device
from mlm_repro.engine.optim.precision import LossScaler
from mlm_repro.engine.optim.schedule import learning_rate
from mlm_repro.engine.parallel.mesh import serial_mesh
from mlm_repro.engine.rng import Dropout
from mlm_repro.engine.run.files import Validation, read_metrics, steps_in, validations_in
from mlm_repro.engine.run.resolved import resolve_begun
from mlm_repro.engine.step import Gradient
from mlm_repro.engine.trainer import Trainer
from mlm_repro.lineage.atomic import JSON
from mlm_repro.lineage.chain import complete_checkpoints, iteration_of, resolve_checkpoint
from mlm_repro.lineage.digest import read_digest
from mlm_repro.lineage.errors import BadInput
from mlm_repro.lineage.run import RunDirectory

Numbers = dict[str, float]
"""Name of a number of an iteration → the number, in the order in which they are computed."""
OF_A_STEP = (
    "batch_size",
    "samples",
    "learning_rate",
    "loss_scale",
    "loss",
    "gradient_norm",
    "skipped",
)
MASTER = "master"


class Start(NamedTuple):
    """Starting point of a training: the number of iterations done, and the directory `place` of the
    checkpoint that gives the weights, with its digest. If `is_whole` the checkpoint gives the
    optimizer's state too. Without a place the weights are random."""

    iteration: int = 0
    place: Path | None = None
    digest: str = ""
    is_whole: bool = False
    """True if the optimizer's state is taken over too."""


class RecordedRun:
    """A training as its directory records it, complete or not: its `config`; its starting point,
    `begin`; and three dicts by iteration: `steps`, iteration → its line of metrics, `validations`,
    iteration → list of the Validations after it, and `checkpoints`, iteration → path of the
    checkpoint."""

    def __init__(self, path: Path) -> None:
        """Read the run at `path`. Raises BadInput for a directory that is not a training or was
        renamed, and unless its metrics have a line for each iteration after its starting point and
        one at least; DataMissing without its dataset. Raises IntegrityFailure or BadInput if its
        starting point is not found, or if its dataset, its manifest or the meaning of its settings
        has changed since it began."""
        directory = RunDirectory.open(path, "training")
        self.path = directory.path
        self.run = resolve_begun(directory)
        self.name = str(path)
        self.config = self.run.config
        lines = read_metrics(self.path)
        self.validations: dict[int, list[Validation]] = defaultdict(list)
        for validation in validations_in(lines):
            self.validations[validation.iteration].append(validation)
        self.checkpoints = {iteration_of(path): path for path in complete_checkpoints(self.path)}
        self.begin = Start()
        seam = self.config.train.continues
        if origin := self.run.origin:
            place = resolve_checkpoint(origin.place)
            self.begin = Start(seam.iteration if seam else 0, place, origin.digest, bool(seam))
            if seam:
                self.checkpoints[seam.iteration] = place
        self.steps = {
            step.iteration: step
            for step in steps_in(lines)
            if step.iteration > self.begin.iteration
        }
        first = self.begin.iteration + 1
        if list(self.steps) != list(range(first, first + len(self.steps))) or not self.steps:
            raise BadInput(
                f"{path} cannot be replayed: its metrics.jsonl does not have a line for each"
                f" iteration from {first} on; train further, or restore that file from a copy"
            )

    @property
    def iterations(self) -> range:
        """A range of the numbers of the recorded iterations, without a gap. Iterations are counted
        from 1, and the range begins with 0, which stands for the weights before the first update.
        If the run continues another at a later iteration, it begins with the first iteration after
        that one."""
        return range(self.begin.iteration + bool(self.begin.iteration), max(self.steps) + 1)

    def numbers(self, iteration: int) -> Numbers:
        """Return a dict name → number of what the run recorded: an iteration's numbers such as the
        loss, and the loss of each validation after it; for iteration 0 validations alone. A number
        that the record lacks, such as a norm that was not finite, is left out."""
        step = self.steps.get(iteration)
        numbers = {name: getattr(step, name) for name in OF_A_STEP} if step else {}
        numbers |= {_named(line): line.loss for line in self.validations[iteration]}
        return {name: float(number) for name, number in numbers.items() if number is not None}

    @property
    def updates(self) -> object:
        """List of a pair for each iteration: True if it made no update, and the loss scale."""
        return [(step.skipped, step.loss_scale) for step in self.steps.values()]

    def start_at(self, iteration: int | None) -> Start:
        """Return the starting point at an iteration: the checkpoint that the run has there, with
        the optimizer's state; for None, where the run itself began. Raises KeyError if it has no
        such checkpoint."""
        if iteration is None:
            return self.begin
        place = self.checkpoints[iteration]
        return Start(iteration, place, read_digest(place), is_whole=True)


class KnownFault(NamedTuple):
    """A known fault of training programs: `kind` has it in words; `plant`, a function that
    changes a SerialReplay, and the settings `train` and `model` of a replay reproduce it. An empty
    `kind` stands for no fault."""

    kind: str
    """The fault in words."""
    plant: "Callable[[SerialReplay], object]" = id
    """Function that plants the fault in a replay after it is built."""
    train: JSON = {}  # noqa: RUF012
    """Settings of `train` that a replay changes to reproduce the fault."""
    model: JSON = {}  # noqa: RUF012
    """Settings of `model` that a replay changes to reproduce the fault."""


NO_FAULT = KnownFault("")


class SerialReplay(Trainer, Guard):
    """Trainer that computes a recorded run again on one rank, in fp64 unless told otherwise.

    It is its own guard: it takes the recorded loss scale, and skips the updates that the run
    skipped.
    """

    def __init__(
        self,
        recorded: RecordedRun,
        start: Start,
        precision: Precision = "fp64",
        is_moved: bool = False,
        fault: KnownFault = NO_FAULT,
    ) -> None:
        """Build the model of the run `recorded`, whole and undivided, in the number format
        `precision` on this process's device, and load the checkpoint of `start`, or draw the run's
        random weights if it has none. With `is_moved` master weights are moved by up to a unit
        round-off; `fault` is planted, by default none. Raises IntegrityFailure for a checkpoint
        that is damaged or has another digest."""
        config = recorded.config
        changed = {"precision": precision, **fault.train}
        train = config.train.model_copy(update=changed)
        model = config.model.model_copy(update=fault.model)
        config = config.model_copy(update={"parallel": SERIAL, "train": train, "model": model})
        super().__init__(
            replace(recorded.run, config=config),
            RunDirectory(recorded.path),
            serial_mesh(local_device()),
        )
        self.recorded = recorded
        self.replayed: dict[int, Numbers] = {}
        """Numbers of the iterations so far, by iteration."""
        self.guards = [self]
        optimizer = self.step.optimizer
        if start.place:
            own = start.place, start.digest, self.model.parameters, optimizer
            self.state = start_from(*own, start.is_whole)
            # The exact weights of a mixed run are its optimizer's; the model's are rounded.
            if start.is_whole and precision == "fp64":
                start_from(*own, is_whole=False)
                optimizer.steps = self.state.optimizer_steps
        self._count_samples(start.iteration)
        self.scaler = LossScaler(**self.state.loss_scaler or {"scale": train.initial_loss_scale})
        """Loss scale that follows from the run's overflows alone, compared with the recorded
        one."""
        for group in optimizer.groups if is_moved else ():
            group.master.copy_(moved(group.master, str(group.weight_decay), 1))
            group.flat.copy_(group.master)
        fault.plant(self)

    def numbers(self, iteration: int, validates: bool = True) -> Numbers:
        """Train a recorded iteration again, or nothing for iteration 0. Return a dict name → number
        of this replay: the iteration's numbers such as the loss, infinity for a gradient norm that
        is not finite, and, if `validates`, the loss in each validation that the run made after the
        iteration. Call it for each iteration in order; a further call for the same one returns what
        the first returned, whatever `validates` is, and trains nothing."""
        if iteration in self.replayed:
            return self.replayed[iteration]
        numbers = {}
        if now := self.recorded.steps.get(iteration):
            train = self.recorded.config.train
            overflows = now.gradient_norm is None
            self.now = now
            """Metrics line of the recorded iteration that is being replayed."""
            line = self.iterate(iteration - 1)[0]
            line.skipped = overflows or (train.skip_spikes and bool(now.spike))
            line.loss_scale = self.scaler.scale if train.precision == "fp16" else 1.0
            if line.gradient_norm is None:
                line.gradient_norm = math.inf
            numbers = {name: getattr(line, name) for name in OF_A_STEP}
            self.scaler.update(overflow=overflows)
        for recorded in self.recorded.validations[iteration] if validates else ():
            validation = self._validate(iteration, recorded.samples, recorded.kind)
            numbers[_named(validation)] = validation.loss
        self.replayed[iteration] = numbers
        return numbers

    def before(self, number: int) -> None:
        """Set the loss scale to the one that the run recorded for the iteration that is replayed,
        whose metrics line `numbers` has put in the attribute `now`; the argument is not used.
        Without a loss scaler nothing happens. The trainer calls it at the start of each
        iteration."""
        if self.step.scaler:
            self.step.scaler.scale = self.now.loss_scale

    def skips(self, iteration: Iteration) -> bool:
        """Return True if the recorded run made no update in the iteration that is replayed, for an
        overflow or a spike; the replay then makes none either."""
        return self.now.skipped

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return a dict name → tensor: the first moments of all parameters, as `exp_avg of NAME`,
        then the second moments, as `exp_avg_sq of NAME`, then the weights, as `updated NAME`, each
        time in the order of the model's parameters. If the optimizer has its own copy of a weight,
        the dict has that copy. Every tensor is a view, which the next iteration changes."""
        state = {
            f"{what} of {p.name}": value for p, what, value in whole_state(self.step.optimizer)
        }
        weights = {
            f"updated {p.name}": state.pop(f"{MASTER} of {p.name}", p.local.data)
            for p in self.model.parameters
        }
        return {name: (state | weights)[name] for name in computation_order([*state, *weights])}


def _passed(owner: object, name: str, change: Callable[[Any], Any]) -> None:
    """Replace a method of an object by one that returns `change(result)` of the old one's
    result."""
    usual = getattr(owner, name)
    vars(owner)[name] = lambda *args: change(usual(*args))


def _multiplied(factor: float, replay: SerialReplay) -> None:
    """Plant a fault in a replay: its reduced gradients and their norms are multiplied by `factor`
    from now on."""

    def times(gradient: Gradient) -> Gradient:
        for group in replay.step.optimizer.groups:
            group.main_gradient.mul_(factor)
        return replace(gradient, norm=gradient.norm * factor)

    _passed(replay.step, "gradient", times)


def _scaled(replay: SerialReplay, gradient: Gradient) -> Gradient:
    """Return a copy of `gradient` whose field `norm` alone is multiplied by the loss scale that the
    run recorded for the iteration that `replay` is at, `replay.now`, as if the scale had not been
    taken out of the norm."""
    return replace(gradient, norm=gradient.norm * replay.now.loss_scale)


def _clipped_scaled(replay: SerialReplay) -> None:
    update = replay.step.update
    vars(replay.step)["update"] = lambda gradient, *args: update(_scaled(replay, gradient), *args)


def _ahead(replay: SerialReplay) -> None:
    """Plant a fault in a replay: the clock of the learning rate also counts the samples of the
    current batch."""
    train = replay.config.train

    def rate() -> float:
        samples = replay.updated_samples + (replay.now.batch_size or 0)
        return learning_rate(train, samples / train.global_batch_size)

    vars(replay)["rate"] = rate


def _decayed(replay: SerialReplay) -> None:
    for group in replay.step.optimizer.groups:
        group.weight_decay = replay.config.train.weight_decay


def _row_left_out(row: int, replay: SerialReplay) -> None:
    """Plant a fault in a replay, which keeps it: lookups of the word embedding's row number `row`
    give that row no gradient, as with torch's `padding_idx`."""

    def leave_out(module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> None:
        if output.requires_grad:
            is_row = inputs[0].T.eq(row).unsqueeze(-1)
            output.register_hook(lambda gradient: gradient.masked_fill(is_row, 0.0))

    replay.model.chunks[0].get_submodule("embedding.word_embeddings").register_forward_hook(
        leave_out
    )


def _reused(again: Callable[[Dropout], Dropout], replay: SerialReplay) -> None:
    """Plant a fault in `replay`, in place and from now on: the Dropout of each microbatch is
    replaced by the one that `again` returns for it, which reuses masks."""
    _passed(
        replay.inputs,
        "of",
        lambda inputs: [replace(batch, dropout=again(batch.dropout)) for batch in inputs],
    )


class OneLayer(Dropout):
    """Dropout with a known fault, for a replay: it uses, in every layer, the masks of the first
    layer."""

    def mask(self, site: str, first_row: int = 0) -> DropoutMask:
        """Return a DropoutMask for `site`, a point of any layer by name, as for the same point of
        the first layer: each number in the name is read as 0. The mask begins at row `first_row` of
        the whole one."""
        return super().mask(re.sub(r"\d+", "0", site), first_row)


def _named(validation: Validation) -> str:
    return f"{validation.kind} of {validation.samples} sequences"


def known_faults(recorded: RecordedRun, row: int | None) -> Iterator[KnownFault]:
    """Yield a KnownFault for each known fault that this run's settings allow, with the settings or
    the change of a replay that reproduce it. A fault may come several times, with other changes.
    `row` is the index of the word embedding's row that is farthest off, None for no row."""
    model = recorded.config.model
    train = recorded.config.train
    dp = recorded.run.layout.dp
    batch = train.global_batch_size
    count = batch // (train.microbatch_size * dp)
    other = "samples" if train.clock == "updates" else "updates"
    counts = f"the schedule counts {other}, not {train.clock}"
    yield KnownFault(counts, train={"clock": other})
    # Two such faults are known: the end of the schedule still in updates, and the batch itself
    # counted too.
    if other == "samples":
        yield KnownFault(
            counts,
            train={"clock": other, "decay_iterations": train.decay_iterations or train.iterations},
        )
        yield KnownFault(counts, _ahead)
    if train.weight_decay:
        yield KnownFault("biases and layer norms are decayed", _decayed)
    if model.padded_vocab_size > model.vocab_size:
        yield KnownFault(
            "the embedding's padding rows take part in the softmax",
            model={"vocab_size": model.padded_vocab_size},
        )
    if row is not None:
        looked_up = f"row {row} of the word embedding has no gradient where it is looked up"
        yield KnownFault(looked_up, partial(_row_left_out, row))
    if model.family == "bert":
        told = "the loss is a mean of the microbatches' means, not of the batch"
        not_told = "microbatch"
        if train.normalise != "batch":
            told = "the loss is the mean of the batch, not of microbatches' means"
            not_told = "batch"
        yield KnownFault(told, train={"normalise": not_told})
    if train.precision == "fp16" and train.clip_gradient:
        clipped = "the gradient is clipped before the loss scale is taken out"
        yield KnownFault(clipped, _clipped_scaled)
        yield KnownFault(
            clipped, lambda replay: _passed(replay.step, "gradient", partial(_scaled, replay))
        )
    if model.dropout:
        first = tuple(range(train.microbatch_size))
        each = batch // dp
        reuses = {
            "iteration": lambda dropout: replace(dropout, iteration=0),
            "microbatch": lambda dropout: replace(dropout, samples=first),
            "layer": lambda dropout: OneLayer(**vars(dropout)),
            "data-parallel rank": lambda dropout: replace(
                dropout, samples=tuple(place % each for place in dropout.samples)
            ),
        }
        for of in list(reuses)[: 3 + (dp > 1)]:
            yield KnownFault(
                f"the first dropout masks are reused in every {of}", partial(_reused, reuses[of])
            )
    sizes = {
        dp * count: f"all {dp * count} microbatches",
        count: f"a rank's {count} microbatches",
        dp: f"the {dp} data-parallel ranks",
    }
    for size in [size for size in sizes if size > 1]:
        for word, factor in (("multiplied", size), ("divided", 1 / size)):
            yield KnownFault(
                f"the gradient is {word} once too often by {sizes[size]}",
                partial(_multiplied, factor),
            )
