"""Bytes that a rank holds and sends under ZeRO, data, tensor and pipeline parallelism, counted on gloo ranks.

Each is beside its closed form: memory as `engine.costs` has it; bytes sent as Rajbhandari et al. 2020 (Section 7) and
the 2021 paper (Sections 2.3 and 3.3.1) have them. The counts depend on no clock and on no link.
"""

from collections import Counter
from dataclasses import replace
from typing import Any

import torch
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from engine.config import ModelConfig, ParallelConfig, Precision, TrainConfig
from engine.costs import fullest_rank, parameter_count
from engine.launch.forked import run_forked
from engine.launch.mesh import build_mesh
from engine.model.microbatch import PipelineInput
from engine.parallel.layout import Layout
from engine.step import build_step
from experiments.sealed import Line
from lineage.progress import Progress, announce

MODEL = ModelConfig(
    num_layers=4, hidden_size=64, num_heads=4, seq_length=32, vocab_size=96, padded_vocab_size=96, dropout=0.0
)
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
STAGES = {1: "optimizer states", 3: "optimizer states, gradients and parameters"}
"""As the ZeRO paper names them."""


REPORTED = 3
"""Most numbers that an iteration reduces besides tensors: loss, gradient norm and a flag. They are not counted."""


class CollectiveBytes(TorchDispatchMode):
    """Bytes of the tensors that this rank's collectives and messages are about, by operation and size of group."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[tuple[str, int]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(func).startswith("c10d."):
            name = str(func).removeprefix("c10d.").split(".")[0]
            leaves = tree_leaves(args)
            tensors = [
                leaf.numel() * leaf.element_size()
                for leaf in leaves
                if isinstance(leaf, torch.Tensor) and leaf.numel() > REPORTED
            ]
            groups = [
                each for each in leaves if isinstance(each, torch.ScriptObject) and "ProcessGroup" in str(each._type())
            ]
            if tensors:
                size = ProcessGroup.unbox(groups[0]).size()
                self.found[name, size] += max(tensors) * (size if name == "allgather_" else 1)  # it has a list of parts
        return func(*args, **(kwargs or {}))

    @property
    def sent(self) -> float:
        """Bytes that this rank sends, collectives by rings (2021 paper, Section 3.3.1: an all-reduce is 2(d − 1)/d)."""
        total = 0.0
        for (name, size), count in self.found.items():
            if name == "send":
                total += count
            elif "reduce_scatter" in name or "allgather" in name or "broadcast" in name:
                total += count * (size - 1) / size
            elif name == "allreduce_":
                total += 2 * count * (size - 1) / size
        return total


def measure_sent_bytes() -> list[Line]:
    """Megabytes that a rank sends in an iteration, the mean over ranks, at several batches; ratios of ZeRO's stages.

    An iteration has its optimizer step, in which ZeRO stage 1 sends too.
    """
    lines: list[Line] = []
    at_least: dict[str, float] = {}
    announce(f"{len(LAYOUTS)} layouts of {RANKS} processes, an iteration at each of {len(BATCHES)} batches")
    with Progress("zero", len(LAYOUTS), "layouts") as progress:
        for name, parallel in LAYOUTS.items():
            by_rank = run_forked(sent_bytes, RANKS, MODEL, parallel)
            for batch, sent in zip(BATCHES, zip(*by_rank, strict=True), strict=True):
                position = {"series": name, "quantity": "sent_megabytes", "x": float(batch), "x_name": "global_batch"}
                measured = sum(sent) / RANKS
                at_least.setdefault(name, measured)
                note = f"{RANKS} ranks, {parameter_count(MODEL):,} parameters in fp32"
                counted = account(MODEL, parallel, batch) / 1e6
                lines.append(position | {"kind": "scaled", "value": measured / 1e6, "note": note})
                lines.append(position | {"kind": "computed", "value": counted, "note": note})
            progress.advance()
    for stage, series in STAGES.items():
        ratio = at_least[f"ZeRO stage {stage}"] / at_least["data parallel"]
        lines.append({"series": series, "quantity": "communication_ratio", "kind": "scaled", "value": ratio,
                      "note": "one microbatch to a rank"})  # fmt: skip
    return lines


def account(model: ModelConfig, parallel: ParallelConfig, batch: int) -> float:
    """Bytes in fp32 that one of `RANKS` ranks sends in an iteration, by the papers.

    Of Ψ parameters data parallelism and ZeRO stage 1 send 2Ψ, stage 3 sends 3Ψ in each pass over a microbatch, all
    times (d − 1)/d. A microbatch of b sequences costs tensor parallelism 8bsh(t − 1)/t a layer, and a pipeline bsh at
    each border and as much on the way back.
    """
    ring = (RANKS - 1) / RANKS
    activations = 4 * batch * model.seq_length * model.hidden_size
    if parallel.tp > 1:
        return 8 * activations * ring * model.num_layers
    if parallel.pp > 1:
        return 2 * activations * ring
    passes = batch // RANKS
    return 4 * parameter_count(model) * ring * (3 * passes if parallel.shard_parameters else 2)


def sent_bytes(model: ModelConfig, parallel: ParallelConfig) -> list[float]:
    """What this rank sends in one iteration of each of `BATCHES`."""
    return [iteration(model, parallel, batch).sent for batch in BATCHES]


def iteration(model: ModelConfig, parallel: ParallelConfig, batch: int) -> CollectiveBytes:
    """This rank's collectives and messages of one iteration in fp32, in microbatches of one sequence."""
    ranks = torch.distributed.get_world_size()
    local = build_mesh(Layout(tp=parallel.tp, pp=parallel.pp, dp=ranks // parallel.tp // parallel.pp))
    axes = {name: replace(getattr(local, name), shared_memory=None) for name in ("tp", "pp", "dp", "embedding")}
    mesh = replace(local, **axes)  # as ranks of several machines: all goes over links, where it is counted
    _, step = build_step(model, TrainConfig(precision="fp32"), parallel, mesh)
    tokens = torch.zeros(1, model.seq_length + 1, dtype=torch.int64)
    with CollectiveBytes() as counted:
        step.run([PipelineInput(tokens[:, :-1], tokens[:, 1:])] * (batch // mesh.dp.size), 1e-4)
    return counted


def measure_held_bytes() -> list[Line]:
    """Bytes of parameters, gradients and optimizer state for each parameter of the model, the mean over ranks."""
    lines: list[Line] = []
    names = ("data parallel", "ZeRO stage 1", "ZeRO stage 3")
    announce(f"{len(names)} layouts on 2 and 4 processes, an iteration each")
    for name in names:
        parallel = LAYOUTS[name]
        for ranks in (2, 4):
            position = {"series": name, "quantity": "state_bytes_per_parameter", "x": float(ranks), "x_name": "dp"}
            held = sum(run_forked(held_bytes, ranks, parallel, "bf16")) / ranks / parameter_count(MODEL)
            state = fullest_rank(MODEL, TrainConfig(precision="bf16"), parallel, ranks).state
            note = f"{parameter_count(MODEL):,} parameters in bf16"
            lines.append(position | {"kind": "scaled", "value": held, "note": note})
            lines.append(position | {"kind": "computed", "value": state / parameter_count(MODEL), "note": note})
    return lines


def held_bytes(parallel: ParallelConfig, precision: Precision) -> int:
    """Bytes of this rank's parameters, gradients, master weights and moments between iterations."""
    mesh = build_mesh(Layout(dp=torch.distributed.get_world_size()))
    _, step = build_step(MODEL, TrainConfig(precision=precision), parallel, mesh)
    tensors = [
        tensor
        for group in step.optimizer.groups
        for tensor in (group.flat, group.main_gradient, group.master, group.exp_avg, group.exp_avg_sq)
    ]
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}
    return sum(storages.values())
