"""Two ways to a learning rate: a sweep (Smith 2017, arXiv 1506.01186; fast.ai) and the fluctuation-dissipation relation
(Yaida 2018, arXiv 1810.00004).

In the sweep the rate rises exponentially while the model trains. The finder suggests a tenth of the rate at which the
smoothed loss is lowest, because the loss is about to rise there. By the relation the rate falls from the first one,
each time that the weights have come to rest in their own noise.
"""

import math
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from mlm_repro.engine.run.files import LearningRateSweep
from mlm_repro.engine.run.resolved import ResolvedRun
from mlm_repro.lineage.environment import describe_environment
from mlm_repro.lineage.errors import BadInput
from mlm_repro.lineage.files import write_document
from mlm_repro.lineage.progress import Progress, announce
from mlm_repro.lineage.variables import rank

SMOOTHING = 0.9
"""Decay of the moving average of losses."""
DIVERGED = 1.1
"""The sweep has diverged if the smoothed loss is above the first loss times this."""
STATIONARY = 0.01
"""The relation holds where both sides are equal up to this share (Yaida's X)."""
LOWERED = 0.1
"""Factor on the rate where the relation holds (Yaida's 1 - Y)."""
CHECKS = 20
"""How often in all iterations the relation is looked at; Yaida looks after each epoch."""
NOTES = [
    f"losses are smoothed with a decay of {SMOOTHING}; the sweep ends above {DIVERGED} times the first",
    "the suggestion is a tenth of the rate at which the smoothed loss is lowest",
]
STATIONARY_NOTES = [
    f"the rate falls by {LOWERED:g} where dissipation and fluctuation agree within {STATIONARY:g} over the latest half",
    "of the iterations at that rate; the suggestion is the last rate",
]


class StationaryRate:
    """A rate that falls where the weights w have become stationary under their updates u.

    Where they are, E|w + u|² = E|w|², so the dissipation -E[w·u] is the fluctuation E|u|²/2, whatever the optimizer. Of
    SGD, u = -ηg, that is Yaida's first relation E[w·g] = η E|g|²/2. Both are averaged over the latest half of the
    iterations at a rate. Without weight decay a network's weights may never come to rest.
    """

    def __init__(self, rate: float, period: int) -> None:
        """Start at a rate, and look at the relation every `period` iterations."""
        self.rate, self.period = rate, period
        self.lowered: list[float] = []
        self._terms: list[tuple[float, float]] = []

    @property
    def ratio(self) -> float:
        """Dissipation over fluctuation: 1 at rest, more while the weights shrink, less while they grow."""
        latest = self._terms[len(self._terms) // 2 :]
        dissipation, fluctuation = (math.fsum(terms) for terms in zip((0.0, 0.0), *latest, strict=True))
        return dissipation / fluctuation if fluctuation else math.inf

    def add(self, dissipation: float, fluctuation: float) -> None:
        """Add an iteration's -w·u and |u|²/2, and lower the rate if it is time and the relation holds."""
        self._terms.append((dissipation, fluctuation))
        if len(self._terms) % self.period == 0 and abs(self.ratio - 1) < STATIONARY:
            self.lowered.append(self.rate)
            self.rate *= LOWERED
            self._terms.clear()

    def describe(self) -> str:
        """The suggestion in words."""
        left = ", ".join(f"{rate:.3g}" for rate in self.lowered)
        reached = f"the weights became stationary at {left}" if left else "the weights never became stationary"
        since = f"dissipation over fluctuation is {self.ratio:.3g}" if self._terms else "nothing was measured"
        return f"suggested learning rate {self.rate:.3g}: {reached}; {since} since"


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


def suggest_learning_rate(
    run: ResolvedRun, low: float, high: float, iterations: int, out: Path, stationary: bool = False
) -> str:
    """Find the rate, write its curve as NAME.json in `out` on the first rank, and describe it. Every rank calls it."""
    falling = StationaryRate(high, max(iterations // CHECKS, 1)) if stationary else None
    curve = find_learning_rate(run, low, high, iterations, falling)
    said = falling.describe() if falling else describe_curve(curve, high)
    return "" if rank() else f"{said}\nwritten: {write_curve(out, run, curve, falling)}"


def write_curve(folder: Path, run: ResolvedRun, curve: RateCurve, falling: StationaryRate | None = None) -> Path:
    """Write the curve as NAME.json and return its path."""
    train, path = run.config.train, folder / f"{run.config.name}.json"
    folder.mkdir(parents=True, exist_ok=True)
    sweep = LearningRateSweep(
        benchmark="learning-rate", name=run.config.name, optimizer=train.optimizer, seed=train.seed,
        global_batch_size=train.global_batch_size, ranks=run.layout.world_size, rates=curve.rates, losses=curve.losses,
        smoothed=curve.smoothed, lowest_rate=curve.lowest_rate,
        suggestion=falling.rate if falling else curve.suggestion, notes=STATIONARY_NOTES if falling else NOTES,
        environment=describe_environment(),
    )  # fmt: skip
    write_document(path, sweep)
    return path


def find_learning_rate(
    run: ResolvedRun, low: float, high: float, iterations: int, falling: StationaryRate | None = None
) -> RateCurve:
    """Train while the rate rises from `low` to `high` over `iterations`, until the loss diverges; or at that of
    `falling`, which is told of every update.

    Model, data, order and optimizer are those of the run, from iteration 0; nothing of the training is kept. Every rank
    calls it and has the result. Raises BadInput for rates that do not rise or fewer than 2 iterations.
    """
    from mlm_repro.engine.step import NotFinite
    from mlm_repro.engine.train import begun_on_ranks
    from mlm_repro.engine.trainer import Trainer

    if not 0 < low < high < float("inf") or iterations < 2:
        raise BadInput(f"no sweep: {iterations} iterations from a rate of {low:g} to {high:g}")
    rates = {"min_learning_rate": low, "learning_rate": high, "warmup_iterations": 0, "wsd_iterations": None}
    decay = "constant" if falling else "exponential"
    settings = rates | {
        "clock": "updates", "decay": decay, "decay_iterations": None, "iterations": iterations, "skip_spikes": False,
    }  # fmt: skip
    run = _with(run, settings)
    curve = RateCurve()
    with tempfile.TemporaryDirectory() as folder, begun_on_ranks(run, Path(folder)) as (directory, mesh):
        if mesh.is_first:
            announce(run.describe_work(), "only the losses are kept")
        trainer = Trainer(run, directory, mesh)
        trainer.prepare()
        name, quiet = f"{run.config.name}, learning rates", not mesh.is_first
        with Progress(name, iterations, "iterations", quiet=quiet) as progress:
            for iteration in range(iterations):
                before = [group.master.clone() for group in trainer.step.optimizer.groups] if falling else []
                try:
                    line, _, _ = trainer.iterate(iteration)
                except NotFinite:
                    break
                if line.skipped:  # fp16, until its loss scale fits
                    continue
                if falling:
                    falling.add(*trainer.step.optimizer.update_moments(before))
                    trainer.config = _with(run, {"learning_rate": falling.rate}).config
                if curve.add(line.learning_rate, line.loss):
                    break
                progress.advance(1, f"lr {line.learning_rate:.2e}, loss {line.loss:.3f}")
    return curve


def _with(run: ResolvedRun, settings: dict[str, Any]) -> ResolvedRun:
    train = run.config.train.model_copy(update=settings)
    return replace(run, config=run.config.model_copy(update={"train": train}))
