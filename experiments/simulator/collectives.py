"""Time of collectives and messages: latency and bytes over bandwidth, by where the ranks are.
Imports no torch.

Ranks count tp fastest, then dp, then pp (`engine/parallel/layout.py`): a tensor-parallel group
fills whole nodes first.
"""

import numpy as np

from mlm_repro.experiments.simulator.cluster import Machine
from mlm_repro.experiments.simulator.workload import Floats, Workloads

ADAPTERS_POWER = 8
"""Exponent with which the share of network adapters that gradients use rises with the data-parallel
groups of a node; from measured times."""


def node_all_reduce_seconds(machine: Machine, ranks: Floats, sent_bytes: Floats) -> Floats:
    """Return the seconds of a ring all-reduce of a tensor of `sent_bytes` bytes among `ranks` ranks
    of one node, by the latencies and the speed of links inside a node that `machine` has, with no
    other traffic on the links. `ranks` and `sent_bytes` are numbers, or arrays for a result element
    by element. A single rank still takes the latency, so callers replace its time by 0."""
    start = machine.node_latency_seconds + machine.node_rank_latency_seconds * (ranks - 1)
    return start + 2 * (ranks - 1) / ranks * sent_bytes / (
        machine.link_bytes_per_second * machine.node_efficiency
    )


def tensor_all_reduce_seconds(machine: Machine, w: Workloads, sent_bytes: Floats) -> Floats:
    """Return an array with the seconds, for each workload, of an all-reduce of a tensor of
    `sent_bytes` bytes in one tensor-parallel group, 0 for a group of one; `w` has the workloads as
    columns. Inside a node the all-reduce is slowed by the computation beside it. A group larger
    than a node has the node's network to itself.

    An all-gather and a reduce-scatter, which sequence parallelism uses instead, together take as
    long as one all-reduce.
    """
    inside = node_all_reduce_seconds(machine, w.t, sent_bytes) * machine.collective_slowdown
    network = machine.network_bytes_per_second * machine.network_efficiency
    across = np.log2(w.t) * machine.tensor_step_seconds + (
        2 * (w.t - 1) / w.t * sent_bytes / network
    )
    return np.where(w.t == 1, 0.0, np.where(w.t <= machine.gpus_per_node, inside, across))


def stage_message_seconds(machine: Machine, w: Workloads) -> Floats:
    """Return an array with the seconds, for each workload, to send a microbatch's activation, or
    its gradient, to the next pipeline stage; 0 if there is one stage. `w` has the workloads as
    columns.

    With the scatter/gather optimisation (2021 paper, Section 4.1) each rank sends b·s·h/t elements.
    On several nodes all ranks of a node send through its adapters at once.
    """
    sent = w.b * w.s * w.h * machine.element_bytes * w.message_share
    inside = w.gpus <= machine.gpus_per_node
    adapter = machine.network_bytes_per_second * machine.network_efficiency / machine.gpus_per_node
    return (w.p > 1) * sent / np.where(inside, machine.link_bytes_per_second, adapter)


def data_all_reduce_seconds(machine: Machine, w: Workloads, sent_bytes: Floats) -> Floats:
    """Return an array with the seconds, for each workload, of an all-reduce of a tensor over a
    rank's data-parallel group, 0 for a group of one; an all-gather or a reduce-scatter takes half.
    `sent_bytes` has the tensor's bytes, and each attribute of `w` one number, for each workload. If
    all data-parallel groups lie in one node, the links of the node carry the all-reduce, else the
    network.

    Groups that share a node (one per tensor-parallel rank) share its network adapters. If several
    ranks of one group are on a node too, their rings collide on a few adapters: a single group uses
    `network_share` of the bandwidth, a constant of the machine, and as many groups as GPUs use all
    of it. Between the two, measured times rise late, hence the high power. The bandwidth in use
    never falls as groups are added, so gradients never take longer for being divided further.
    """
    groups = np.minimum(w.t, machine.gpus_per_node)
    # One share for every number of groups below a full node was tried first: times then jumped.
    apart = ((groups - 1) / np.maximum(machine.gpus_per_node - 1, 1)) ** ADAPTERS_POWER
    used = (machine.network_share + (1 - machine.network_share) * apart) / groups
    network = machine.network_bytes_per_second * machine.network_efficiency * used
    inside = node_all_reduce_seconds(machine, w.d, sent_bytes)
    across = 2 * (w.d - 1) / w.d * sent_bytes / network
    return np.where(w.d == 1, 0.0, np.where(w.d * w.t <= machine.gpus_per_node, inside, across))
