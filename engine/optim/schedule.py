"""Learning rate against iteration. Imports no torch."""

import math

from mlm_repro.engine.config import TrainConfig


def learning_rate(train: TrainConfig, step: int) -> float:
    """Rate of optimizer step `step` (the first is 1): linear warm-up, then one fall to the minimum, or none.

    `clipped-cosine`, with w warm-up steps of N: max(peak/2·(1 + cos(π(min(n, N − w) − w)/N)), floor), the code of
    2019. `cosine`: floor + (peak − floor)/2·(1 + cos(π(n − w)/(N − w))), Megatron-LM since v2.
    `linear`: a straight line from peak to floor, as for BERT. `exponential` rises from floor to peak, by equal factors.
    """
    peak, floor = train.learning_rate, train.min_learning_rate
    warmup, end = train.warmup_iterations, train.decay_iterations or train.iterations
    if train.decay == "exponential":
        return floor * (peak / floor) ** (min(step - 1, end - 1) / max(end - 1, 1))
    if step <= warmup:
        return peak * step / warmup
    if train.decay == "constant":
        return peak
    if train.decay == "clipped-cosine":
        step = min(step, end - warmup)
        return max(peak / 2 * (1 + math.cos(math.pi * (step - warmup) / end)), floor)
    if step > end:
        return floor
    if train.decay == "linear":
        return floor + (peak - floor) * (end - step) / (end - warmup)
    return floor + (peak - floor) / 2 * (1 + math.cos(math.pi * (step - warmup) / (end - warmup)))
