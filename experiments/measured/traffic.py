"""Bytes that gloo ranks send in an iteration, logged at their collectives.

Every rank counts as a machine of its own: no memory is shared. The counts depend neither on clocks
nor on links.
"""

from collections import Counter
from typing import Any

import torch
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mlm_repro.engine.config import ModelConfig, ParallelConfig, TrainConfig
from mlm_repro.engine.costs import parameter_count
from mlm_repro.engine.launch.forked import run_forked
from mlm_repro.engine.launch.mesh import build_mesh
from mlm_repro.engine.model.microbatch import PipelineInput
from mlm_repro.engine.parallel.layout import Layout
from mlm_repro.engine.step import build_step
from mlm_repro.experiments.sealed import Line, lines
from mlm_repro.lineage.progress import Progress, announce

MODEL = ModelConfig(
    num_layers=4,
    hidden_size=64,
    num_heads=8,
    seq_length=32,
    vocab_size=96,
    padded_vocab_size=128,
    dropout=0.0,
)
ELEMENT = 4
"""Number of bytes of an fp32 number."""
BSH = MODEL.seq_length * MODEL.hidden_size
"""Number of elements of a microbatch of one sequence between layers, b·s·h."""
WIDTHS = (2, 4, 8)
"""Numbers of tensor-parallel ranks that collectives are counted at."""
REPORTED = 3
"""Tensors of at most this many elements are not counted: loss, gradient norm and a flag."""
RANKS = 4
BATCHES = (4, 8, 16)
"""Sequences of an iteration over all ranks; a microbatch is one."""
LAYOUTS = {
    "data parallel": ParallelConfig(),
    "ZeRO stage 1": ParallelConfig(shard_optimizer=True),
    "ZeRO stage 3": ParallelConfig(shard_parameters=True),
    "tensor parallel": ParallelConfig(tp=RANKS),
    "pipeline parallel": ParallelConfig(pp=RANKS),
}
"""Layouts of `RANKS` ranks by name; the ranks that a layout does not divide are data-parallel."""
PASSED_ON = ("reduce", "gather", "alltoall_base", "allgather", "allgather_base", "broadcast")
"""Names of operations that send (d − 1)/d of their counted bytes from each rank, as a
reduce-scatter does: a tensor leaves the rank once, without the rank's own part."""
STAGES = {1: "optimizer states", 3: "optimizer states, gradients and parameters"}
"""Words of ZeRO's paper for the state that each stage divides, by the stage."""


class Traffic(TorchDispatchMode):
    """Context manager that counts this rank's collectives and its messages, sent and received,
    while it is entered: their number in `calls`, and in `bytes` the bytes of the largest tensor of
    each, for `allgather` times the size of the group; both are Counters by (operation, size of
    group). Operations without a tensor of more than `REPORTED` elements are not counted."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[tuple[str, int]] = Counter()
        self.bytes: Counter[tuple[str, int]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(func).startswith("c10d."):
            name = str(func).removeprefix("c10d.").split(".")[0].strip("_")
            self._count(name, tree_leaves(args))
        return func(*args, **(kwargs or {}))

    def _count(self, name: str, leaves: list[Any]) -> None:
        """Count an operation `name` by (`name`, size of its group): one more in the attribute
        `calls`, and in the attribute `bytes` the bytes of its largest tensor, for `allgather` times
        the size of the group. `leaves` are its arguments, flattened, with the ProcessGroup among
        them. Nothing is counted if no tensor has more than `REPORTED` elements."""
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        largest = max((tensor.nbytes for tensor in tensors if tensor.numel() > REPORTED), default=0)
        if not largest:
            return
        objects = [leaf for leaf in leaves if isinstance(leaf, torch.ScriptObject)]
        group = next(handle for handle in objects if "ProcessGroup" in str(handle._type()))
        size = ProcessGroup.unbox(group).size()
        self.calls[name, size] += 1
        # `allgather` lists a tensor for each rank; the other operations list one.
        self.bytes[name, size] += largest * (size if name == "allgather" else 1)

    @property
    def sent(self) -> float:
        """The number of bytes that this rank sends if collectives run as rings, by the operations
        counted so far.

        A message that it sends counts whole, one that it receives not at all. An all-reduce counts
        2(d − 1)/d of its tensor, a collective that begins or ends with a divided tensor half as
        much (2021 paper, Section 3.3.1). A reduction to one rank and a broadcast count with the
        mean over ranks.
        """
        total = 0.0
        for (name, size), count in self.bytes.items():
            if name == "send":
                total += count
            elif "reduce_scatter" in name or name in PASSED_ON:
                total += count * (size - 1) / size
            elif name == "allreduce":
                total += 2 * count * (size - 1) / size
        return total


def iteration(
    model: ModelConfig, parallel: ParallelConfig, batch: int, trains: bool = True
) -> Traffic:
    """Build a new model of the configuration `model`, with random weights and divided by the layout
    `parallel`, and run an iteration of it in fp32, or its forward passes alone if `trains` is
    false; return this rank's Traffic. Ranks that tp and pp leave are data-parallel. A microbatch is
    one sequence; `batch`, the number of sequences on all ranks together, is rounded down to a
    multiple of the data-parallel ranks. Every rank calls this."""
    dp = torch.distributed.get_world_size() // parallel.tp // parallel.pp
    layout = Layout(tp=parallel.tp, pp=parallel.pp, dp=dp)
    mesh = build_mesh(layout, parallel.sequence_parallel)
    partitioned, step = build_step(model, TrainConfig(precision="fp32"), parallel, mesh)
    tokens = torch.zeros(1, model.seq_length + 1, dtype=torch.int64)
    microbatches = [PipelineInput(tokens[:, :-1], tokens[:, 1:])] * (batch // mesh.dp.size)
    with Traffic() as counted:
        if trains:
            step.run(microbatches, 1e-4)
        else:
            partitioned.evaluate(microbatches)
    return counted


def of_layer(parallel: ParallelConfig) -> tuple[Traffic, Traffic]:
    """Return a pair of Traffics that one layer of `MODEL` adds on this tensor-parallel rank for one
    sequence: in the forward pass alone, and in a whole iteration. `parallel` must have all ranks as
    tensor-parallel ranks. Every rank calls this; four iterations are run."""
    half = MODEL.model_copy(update={"num_layers": MODEL.num_layers // 2})

    def added(trains: bool) -> Traffic:
        # The models differ by two layers, so embedding and head cancel in the difference.
        deep = iteration(MODEL, parallel, 1, trains)
        shallow = iteration(half, parallel, 1, trains)
        for more, fewer in ((deep.calls, shallow.calls), (deep.bytes, shallow.bytes)):
            for key in more:
                more[key] = (more[key] - fewer[key]) // 2
        return deep

    return added(False), added(True)


def measure_traffic() -> list[Line]:
    """Run small models on several processes and return a list of lines, dicts with a record's
    fields, with the traffic of tensor, sequence, pipeline and data parallelism, in counts, in
    multiples of b·s·h and in ratios. Starts processes."""
    announce(f"small models on 2 to {2 * max(WIDTHS)} processes, an iteration of each layout")
    note = (
        f"{MODEL.num_layers} layers of {MODEL.hidden_size}, sequences of {MODEL.seq_length}, gloo,"
        " fp32"
    )
    numbers = _tensor() + _sequence() + _pipeline() + _interleaved() + _batches()
    return [line | {"note": note} for line in numbers]


def _tensor() -> list[Line]:
    series = "tensor parallel"
    numbers = []
    for tp in WIDTHS:
        forward, training = run_forked(of_layer, tp, ParallelConfig(tp=tp))[0]
        elements = training.sent / ELEMENT / BSH / ((tp - 1) / tp)
        numbers += lines(series, {"layer_elements": elements}, x=float(tp), x_name="tp")
    first = forward.calls.total()
    both = training.calls.total()
    counts = {
        "all_reduces_forward": first,
        "all_reduces": both,
        "all_reduces_backward": both - first,
    }
    return numbers + lines(series, counts)


def _sequence() -> list[Line]:
    tp = WIDTHS[0]
    forward, training = run_forked(of_layer, tp, ParallelConfig(tp=tp, sequence_parallel=True))[0]
    plain, _ = run_forked(of_layer, tp, ParallelConfig(tp=tp))[0]
    values = {"forward_traffic_ratio": forward.sent / plain.sent}
    for name, word in (("all_gathers", "allgather"), ("reduce_scatters", "reduce_scatter")):
        first, both = (
            sum(n for (op, _), n in traffic.calls.items() if word in op)
            for traffic in (forward, training)
        )
        values |= {f"{name}_forward": first, f"{name}_backward": both - first}
    return lines("tensor and sequence parallel", values)


def _passed_on(parallel: ParallelConfig, model: ModelConfig = MODEL) -> list[float]:
    """Run an iteration of `model` in the layout `parallel`, on as many processes as the layout has
    ranks and with four microbatches; return a list, in rank order, of the multiples of b·s·h that
    each rank sends to other stages for a microbatch."""
    batch = 4
    ranks = run_forked(iteration, parallel.pp * parallel.tp, model, parallel, batch)
    return [rank.bytes["send", parallel.pp] / ELEMENT / BSH / batch for rank in ranks]


def _pipeline() -> list[Line]:
    """Measure what a rank sends to the other of two stages for each microbatch, in multiples of
    b·s·h, and return a list of lines, dicts with a record's fields. Two lines are without tensor
    parallelism: the first stage forward, and the last stage backward. Two more, for the first and
    the last number of tensor-parallel ranks in WIDTHS, are the first stage forward, whose message
    these ranks divide. Starts processes."""
    first, last = _passed_on(ParallelConfig(pp=2))
    numbers = lines(
        "pipeline parallel", {"border_elements_forward": first, "border_elements_backward": last}
    )
    for tp in (WIDTHS[0], WIDTHS[-1]):
        value = {"border_elements_forward": _passed_on(ParallelConfig(pp=2, tp=tp))[0]}
        numbers += lines("pipeline parallel, scatter/gather", value, x=float(tp), x_name="tp")
    return numbers


def _interleaved() -> list[Line]:
    """Return a list of two lines, dicts with a record's fields, for two and for four chunks: what
    an inner one of four pipeline ranks sends to the others for a microbatch, divided by what it
    sends with one chunk. Starts processes."""
    model = MODEL.model_copy(update={"num_layers": 16})
    numbers = []
    plain = _passed_on(ParallelConfig(pp=4), model)[1]
    for chunks in (2, 4):
        parallel = ParallelConfig(pp=4, chunks=chunks, schedule="interleaved")
        values = {"border_traffic_ratio": _passed_on(parallel, model)[1] / plain}
        numbers += lines("interleaved", values, x=float(chunks), x_name="chunks")
    return numbers


def _batches() -> list[Line]:
    """Return a list of lines, dicts with a record's fields, with the bytes that a rank sends in an
    iteration of four microbatches per rank, relative to an iteration of one microbatch per rank,
    for data and for tensor parallelism. Starts processes."""
    numbers = []
    for series, parallel in (
        ("data parallel", ParallelConfig()),
        ("tensor parallel", ParallelConfig(tp=2)),
    ):
        replicas = 2 // parallel.tp
        many, single = (
            run_forked(iteration, 2, MODEL, parallel, count * replicas)[0].sent for count in (4, 1)
        )
        numbers += lines(series, {"traffic_of_four_microbatches": many / single})
    return numbers


def measure_sent_bytes() -> list[Line]:
    """Run an iteration of each of `LAYOUTS` at each of `BATCHES` and return a list of lines, dicts
    with a record's fields: the megabytes that a rank sends, the mean over ranks, for every layout
    and batch; and the bytes that ZeRO's stages 1 and 3 send relative to data parallelism, with one
    microbatch to a rank. Starts processes.

    An iteration has its optimizer step, in which ZeRO stage 1 sends too.
    """
    numbers = []
    with_one_microbatch: dict[str, float] = {}
    announce(
        f"{len(LAYOUTS)} layouts of {RANKS} processes, an iteration at each of {len(BATCHES)}"
        " batches"
    )
    with Progress("zero", len(LAYOUTS), "layouts") as progress:
        for name, parallel in LAYOUTS.items():
            for batch in BATCHES:
                ranks = run_forked(iteration, RANKS, MODEL, parallel, batch)
                measured = sum(rank.sent for rank in ranks) / RANKS
                # The first batch has one microbatch a rank, for which the ratios of ZeRO's stages
                # are stated.
                with_one_microbatch.setdefault(name, measured)
                numbers += lines(
                    name,
                    {"sent_megabytes": measured / 1e6},
                    "scaled",
                    x=float(batch),
                    x_name="global_batch",
                    note=f"{RANKS} ranks, {parameter_count(MODEL):,} parameters in fp32",
                )
            progress.advance()
    for stage, series in STAGES.items():
        ratio = with_one_microbatch[f"ZeRO stage {stage}"] / with_one_microbatch["data parallel"]
        numbers += lines(series, {"communication_ratio": ratio}, note="one microbatch to a rank")
    return numbers
