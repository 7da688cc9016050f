"""Learning rate as a function of the clock of a training. Imports no torch."""

import math

from mlm_repro.engine.batch_schedule import BatchSchedule
from mlm_repro.engine.config import TrainConfig


def clock(train: TrainConfig, updates: int, samples: int) -> float:
    """Return as a number the time from which the learning rate of an update follows, in the unit
    that `train.clock` names: the number of updates including this one, or the number of samples
    before it divided by the global batch size. `updates` and `samples` count what came before it.

    Megatron-LM calls it `num_steps` (`optimizer_param_scheduler.py`, there in samples).
    """
    return updates + 1 if train.clock == "updates" else samples / train.global_batch_size


def end_of_schedule(train: TrainConfig) -> float:
    """Return as a number the time at which the learning rate's schedule ends, counted in updates
    or, with `train.clock` = samples, in samples divided by the global batch size: the end of the
    training unless `train.decay_iterations` names another."""
    if train.decay_iterations or train.clock == "updates":
        return train.decay_iterations or train.iterations
    # With a growing batch the training has fewer samples than iterations × batch.
    return BatchSchedule(train).samples_before(train.iterations) / train.global_batch_size


def learning_rate(train: TrainConfig, time: float) -> float:
    """Return the learning rate at `time`, which the function `clock` gives: the number of updates,
    this one included, or, with `train.clock` = samples, that of the samples before it divided by
    the global batch size. Linear warm-up, then one fall towards the floor,
    `train.min_learning_rate`, or none (`constant`).

    With w warm-up steps of N, all in this unit, n the time, and peak and floor rates; after N
    `clipped-cosine` and `exponential` keep their last rate, and the others with a fall give the
    floor:

    - `clipped-cosine`: max(peak/2·(1 + cos(π(min(n, N − w) − w)/N)), floor), the code of 2019.
    - `cosine`: floor + (peak − floor)/2·(1 + cos(π(n − w)/(N − w))), Megatron-LM since v2.
    - `linear`: a straight line from peak to floor, as for BERT.
    - `inverse-square-root`: max(peak·√(w/n), floor), with w and n at least one update or, in this
      unit, one sample.
    - `WSD`: the peak, and in the last d steps of N a fall by its own form. `WSD` and
      `inverse-square-root` follow `optimizer_param_scheduler.py` of Megatron-Core 0.16.
    - `exponential`: a rise from floor to peak by equal factors, without a warm-up.
    """
    peak = train.learning_rate
    floor = train.min_learning_rate
    warmup = train.warmup_iterations
    end = end_of_schedule(train)
    if train.decay == "exponential":
        # From time 1, the first update, whose rate is the floor.
        return floor * (peak / floor) ** (min(time - 1, end - 1) / max(end - 1, 1))
    if warmup and time <= warmup:
        return peak * time / warmup
    if train.decay == "constant":
        return peak
    if train.decay == "clipped-cosine":
        # As the code of 2019 bounds it (`AnnealingLR.get_lr`), so that its cosine never comes to
        # its end.
        time = min(time, end - warmup)
        return max(peak / 2 * (1 + math.cos(math.pi * (time - warmup) / end)), floor)
    if time > end:
        return floor
    if train.decay == "inverse-square-root":
        # One update or one sample, because the root of w/n is infinite at time 0.
        least = 1 / train.global_batch_size if train.clock == "samples" else 1
        return max(peak * math.sqrt(max(warmup, least) / max(time, least)), floor)
    return floor + (peak - floor) * _share_left(train, time, end)


def _share_left(train: TrainConfig, time: float, end: float) -> float:
    """Return the share, from 1 to 0, of the learning rate's way from floor to peak that is left at
    `time`, which is at most `end`, the end of the schedule, both counted as `clock` does. The fall
    has the form of `train.decay`, linear or cosine, and takes the time from the end of the warm-up
    to `end`. With WSD it has the form of `train.wsd_decay` and takes the last
    `train.wsd_iterations` alone. The share is 1 before the fall and 0 at `end`."""
    length = train.wsd_iterations or end - train.warmup_iterations
    done = max(time - (end - length), 0) / length
    form = train.wsd_decay if train.decay == "WSD" else train.decay
    if form == "exponential":
        # Megatron-Core's form, shifted so that it ends at 0.
        return 2 * 0.5**done - 1
    if form == "minus_sqrt":
        return 1 - math.sqrt(done)
    return 1 - done if form == "linear" else (1 + math.cos(math.pi * done)) / 2
