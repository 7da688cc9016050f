"""vTrain's validation data: GPT models under Megatron-DeepSpeed on 2 to 512 A100s. Imports no torch."""

from experiments.arena.terms import DataSet
from experiments.simulator.measurements import Measured, multi_node, single_node


def load() -> DataSet:
    """All 785 iterations, by model."""
    rows = [Measured(one.workload, one.value) for one in (*single_node(), *multi_node())]
    return DataSet("vTrain, A100", "dgx-a100-80g", rows, lambda w: (w.hidden, w.layers, w.seq))
