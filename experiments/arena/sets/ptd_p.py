"""Table 1 of the 2021 paper: GPT models of 1.7 to 1,008 billion parameters on up to 3,072 A100s. Imports no torch."""

from experiments.arena.terms import DataSet
from experiments.simulator.measurements import Measured, ptd_p_table_1
from experiments.simulator.workload import flops_of


def load() -> DataSet:
    """The ten rows as seconds of an iteration; the shipped constants are fitted on vTrain's times of two of them."""
    rows = [Measured(one.workload, flops_of(one.workload) / (one.value * 1e12 * one.workload.gpus))
            for one in ptd_p_table_1()]  # fmt: skip
    return DataSet("2021 paper, Table 1, A100", "dgx-a100-80g", rows, lambda _: None)
