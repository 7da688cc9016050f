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
    """One training iteration as guards see it: its batch, its gradient, and its line of the
    metrics."""

    number: int
    """Number of the iteration, counted from 0."""
    batch_size: int
    """Number of sequences of all ranks together."""
    microbatches: "Sequence[PipelineInput]"
    """This rank's microbatches."""
    gradient: "Gradient"
    line: Step = field(init=False)
    """Line of the metrics for this iteration, set after the update was made or skipped."""


class Guard:
    """Base class of a check on every iteration. All ranks call their guards in the same order, so
    guards may communicate."""

    def before(self, number: int) -> None:
        """Prepare for iteration `number` (from 0), before its microbatches are computed."""

    def skips(self, iteration: Iteration) -> bool:
        """Return True if the iteration's update must be skipped. Called once its gradient is known,
        before the update. Raise an error if the run must end."""
        return False

    def after(self, iteration: Iteration) -> str:
        """Inspect an iteration after its update was made or skipped; may add to its metrics line.
        Return a warning for the user, or an empty text."""
        return ""

    def before_checkpoint(self) -> None:
        """Check the state before a checkpoint is written. Raise an error if it must not be kept."""
