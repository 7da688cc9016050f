"""The learning-rate finder (Smith 2017, arXiv 1506.01186; fast.ai): its training and its curve.

The rate rises exponentially while the model trains. The finder suggests a tenth of the rate at which the smoothed loss
is lowest, because the loss is about to rise there.
"""

import math
import tempfile
from dataclasses import replace
from pathlib import Path

from engine.run.files import LearningRateSweep
from engine.run.resolved import ResolvedRun
from lineage.environment import describe_environment
from lineage.errors import BadInput
from lineage.files import write_document
from lineage.progress import Progress, announce
from lineage.variables import rank

SMOOTHING = 0.9
"""Decay of the moving average of losses."""
DIVERGED = 1.1
"""The sweep has diverged if the smoothed loss is above the first loss times this."""


NOTES = [
    f"losses are smoothed with a decay of {SMOOTHING}; the sweep ends above {DIVERGED} times the first",
    "the suggestion is a tenth of the rate at which the smoothed loss is lowest",
]


class RateCurve:
    """Loss against learning rate, up to the end of the sweep."""

    def __init__(self) -> None:
        self.rates: list[float] = []
        self.losses: list[float] = []
        self.smoothed: list[float] = []
        """Moving average of losses, without the bias of its start."""
        self._average = 0.0

    def add(self, rate: float, loss: float) -> bool:
        """Add an iteration's rate and loss. Returns True if the sweep has diverged and should end."""
        if not math.isfinite(loss):
            return True
        self._average = SMOOTHING * self._average + (1 - SMOOTHING) * loss
        self.rates.append(rate)
        self.losses.append(loss)
        self.smoothed.append(self._average / (1 - SMOOTHING ** len(self.rates)))
        return self.smoothed[-1] > DIVERGED * self.losses[0]

    @property
    def lowest_rate(self) -> float | None:
        """Rate of the lowest smoothed loss; None if the loss never fell below the first."""
        place = self.smoothed.index(min(self.smoothed)) if self.smoothed else 0
        return self.rates[place] if place else None

    @property
    def suggestion(self) -> float | None:
        """Suggested rate; None if the loss never fell."""
        return self.lowest_rate and self.lowest_rate / 10


def describe_curve(curve: RateCurve, high: float) -> str:
    """The suggestion in words."""
    if curve.suggestion is None:
        return "the loss never fell below that of the first rate: begin lower (--low), or take more iterations"
    end = f"the sweep ended at {curve.rates[-1]:.3g}" if curve.rates[-1] < high * (1 - 1e-9) else "it never diverged"
    lowest = f"the smoothed loss is lowest at {curve.lowest_rate:.3g}"
    return f"suggested learning rate {curve.suggestion:.3g}: {lowest}; {end}"


def suggest_learning_rate(run: ResolvedRun, low: float, high: float, iterations: int, out: Path) -> str:
    """Find the curve, write it as NAME.json in `out` on the first rank, and describe it. Every rank calls it."""
    curve = find_learning_rate(run, low, high, iterations)
    return "" if rank() else f"{describe_curve(curve, high)}\nwritten: {write_curve(out, run, curve)}"


def write_curve(folder: Path, run: ResolvedRun, curve: RateCurve) -> Path:
    """Write the curve as NAME.json and return its path; the report draws it with the benchmarks."""
    train, path = run.config.train, folder / f"{run.config.name}.json"
    folder.mkdir(parents=True, exist_ok=True)
    sweep = LearningRateSweep(
        benchmark="learning-rate", name=run.config.name, optimizer=train.optimizer, seed=train.seed,
        global_batch_size=train.global_batch_size, ranks=run.layout.world_size, rates=curve.rates, losses=curve.losses,
        smoothed=curve.smoothed, lowest_rate=curve.lowest_rate, suggestion=curve.suggestion, notes=NOTES,
        environment=describe_environment(),
    )  # fmt: skip
    write_document(path, sweep)
    return path


def find_learning_rate(run: ResolvedRun, low: float, high: float, iterations: int) -> RateCurve:
    """Train while the rate rises from `low` to `high` over `iterations`, until the loss diverges.

    Model, data, order and optimizer are those of the run, from iteration 0; nothing of the training is kept. Every rank
    calls it and has the result. Raises BadInput for rates that do not rise or fewer than 2 iterations.
    """
    from engine.step import NotFinite
    from engine.train import begun_on_ranks
    from engine.trainer import Trainer

    if not 0 < low < high < float("inf") or iterations < 2:
        raise BadInput(f"no sweep: {iterations} iterations from a rate of {low:g} to {high:g}")
    rates = {"min_learning_rate": low, "learning_rate": high, "warmup_iterations": 0}
    schedule = {"decay": "exponential", "decay_iterations": None, "iterations": iterations}
    settings = rates | schedule | {"skip_spikes": False}
    train = run.config.train.model_copy(update=settings)
    run = replace(run, config=run.config.model_copy(update={"train": train}))
    curve = RateCurve()
    with tempfile.TemporaryDirectory() as folder, begun_on_ranks(run, Path(folder)) as (directory, mesh):
        if mesh.is_first:
            announce(run.describe_work(), "only the losses are kept")
        trainer = Trainer(run, directory, mesh)
        name, quiet = f"{run.config.name}, learning rates", not mesh.is_first
        with Progress(name, iterations, "iterations", quiet=quiet) as progress:
            for iteration in range(iterations):
                try:
                    line, _, _ = trainer.iterate(iteration)
                except NotFinite:
                    break
                if line.skipped:  # fp16, until its loss scale fits
                    continue
                if curve.add(line.learning_rate, line.loss):
                    break
                progress.advance(1, f"lr {line.learning_rate:.2e}, loss {line.loss:.3f}")
    return curve
