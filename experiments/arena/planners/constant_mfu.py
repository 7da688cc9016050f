"""One utilisation for all layouts: the median of what is known, or 40 % where nothing is. Imports no torch."""

from collections.abc import Sequence
from statistics import median

from experiments.arena.planners.rule_of_thumb import rule_memory
from experiments.arena.terms import Guess
from experiments.simulator.cluster import load_cluster
from experiments.simulator.measurements import Measured
from experiments.simulator.workload import Workload, flops_of

NAME = "constant MFU"
OTHERWISE = 0.4


def guesses(cluster: str, known: Sequence[Measured], asked: Sequence[Workload]) -> list[Guess]:
    """Operations over peak and utilisation; all layouts of a model that fit are as good."""
    constants = load_cluster(cluster).constants
    peak = constants.matmul_flops_per_second.value

    def at_peak(w: Workload) -> float:
        return flops_of(w) / (w.gpus * peak)

    share = median([at_peak(one.workload) / one.seconds for one in known if one.ran] or [OTHERWISE])
    needed = [rule_memory(w) for w in asked]
    fits = [each <= constants.memory_bytes.value for each in needed]
    return [Guess((fit,), at_peak(w) / share, fits=fit, memory_gib=each / 2**30)
            for w, fit, each in zip(asked, fits, needed, strict=True)]  # fmt: skip
