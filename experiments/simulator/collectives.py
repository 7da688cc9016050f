"""Time of collectives and messages: latency and bytes over bandwidth, by where the ranks are. Imports no torch.

Ranks count tp fastest, then dp, then pp (`engine.parallel.layout`): a tensor-parallel group fills whole nodes first.
"""

import numpy as np

from experiments.simulator.cluster import Machine
from experiments.simulator.workload import Floats, Workloads


def node_all_reduce_seconds(machine: Machine, ranks: Floats, sent_bytes: Floats) -> Floats:
    """Ring all-reduce of `sent_bytes` among ranks of one node, alone on its links."""
    start = machine.node_latency_seconds + machine.node_rank_latency_seconds * (ranks - 1)
    return start + 2 * (ranks - 1) / ranks * sent_bytes / machine.node_bus_bytes_per_second


def tensor_all_reduce_seconds(machine: Machine, w: Workloads, sent_bytes: Floats) -> Floats:
    """All-reduce of one tensor-parallel group; a group larger than a node has the node's network to itself."""
    inside = node_all_reduce_seconds(machine, w.t, sent_bytes) * machine.collective_slowdown
    network = machine.network_bytes_per_second * machine.network_efficiency
    across = machine.network_latency_seconds * w.t + 2 * (w.t - 1) / w.t * sent_bytes / network
    return np.where(w.t == 1, 0.0, np.where(w.t <= machine.gpus_per_node, inside, across))


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


def gradient_all_reduce_seconds(machine: Machine, w: Workloads, gradient_bytes: Floats) -> Floats:
    """All-reduce of a rank's gradients over its data-parallel group.

    Across nodes, the groups that share a node (one per tensor-parallel rank) share its adapters, and where several
    ranks of one group share a node only `network_share` of them is in use.
    """
    inside = node_all_reduce_seconds(machine, w.d, gradient_bytes)
    groups = np.minimum(w.t, machine.gpus_per_node)
    used = np.where(w.t < machine.gpus_per_node, machine.network_share, 1.0)
    network = machine.network_bytes_per_second * machine.network_efficiency * used / groups
    across = machine.network_latency_seconds * w.d + 2 * (w.d - 1) / w.d * gradient_bytes / network
    seconds = np.where(w.d * w.t <= machine.gpus_per_node, inside, across)
    return np.where(w.d == 1, 0.0, seconds)
