"""Time of collectives and messages: latency and bytes over bandwidth, by where the ranks are. Imports no torch.

Ranks count tp fastest, then dp, then pp (`engine/parallel/layout.py`): a tensor-parallel group fills whole nodes first.
"""

import numpy as np

from mlm_repro.experiments.simulator.cluster import Machine
from mlm_repro.experiments.simulator.workload import Floats, Workloads

ADAPTERS_POWER = 8
"""Power of the groups of a node with which the share of adapters in use by gradients rises; from measured times."""


def node_all_reduce_seconds(machine: Machine, ranks: Floats, sent_bytes: Floats) -> Floats:
    """Ring all-reduce of `sent_bytes` among ranks of one node, alone on its links."""
    start = machine.node_latency_seconds + machine.node_rank_latency_seconds * (ranks - 1)
    return start + 2 * (ranks - 1) / ranks * sent_bytes / machine.node_bus_bytes_per_second


def tensor_all_reduce_seconds(machine: Machine, w: Workloads, sent_bytes: Floats) -> Floats:
    """All-reduce of one tensor-parallel group; a group larger than a node has the node's network to itself.

    An all-gather and a reduce-scatter, which sequence parallelism has in its place, take as long.
    """
    inside = node_all_reduce_seconds(machine, w.t, sent_bytes) * machine.collective_slowdown
    network = machine.network_bytes_per_second * machine.network_efficiency
    across = w.t * machine.tensor_step_seconds
    across = across + 2 * (w.t - 1) / w.t * sent_bytes / (network * machine.tensor_network_share)
    return np.where(w.t == 1, 0.0, np.where(w.t <= machine.gpus_per_node, inside, across))


def pipeline_host_seconds(machine: Machine, w: Workloads) -> Floats:
    """Host time that a pipeline across nodes adds to a layer's forward pass.

    Measured: 4 ms a layer, forward and backward, beside 2 tensor-parallel ranks, 17 ms beside 8 and 67 ms beside 32.
    """
    crosses = (w.p > 1) & (w.gpus > machine.gpus_per_node)
    return np.where(crosses, w.t**1.1 * machine.pipeline_step_seconds, 0.0)


def stage_message_seconds(machine: Machine, w: Workloads) -> Floats:
    """One activation, or the gradient of one, to the next pipeline stage.

    With the scatter/gather optimisation (2021 paper, Section 4.1) each rank sends b·s·h/t elements. On several nodes
    all ranks of a node send through its adapters at once.
    """
    sent = w.b * w.s * w.h * machine.element_bytes * w.message_share
    inside = w.gpus <= machine.gpus_per_node
    adapter = machine.network_bytes_per_second * machine.network_efficiency / machine.gpus_per_node
    seconds = sent / np.where(inside, machine.link_bytes_per_second, adapter)
    return np.where(w.p == 1, 0.0, seconds)


def data_all_reduce_seconds(machine: Machine, w: Workloads, sent_bytes: Floats) -> Floats:
    """All-reduce of so many bytes over a rank's data-parallel group; an all-gather or a reduce-scatter takes half.

    Between nodes the groups that share a node (one per tensor-parallel rank) share its adapters. Where ranks of one
    group share a node too, rings collide on few adapters: with one group `network_share` of them is in use, all where
    each GPU is of another group; between, measured times rise late, here with a high power. Bandwidth in use never
    falls with the groups, so gradients never take longer for being divided further. Each rank adds its share.
    """
    groups = np.minimum(w.t, machine.gpus_per_node)
    apart = ((groups - 1) / np.maximum(machine.gpus_per_node - 1, 1)) ** ADAPTERS_POWER
    used = (machine.network_share + (1 - machine.network_share) * apart) / groups
    network = machine.network_bytes_per_second * machine.network_efficiency * used
    inside = node_all_reduce_seconds(machine, w.d, sent_bytes)
    across = 2 * (w.d - 1) / w.d * sent_bytes / network * (1 + w.d * machine.network_rank_share)
    seconds = np.where(w.d * w.t <= machine.gpus_per_node, inside, across)
    return np.where(w.d == 1, 0.0, seconds)


def stalls_seconds(machine: Machine, w: Workloads) -> Floats:
    """Additional time of an iteration on several nodes that stalls.

    Messages between stages stall one after the other; without a pipeline a tensor-parallel group stalls in every layer.
    """
    each = np.where(w.p > 2, 4.0, 2.0) * w.m + 2 * (w.p - 1)
    seconds = np.where(w.p > 1, each * machine.stall_seconds, w.m * w.layers * machine.tensor_stall_seconds)
    return np.where(w.gpus > machine.gpus_per_node, seconds, 0.0)


def stall_probability(machine: Machine, w: Workloads) -> Floats:
    """Chance that it does: it grows with the pairs of nodes, one of which suffices; without a pipeline with the
    tensor-parallel ranks too, and steeper with the nodes.

    Messages beside a tensor-parallel group on more than two nodes always stall.
    """
    nodes = w.gpus / machine.gpus_per_node
    stalls = (nodes > 1) & (machine.stall_nodes > 0)
    pairs = (nodes / max(machine.stall_nodes, 1.0)) ** 2
    rate = np.where(w.t > 2 * machine.gpus_per_node, 10.0, machine.stall_rate + pairs)
    rate = np.where(w.p > 1, rate, np.where(w.t > 1, w.t, 0.0) / machine.stall_ranks * (1 + pairs**2))
    return np.where(stalls, 1 - np.exp(-rate), 0.0)
