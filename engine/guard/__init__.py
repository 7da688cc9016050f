"""Interface of guards, which watch a training run before and after each update.

Imports no torch. `engine/guard/guards.py` has the list of guards; the trainer imports nothing else
of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mlm_repro.engine.run.files import Step

if TYPE_CHECKING:
    from mlm_repro.engine.model.microbatch import PipelineInput
    from mlm_repro.engine.step import Gradient


@dataclass
class Iteration:
    """One training iteration as guards see it: its number, the size of its global batch, this
    rank's microbatches, the loss and the norm of the gradient (a Gradient, not the tensors), and
    `line`, its line of the metrics, an attribute that is missing until the update was made or
    skipped."""

    number: int
    """Number of this iteration in the training, counted from 0."""
    batch_size: int
    """Number of sequences in this iteration's global batch, over all ranks."""
    microbatches: "Sequence[PipelineInput]"
    """Microbatches of this iteration that this rank computes, in order."""
    gradient: "Gradient"
    """Mean loss of the global batch, and the norm of its whole gradient before clipping."""
    line: Step = field(init=False)
    """A Step, the line of the metrics for this iteration, set after the update was made or skipped;
    until then there is no such attribute."""


class Guard:
    """Base class of a check that a training calls on every iteration, before it, between its
    gradient and its update, and after it, and before each checkpoint. A subclass overrides the
    methods that it needs; by default they change nothing, skip no update and warn of nothing. An
    error that a method raises ends the run. All ranks call their guards in the same order, so a
    guard may communicate."""

    def before(self, number: int) -> None:
        """Prepare for the iteration `number`, counted from 0; a guard may override this, by default
        nothing is done. Every rank calls this before the iteration's microbatches are computed.
        Raise an error if the run must end."""

    def skips(self, iteration: Iteration) -> bool:
        """Return True if the iteration's update must be skipped, False by default; every rank must
        return the same. Every rank calls this once the iteration's gradient is known, before the
        update, even if another guard skips it. Raise an error if the run must end."""
        return False

    def after(self, iteration: Iteration) -> str:
        """Inspect an iteration after its update was made or skipped, when `iteration.line`, its
        line of the metrics, is set; a guard may change that line. Every rank calls this. Return a
        warning for the user, or an empty text for none, as by default; only rank 0's is printed."""
        return ""

    def before_checkpoint(self) -> None:
        """Check the training's state before a checkpoint of it is written; every rank calls this.
        There are no arguments: a guard checks objects that it was made with, such as the
        parameters. Raise an error, which ends the run, if the state must not be kept; nothing is
        returned, and by default nothing is done."""
