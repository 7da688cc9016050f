"""One training step: forward and backward over the microbatches, gradient reduction, clipping and
update.

Every loop that trains goes through `TrainingStep`: the trainer, parity runs, benchmarks,
calibration, fine-tuning.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import torch

from mlm_repro.engine.config import ModelConfig, ParallelConfig, TrainConfig
from mlm_repro.engine.kernels import registry
from mlm_repro.engine.model.microbatch import PipelineInput
from mlm_repro.engine.optim.adam import build_optimizer
from mlm_repro.engine.optim.precision import DTYPES, LossScaler
from mlm_repro.engine.parallel.mesh import ParallelMesh
from mlm_repro.engine.pipeline.executor import PartitionedModel, partition
from mlm_repro.lineage.errors import Diverged
from mlm_repro.lineage.progress import announce

SHORT_SECONDS = 0.5
"""Seconds of a rehearsed iteration below which it is timed four times; a longer one is timed
once."""


class NotFinite(Diverged):
    """Error for a training whose loss or gradient is not finite, or that made no update (exit code
    3)."""


@dataclass(frozen=True)
class Gradient:
    """Results of forward and backward over one global batch, before the weights change: loss,
    gradient norm and the sum of all ranks' `signal` numbers; all three are the same on every
    rank."""

    loss: float
    """Mean loss over the sequences of the global batch."""
    norm: float
    """Norm of the whole gradient, before clipping."""
    signals: int
    """Sum over the ranks of the number `signal` that each gave to `TrainingStep.gradient`."""

    @property
    def is_finite(self) -> bool:
        """True if loss and norm are finite, so that the weights can be updated."""
        return math.isfinite(self.loss) and math.isfinite(self.norm)


class TrainingStep:
    """One rank's part of a training: its `model`, and the gradient reducer, the optimizer and, in
    fp16, the loss scaler, which are built here for `train`. The method `run` does a whole training
    iteration; `gradient` and then `update` are its two halves. With `shard_optimizer` the state of
    the optimizer is divided over the data-parallel ranks. Every rank has one, and a model belongs
    to one alone."""

    def __init__(
        self, model: PartitionedModel, train: TrainConfig, shard_optimizer: bool = False
    ) -> None:
        self.model = model
        self.mesh = model.mesh
        self.optimizer = build_optimizer(
            model.parameters, train, model.storage_mesh, shard_optimizer
        )
        self.reducer = model.reducer(self.optimizer.groups)
        self.scaler = LossScaler(train.initial_loss_scale) if train.precision == "fp16" else None

    @property
    def loss_scale(self) -> float:
        """Factor of the loss in the backward pass, by which gradients are divided again; 1 unless
        the precision is fp16."""
        return self.scaler.scale if self.scaler else 1.0

    def gradient(self, microbatches: Sequence[PipelineInput], signal: int = 0) -> Gradient:
        """Run forward and backward over this rank's microbatches, reduce the gradient, and return a
        Gradient, the same on every rank: the mean loss of the global batch, the gradient's norm
        before clipping, and the sum of `signal` over all ranks. The weights stay; the gradient
        stays in the optimizer for the method `update`.

        Every rank calls it, with equally many microbatches. The host waits for a GPU once in a
        step, at the end of this method.
        """
        mesh = self.mesh
        scale = self.loss_scale
        loss_sum = self.model.forward_backward(microbatches, self.reducer, scale)
        sequences = sum(len(microbatch.tokens) for microbatch in microbatches)
        # One divisor for the mean over microbatches and the loss scale: a second would be another
        # pass over the gradient.
        self.reducer.finish(len(microbatches) * scale)
        # The signal travels with the loss, in its number format, and needs no collective of its own
        # over pp and dp. Tensor-parallel ranks have the same loss, so over tp the signal alone is
        # summed.
        raised = torch.tensor(float(signal), dtype=torch.float64, device=mesh.device)
        report = mesh.pp.all_reduce(
            mesh.dp.all_reduce(torch.stack([loss_sum, mesh.tp.all_reduce(raised)]))
        )
        # One copy to the host for all three numbers, because each copy waits for the GPU.
        loss, signals, norm = torch.stack([*report, self.optimizer.gradient_norm()]).tolist()
        return Gradient(loss / (sequences * mesh.dp.size), norm, round(signals))

    def update(self, gradient: Gradient, learning_rate: float, skip: bool = False) -> bool:
        """Clip the reduced gradient to `train.clip_gradient`, update the weights with the rate
        `learning_rate`, and return True. The argument `gradient` is what the method `gradient`
        returned last; if its loss or norm is not finite, or if `skip` is True, the weights stay and
        the result is False. Every rank calls it.

        In fp16 the next loss scale is set in either case, by the norm alone.
        """
        # Both numbers are asked: an infinite loss can have a finite gradient.
        changes = gradient.is_finite and not skip
        if changes:
            self.optimizer.step(learning_rate, gradient.norm)
        if self.scaler:
            # By the norm alone, not by `changes`: a spike that is skipped is no overflow.
            self.scaler.update(overflow=not math.isfinite(gradient.norm))
        return changes

    def run(self, microbatches: Sequence[PipelineInput], learning_rate: float) -> Gradient:
        """Run one whole iteration, gradient and update with the rate `learning_rate`, and return
        the Gradient: mean loss of the global batch and norm. Nothing is updated if either is not
        finite. Every rank calls it, with equally many microbatches."""
        gradient = self.gradient(microbatches)
        self.update(gradient, learning_rate)
        return gradient

    def rehearse(self, microbatches: Sequence[PipelineInput]) -> tuple[float, float]:
        """Run a few iterations over this rank's `microbatches`, equally many on every rank. The
        iterations leave the weights as they are, and are run so that memory is allocated and loops
        are compiled before the first real iteration. After the first round the method `capture`
        makes CUDA graphs of the passes on a single GPU. Every rank calls it, before the first step.

        Overwrites the gradients and clears the optimizer's moments and step count. The states that
        a Transformer-XL with memory leaves for these microbatches stay: the caller drops the states
        with `discard` of its StreamMemory. Returns a pair: the seconds of forward and backward over
        the microbatches, and the seconds of the update, both medians without the first round.
        """
        # The first round compiles loops and allocates, so its time is not counted. It also asks for
        # every dropout site, which a capture has to know.
        rounds = [self._rehearse_once(microbatches)]
        self.capture(microbatches)
        rounds.append(self._rehearse_once(microbatches))
        # Rank 0's time decides for all: ranks with different numbers of rounds would wait for each
        # other for ever. One round of a short iteration is mostly noise.
        if self.mesh.world.gather_objects(sum(rounds[1]))[0] < SHORT_SECONDS:
            rounds += [self._rehearse_once(microbatches) for _ in range(3)]
        return median(computing for computing, _ in rounds[1:]), median(
            updating for _, updating in rounds[1:]
        )

    def capture(self, microbatches: Sequence[PipelineInput]) -> None:
        """Capture CUDA graphs of forward and backward, which replay microbatches of the first one's
        shape from now on, if over `microbatches` they give exactly the loss and norm that the same
        passes give without graphs; else print a line to standard error, unless `--quiet` is given,
        and go on without graphs. Overwrites the gradients.

        Does nothing without a GPU, on several ranks, and for models with sentence pairs or a
        Transformer-XL's memory.
        """
        # A graph copies `PipelineInput.tensors` alone, which a BERT's pairs and a model's memory
        # are not among; messages between ranks are not captured either.
        batch = microbatches[0]
        is_alone = self.mesh.layout.world_size == 1
        if not (
            registry.on_gpu(self.mesh.device)
            and is_alone
            and batch.pairs is None
            and batch.recurrence is None
        ):
            return
        own = self._computed(microbatches)
        try:
            self.model.capture(batch, self.reducer)
            captured = self._computed(microbatches)
        except RuntimeError as error:
            captured = str(error)
        # Equal to the last bit: a run must not depend on whether its steps were replayed.
        if captured != own:
            self.model.graphs = None
            announce(
                "CUDA graphs are not used, so that steps take longer: with them summed loss and"
                f" gradient norm are {captured}, without them {own}"
            )

    def _computed(self, microbatches: Sequence[PipelineInput]) -> list[float] | str:
        """Compute the gradient of the mean losses of this rank's microbatches, summed over the
        microbatches and averaged over data-parallel ranks, without a loss scale. Return a list of
        two numbers: this rank's sum of (loss × sequences), and that gradient's norm over all ranks.
        The gradient stays in the optimizer, and the weights stay as they are. Every rank calls
        it."""
        total = self.model.forward_backward(microbatches, self.reducer)
        self.reducer.finish(1.0)
        return torch.stack([total, self.optimizer.gradient_norm()]).tolist()

    def _rehearse_once(self, microbatches: Sequence[PipelineInput]) -> tuple[float, float]:
        begun = time.monotonic()
        self._computed(microbatches)
        computed = time.monotonic()
        self.optimizer.try_step()
        # Reading a number waits for the GPU, whose update would otherwise not be in the time.
        self.optimizer.gradient_norm().item()
        return computed - begun, time.monotonic() - computed


def build_step(
    model: ModelConfig, train: TrainConfig, parallel: ParallelConfig, mesh: ParallelMesh
) -> tuple[PartitionedModel, TrainingStep]:
    """Return a pair: this rank's part of the configured model, a PartitionedModel with initial
    values, and the TrainingStep over it. Every rank calls it. Raises BadInput as the function
    `partition` does, such as for fewer layers than pipeline stages."""
    partitioned = partition(model, parallel, mesh, DTYPES[train.precision], train.seed)
    return partitioned, TrainingStep(partitioned, train, parallel.shard_optimizer)
