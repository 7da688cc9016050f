"""Bubble and activations in flight of each schedule, measured in a run whose stages sleep for a known time.

A message that a stage gets also says when its sender had slept enough to send it, so that the time which the schedule
costs is told apart from the time which this machine takes to wake up processes and to carry messages.
"""

import time
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from engine.config import ModelConfig
from engine.launch.mesh import build_mesh
from engine.model.microbatch import PipelineInput
from engine.parallel.layout import Layout
from engine.pipeline.executor import PipelineExecutor
from engine.pipeline.lowering import lower
from engine.pipeline.schedule import ScheduleName, compute_orders, ideal_bubble, peaks_in_flight
from tests.ranks import run_ranks

PP, MICROBATCHES = 4, 8
FORWARD, BACKWARD = 1, 2
"""Units of sleep that a chunk's passes take."""
UNIT_SECONDS = 0.15
CONFIG = ModelConfig(
    num_layers=8, hidden_size=4, num_heads=1, seq_length=2, vocab_size=8, padded_vocab_size=8, dropout=0.0
)


class Clock:
    """What a rank has slept and waited for, in units, and how many of its activations are in flight."""

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
        ctx.clock = clock
        clock.in_flight += 1
        clock.peak = max(clock.peak, clock.in_flight)
        return clock.sleep(FORWARD, x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.clock.in_flight -= 1
        return ctx.clock.sleep(BACKWARD, gradient), None


class SleepingStage(nn.Module):
    """What the executor needs of a stage, with next to no arithmetic."""

    def __init__(self, is_first: bool, clock: Clock) -> None:
        super().__init__()
        self.config, self.is_first, self.clock = CONFIG, is_first, clock
        self.offset = nn.Parameter(torch.zeros(CONFIG.hidden_size))

    def run_stage(self, inputs: torch.Tensor, batch: PipelineInput) -> torch.Tensor:
        if self.is_first:
            inputs = torch.zeros(CONFIG.seq_length, len(inputs), CONFIG.hidden_size)  # [s, b, h]
        hidden: torch.Tensor = Sleep.apply(inputs + self.offset, self.clock)
        return hidden

    def batch_loss(self, hidden: torch.Tensor, batch: PipelineInput) -> torch.Tensor:
        return hidden.mean()


class Measured(NamedTuple):
    units: int
    seconds: float
    peak: int
    left: int


def run_schedule(name: ScheduleName, chunks: int) -> Measured:
    """One iteration of this rank, its seconds counted from a barrier."""
    mesh = build_mesh(Layout(pp=PP))
    clock = Clock()
    stages = [SleepingStage(mesh.pp.rank == chunk == 0, clock) for chunk in range(chunks)]
    executor = PipelineExecutor(stages, mesh, scatter_gather=False)
    program = lower(compute_orders(name, PP, chunks, MICROBATCHES), chunks).programs[mesh.pp.rank]
    tokens = torch.ones(1, CONFIG.seq_length, dtype=torch.long)
    microbatches = [PipelineInput(tokens, tokens)] * MICROBATCHES
    executor.run(program, microbatches)  # makes connections and threads before the clock starts
    clock.units, clock.peak, clock.unit_seconds = 0, 0, UNIT_SECONDS
    mesh.barrier()
    start = time.monotonic()
    executor.run(program, microbatches)
    return Measured(clock.units, time.monotonic() - start, clock.peak, clock.in_flight)


@pytest.mark.parametrize(("name", "chunks"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2)])
def test_measured_bubble_and_activations_in_flight(name: ScheduleName, chunks: int) -> None:
    """The bubble is (slowest rank's time) / (m · (t_f + t_b)) − 1.

    By what was slept and waited for it is the formula's own value. By the wall clock, to which everything else that
    runs on this machine adds, it is no less.
    """
    formula = ideal_bubble(name, PP, chunks, MICROBATCHES)
    ideal_units = MICROBATCHES * chunks * (FORWARD + BACKWARD)
    ranks = run_ranks(run_schedule, PP, name, chunks)
    assert max(rank.units for rank in ranks) / ideal_units - 1 == pytest.approx(formula)
    bubble = max(rank.seconds for rank in ranks) / (ideal_units * UNIT_SECONDS) - 1
    print(f"{name}: bubble {bubble:.4f} by the wall clock, the formula says {formula:.4f}")
    assert bubble >= formula
    peaks = [rank.peak for rank in ranks]
    assert peaks == peaks_in_flight(name, PP, chunks, MICROBATCHES)
    assert peaks[0] == {"gpipe": MICROBATCHES, "1f1b": PP, "interleaved": 11}[name]
    assert all(rank.left == 0 for rank in ranks)
