"""Clusters: what a machine can do, as constants that each say where they come from. Imports no torch."""

from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

from pydantic import FiniteFloat, NonNegativeFloat, PositiveInt, model_validator

from engine.config import Precision
from engine.costs import PARAMETER_BYTES
from lineage.config import Config, load_config
from lineage.shipped import Shipped, find_file

FOLDER = Path(__file__).parent.parent / "clusters"


class Constant(Config):
    """A number of the cost model and its origin."""

    value: NonNegativeFloat
    kind: Literal["datasheet", "micro-benchmark", "fit", "counted", "transferred"]
    """datasheet: the maker's figure; micro-benchmark: of the operation itself; fit: to whole iterations;
    counted: in the software; transferred: from another machine, without a measurement on this one."""
    source: str
    """Document, table or named set of measurements."""


class Constants(Config):
    """Everything the cost model knows of a cluster; units stand in names, per GPU unless said otherwise."""

    gpus_per_node: Constant
    memory_bytes: Constant
    matmul_flops_per_second: Constant
    """Peak of dense matrix products at the cluster's precision."""
    memory_bytes_per_second: Constant
    link_bytes_per_second: Constant
    """One direction between two GPUs of a node."""
    network_bytes_per_second: Constant
    """One direction between two nodes, all adapters of a node together."""
    node_latency_seconds: Constant
    """Start of an all-reduce inside a node."""
    node_rank_latency_seconds: Constant
    """Added for each rank beyond the first."""
    node_bus_bytes_per_second: Constant
    """Bus bandwidth (2(n − 1)/n · bytes/seconds) of large all-reduces inside a node."""
    matmul_efficiency: Constant
    """Share of the peak that the largest matrix products reach."""
    matmul_half_size: Constant
    """Size of a dimension, in elements, at which a product runs at half of that."""
    memory_efficiency: Constant
    """Share of the memory bandwidth that element-wise operations reach."""
    host_layer_seconds: Constant
    """Host time to start the operations of one layer's forward pass; backward takes twice that."""
    host_collective_seconds: Constant
    """Host time to start one collective."""
    host_microbatch_seconds: Constant
    """Host time of one microbatch outside the layers: loss, loss scaling, bookkeeping."""
    host_iteration_seconds: Constant
    """Host time of one iteration outside microbatches."""
    host_exponent: Constant
    """p in (host^p + device^p)^(1/p), the time of a pass: 1 where one waits for the other, ∞ where they overlap."""
    collective_slowdown: Constant
    """Time of a collective beside computation over its time alone."""
    network_efficiency: Constant
    """Share of the network's bandwidth that messages reach."""
    network_latency_seconds: Constant
    """Added for each rank of an all-reduce between nodes."""
    network_share: Constant
    """Share of a node's adapters in use by gradients when several ranks of a data-parallel group share the node."""
    gradient_overlap: Constant
    """Share of the last backward pass that hides gradient reduction, where there is no pipeline."""

    @model_validator(mode="before")
    @classmethod
    def _leave_out_former(cls, values: Any) -> Any:
        """Files of earlier versions state the bytes of a parameter, which `engine.costs` knows."""
        if not isinstance(values, dict):
            return values
        return {name: value for name, value in values.items() if name != "state_bytes_per_parameter"}


class Interval(Config):
    """Where nine in ten measurements lie, as factors on the prediction (5th and 95th percentile of held-out ratios)."""

    low: FiniteFloat
    high: FiniteFloat
    source: str

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not 0 < self.low <= self.high:
            raise ValueError(f"low = {self.low} must be above 0 and not above high = {self.high}")
        return self


class Intervals(Config):
    """Intervals of runs inside one node and of runs on several."""

    one_node: Interval
    several_nodes: Interval


class Cluster(Config):
    """A named machine."""

    title: str
    """What it is, in words."""
    precision: Precision
    """Of parameters and activations."""
    max_gpus: PositiveInt | None = None
    """GPUs of the machine in all; None where nodes can be added."""
    constants: Constants
    intervals: Intervals


class Machine(NamedTuple):
    """The values of a cluster's constants, as the cost model takes them. Fields are those of `Constants`."""

    element_bytes: float
    gpus_per_node: float
    memory_bytes: float
    matmul_flops_per_second: float
    memory_bytes_per_second: float
    link_bytes_per_second: float
    network_bytes_per_second: float
    node_latency_seconds: float
    node_rank_latency_seconds: float
    node_bus_bytes_per_second: float
    matmul_efficiency: float
    matmul_half_size: float
    memory_efficiency: float
    host_layer_seconds: float
    host_collective_seconds: float
    host_microbatch_seconds: float
    host_iteration_seconds: float
    host_exponent: float
    collective_slowdown: float
    network_efficiency: float
    network_latency_seconds: float
    network_share: float
    gradient_overlap: float


def machine_of(cluster: Cluster) -> Machine:
    """The cluster's constants without their origins."""
    values = {name: getattr(cluster.constants, name).value for name in Constants.model_fields}
    return Machine(element_bytes=PARAMETER_BYTES[cluster.precision].weight, **values)


def load_cluster(name: str) -> Cluster:
    """A shipped cluster, or that of a TOML file. Raises BadInput for anything else."""
    return load_config(find_file(name, Shipped.CLUSTER), Cluster)
