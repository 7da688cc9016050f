"""What watches a training run: each guard sees every iteration before and after its update. Imports no torch.

`engine/guard/guards.py` is the list of them, and all that the trainer knows.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lineage.files import Step

if TYPE_CHECKING:
    from engine.model.microbatch import PipelineInput
    from engine.step import Gradient


@dataclass
class Iteration:
    """What a guard is shown of one iteration."""

    number: int
    """From 0."""
    batch_size: int
    """Sequences over all ranks."""
    microbatches: "Sequence[PipelineInput]"
    """This rank's."""
    gradient: "Gradient"
    line: Step = field(init=False)
    """What the metrics say of it, once the update was made or left out."""


class Guard:
    """Watches one thing. The guards of all ranks are called in the same order, so they may communicate."""

    def before(self, number: int) -> None:
        """Before the microbatches of iteration `number` (from 0) are computed."""

    def skips(self, iteration: Iteration) -> bool:
        """Whether the update must be left out. Raises where the run must end."""
        return False

    def after(self, iteration: Iteration) -> str:
        """After the update; may add to the metrics line. Returns a warning for the user, or nothing."""
        return ""

    def before_checkpoint(self) -> None:
        """Before a checkpoint is written. Raises where the state must not be kept."""
