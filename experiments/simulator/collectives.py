"""Time of collectives and messages: latency and bytes over bandwidth, by where the ranks are.
Imports no torch.

Ranks count tp fastest, then dp, then pp (`engine/parallel/layout.py`): a tensor-parallel group
fills whole nodes first.
"""

import numpy as np

from mlm_repro.experiments.simulator.cluster import Machine
from mlm_repro.experiments.simulator.workload import Floats, Workloads

ADAPTERS_POWER = 8
"""Power of the groups of a node with which the share of adapters in use by gradients rises; from
measured times."""


def node_all_reduce_seconds(machine: Machine, ranks: Floats, sent_bytes: Floats) -> Floats:
    """Ring all-reduce of `sent_bytes` among ranks of one node, alone on its links."""
    start = machine.node_latency_seconds + machine.node_rank_latency_seconds * (ranks - 1)
    return start + 2 * (ranks - 1) / ranks * sent_bytes / (
        machine.link_bytes_per_second * machine.node_efficiency
    )


def tensor_all_reduce_seconds(machine: Machine, w: Workloads, sent_bytes: Floats) -> Floats:
    """All-reduce of one tensor-parallel group; a group larger than a node has the node's network to
    itself.

    An all-gather and a reduce-scatter, which sequence parallelism has in its place, take as long.
    """
    inside = node_all_reduce_seconds(machine, w.t, sent_bytes) * machine.collective_slowdown
    network = machine.network_bytes_per_second * machine.network_efficiency
    across = w.t * machine.tensor_step_seconds
    across = across + 2 * (w.t - 1) / w.t * sent_bytes / network
    return np.where(w.t == 1, 0.0, np.where(w.t <= machine.gpus_per_node, inside, across))


def stage_message_seconds(machine: Machine, w: Workloads) -> Floats:
    """One activation, or the gradient of one, to the next pipeline stage.

    With the scatter/gather optimisation (2021 paper, Section 4.1) each rank sends b·s·h/t elements.
    On several nodes all ranks of a node send through its adapters at once.
    """
    sent = w.b * w.s * w.h * machine.element_bytes * w.message_share
    inside = w.gpus <= machine.gpus_per_node
    adapter = machine.network_bytes_per_second * machine.network_efficiency / machine.gpus_per_node
    seconds = sent / np.where(inside, machine.link_bytes_per_second, adapter)
    return np.where(w.p == 1, 0.0, seconds)


def data_all_reduce_seconds(machine: Machine, w: Workloads, sent_bytes: Floats) -> Floats:
    """All-reduce of so many bytes over a rank's data-parallel group; an all-gather or a
    reduce-scatter takes half.

    Between nodes the groups that share a node (one per tensor-parallel rank) share its adapters.
    Where ranks of one group share a node too, rings collide on few adapters: with one group
    `network_share` of them is in use, all where each GPU is of another group; between, measured
    times rise late, here with a high power. Bandwidth in use never falls with the groups, so
    gradients never take longer for being divided further.
    """
    groups = np.minimum(w.t, machine.gpus_per_node)
    apart = ((groups - 1) / np.maximum(machine.gpus_per_node - 1, 1)) ** ADAPTERS_POWER
    used = (machine.network_share + (1 - machine.network_share) * apart) / groups
    network = machine.network_bytes_per_second * machine.network_efficiency * used
    inside = node_all_reduce_seconds(machine, w.d, sent_bytes)
    across = 2 * (w.d - 1) / w.d * sent_bytes / network
    seconds = np.where(w.d * w.t <= machine.gpus_per_node, inside, across)
    return np.where(w.d == 1, 0.0, seconds)
