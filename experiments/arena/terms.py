"""What planners are asked and answer. Imports no torch."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from experiments.simulator.measurements import Measured
from experiments.simulator.workload import Workload


class Guess(NamedTuple):
    """What a planner says of one workload; what it says nothing of is nan or None."""

    preference: tuple[float, ...]
    """The layout with the largest is recommended; of equal ones any."""
    seconds: float = math.nan
    low: float = math.nan
    high: float = math.nan
    fits: bool | None = None
    memory_gib: float = math.nan
    otherwise: "Guess | None" = None
    """Of a run that stalls where this foresees none, or does not where it does."""


class DataSet(NamedTuple):
    """Measured configurations; every part is predicted by what is known of the others."""

    name: str
    cluster: str
    rows: Sequence[Measured]
    part: Callable[[Workload], object]
    """What is left out together, such as a model's size; None for a row that is predicted by constants as shipped."""


Guesses = Callable[[str, Sequence[Measured], Sequence[Workload]], list[Guess]]
