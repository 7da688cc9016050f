"""A llama's pipeline stages and memory as nanotron of 2024 has them, in closed form. Imports no torch.

Gated MLP, RMSNorm, rotary positions, fused attention, sequence parallelism, bf16 with fp32 sums of gradients.
"""

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from experiments.simulator.workload import Floats, Workload, layer_parameters

HEAD_SHARE = 0.95
"""Weight of the output head, by its parameters, where blocks are dealt to stages: below the 0.967 at which the measured
times of 16 stages of 32 layers say that the head has a stage of its own."""
STATE, OWNED = 8.0, 12.0
"""Bytes of a parameter: bf16 weight and gradient and fp32 sum; fp32 master and two moments, which ZeRO 1 divides."""
LAYER_HIDDEN, LAYER_INNER = 26.0, 8.0
"""Bytes kept of a token per element of h and f: inputs and outputs of norms, queries, keys and values before and after
rotation, attention; gate, up, activation and product."""
BOUNDARY, GATHERED = 4.0, 90.0
"""Bytes per element of [s, b, h] that tensor parallelism does not divide: of a message between stages, and of gathered
inputs that are freed late where the host runs ahead, by as many operations as it can have waiting on the device."""
LOGITS, FORMER = 6.0, 6.0
"""Bytes per logit: bf16 and fp32; of the microbatch before, which is freed after the next has been computed."""
FIXED_BYTES = 0.4e9


@lru_cache(maxsize=4096)
def stage_blocks(w: Workload) -> NDArray[np.int64]:
    """Layers and heads of each stage, [2, p]: a stage ends with the block by which it has its share of parameters."""
    layer, head = layer_parameters(w), HEAD_SHARE * w.vocab * w.hidden
    blocks, reached, stage = np.zeros((2, w.pp), np.int64), 0.0, 0
    for kind in (*[0] * w.layers, 1):
        blocks[kind, stage] += 1
        reached += (layer, head)[kind]
        if reached > (w.layers * layer + head) * (stage + 1) / w.pp and stage < w.pp - 1:
            stage += 1
    return blocks


@lru_cache(maxsize=4096)
def stage_parameters(w: Workload) -> Floats:
    """Parameters that a rank of each stage holds; a tied embedding is held twice where first and last stage differ."""
    layers, heads = stage_blocks(w)
    parameters = layers * layer_parameters(w) + heads * w.vocab * w.hidden * (not w.tied or w.pp > 1)
    parameters[0] += w.vocab * w.hidden
    return np.asarray(parameters / w.tp, np.float64)


def memory_bytes(w: Workload, ahead: float) -> float:
    """Peak memory of the fullest rank; `ahead`, from 0 to 1, tells how far the host runs ahead."""
    layers, heads = stage_blocks(w)
    tokens, stages = w.micro_batch * w.seq, np.arange(w.pp)
    waiting = np.minimum(w.pp - stages, w.microbatches)
    state = stage_parameters(w) * (STATE + OWNED / (w.dp if w.zero else 1))
    per_token = (LAYER_HIDDEN * w.hidden + LAYER_INNER * w.inner) / w.tp
    logits = heads * w.vocab / w.tp * (LOGITS + FORMER * (w.microbatches > 1))
    held = tokens * (waiting * (layers * per_token + BOUNDARY * w.hidden * (stages > 0)) + logits)
    return float((state + held).max() + FIXED_BYTES + ahead * tokens * GATHERED * w.hidden * (1 - 1 / w.tp))
