"""Programs that train a model on some ranks, each in processes of its own: this engine in a layout, and nanoGPT."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from engine.config import ParallelConfig
from engine.formats.peers import NanoGPTModel, adamw, their_weights
from engine.guard.memory import PeakMemory
from engine.launch.forked import run_forked
from engine.launch.local import keep_large_buffers
from engine.launch.mesh import build_mesh, local_device
from engine.launch.threads import RanksFailed
from engine.model.gpt2 import GPT2
from engine.parallel.layout import Layout
from engine.parallel.mesh import serial_mesh
from experiments.iterations import Step, TrainingSize, our_step
from lineage.errors import UserError
from lineage.progress import Progress

K = TypeVar("K")


@dataclass(frozen=True)
class Timed:
    """Timed iterations of one round, in processes of their own."""

    seconds: list[float]
    """Time of every iteration after the warm-up."""
    losses: list[float]
    """Losses of every iteration."""
    peak_bytes: int = 0
    """Memory of the first rank."""


@dataclass(frozen=True)
class OurLayout:
    """This engine in one layout."""

    name: str
    ranks: int = 1
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    microbatches: int = 1
    """Microbatches of each rank in an iteration."""
    is_tuned: bool = True

    def build(self, size: TrainingSize) -> Step:
        """Return a step of this rank's part of the layout."""
        parallel = self.parallel
        layout = Layout(parallel.tp, parallel.pp, self.ranks // (parallel.tp * parallel.pp))
        mesh = build_mesh(layout, parallel.sequence_parallel)
        return our_step(size, parallel, mesh, self.microbatches)


@dataclass(frozen=True)
class Peer:
    """nanoGPT's model on one rank, with this engine's initial weights, in a loop as such programs write it."""

    name: str
    ranks: int = 1
    is_tuned: bool = True
    """True if it has this engine's allocator setting, and the fused AdamW."""
    is_compiled: bool = False

    def build(self, size: TrainingSize) -> Step:
        """Return a step of the model."""
        network = GPT2(size.model, serial_mesh())
        network.initialize(size.train.seed)
        train, device = size.train, local_device()
        with device:  # a GPU draws the values that are replaced in less time
            model = NanoGPTModel(size.model).train()
        model.load_theirs(their_weights(network))
        parameters = list(model.parameters())
        optimizer = adamw(model, train, fused=self.is_tuned)
        dropouts = [each for each in model.modules() if isinstance(each, torch.nn.Dropout)]
        if self.is_compiled:
            model.compile()
        torch.manual_seed(train.seed)

        def step(iteration: int, dropout: float) -> float:
            for each in dropouts:
                each.p = dropout
            rows = torch.from_numpy(size.batch(iteration)).to(device)
            with torch.autocast(device.type, torch.bfloat16, enabled=train.precision == "bf16"):
                value = model(rows[:, :-1], rows[:, 1:])
            value.backward()
            torch.nn.utils.clip_grad_norm_(parameters, train.clip_gradient)
            optimizer.step()
            optimizer.zero_grad()
            return float(value.item())

        return step


Contender = OurLayout | Peer


def measure_contender(contender: Contender, size: TrainingSize, *how: Any) -> Timed:
    """Run `time_contender` on new ranks and return what the first one gives."""
    timed: Timed = on_ranks(contender.name, contender.ranks, time_contender, contender, size, *how)[0]
    return timed


def time_contender(
    contender: Contender, size: TrainingSize, dropout: float = 0.0, clock: Callable[[], float] = time.perf_counter
) -> Timed:
    """Run the iterations of one round; called on each rank."""
    if contender.is_tuned:
        keep_large_buffers()
    memory = PeakMemory(local_device())
    step = contender.build(size)
    barrier: Callable[[], object] = dist.barrier if contender.ranks > 1 else lambda: None
    seconds, losses = [], []
    for iteration in range(size.train.iterations):
        barrier()
        start = clock()
        losses.append(step(iteration, dropout))
        barrier()
        seconds.append(clock() - start)
    return Timed(seconds[size.warm_up :], losses, memory.bytes())


def in_turn(name: str, rounds: int, measurements: Mapping[K, Callable[[], Any]]) -> dict[K, list[Any]]:
    """Take every measurement in each round, so that other work on the machine falls on each alike."""
    taken: dict[K, list[Any]] = {key: [] for key in measurements}
    with Progress(name, rounds * len(measurements), "measurements") as progress:
        for _ in range(rounds):
            for key, measure in measurements.items():
                taken[key].append(measure())
                progress.advance(1, ", ".join(map(str, key)) if isinstance(key, tuple) else str(key))
    return taken


def on_ranks(name: str, ranks: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Return a function's results on new processes. Raises UserError with the measurement's name if one fails."""
    try:
        return run_forked(function, ranks, *arguments, timeout_seconds=600.0)
    except RanksFailed as error:
        raise UserError(f"{name}: {error.sentence}") from error
