"""Constants of machines and of the software that trains on them, each with its source. Imports no
torch."""

from typing import Annotated, Any, Generic, Literal, Self, TypeVar

from pydantic import Field, FiniteFloat, NonNegativeFloat, model_validator

from mlm_repro.engine.config import Precision
from mlm_repro.engine.costs import PARAMETER_BYTES
from mlm_repro.lineage.config import Config, load_config, parse_config, read_toml
from mlm_repro.lineage.shipped import HOME, Shipped, find_file


class Constant(Config):
    """A number of the cost model: `value`, at least 0, whose unit, if it has one, is in the name of
    the constant's field, such as `memory_bytes`; `kind`, the way in which it was found, such as
    `fit`; and `source`, the document, table or measurements that it is from."""

    value: NonNegativeFloat
    kind: Literal["datasheet", "micro-benchmark", "fit", "counted", "transferred"]
    """datasheet: the maker's figure; micro-benchmark: of the operation itself; fit: to whole
    iterations; counted: in the software; transferred: from another machine, without a measurement
    on this one."""
    source: str
    """Document, table or named set of measurements that the value is from."""


Number = TypeVar("Number", Constant, float)


def unmeasured(value: float) -> Any:
    """Return a pydantic field, of type Any, for a Constant that a file may omit. Its default is a
    Constant of `value`, of the kind `counted` and with the source `not measured`. A class whose
    field is a plain number instead, such as Machine, must be given a value for the field: without a
    value pydantic raises its error, because the default is no number."""
    return Field(
        {"value": value, "kind": "counted", "source": "not measured"}, validate_default=True
    )


class Hardware(Config, Generic[Number]):
    """Constants by which the cost model describes a machine and its network: sizes, peak rates,
    bandwidths, latencies, and the shares of peak and bandwidth that work reaches. Units are in the
    names; sizes and rates are per GPU unless stated otherwise. In a file each is a Constant, with
    its source; for computing, a plain number."""

    gpus_per_node: Number
    memory_bytes: Number
    matmul_flops_per_second: Number
    """Peak rate of dense matrix products at the cluster's precision."""
    vector_flops_per_second: Number
    """Peak of fp32 products without tensor cores, at which attention runs unless the width of its
    heads is a multiple of 8."""
    memory_bytes_per_second: Number
    link_bytes_per_second: Number
    """Bandwidth in one direction between two GPUs of a node."""
    network_bytes_per_second: Number
    """Bandwidth in one direction between two nodes, all adapters of a node together."""
    node_latency_seconds: Number
    """Time to start an all-reduce inside a node."""
    node_rank_latency_seconds: Number
    """Latency of an all-reduce inside a node that each rank beyond the first adds."""
    # A share of the link's bandwidth, so that it can be transferred to a machine with other links.
    node_efficiency: Number
    """Share of a link's bandwidth that large all-reduces inside a node reach, by 2(n − 1)/n ·
    bytes/seconds."""
    matmul_efficiency: Number
    """Share of the peak that the largest matrix products reach."""
    matmul_half_size: Number
    """Size of a dimension, in elements, that halves the efficiency of a product."""
    network_efficiency: Number
    """Share of the network's bandwidth that messages reach."""
    network_share: Number
    """Share of the network's bandwidth that gradients use if all GPUs of a node are in one
    data-parallel group."""


class SoftwareConstants(Config, Generic[Number]):
    """Constants by which the cost model describes a training program: the host's time to start
    work, how far passes and collectives overlap or slow each other, the shares of bandwidth and
    peak that element-wise operations and fused attention reach, whether attention is fused, what
    gradients and ZeRO 3 take, and how uncertain the computed memory is. In a file each is a
    Constant, with its source; for computing, a plain number."""

    memory_efficiency: Number
    """Share of the memory bandwidth that element-wise operations reach."""
    host_layer_seconds: Number
    """Host time to start the operations of one layer's forward pass; backward takes twice that, and
    three times where the whole layer is computed again."""
    host_collective_seconds: Number
    """Host time to start one collective."""
    host_microbatch_seconds: Number
    """Host time of one microbatch outside the layers: loss, loss scaling, bookkeeping."""
    host_iteration_seconds: Number
    """Host time of one iteration outside microbatches."""
    host_exponent: Number
    """p in (host^p + device^p)^(1/p), the time of a pass: 1 where one waits for the other, ∞ where
    they overlap."""
    collective_slowdown: Number
    """Time of a tensor-parallel collective inside a node, beside computation, over its time
    alone."""
    gradient_overlap: Number
    """Share of the last backward pass that hides gradient reduction; under ZeRO 3 the share of the
    shorter of computation and communication that the longer one hides."""
    flash_efficiency: Number = unmeasured(0.3)
    """Share of the peak that fused attention reaches, counting only the products that a causal mask
    leaves."""
    fused_attention: Number = unmeasured(0.0)
    """1 where attention is fused: no scores are stored, and half of them are skipped."""
    gradient_bytes: Number = unmeasured(0.0)
    """Bytes of a gradient's element when it is reduced; 0 if it has a parameter's size."""
    gathered_squares: Number = unmeasured(12.0)
    """Parameters that ZeRO 3 gathers at a time, in h²: 12 of a layer, 4 of its largest product."""
    host_softmax_seconds: Number = unmeasured(0.0)
    """Host time that a layer's forward pass takes in addition where softmax is not fused, because a
    rank's heads times its microbatch are not a multiple of 4; backward takes twice that."""
    tensor_step_seconds: Number = unmeasured(0.0)
    """Latency of a collective of a tensor-parallel group larger than a node, for each doubling of
    its ranks."""
    memory_error: Number = unmeasured(0.08)
    """Standard deviation of the logarithm of measured over computed memory."""


class Constants(Hardware[Number], SoftwareConstants[Number], Generic[Number]):
    """All constants of the cost model: a cluster's and its software's."""


class ErrorInterval(Config):
    """Range from `low` to `high`, two factors on the prediction, in which 90 % of measurements lie;
    `source` says in words what it was made from. `coverage` and `score` tell how well such an
    interval held measurements that it was made without, and `baseline` is a simple rule's score on
    them; each is None if it was not tested."""

    low: FiniteFloat
    high: FiniteFloat
    source: str
    coverage: Annotated[float, Field(ge=0, le=1)] | None = None
    """Share of held-out measurements inside an interval that was made without them; None if it was
    not tested."""
    score: NonNegativeFloat | None = None
    """Mean interval score of held-out measurements, in logarithms (Gneiting and Raftery 2007,
    Section 6.2): the interval's width, plus 20 times the distance by which a measurement lies
    outside. Less is better."""
    baseline: NonNegativeFloat | None = None
    """Score of a rule by which every GPU reaches the same share of its peak: the median of the
    other rows."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not 0 < self.low <= self.high:
            raise ValueError(f"low = {self.low} must be above 0 and not above high = {self.high}")
        return self


class Intervals(Config):
    """Error intervals, as factors on the prediction: `one_node` and `several_nodes` of a run within
    the measured range, by its number of nodes, `extrapolated` of a run beyond that range, and
    `ratio` of the ratio of two runs, None if the ratio is as uncertain as a run."""

    one_node: ErrorInterval
    several_nodes: ErrorInterval
    extrapolated: ErrorInterval
    """Interval beyond `reach`: it covers every source's range when a fit predicts that source
    without having seen it."""
    ratio: ErrorInterval | None = None
    """Interval of a ratio of two runs, whose common errors cancel; None if it is as uncertain as a
    run."""


class Reach(Config):
    """Range of a fit's rows: their processors, and the minimum and maximum of nodes, sequence
    length and parameters."""

    processors: tuple[str, ...]
    nodes: tuple[float, float]
    seq: tuple[float, float]
    parameters: tuple[float, float]


class Software(Config):
    """A version of a training program: its constants on the cluster that it was measured on, the
    error intervals of predictions with them, and the reach, the range of the measured runs."""

    title: str
    constants: SoftwareConstants[Constant]
    intervals: Intervals
    reach: Reach


class Cluster(Config):
    """A machine with one kind of GPU and the software that trains on it, as the cost model
    describes them: a TOML file in which `load_cluster` has filled the gaps from the software's
    file. Constants, intervals and reach are complete here; for other software load the file
    again."""

    title: str
    """The machine in words."""
    software: str = ""
    """Software whose constants, intervals and reach fill the gaps of this file; empty if it has no
    gaps."""
    processor: str
    """Name of the GPU, as the software's reach has it."""
    precision: Precision
    """Format of parameters and activations."""
    constants: Constants[Constant]
    intervals: Intervals
    reach: Reach

    def beyond(self, gpus: int, seq: int, parameters: int) -> str:
        """Return one text with each reason why a run on this cluster lies outside the rows that the
        constants are fitted on: the cluster's GPU, the number of nodes that `gpus` fill, the
        sequence length `seq` in tokens, or the number of `parameters`, with the range of the rows.
        It is empty if the run lies inside."""
        reasons = []
        if self.processor not in self.reach.processors:
            reasons.append(f"{self.processor}, measured is {' and '.join(self.reach.processors)}")
        nodes = max(gpus / self.constants.gpus_per_node.value, 1.0)
        for name, value, (least, most) in (
            ("nodes", nodes, self.reach.nodes),
            ("positions", seq, self.reach.seq),
            ("parameters", parameters, self.reach.parameters),
        ):
            if not least <= value <= most:
                reasons.append(f"{value:,.0f} {name}, measured are {least:,.0f} to {most:,.0f}")
        return "; ".join(reasons)

    def interval(self, gpus: int, beyond: str) -> ErrorInterval:
        """Return the ErrorInterval of a run on this many GPUs: on one node, on several, or, if
        `beyond` is not empty, extrapolated. `beyond` is the text that the method `beyond` returns
        for the run."""
        if beyond:
            return self.intervals.extrapolated
        return (
            self.intervals.one_node
            if gpus <= self.constants.gpus_per_node.value
            else self.intervals.several_nodes
        )


class Machine(Constants[float]):
    """The values of a cluster's constants as the cost model takes them: each is a float, without
    its source, in a field of the constant's name. `element_bytes` is the number of bytes of an
    element in the cluster's precision."""

    element_bytes: float

    def replaced(self, **values: float) -> Self:
        """Return a copy of this machine with other values of the constants that the keywords name.
        Raises ValidationError for an unknown name."""
        return self.model_validate({**dict(self), **values})


def machine_of(cluster: Cluster) -> Machine:
    """Return the Machine that the cost model calculates with: the values of the cluster's
    constants, and the bytes of an element in the cluster's precision."""
    values = {name: getattr(cluster.constants, name).value for name in Constants.model_fields}
    return Machine(element_bytes=PARAMETER_BYTES[cluster.precision].weight, **values)


def load_cluster(name: str, software: str = "") -> Cluster:
    """Return the Cluster `name`, a shipped one or one in a TOML file, completed by its own software
    or by the one that `software` names. Raises BadInput if a name is unknown or a file is not
    valid.

    The cluster's own file wins over the constants, intervals and reach of its own software. If
    `software` names another one, that one's values win over both.
    """
    path = find_file(name, Shipped.CLUSTER)
    values = read_toml(path)
    own = values.get("software", "")
    named = software or own
    if named and isinstance(named, str):
        file = load_config(find_file(named, Shipped.SOFTWARE), Software)
        of_software = file.model_dump(
            include={"constants", "intervals", "reach"}, exclude_none=True
        )
        for table, shared in of_software.items():
            stated = values.get(table, {})
            if isinstance(stated, dict):
                values[table] = shared | stated if named == own else stated | shared
        values["software"] = named
    return parse_config(values, Cluster, str(path))


FITTED = HOME / "experiments"
"""Folder below which the files of fitted constants lie; the files of clusters and software extend
them."""
