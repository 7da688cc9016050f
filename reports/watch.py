"""A training run on the terminal, while it goes on: what its files say, and nothing else."""

import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from lineage.errors import BadInput
from lineage.run import RunDirectory
from reports.numbers import MISSING, duration, show
from reports.training_runs import METRICS, Training, read_training

REFRESH_SECONDS = 2.0
RECENT = 50
"""Iterations that the rate and the time left are reckoned from."""
SILENT_SECONDS = 60.0
"""A run that has written nothing for so long, and for ten iterations, may have stopped."""
BARS = "▁▂▃▄▅▆▇█"
SPARKLINE = 40


@dataclass(frozen=True)
class View:
    """A run at one moment."""

    name: str
    iterations: int
    """Planned."""
    training: Training
    is_complete: bool
    silent_seconds: float
    """Since the last line was written."""

    @property
    def done(self) -> int:
        """Iterations."""
        return self.training.steps[-1].iteration if self.training.steps else 0

    @property
    def iteration_seconds(self) -> float | None:
        """Median over the recent iterations."""
        recent = self.training.steps[-RECENT:]
        return median(step.seconds for step in recent) if recent else None

    @property
    def left_seconds(self) -> float | None:
        """Until the last iteration ends, at the recent rate; validations come on top."""
        each = self.iteration_seconds
        return None if each is None else each * (self.iterations - self.done)

    @property
    def state(self) -> str:
        """In words."""
        if self.is_complete:
            return "complete"
        if self.silent_seconds > max(SILENT_SECONDS, 10 * (self.iteration_seconds or 0)):
            return f"nothing written for {duration(self.silent_seconds)}: stopped, or in a long iteration"
        return "training" if self.training.steps else "starting"


def watch(directory: Path) -> None:
    """Show a run until it is complete, or once if it is, or if standard output is no terminal.

    Raises BadInput where there is no training run, IntegrityFailure where its manifest is damaged.
    """
    console = Console(file=sys.__stdout__)  # it moves the cursor, which `run_command` lets nothing else do
    view = look_at(directory)
    if view.is_complete or not console.is_terminal:
        console.print(render_view(view))
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with Live(render_view(view), console=console, auto_refresh=False) as live:
            while not view.is_complete:
                time.sleep(REFRESH_SECONDS)
                view = look_at(directory)
                live.update(render_view(view), refresh=True)
    except KeyboardInterrupt:
        pass


def look_at(directory: Path) -> View:
    """The run as its files have it now."""
    if not directory.exists():
        begun = sorted(path.name for path in directory.parent.glob(f"{directory.name}-*") if path.is_dir())
        others = f"; there {'are' if len(begun) > 1 else 'is'} {', '.join(begun)}" if begun else ""
        raise BadInput(f"there is no run at {directory}{others}")
    run = RunDirectory.open(directory)
    manifest = run.manifest
    train: Any = manifest.get("config", {}).get("train", {}) if isinstance(manifest.get("config"), dict) else {}
    if manifest.get("kind") != "training" or not isinstance(train.get("iterations"), int):
        raise BadInput(f"{directory} is not a training run but {manifest.get('kind', 'nothing that is known')!s}")
    metrics = run.path / METRICS
    written = (metrics if metrics.is_file() else run.path).stat().st_mtime
    training = read_training(run.path, run.path.name)
    return View(run.path.name, train["iterations"], training, run.is_complete, max(time.time() - written, 0.0))


def render_view(view: View) -> RenderableType:
    """What is shown of it."""
    steps, validations = view.training.steps, view.training.validations
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True)

    def row(name: str, value: str, more: RenderableType = "") -> None:
        table.add_row(Text(name), Text(value), more)

    row("iteration", f"{view.done:,} of {view.iterations:,}", ProgressBar(view.iterations, view.done, SPARKLINE))
    if steps:
        last, recent = steps[-1], steps[-RECENT:]
        row("training loss", show(last.loss), sparkline([step.loss for step in steps]))
        if validations:
            newest = validations[-1]
            curve = sparkline([validation.perplexity for validation in validations])
            row("validation perplexity", show(newest.perplexity), f"{curve} after {newest.iteration:,}")
        row("gradient norm", MISSING if last.gradient_norm is None else show(last.gradient_norm))
        row("learning rate", f"{last.learning_rate:.2e}")
        rate, tflops = (fmean(getattr(s, name) for s in recent) for name in ("tokens_per_second", "model_tflops"))
        row("rate", f"{rate:,.0f} tokens/s", f"{tflops:.3g} TFLOP/s, {show(view.iteration_seconds)} s an iteration")
    if view.is_complete and view.training.summary:
        row("time", duration(view.training.summary.train_seconds))
    elif steps:
        row("time left", duration(view.left_seconds))
    remarks = [Text(problem.sentence, style="italic") for problem in view.training.problems]
    return Group(Text(f"{view.name}: {view.state}", style="bold"), table, *remarks)


def sparkline(values: Sequence[float], width: int = SPARKLINE, scale: tuple[float, float] | None = None) -> str:
    """Means of equal stretches as bars on `scale`, by default from the least to the greatest; empty for nothing."""
    count = min(width, len(values))
    edges = [len(values) * place // count for place in range(count + 1)] if count else []
    means = [fmean(values[start:end]) for start, end in pairwise(edges)]
    low, high = scale or (min(means, default=0.0), max(means, default=0.0))
    return "".join(BARS[round((mean - low) / (high - low) * (len(BARS) - 1))] if high > low else "▄" for mean in means)
