"""Clusters as files that commands write: fitted constants (`calibrate`) and measured machines (`plan --mine`)."""

import json
from collections.abc import Mapping

from experiments.simulator.cluster import Cluster, Constant, Constants, Interval, Machine
from lineage.installation import HOME

FITTED = {"clusters": HOME / "experiments/clusters/fitted", "software": HOME / "experiments/software/fitted"}
"""Folders of fitted constants, which the files of clusters and software extend."""
DATASHEET = ("gpus_per_node", "memory_bytes", "matmul_flops_per_second", "memory_bytes_per_second",
             "link_bytes_per_second", "network_bytes_per_second")  # fmt: skip
"""Constants that the cluster's own file states."""
DIGITS = 4


def stated_constants(machine: Machine, sources: Mapping[str, tuple[str, str]]) -> dict[str, Constant]:
    """The machine's constants, rounded, with kind and source by name."""
    return {
        name: Constant(value=rounded(getattr(machine, name)), kind=kind, source=source)  # type: ignore[arg-type]
        for name, (kind, source) in sources.items()
    }


def fitted_toml(constants: Mapping[str, Constant], intervals: Mapping[str, Interval]) -> str:
    """The text of a file that a cluster or a software extends."""
    return "\n".join(["# Written by `mlm-experiment calibrate`.", *_tables(constants, intervals)]) + "\n"


def cluster_toml(cluster: Cluster) -> str:
    """The text of a cluster's own file, which `load_cluster` reads back."""
    constants = {name: getattr(cluster.constants, name) for name in Constants.model_fields}
    intervals = {name: interval for name, interval in cluster.intervals if interval}
    head = [f'title = "{cluster.title}"', f'precision = "{cluster.precision}"', f"max_gpus = {cluster.max_gpus}", ""]
    return "\n".join(["# Written by `mlm-experiment plan --mine`.", *head, *_tables(constants, intervals)]) + "\n"


def _tables(constants: Mapping[str, Constant], intervals: Mapping[str, Interval]) -> list[str]:
    lines = ["[constants]"]
    lines += [
        f'{name} = {{ value = {constant.value!r}, kind = "{constant.kind}", source = "{constant.source}" }}'
        for name, constant in constants.items()
    ]
    for name, interval in intervals.items():
        stated = interval.model_dump(exclude_none=True)
        lines += ["", f"[intervals.{name}]", *(f"{key} = {json.dumps(value)}" for key, value in stated.items())]
    return lines


def rounded(value: float) -> float:
    """The value to as many digits as are kept."""
    return float(f"{value:.{DIGITS}g}")
