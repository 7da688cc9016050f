"""Time of one rank's computation in a layer, the output head and the optimizer. Imports no torch.

Matrix products run at a share of the peak that falls with each of their dimensions; element-wise
operations move bytes. Shapes: b microbatch, s sequence, h hidden, t tensor-parallel ranks, v
vocabulary, as in the papers.
"""

from typing import Any, NamedTuple

import numpy as np

from mlm_repro.experiments.simulator.cluster import Machine
from mlm_repro.experiments.simulator.collectives import tensor_all_reduce_seconds
from mlm_repro.experiments.simulator.workload import Floats, Workloads

HIDDEN_FORWARD, HIDDEN_BACKWARD = 11.0, 17.0
"""Elements moved per element of [s, b, h]: two layer norms (read, write; backward read twice,
write), two dropout-and-add (read twice, write, mask of half an element), in backward two sums of
gradients."""
DIVIDED_FORWARD, DIVIDED_BACKWARD = 10.0, 14.0
"""Elements moved by operations that tensor parallelism divides: GeLU at 4h (read, write; backward
read twice, write), a transpose."""
SCORES_FORWARD, SCORES_BACKWARD = 4.5, 5.5
"""Elements moved per attention score: masked softmax (read, write; backward read twice, write),
dropout with its mask."""
BACKWARD_PRODUCTS = 2.0
"""Products of a linear layer's backward pass over those in its forward pass: gradients of inputs
and of weights."""
ACCUMULATED = 3.0
"""Elements moved per parameter and microbatch: its gradient is read and added to the sum (read,
write)."""
FLASH_BACKWARD = 2.5
"""Products of fused attention's backward pass over its forward pass; backward recomputes the scores
(Dao et al. 2022)."""
LOGITS_BYTES = 24.0
"""Bytes moved per logit: written, converted to fp32, exponentiated, and back."""
OPTIMIZER_BYTES = 40.0
"""Bytes moved per parameter: gradient unscaled and its norm taken, Adam's four inputs and three
outputs, a half-precision copy."""


class Passes(NamedTuple):
    """Seconds of one microbatch's forward pass, and of its backward pass with recomputation,
    through a part of the model on one rank, such as a layer or a stage: each an array of one
    element per workload, or per workload and stage."""

    forward: Any
    backward: Any


def matmul_seconds(machine: Machine, rows: Floats, columns: Floats, depth: Floats) -> Floats:
    """Return the seconds of a matrix product [rows, depth] × [depth, columns]: its 2 · rows ·
    columns · depth operations over the rate that `machine` reaches, which is lower where one of the
    three sizes is small. The sizes are numbers or arrays, and the result is element by element."""
    half = machine.matmul_half_size
    share = rows / (rows + half) * columns / (columns + half) * depth / (depth + half)
    return (
        2
        * rows
        * columns
        * depth
        / (machine.matmul_flops_per_second * machine.matmul_efficiency * share)
    )


def bytes_seconds(machine: Machine, moved_bytes: Floats) -> Floats:
    """Return the seconds of element-wise work that moves this many bytes, a number or an array, by
    the cost model: the bytes over the bandwidth that such work reaches."""
    return moved_bytes / (machine.memory_bytes_per_second * machine.memory_efficiency)


def layer_passes(machine: Machine, w: Workloads) -> Passes:
    """Return a Passes: for each workload the seconds of one transformer layer's forward and
    backward pass on a microbatch, with recomputation, the host's work and the layer's
    tensor-parallel all-reduces, two in each direction (2019 paper, Figure 4). `w` has the workloads
    as columns."""
    tokens = w.b * w.s
    elements = tokens * w.h * machine.element_bytes
    widened = matmul_seconds(machine, tokens, w.f / w.t, w.h)
    narrowed = matmul_seconds(machine, tokens, w.h, w.f / w.t)
    linears = (
        matmul_seconds(machine, tokens, 3 * w.h / w.t, w.h)
        + matmul_seconds(machine, tokens, w.h, w.h / w.t)
        + widened
        + narrowed
    )
    inner = w.width * w.heads / w.t
    read = w.b * w.keys_length
    # queries, keys and values of memory and segment; encoded distances, once for all sequences
    recurrent = (
        matmul_seconds(machine, read, 3 * inner, w.h)
        + matmul_seconds(machine, w.keys_length, inner, w.h)
        + matmul_seconds(machine, tokens, w.h, inner)
        + widened
        + narrowed
    )
    linears = np.where(w.xl == 1, recurrent, linears)
    # By content, and by distance.
    products = matmul_seconds(machine, w.s, w.keys_length, w.width) * (1 + w.xl) + (
        matmul_seconds(machine, w.s, w.width, w.keys_length)
    )
    slower = np.where(
        w.width % 8 == 0, 1.0, machine.matmul_flops_per_second / machine.vector_flops_per_second
    )
    attention = products * slower * w.b * w.heads / w.t
    scores = w.b * w.heads * w.s * w.keys_length / w.t * machine.element_bytes * (1 + w.xl)
    all_reduce = tensor_all_reduce_seconds(machine, w, elements)

    def moved(hidden: float, divided: float) -> Floats:
        return bytes_seconds(machine, elements * (hidden / w.outside + divided / w.t))

    accumulated = bytes_seconds(
        machine, layer_weights(w) / w.t * machine.element_bytes * ACCUMULATED
    )
    flash = (
        2
        * w.b
        * w.s
        * w.s
        * w.h
        / w.t
        / (machine.matmul_flops_per_second * machine.flash_efficiency)
    )
    core = attention + bytes_seconds(machine, scores * SCORES_FORWARD)
    core_backward = 2 * attention + bytes_seconds(machine, scores * SCORES_BACKWARD)
    if machine.fused_attention:
        core, core_backward = (
            np.where(w.xl == 1, *times)
            for times in ((core, flash), (core_backward, FLASH_BACKWARD * flash))
        )
    forward = linears + core + moved(HIDDEN_FORWARD, DIVIDED_FORWARD) + 2 * all_reduce
    backward = (
        BACKWARD_PRODUCTS * linears
        + core_backward
        + moved(HIDDEN_BACKWARD, DIVIDED_BACKWARD)
        + 2 * all_reduce
        + accumulated
        + w.full * forward
        + w.selective * core
    )

    # Megatron-LM's fused kernel takes four matrices of scores at a time (`fused_softmax.py`,
    # `custom_kernel_constraint`).
    host = (
        machine.host_layer_seconds
        + 2 * machine.host_collective_seconds * (w.t > 1)
        + machine.host_softmax_seconds * (w.b * w.heads / w.t % 4 != 0)
    )
    return Passes(
        _overlapped(machine, host, forward), _overlapped(machine, host * (2 + w.full), backward)
    )


def layer_weights(w: Workloads) -> Floats:
    """Return an array with the number of parameters, for each workload, in a whole layer of a GPT-2
    or a Transformer-XL, on all tensor-parallel ranks together, without biases and norms. `w` has
    the workloads as columns."""
    return np.where(w.xl == 1, 5 * w.h * w.width * w.heads + 2 * w.h * w.f, 12 * w.h * w.h)


def head_passes(machine: Machine, w: Workloads) -> Passes:
    """Return a Passes: for each workload the seconds that a microbatch's output layer takes forward
    and backward: logits, cross-entropy, and half of the host's work per microbatch in each pass.
    `w` has the workloads as columns."""
    tokens = w.b * w.s
    product = matmul_seconds(machine, tokens, w.v / w.t, w.h)
    moved = bytes_seconds(machine, tokens * w.v / w.t * LOGITS_BYTES) / 2
    host = machine.host_microbatch_seconds / 2
    return Passes(product + moved + host, 2 * product + moved + host)


def optimizer_seconds(machine: Machine, parameters: Floats) -> Floats:
    """Return the seconds of one step of Adam over this number of a rank's parameters, a number or
    an array with one element per workload."""
    return bytes_seconds(machine, parameters * OPTIMIZER_BYTES)


def _overlapped(machine: Machine, host: Floats, device: Floats) -> Floats:
    power = machine.host_exponent
    largest = np.maximum(host, device)
    # With the larger time taken out, no power of a small number underflows.
    return largest * ((host / largest) ** power + (device / largest) ** power) ** (1 / power)
