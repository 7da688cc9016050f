"""The Ultra-Scale Playbook: Llamas of three sizes under nanotron on 8 to 512 H100s; half failed. Imports no torch."""

from experiments.arena.terms import DataSet
from experiments.simulator.measurements import costed, ultrascale


def load() -> DataSet:
    """The rows that do not contradict themselves, by model size."""
    return DataSet("Ultra-Scale Playbook, H100", "h100", costed(ultrascale()), lambda w: w.hidden)
