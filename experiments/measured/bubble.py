"""Bubble and activations in flight of a schedule, counted by logical clocks in the engine's
pipeline.

A message carries its sender's time in units of a forward pass (Lamport, 1978), so the counts show
the cost of the order in which the executor computes and sends.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mlm_repro.engine.config import ModelConfig, ScheduleName
from mlm_repro.engine.launch.forked import run_forked
from mlm_repro.engine.launch.mesh import build_mesh
from mlm_repro.engine.model.microbatch import PipelineInput
from mlm_repro.engine.parallel.layout import Layout
from mlm_repro.engine.parallel.mesh import ParallelMesh
from mlm_repro.engine.pipeline.executor import PipelineExecutor
from mlm_repro.engine.pipeline.lowering import lower
from mlm_repro.engine.pipeline.schedule import compute_orders
from mlm_repro.experiments.catalogue import Experiment
from mlm_repro.experiments.published import position, workload_rows
from mlm_repro.experiments.sealed import Line, lines
from mlm_repro.experiments.simulator.measurements import workload_of
from mlm_repro.lineage.progress import announce

FORWARD = 1
"""Units of time that a chunk's forward pass takes."""
BACKWARD = 2
"""Units of time that a chunk's backward pass takes."""
MOST_RANKS = 32
"""Largest pipeline that is measured on one machine."""
CONFIG = ModelConfig(
    num_layers=8,
    hidden_size=4,
    num_heads=1,
    seq_length=2,
    vocab_size=8,
    padded_vocab_size=8,
    dropout=0.0,
)


class Clock:
    """A rank's logical time, `units`, a whole number of a chunk's forward passes that includes
    waiting, and its present and largest number of activations in flight, `in_flight` and `peak`;
    all begin at 0. The method `pass_on` sets the time to the one that a received tensor carries, if
    that is later, adds the units of a pass and returns a tensor that carries the new time; a Tick
    calls it and changes the counts too."""

    def __init__(self) -> None:
        self.units = 0
        self.in_flight = 0
        self.peak = 0

    def pass_on(self, units: int, arrived: Tensor) -> Tensor:
        """Advance the clock to the time that the tensor `arrived` carries, if that is later, then
        by `units`. Return a tensor of the same shape, all of whose elements are the new time."""
        self.units = max(self.units, int(arrived.max())) + units
        return torch.full_like(arrived, self.units)


class Tick(torch.autograd.Function):
    """An operation of autograd on a rank's Clock and on a tensor whose elements carry a time, the
    sender's. Instead of computing, its forward and its backward pass advance the clock to that
    time, if it is later, and by the length of the pass, and return a tensor that carries the new
    time. Between the two passes the clock counts one more activation in flight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, clock: Clock) -> Tensor:
        """Advance `clock` to the time that the tensor `x` carries, if that is later, and by a
        forward pass, and count one more activation in flight. Return a tensor of the same shape
        that carries the new time."""
        ctx.clock = clock
        clock.in_flight += 1
        clock.peak = max(clock.peak, clock.in_flight)
        return clock.pass_on(FORWARD, x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Advance the clock of the forward pass to the time that `gradient` carries, if that is
        later, and by a backward pass, and count one activation less in flight. Return a gradient
        that carries the new time, and None for the clock."""
        ctx.clock.in_flight -= 1
        return ctx.clock.pass_on(BACKWARD, gradient), None


class TimedStage(nn.Module):
    """Stand-in for a pipeline stage in the executor: instead of computing, its passes advance
    `clock`, and its states carry the time to the next stage."""

    def __init__(self, is_first: bool, clock: Clock) -> None:
        super().__init__()
        self.config = CONFIG
        self.is_first = is_first
        self.clock = clock
        # Added to every input, so that autograd runs backward through every stage.
        self.offset = nn.Parameter(torch.zeros(CONFIG.hidden_size))

    def run_stage(self, inputs: Tensor, batch: PipelineInput) -> Tensor:
        """Advance the clock to the time that `inputs` carry, if that is later, and then by the
        length of a forward pass; return states [s, b, h] that carry the new time. The first stage
        gets tokens and begins at its own time. `batch` is not used."""
        if self.is_first:
            inputs = torch.zeros(CONFIG.seq_length, len(inputs), CONFIG.hidden_size)  # [s, b, h]
        hidden: Tensor = Tick.apply(inputs + self.offset, self.clock)
        return hidden

    def batch_loss(self, hidden: Tensor, batch: PipelineInput) -> Tensor:
        """Return the mean of the states `hidden`, a scalar from which backward can start; `batch`
        is not used."""
        return hidden.mean()


def run_schedule(name: ScheduleName, pp: int, chunks: int, counts: Sequence[int]) -> list[Clock]:
    """Run an iteration by the schedule `name` for each number of microbatches in `counts`, on this
    rank of a pipeline of `pp` ranks with `chunks` stages on each. Return a list of this rank's
    Clocks, one for each number, in that order: at the iteration's end, `units` is the rank's
    logical time with waiting, `peak` the largest number of activations that its stages together had
    in flight. The stages compute nothing; their passes advance the Clock. All `pp` ranks call
    this."""
    mesh = build_mesh(Layout(pp=pp))
    clocks = []
    for count in counts:
        clock = Clock()
        stages = [TimedStage(mesh.pp.rank == chunk == 0, clock) for chunk in range(chunks)]
        run_stages(stages, mesh, name, count)
        clocks.append(clock)
    return clocks


def run_stages(
    stages: list[Any], mesh: ParallelMesh, name: ScheduleName, count: int, sequences: int = 1
) -> None:
    """Run the forward and backward passes of one iteration through `stages`, a list of this rank's,
    one for each chunk, by the schedule `name`, on `count` microbatches of `sequences` sequences,
    whose tokens are all 1. Nothing is returned: gradients are added to the parameters', and no
    optimizer step follows. All ranks of the pipeline call this."""
    tokens = torch.ones(sequences, stages[0].config.seq_length, dtype=torch.long)
    orders = compute_orders(name, mesh.pp.size, len(stages), count)
    program = lower(orders, len(stages)).programs[mesh.pp.rank]
    PipelineExecutor(stages, mesh, False, [PipelineInput(tokens, tokens)] * count).run(program)


SCHEDULES: dict[str, tuple[ScheduleName, int, int, int]] = {
    "all forward, all backward": ("gpipe", 4, 1, 8),
    "default": ("1f1b", 4, 1, 8),
    "interleaved": ("interleaved", 4, 2, 8),
    "default, 175B": ("1f1b", 8, 1, 64),
    "interleaved, 175B": ("interleaved", 8, 3, 64),
}
"""Schedule, number of stages p, of chunks v and of microbatches m, by name of the series: of the
2021 paper's Figures 3 and 4 and of the 2022 paper's GPT-3 (Table 3)."""


def measure_schedules() -> list[Line]:
    """Run each of `SCHEDULES` with logical clocks and return a list of lines, dicts with a record's
    fields: the schedule's bubble fraction, its peak number of microbatches in flight on the first
    rank (a chunk counts as a fraction of a stage), that peak as a share of the stages, and the
    default schedule's bubble over the interleaved one's. Starts processes; raises RanksFailed if
    one fails or takes 300 seconds."""
    announce("pipelines of 4 and 8 processes with logical clocks")
    numbers = []
    fractions = {}
    for series, (name, pp, chunks, count) in SCHEDULES.items():
        ranks = [clock for (clock,) in run_forked(run_schedule, pp, name, pp, chunks, [count])]
        ideal = count * chunks * (FORWARD + BACKWARD)
        peak = ranks[0].peak / chunks
        fractions[series] = max(rank.units for rank in ranks) / ideal - 1
        values = {
            "bubble_fraction": fractions[series],
            "microbatches_in_flight": peak,
            "layers_in_flight_share": peak / pp,
        }
        note = (
            f"{pp} processes with logical clocks, schedule {name}, {chunks} chunks, {count}"
            " microbatches"
        )
        numbers += lines(series, values, note=note)
    reduction = {"bubble_reduction": fractions["default"] / fractions["interleaved"]}
    return numbers + lines("interleaved", reduction, note="of the bubbles above")


def measure_bubbles(experiment: Experiment) -> list[Line]:
    """Run the experiment's pipelines of up to `MOST_RANKS` ranks with logical clocks and return a
    list of lines, dicts with a record's fields, with the bubble of each. Larger pipelines are left
    out. Starts processes; raises RanksFailed if one fails or takes 300 seconds.

    The schedule is 1F1B, and the bubble is (slowest rank's time) / (m · (t_f + t_b)) − 1 with m
    microbatches. For an experiment's part that computes a `bubble_share`, the schedule is GPipe's,
    and the same idle time is given as a share of the whole.
    """
    numbers = []
    for part in experiment.parts:
        name = "gpipe" if "bubble_share" in part.computed else "1f1b"
        rows = defaultdict(list)
        for row in workload_rows(part.workloads):
            if int(row["pp"]) <= MOST_RANKS:
                rows[int(row["pp"])].append(row)
        announce(f"pipelines of {', '.join(map(str, rows))} processes with logical clocks")
        for pp, of_width in rows.items():
            counts = [
                int(row.get("microbatches") or workload_of(row).microbatches) for row in of_width
            ]
            ranks = run_forked(run_schedule, pp, name, pp, 1, counts)
            note = f"{pp} processes with logical clocks, schedule {name}"
            for row, count, *clocks in zip(of_width, counts, *ranks, strict=True):
                slowest = max(clock.units for clock in clocks)
                bubble = slowest / (count * (FORWARD + BACKWARD)) - 1
                if name == "gpipe":
                    bubble /= 1 + bubble
                values = {part.computed[0]: bubble}
                numbers += lines(values=values, note=note, **position(part, row))
    return numbers
