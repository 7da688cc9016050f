"""Constants of the machine at hand from what was timed on it. Imports no torch."""

from collections.abc import Sequence

import numpy as np

from experiments.simulator.calibrate import BOUNDS, fit, fit_node, least
from experiments.simulator.cluster import Machine
from experiments.simulator.compute import matmul_seconds
from experiments.simulator.measurements import AllReduce, Observation, predicted
from experiments.simulator.workload import Floats

EFFICIENCIES = ("matmul_efficiency", "memory_efficiency")


def fit_local(
    machine: Machine,
    matmul: Sequence[tuple[int, float]],
    all_reduces: Sequence[AllReduce],
    iterations: Sequence[Observation],
) -> tuple[Machine, Floats]:
    """The machine with its rates fitted on benchmarks and its efficiencies on whole iterations; and of each iteration
    measured over predicted time, predicted without it."""
    machine = _fit_matmul(machine, *np.array(matmul).T)
    if all_reduces:
        machine = fit_node(machine, all_reduces)
    ratios = []
    for place, row in enumerate(iterations):
        others = [*iterations[:place], *iterations[place + 1 :]]
        ratios.append(row.value / predicted(_fit_efficiencies(machine, others), [row])[0])
    return _fit_efficiencies(machine, iterations), np.array(ratios)


def _fit_matmul(machine: Machine, widths: Floats, seconds: Floats) -> Machine:
    """Rate and half size of matrix products, from square ones."""

    def errors(trial: Machine) -> Floats:
        return np.log(matmul_seconds(trial, widths, widths, widths) / seconds)

    fastest = float((2 * widths**3 / seconds).max())
    bounds = {"matmul_flops_per_second": (1e6, 1e17), "matmul_half_size": BOUNDS["matmul_half_size"]}
    start = machine._replace(matmul_efficiency=1.0, matmul_flops_per_second=fastest, matmul_half_size=30.0)
    return least(start, tuple(bounds), bounds, errors)


def _fit_efficiencies(machine: Machine, rows: Sequence[Observation]) -> Machine:
    return fit(machine._replace(matmul_efficiency=0.8, memory_efficiency=0.5), EFFICIENCIES, rows, np.ones(len(rows)))
