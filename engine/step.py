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
"""A rehearsed iteration below this is timed four times, others once."""


class NotFinite(Diverged):
    """The loss or the gradient is no longer a number (exit code 3)."""


@dataclass(frozen=True)
class Gradient:
    """Results of forward and backward, before the weights change; the same on every rank."""

    loss: float
    """Mean over the sequences of the global batch."""
    norm: float
    """Norm of the whole gradient, before clipping."""
    signals: int
    """Sum of the ranks' signals."""

    @property
    def is_finite(self) -> bool:
        """True if loss and norm are finite, so that the weights can be updated."""
        return math.isfinite(self.loss) and math.isfinite(self.norm)


class TrainingStep:
    """A rank's model, gradient reducer, optimizer and loss scale, and how a batch goes through
    them."""

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
        """Factor on the loss before the backward pass."""
        return self.scaler.scale if self.scaler else 1.0

    def gradient(self, microbatches: Sequence[PipelineInput], signal: int = 0) -> Gradient:
        """Loss and reduced gradient of this rank's microbatches. Every rank calls it, with as many
        microbatches.

        `signal` is summed over the ranks with the loss. Only at the end, and nowhere else in a
        step, the host waits for a GPU.
        """
        mesh, scale = self.mesh, self.loss_scale
        loss_sum = self.model.forward_backward(microbatches, self.reducer, scale)
        sequences = sum(len(microbatch.tokens) for microbatch in microbatches)
        self.reducer.finish(len(microbatches) * scale)
        raised = torch.tensor(float(signal), dtype=torch.float64, device=mesh.device)
        report = mesh.pp.all_reduce(
            mesh.dp.all_reduce(torch.stack([loss_sum, mesh.tp.all_reduce(raised)]))
        )
        loss, signals, norm = torch.stack([*report, self.optimizer.gradient_norm()]).tolist()
        return Gradient(loss / (sequences * mesh.dp.size), norm, round(signals))

    def update(self, gradient: Gradient, learning_rate: float, skip: bool = False) -> bool:
        """Clip and step, unless told to skip or something is not finite; returns True if the
        weights changed."""
        changes = gradient.is_finite and not skip
        if changes:
            self.optimizer.step(learning_rate, gradient.norm)
        if self.scaler:
            self.scaler.update(overflow=not math.isfinite(gradient.norm))
        return changes

    def run(self, microbatches: Sequence[PipelineInput], learning_rate: float) -> Gradient:
        """One whole iteration: gradient, then update."""
        gradient = self.gradient(microbatches)
        self.update(gradient, learning_rate)
        return gradient

    def rehearse(self, microbatches: Sequence[PipelineInput]) -> tuple[float, float]:
        """Allocate what an iteration allocates, before the first one; changes nothing.

        Returns the seconds of forward and backward over the microbatches, and of the update, when
        they are repeated.
        """
        rounds = [self._rehearse_once(microbatches)]
        self.capture(microbatches)
        rounds.append(self._rehearse_once(microbatches))
        if self.mesh.world.gather_objects(sum(rounds[1]))[0] < SHORT_SECONDS:
            rounds += [self._rehearse_once(microbatches) for _ in range(3)]
        return median(computing for computing, _ in rounds[1:]), median(
            updating for _, updating in rounds[1:]
        )

    def capture(self, microbatches: Sequence[PipelineInput]) -> None:
        """Compute microbatches of this shape by CUDA graphs, on one GPU and if these give the same
        numbers."""
        batch, is_alone = microbatches[0], self.mesh.layout.world_size == 1
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
        if captured != own:
            self.model.graphs = None
            announce(
                f"microbatches are not replayed as CUDA graphs: these gave {captured}, not {own}"
            )

    def _computed(self, microbatches: Sequence[PipelineInput]) -> list[float] | str:
        """Sum of the losses, and norm of the gradient."""
        total = self.model.forward_backward(microbatches, self.reducer)
        self.reducer.finish(1.0)
        return torch.stack([total, self.optimizer.gradient_norm()]).tolist()

    def _rehearse_once(self, microbatches: Sequence[PipelineInput]) -> tuple[float, float]:
        begun = time.monotonic()
        self._computed(microbatches)
        computed = time.monotonic()
        self.optimizer.try_step()
        self.optimizer.gradient_norm().item()
        return computed - begun, time.monotonic() - computed


def build_step(
    model: ModelConfig, train: TrainConfig, parallel: ParallelConfig, mesh: ParallelMesh
) -> tuple[PartitionedModel, TrainingStep]:
    """The configured model on this rank and the step that trains it."""
    partitioned = partition(model, parallel, mesh, DTYPES[train.precision], train.seed)
    return partitioned, TrainingStep(partitioned, train, parallel.shard_optimizer)
