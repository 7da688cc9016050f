"""Records the first iterations of an engine's training as a trace."""

import os
from pathlib import Path

import torch

from engine.compare.tensors import Piece
from engine.config import RunConfig
from experiments.verify.engines import Engine, Work
from experiments.verify.parity import ParityLayout
from experiments.verify.traces import Trace, finish_trace, write_rank
from experiments.verify.work import described, engine_class, on_ranks, shared_work
from lineage.atomic import new_directory
from lineage.errors import BadInput
from lineage.progress import announce


def record_trace(
    config: RunConfig, engine: str, layout: str, iterations: int, draws: int, out: Path, dropout: float = 0.0
) -> Trace:
    """Write the trace `out`, with as many further draws. Biases and layer norms are moved from 0 and 1 first.

    Rates are Megatron-Core's, in whichever engine; dropout masks are each engine's own. Raises BadInput where the
    engine cannot run it or `out` is there.
    """
    if os.path.lexists(out):
        raise BadInput(f"{out} exists already: name a new directory")
    kind = engine_class(engine)
    torch.set_num_threads(1)
    with shared_work(config, layout, iterations, dropout, nudges=True) as (work, chosen):
        if engine == "megatron-core" and chosen.shard_optimizer:
            raise BadInput("megatron-core's distributed optimizer reduces parts of gradients alone: leave zero1 out")
        announce(f"{1 + draws} trainings of {iterations} iterations, each on {chosen.world_size} processes")
        with new_directory(out) as directory:
            for draw in range(draws + 1):
                ranks = on_ranks(_record_rank, chosen, kind, work, chosen, draw, directory)
            unnamed = sorted({name for rank in ranks for name in rank})
            setting = f"{config.name}, {chosen.name}, {iterations} iterations"
            trace = Trace(engine=described(engine), precision=config.train.precision, setting=setting, unnamed=unnamed)
            finish_trace(directory, trace)
    return trace


def _record_rank(kind: type[Engine], work: Work, layout: ParityLayout, draw: int, directory: Path) -> list[str]:
    """On a rank: write its part; the parameters without a name."""
    engine = kind(work, layout)
    pieces: list[Piece] = []
    recorder = engine.recorder(pieces.append)
    engine.run(recorder, draw)
    write_rank(directory, draw, int(os.environ["RANK"]), pieces)
    return [name for name, _ in engine.parameters() if recorder.ours(name) is None]
