"""The learning-rate finder's curve and what it suggests (Smith 2017, arXiv 1506.01186; fast.ai). Imports no torch.

The rate rises exponentially while the model trains. A tenth of the rate at which the smoothed loss is lowest is
suggested: where it is lowest, the loss is about to rise.
"""

import math
from itertools import pairwise
from pathlib import Path

from engine.config import RunConfig
from lineage.atomic import write_json
from lineage.environment import describe_environment

SMOOTHING = 0.9
"""Decay of the moving average of losses."""
DIVERGED = 1.1
"""A smoothed loss above the first loss times this has diverged."""


def sweep_rate(low: float, high: float, share: float) -> float:
    """The rate at a share of the way from low to high, each step a constant factor."""
    return low * (high / low) ** share


class RateCurve:
    """Loss against learning rate, as far as the sweep got."""

    def __init__(self) -> None:
        self.rates: list[float] = []
        self.losses: list[float] = []
        self.smoothed: list[float] = []
        """Moving average of losses, without the bias of its start."""
        self._average = 0.0

    def add(self, rate: float, loss: float) -> bool:
        """Add an iteration's rate and loss; whether the sweep has diverged and should end."""
        if not math.isfinite(loss):
            return True
        self._average = SMOOTHING * self._average + (1 - SMOOTHING) * loss
        self.rates.append(rate)
        self.losses.append(loss)
        self.smoothed.append(self._average / (1 - SMOOTHING ** len(self.rates)))
        return self.smoothed[-1] > DIVERGED * self.losses[0]

    @property
    def lowest_rate(self) -> float | None:
        """Where the smoothed loss is lowest; None if it never fell below the first."""
        if not self.rates:
            return None
        place = min(range(len(self.rates)), key=lambda index: self.smoothed[index])
        return self.rates[place] if place else None

    @property
    def steepest_rate(self) -> float | None:
        """Where the smoothed loss falls fastest for each factor of the rate; None if it never falls."""
        falls = [
            ((before[1] - after[1]) / math.log(after[0] / before[0]), after[0])
            for before, after in pairwise(zip(self.rates, self.smoothed, strict=True))
            if after[0] > before[0]
        ]
        fastest, rate = max(falls, default=(0.0, 0.0))
        return rate if fastest > 0 else None

    @property
    def suggestion(self) -> float | None:
        """A tenth of the rate at which the smoothed loss is lowest; None if it never fell."""
        return None if self.lowest_rate is None else self.lowest_rate / 10


def describe_curve(curve: RateCurve, high: float) -> str:
    """What the curve suggests, in words."""
    if curve.lowest_rate is None or curve.suggestion is None:
        return "the loss never fell below that of the first rate: begin lower (--low), or take more iterations"
    found = f"the smoothed loss is lowest at {curve.lowest_rate:.3g}, falls fastest at {curve.steepest_rate:.3g}"
    end = f"the sweep ended at {curve.rates[-1]:.3g}" if curve.rates[-1] < high * (1 - 1e-9) else "it never diverged"
    return f"suggested learning rate {curve.suggestion:.3g}: {found}; {end}"


def write_curve(folder: Path, config: RunConfig, curve: RateCurve, ranks: int) -> Path:
    """Write the curve as NAME.json and return its path; the report draws it with the benchmarks."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{config.name}.json"
    write_json(
        path,
        {
            "benchmark": "learning-rate",
            "name": config.name,
            "optimizer": config.train.optimizer,
            "global_batch_size": config.train.global_batch_size,
            "seed": config.train.seed,
            "ranks": ranks,
            "rates": curve.rates,
            "losses": curve.losses,
            "smoothed": curve.smoothed,
            "lowest_rate": curve.lowest_rate,
            "steepest_rate": curve.steepest_rate,
            "suggestion": curve.suggestion,
            "environment": describe_environment(),
            "notes": [
                f"losses are smoothed with a decay of {SMOOTHING}; the sweep ends above {DIVERGED} times the first",
                "the suggestion is a tenth of the rate at which the smoothed loss is lowest",
            ],
        },
    )
    return path
