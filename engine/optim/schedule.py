"""Learning rate against the clock of a training. Imports no torch."""

import math

from mlm_repro.engine.batch_schedule import BatchSchedule
from mlm_repro.engine.config import TrainConfig


def clock(train: TrainConfig, updates: int, samples: int) -> float:
    """The clock at an update, by `train.clock`, from the number of updates before it and the
    samples of those.

    Megatron-LM calls it `num_steps` (`optimizer_param_scheduler.py`, there in samples).
    """
    return updates + 1 if train.clock == "updates" else samples / train.global_batch_size


def end_of_schedule(train: TrainConfig) -> float:
    """The clock at which the schedule ends: that of the end of the training unless
    `decay_iterations` names another."""
    if train.decay_iterations or train.clock == "updates":
        return train.decay_iterations or train.iterations
    return BatchSchedule(train).samples_before(train.iterations) / train.global_batch_size


def learning_rate(train: TrainConfig, time: float) -> float:
    """Rate at `time` of the clock: linear warm-up, then one fall to the minimum, or none.

    With w warm-up steps of N and peak and floor rates:

    - `clipped-cosine`: max(peak/2·(1 + cos(π(min(n, N − w) − w)/N)), floor), the code of 2019.
    - `cosine`: floor + (peak − floor)/2·(1 + cos(π(n − w)/(N − w))), Megatron-LM since v2.
    - `linear`: a straight line from peak to floor, as for BERT.
    - `inverse-square-root`: max(peak·√(w/n), floor).
    - `WSD`: the peak, and in the last d steps of N a fall by its own form. It and the one before
      follow `optimizer_param_scheduler.py` of Megatron-Core 0.16.
    - `exponential`: a rise from floor to peak by equal factors.
    """
    peak, floor = train.learning_rate, train.min_learning_rate
    warmup, end = train.warmup_iterations, end_of_schedule(train)
    if train.decay == "exponential":
        return floor * (peak / floor) ** (min(time - 1, end - 1) / max(end - 1, 1))
    if warmup and time <= warmup:
        return peak * time / warmup
    if train.decay == "constant":
        return peak
    if train.decay == "clipped-cosine":
        time = min(time, end - warmup)
        return max(peak / 2 * (1 + math.cos(math.pi * (time - warmup) / end)), floor)
    if time > end:
        return floor
    if train.decay == "inverse-square-root":
        least = 1 / train.global_batch_size if train.clock == "samples" else 1
        return max(peak * math.sqrt(max(warmup, least) / max(time, least)), floor)
    return floor + (peak - floor) * _share_left(train, time, end)


def _share_left(train: TrainConfig, time: float, end: float) -> float:
    """Share of the way from floor to peak that is left at `time`."""
    length = train.wsd_iterations or end - train.warmup_iterations
    done = max(time - (end - length), 0) / length
    form = train.wsd_decay if train.decay == "WSD" else train.decay
    if form == "exponential":
        return 2 * 0.5**done - 1
    if form == "minus_sqrt":
        return 1 - math.sqrt(done)
    return 1 - done if form == "linear" else (1 + math.cos(math.pi * done)) / 2
