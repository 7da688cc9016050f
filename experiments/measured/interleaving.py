"""The interleaved schedule's gain in pipelines of two processes, by the clock, with the share of communication.

Every turn runs each schedule once at each number of microbatches, one after the other: what slows a turn slows all.
"""

import os
import time

import torch

from engine.config import ModelConfig, ParallelConfig, ScheduleName
from engine.launch.forked import run_forked
from engine.launch.mesh import build_mesh
from engine.model.microbatch import PipelineInput
from engine.parallel.layout import Layout
from engine.pipeline.executor import PartitionedModel, PipelineExecutor
from engine.pipeline.lowering import lower
from engine.pipeline.schedule import compute_orders, ideal_bubble
from experiments.sealed import Line, lines
from lineage.environment import describe_environment
from lineage.progress import announce

MODEL = ModelConfig(
    num_layers=8, hidden_size=256, num_heads=4, seq_length=128, vocab_size=128, padded_vocab_size=128, dropout=0.0
)
PP, CHUNKS, TURNS = 2, (1, 2, 4), 5
MICROBATCHES = (2, 4, 6, 8, 10)
"""The 2021 paper's Figure 12 has as many for each stage."""
NAMES: dict[int, ScheduleName] = {chunks: "interleaved" if chunks > 1 else "1f1b" for chunks in CHUNKS}
Spent = dict[tuple[int, int], list[tuple[float, float]]]
"""Seconds of an iteration, and of these in communication, of each turn, by chunks and microbatches."""


def time_schedules() -> Spent:
    """This rank's time; a turn before the others is not counted."""
    mesh = build_mesh(Layout(pp=PP))
    tokens = torch.arange(MODEL.seq_length)[None] % MODEL.vocab_size
    spent: Spent = {(chunks, count): [] for count in MICROBATCHES for chunks in CHUNKS}
    models = {}
    for chunks in CHUNKS:
        parallel = ParallelConfig(pp=PP, chunks=chunks, schedule=NAMES[chunks])
        models[chunks] = PartitionedModel(MODEL, parallel, mesh, torch.float32, seed=0)
    for _ in range(1 + TURNS):
        for (chunks, count), turns in spent.items():
            program = lower(compute_orders(NAMES[chunks], PP, chunks, count), chunks).programs[mesh.pp.rank]
            executor = PipelineExecutor(models[chunks].chunks, mesh, False, [PipelineInput(tokens, tokens)] * count)
            mesh.world.barrier()
            start, waited = time.monotonic(), mesh.waiting.seconds
            executor.run(program)
            turns.append((time.monotonic() - start, mesh.waiting.seconds - waited))
    return {key: turns[1:] for key, turns in spent.items()}


def measure_interleaving() -> list[Line]:
    """Seconds of an iteration, share of communication and gain in each turn; share and gain by the bubble alone.

    Communication is a rank's waiting for messages, that for the other rank's results included: the mean over ranks.
    """
    announce(f"{TURNS} turns of {len(CHUNKS)} schedules at {len(MICROBATCHES)} numbers of microbatches: some minutes")
    load = os.getloadavg()[0]
    ranks: list[Spent] = run_forked(time_schedules, PP, timeout_seconds=1800)
    machine = describe_environment()
    here = (
        f"{PP} processes of one thread, {MODEL.num_layers} layers of {MODEL.hidden_size}, sequences of "
        f"{MODEL.seq_length}, gloo, fp32, on {machine.cores} cores of {machine.cpu} at a load of {load:.1f} before"
    )
    numbers: list[Line] = []
    for chunks, count in ranks[0]:
        place = {"x": float(count), "x_name": "microbatches"}
        series = f"{chunks} chunks"
        bubble, plain = (ideal_bubble(NAMES[each], PP, each, count) for each in (chunks, 1))
        gain = 100 * ((1 + plain) / (1 + bubble) - 1)
        computed = {"bubble_share": bubble / (1 + bubble), "bubble_gain_percent": gain}
        numbers += lines(series, computed, "computed", **place)
        for turn in range(TURNS):
            seconds, before = (max(rank[each, count][turn][0] for rank in ranks) for each in (chunks, 1))
            shares = [waited / whole for whole, waited in (rank[chunks, count][turn] for rank in ranks)]
            values = {"iteration_seconds": seconds, "communication_share": sum(shares) / PP}
            values |= {"gain_percent": 100 * (before / seconds - 1)} if chunks > 1 else {}
            numbers += lines(series, values, "scaled", seed=turn, note=here, **place)
    return numbers
