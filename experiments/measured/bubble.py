"""Bubble and activations in flight of a schedule, measured in the engine's pipeline with stages that sleep.

A message carries the time at which its sender had slept enough to send it. So the cost of the schedule is separated
from the time that this machine takes to wake up processes and to carry messages.
"""

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from engine.config import ModelConfig, ScheduleName
from engine.launch.forked import run_forked
from engine.launch.mesh import build_mesh
from engine.model.microbatch import PipelineInput
from engine.parallel.layout import Layout
from engine.pipeline.executor import PipelineExecutor
from engine.pipeline.lowering import lower
from engine.pipeline.schedule import compute_orders
from experiments.catalogue import Experiment
from experiments.published import position, workload_rows
from experiments.sealed import Line, lines
from experiments.simulator.measurements import workload_of
from lineage.progress import Progress, announce

FORWARD, BACKWARD = 1, 2
"""Units of sleep that a chunk's passes take."""
UNIT_SECONDS = 0.001
MOST_RANKS = 32
"""Largest pipeline that is measured on one machine."""
CONFIG = ModelConfig(
    num_layers=8, hidden_size=4, num_heads=1, seq_length=2, vocab_size=8, padded_vocab_size=8, dropout=0.0
)


class Clock:
    """A rank's time in units of sleep, waiting included, and its activations in flight."""

    def __init__(self) -> None:
        self.units, self.in_flight, self.peak, self.unit_seconds = 0, 0, 0, 0.0

    def sleep(self, units: int, arrived: torch.Tensor) -> torch.Tensor:
        """Sleep once the message `arrived`; the message to pass on, of the same shape."""
        self.units = max(self.units, int(arrived.max())) + units
        time.sleep(units * self.unit_seconds)
        return torch.full_like(arrived, self.units)


class Sleep(torch.autograd.Function):
    """Sleeps forward and backward; in between an activation is in flight."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, clock: Clock) -> torch.Tensor:
        """Sleep for a forward pass."""
        ctx.clock = clock
        clock.in_flight += 1
        clock.peak = max(clock.peak, clock.in_flight)
        return clock.sleep(FORWARD, x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Sleep for a backward pass."""
        ctx.clock.in_flight -= 1
        return ctx.clock.sleep(BACKWARD, gradient), None


class SleepingStage(nn.Module):
    """A pipeline stage for the executor that sleeps instead of computing."""

    def __init__(self, is_first: bool, clock: Clock) -> None:
        super().__init__()
        self.config, self.is_first, self.clock = CONFIG, is_first, clock
        self.offset = nn.Parameter(torch.zeros(CONFIG.hidden_size))

    def run_stage(self, inputs: torch.Tensor, batch: PipelineInput) -> torch.Tensor:
        """Sleep once the input is there."""
        if self.is_first:
            inputs = torch.zeros(CONFIG.seq_length, len(inputs), CONFIG.hidden_size)  # [s, b, h]
        hidden: torch.Tensor = Sleep.apply(inputs + self.offset, self.clock)
        return hidden

    def batch_loss(self, hidden: torch.Tensor, batch: PipelineInput) -> torch.Tensor:
        """Any scalar of the states."""
        return hidden.mean()


class Slept(NamedTuple):
    """One rank's iteration."""

    units: int
    """Units slept and waited for, by the times in messages."""
    seconds: float
    """Wall-clock time."""
    peak: int
    """Most activations in flight."""
    left: int
    """Activations still in flight at the end."""


def run_schedule(
    name: ScheduleName, pp: int, chunks: int, counts: Sequence[int], unit_seconds: float = UNIT_SECONDS
) -> list[Slept]:
    """One iteration of this rank of `pp` for each number of microbatches, its seconds counted from a barrier."""
    mesh = build_mesh(Layout(pp=pp))
    clock = Clock()
    stages: list[Any] = [SleepingStage(mesh.pp.rank == chunk == 0, clock) for chunk in range(chunks)]
    tokens = torch.ones(1, CONFIG.seq_length, dtype=torch.long)
    slept = []
    for count in counts:
        program = lower(compute_orders(name, pp, chunks, count), chunks).programs[mesh.pp.rank]
        microbatches = [PipelineInput(tokens, tokens)] * count
        clock.unit_seconds = 0.0
        PipelineExecutor(stages, mesh, False, microbatches).run(
            program
        )  # makes connections and threads before the clock starts
        clock.units, clock.peak, clock.unit_seconds = 0, 0, unit_seconds
        mesh.world.barrier()
        start = time.monotonic()
        PipelineExecutor(stages, mesh, False, microbatches).run(program)
        slept.append(Slept(clock.units, time.monotonic() - start, clock.peak, clock.in_flight))
    return slept


SCHEDULES: dict[str, tuple[ScheduleName, int, int, int]] = {
    "all forward, all backward": ("gpipe", 4, 1, 8),
    "default": ("1f1b", 4, 1, 8),
    "interleaved": ("interleaved", 4, 2, 8),
    "default, 175B": ("1f1b", 8, 1, 64),
    "interleaved, 175B": ("interleaved", 8, 3, 64),
}
"""Schedule, p, v and m of the 2021 paper's Figures 3 and 4 and of the 2022 paper's GPT-3 (Table 3)."""


def measure_schedules() -> list[Line]:
    """Bubble, and most activations in flight in microbatches of the whole stage, of each of `SCHEDULES`."""
    announce("pipelines of 4 and 8 processes whose stages sleep")
    numbers: list[Line] = []
    fractions = {}
    for series, (name, pp, chunks, count) in SCHEDULES.items():
        ranks = [slept for (slept,) in run_forked(run_schedule, pp, name, pp, chunks, [count])]
        ideal, peak = count * chunks * (FORWARD + BACKWARD), ranks[0].peak / chunks
        fractions[series] = max(rank.units for rank in ranks) / ideal - 1
        values = {"bubble_fraction": fractions[series], "microbatches_in_flight": peak,
                  "layers_in_flight_share": peak / pp}  # fmt: skip
        note = f"{pp} processes whose stages sleep, schedule {name}, {chunks} chunks, {count} microbatches"
        numbers += lines(series, values, note=note)
    reduction = {"bubble_reduction": fractions["default"] / fractions["interleaved"]}
    return numbers + lines("interleaved", reduction, note="of the bubbles above")


def bubbles(name: ScheduleName, cases: Sequence[tuple[int, int]]) -> dict[tuple[int, int], float]:
    """(Slowest rank's time) / (m · (t_f + t_b)) − 1 of pipelines of p ranks with m microbatches, by (p, m)."""
    counts = {pp: sorted({count for ranks, count in cases if ranks == pp}) for pp in sorted({pp for pp, _ in cases})}
    announce(f"pipelines of {', '.join(map(str, counts))} processes whose stages sleep")
    measured = {}
    with Progress(name, len(counts), "pipelines") as progress:
        for pp, counted in counts.items():
            ranks = run_forked(run_schedule, pp, name, pp, 1, counted)
            for place, count in enumerate(counted):
                slowest = max(rank[place].units for rank in ranks)
                measured[pp, count] = slowest / (count * (FORWARD + BACKWARD)) - 1
            progress.advance()
    return measured


def measure_bubbles(experiment: Experiment) -> list[Line]:
    """The bubble of the experiment's pipelines, as its own quantity counts it."""
    numbers: list[Line] = []
    for part in experiment.parts:
        rows = [row for row in workload_rows(part.workloads) if int(row["pp"]) <= MOST_RANKS]
        name: ScheduleName = "gpipe" if "bubble_share" in part.computed else "1f1b"
        cases = [(int(row["pp"]), int(row.get("microbatches") or workload_of(row).microbatches)) for row in rows]
        measured = bubbles(name, cases)
        for row, (pp, count) in zip(rows, cases, strict=True):
            to_ideal = measured[pp, count]
            value = {part.computed[0]: to_ideal / (1 + to_ideal) if name == "gpipe" else to_ideal}
            note = f"{pp} processes whose stages sleep, schedule {name}"
            numbers += lines(values=value, note=note, **position(part, row))
    return numbers
