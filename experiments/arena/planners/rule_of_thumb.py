"""The rule of Megatron-LM's and nanotron's guides: of what fits, the least model parallelism, tensors before layers.

It tells no time. Memory is that of the guides: 16 to 20 bytes a parameter, 34 of an activation's element (Korthikanti
et al. 2022, Section 4). Imports no torch.
"""

from collections.abc import Sequence

from experiments.arena.terms import Guess
from experiments.simulator.cluster import load_cluster
from experiments.simulator.measurements import Measured
from experiments.simulator.workload import Workload, layer_parameters

NAME = "rule of thumb"


def guesses(cluster: str, known: Sequence[Measured], asked: Sequence[Workload]) -> list[Guess]:
    """Nothing is learned from what is `known`."""
    constants = load_cluster(cluster).constants
    found = []
    for w in asked:
        needed = rule_memory(w)
        fits = needed <= constants.memory_bytes.value
        within = w.tp <= constants.gpus_per_node.value
        preference = (fits, within, -w.tp * w.pp, -w.pp, w.micro_batch, w.zero)
        found.append(Guess(preference, fits=fits, memory_gib=needed / 2**30))
    return found


def rule_memory(w: Workload) -> float:
    """Bytes of the first stage: states of its parameters, activations of the microbatches that it has at once."""
    llama = w.family == "llama"
    parameters = (w.layers * layer_weights(w) / w.pp + w.vocab * w.hidden) / w.tp
    kept, owned = (8, 12) if llama else (4, 12)
    tokens = w.micro_batch * w.seq * w.hidden
    elements = 2 if w.recompute == "full" else 34 / w.tp
    stages = min(w.pp, w.microbatches)
    return parameters * (kept + owned / (w.dp if w.zero else 1)) + tokens * elements * w.layers / w.pp * stages


def layer_weights(w: Workload) -> float:
    """Parameters of a layer: of a GPT-2 those of its products, 12 h²."""
    return layer_parameters(w) if w.family == "llama" else 12 * w.hidden**2
