"""How much a training computes and about how long that takes here. Imports no torch."""

import time
from pathlib import Path

import numpy as np

from engine.config import RunConfig
from engine.costs import checkpoint_bytes, flops_per_iteration, tokens_trained
from lineage.digest import is_sealed
from lineage.environment import available_cores, list_gpus
from lineage.progress import format_bytes, format_duration

TRAINING_EFFICIENCY = 0.45
"""Share of the measured matrix rate that a training iteration of a twin reaches; only for the estimate of minutes."""
REPEATS = 16
"""Matrix products that the rate is the best of: others at work on the machine disturb some."""


def describe_training(config: RunConfig, ranks: int, iterations_done: int = 0) -> str:
    """What is left to compute; with the time where this machine's own rate gives it: in fp32, a core for each rank."""
    train, share = config.train, 1 - iterations_done / config.train.iterations
    flops_per_token = flops_per_iteration(config.model, train) / (train.global_batch_size * config.model.seq_length)
    flops = flops_per_token * tokens_trained(config.model, train) * share
    work = f"{train.iterations - iterations_done:,} iterations, {flops:.1e} FLOPs on {ranks} ranks"
    if list_gpus() or train.precision != "fp32" or ranks > available_cores():
        return work
    seconds = flops / (matrix_flops_per_second() * TRAINING_EFFICIENCY * ranks)
    return f"{work}, about {format_duration(max(seconds, 1.0))} by the speed of matrix products here"


def describe_disk(config: RunConfig) -> str:
    """What the checkpoints of a run take, one more being written than is kept."""
    count = config.train.keep_checkpoints + 1
    return f"up to {format_bytes(count * checkpoint_bytes(config.model, config.train.precision))} of checkpoints"


def iterations_done(run: Path) -> int:
    """The iteration of the newest checkpoint of a run; 0 if it has none."""
    sealed = (path for path in run.glob("checkpoints/iter_*") if is_sealed(path))
    return max((int(path.name.removeprefix("iter_")) for path in sealed), default=0)


def matrix_flops_per_second() -> float:
    """Of one core: the best of several 512 × 512 fp32 matrix products, by the processor's time."""
    a = np.ones((512, 512), np.float32)
    best = float("inf")
    for _ in range(REPEATS):
        start = time.process_time()
        a @ a
        best = min(best, time.process_time() - start)
    return 2 * 512**3 / best
