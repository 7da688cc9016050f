"""Any layout trains like the serial run: same losses, gradients and weights."""

import itertools
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from mlm_repro.engine.config import ModelConfig, ParallelConfig, TrainConfig
from mlm_repro.engine.launch.mesh import build_mesh
from mlm_repro.engine.launch.threads import run_threads
from mlm_repro.engine.model.microbatch import PipelineInput
from mlm_repro.engine.parallel.layout import Layout
from mlm_repro.engine.rng import Dropout
from mlm_repro.engine.step import build_step
from tests.engine.like_serial import Result, assert_like_serial, trained

MODEL = ModelConfig(
    num_layers=8,
    hidden_size=16,
    num_heads=4,
    seq_length=8,
    vocab_size=29,
    padded_vocab_size=32,
    dropout=0.1,
)
TRAIN = TrainConfig(
    iterations=2,
    global_batch_size=8,
    microbatch_size=1,
    learning_rate=1e-2,
    warmup_iterations=1,
    precision="fp64",
)


def train_on(layout: Layout, parallel: ParallelConfig, optimizer_name: str = "adam") -> Result:
    """Two iterations in float64 on fixed data; whole gradients and weights of this rank's
    stages."""
    mesh = build_mesh(layout, parallel.sequence_parallel)
    model, step = build_step(
        MODEL, TRAIN.model_copy(update={"optimizer": optimizer_name}), parallel, mesh
    )
    tokens = np.random.RandomState(0).randint(
        0, MODEL.vocab_size, (TRAIN.iterations, TRAIN.global_batch_size, 9)
    )
    dp = layout.dp
    micro = 2 if TRAIN.global_batch_size // (2 * dp) >= layout.pp else 1

    def batch(iteration: int) -> list[PipelineInput]:
        microbatches = []
        for block in range(0, TRAIN.global_batch_size, micro * dp):
            places = tuple(range(block + mesh.dp.rank * micro, block + (mesh.dp.rank + 1) * micro))
            rows = torch.from_numpy(tokens[iteration, list(places)])
            dropout = Dropout(MODEL.dropout, TRAIN.seed, iteration, places)
            microbatches.append(PipelineInput(rows[:, :-1], rows[:, 1:], dropout))
        return microbatches

    return trained(model, step, TRAIN, batch)


@cache
def serial() -> Result:
    return run_threads(train_on, 1, Layout(), ParallelConfig())[0]


def layouts() -> Iterator[Any]:
    """tp 1, 2, 4 × pp 1, 2, 4 × dp 1, 2 up to 8 ranks, with every schedule, chunks and
    recomputation among them."""
    divided = itertools.cycle((True, False))
    sharded = itertools.cycle((True, True, False))
    recomputations = itertools.cycle(("none", "full", "selective"))
    for tp, pp, dp in itertools.product((1, 2, 4), (1, 2, 4), (1, 2)):
        if tp * pp * dp > 8:
            continue
        schedules = ("1f1b",) if pp == 1 else ("gpipe", "1f1b", "interleaved")
        for schedule in schedules:
            chunks = 2 if schedule == "interleaved" else 1
            recompute = next(recomputations)
            parallel = ParallelConfig(
                tp=tp,
                pp=pp,
                chunks=chunks,
                schedule=schedule,
                recompute=recompute,
                recompute_layers=1 + dp % 2,
                sequence_parallel=next(divided),
                shard_optimizer=next(sharded),
            )
            extras = ("-sp" if parallel.sequence_parallel else "") + (
                "-zero" if parallel.shard_optimizer else ""
            )
            name = f"tp{tp}-pp{pp}-dp{dp}-{schedule}{chunks}-{recompute}{extras}"
            yield pytest.param(Layout(tp=tp, pp=pp, dp=dp), parallel, id=name)


@pytest.mark.parametrize(("layout", "parallel"), list(layouts()))
def test_layout_equals_serial(layout: Layout, parallel: ParallelConfig) -> None:
    ranks = run_threads(train_on, layout.world_size, layout, parallel)
    assert_like_serial(ranks, serial())
