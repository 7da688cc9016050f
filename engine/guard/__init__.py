"""Guards watch a training run: each sees every iteration before and after its update.

Imports no torch. `engine/guard/guards.py` has the list of guards, which is all that the trainer
knows of them.
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
    """One iteration as a guard sees it."""

    number: int
    """Counts from 0."""
    batch_size: int
    """Sequences over all ranks."""
    microbatches: "Sequence[PipelineInput]"
    """This rank's microbatches."""
    gradient: "Gradient"
    line: Step = field(init=False)
    """The line of the metrics; it exists once the update was made or left out."""


class Guard:
    """Watches one thing. The guards of all ranks are called in the same order, so they may
    communicate."""

    def before(self, number: int) -> None:
        """Called before the microbatches of iteration `number` (from 0) are computed."""

    def skips(self, iteration: Iteration) -> bool:
        """True if the update must be left out. Raises where the run must end."""
        return False

    def after(self, iteration: Iteration) -> str:
        """Called after the update; may add to the metrics line. Returns a warning for the user, or
        nothing."""
        return ""

    def before_checkpoint(self) -> None:
        """Called before a checkpoint is written. Raises where the state must not be kept."""
