"""Calculon's model of time (Isaev et al., SC'23) in short: its formulas re-stated, the shares of peaks of its A100.

Each operation takes its products' time and its bytes' time, one after the other, at shares of the peaks that fall with
its size; collectives take latency and bytes; nothing is started by a host. Its package cannot be installed: another
has the name. Imports no torch.
"""

from collections.abc import Sequence

from experiments.arena.planners.rule_of_thumb import layer_weights, rule_memory
from experiments.arena.terms import Guess
from experiments.simulator.cluster import Machine, load_cluster, machine_of
from experiments.simulator.measurements import Measured
from experiments.simulator.workload import Workload

NAME = "Calculon's formulas"
PRODUCTS = ((128e9, 0.95), (16e9, 0.9), (1e9, 0.6), (0.0, 0.1))
"""Share of the peak by the operations of a product."""
MEMORY = ((100e6, 0.9), (10e6, 0.75), (1e6, 0.6), (0.0, 0.3))
"""The same by the bytes that are moved."""
NODE, NETWORK = (0.6, 1e-6), (0.9, 2e-6)
"""Share of a network's bandwidth, and seconds of latency."""


def guesses(cluster: str, known: Sequence[Measured], asked: Sequence[Workload]) -> list[Guess]:
    """Nothing is learned from what is `known`."""
    machine = machine_of(load_cluster(cluster))
    found = []
    for w in asked:
        seconds, needed = iteration_seconds(machine, w), rule_memory(w)
        fits = needed <= machine.memory_bytes
        found.append(Guess((fits, -seconds), seconds, fits=fits, memory_gib=needed / 2**30))
    return found


def iteration_seconds(machine: Machine, w: Workload) -> float:
    """Microbatches one after the other, the pipeline's bubble, gradients without overlap, Adam."""
    tokens, sharded = w.micro_batch * w.seq, w.family == "llama"
    queries, inner = (1 + 2 * (w.kv_heads or w.heads) / w.heads) * w.hidden, (2 if sharded else 1) * w.inner
    width, heads = w.hidden / w.heads, w.micro_batch * w.heads / w.tp
    products = [(tokens, queries / w.tp, w.hidden), (tokens, w.hidden, w.hidden / w.tp),
                (tokens, inner / w.tp, w.hidden), (tokens, w.hidden, w.inner / w.tp),
                (w.seq * heads, w.seq, width), (w.seq * heads, width, w.seq)]  # fmt: skip
    linear = sum(_product(machine, *each) for each in products)
    element, whole = 2.0 * tokens, 1 / w.tp if sharded else 1.0
    streamed = sum(_moved(machine, element * each) for each in (
        *[2 * w.hidden * whole] * 2, *[3 * w.hidden * whole] * 2, 2 * inner / w.tp,
        *([] if sharded else [4 * w.heads / w.tp * w.seq] * 2)))  # fmt: skip
    tensor = 2 * _all_reduce(machine, w.tp, element * w.hidden, w.tp > machine.gpus_per_node)
    forward = linear + streamed + tensor
    again = {"full": forward, "selective": streamed, "none": 0.0}[w.recompute]
    layer = forward + 2 * (linear + streamed) + tensor + again
    message = 4 * _sent(machine, element * w.hidden / w.tp, w.gpus > machine.gpus_per_node) * (w.pp > 1)
    head = 3 * _product(machine, tokens, w.vocab / w.tp, w.hidden) / w.pp
    slot = w.layers / w.pp * layer + head + message * w.chunks
    parameters = (w.layers * layer_weights(w) / w.pp + w.vocab * w.hidden / w.pp) / w.tp
    gradients = _all_reduce(machine, w.dp, parameters * (4 if sharded else 2), w.dp * w.tp > machine.gpus_per_node)
    owned = parameters / (w.dp if w.zero else 1)
    return slot * (w.microbatches + (w.pp - 1) / w.chunks) + gradients + _moved(machine, owned * 32)


def _product(machine: Machine, rows: float, columns: float, depth: float) -> float:
    flops = 2 * rows * columns * depth
    moved = 2 * (rows * columns + rows * depth + columns * depth)
    return flops / (machine.matmul_flops_per_second * _share(PRODUCTS, flops)) + _moved(machine, moved)


def _moved(machine: Machine, moved_bytes: float) -> float:
    return moved_bytes / (machine.memory_bytes_per_second * _share(MEMORY, moved_bytes))


def _share(table: Sequence[tuple[float, float]], size: float) -> float:
    return next(share for least, share in table if size >= least)


def _all_reduce(machine: Machine, ranks: int, sent_bytes: float, across: bool) -> float:
    """Between nodes the network adds, so that each byte is sent once."""
    return _sent(machine, (1 if across else 2) * (ranks - 1) / ranks * sent_bytes, across) if ranks > 1 else 0.0


def _sent(machine: Machine, sent_bytes: float, across: bool) -> float:
    share, latency = NETWORK if across else NODE
    network = machine.network_bytes_per_second / machine.gpus_per_node
    return latency + sent_bytes / (share * (network if across else machine.link_bytes_per_second))
