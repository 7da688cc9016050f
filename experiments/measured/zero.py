"""Bytes that a rank holds and sends under ZeRO, data, tensor and pipeline parallelism, counted on gloo ranks.

What is held stands beside `engine.costs`. The counts depend on no clock and on no link.
"""

import torch

from engine.config import ParallelConfig, Precision, TrainConfig
from engine.costs import fullest_rank, parameter_count
from engine.launch.forked import run_forked
from engine.launch.mesh import build_mesh
from engine.parallel.layout import Layout
from engine.step import build_step
from experiments.measured.traffic import MODEL, iteration
from experiments.sealed import Line, lines
from lineage.progress import Progress, announce

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


def measure_sent_bytes() -> list[Line]:
    """Megabytes that a rank sends in an iteration, the mean over ranks, at several batches; ratios of ZeRO's stages.

    An iteration has its optimizer step, in which ZeRO stage 1 sends too.
    """
    found: list[Line] = []
    at_least: dict[str, float] = {}
    announce(f"{len(LAYOUTS)} layouts of {RANKS} processes, an iteration at each of {len(BATCHES)} batches")
    with Progress("zero", len(LAYOUTS), "layouts") as progress:
        for name, parallel in LAYOUTS.items():
            for batch in BATCHES:
                sent = [rank.sent for rank in run_forked(iteration, RANKS, MODEL, parallel, batch)]
                measured = sum(sent) / RANKS
                at_least.setdefault(name, measured)
                note = f"{RANKS} ranks, {parameter_count(MODEL):,} parameters in fp32"
                place = {"x": float(batch), "x_name": "global_batch", "note": note}
                found += lines(name, {"sent_megabytes": measured / 1e6}, "scaled", **place)
            progress.advance()
    for stage, series in STAGES.items():
        ratio = at_least[f"ZeRO stage {stage}"] / at_least["data parallel"]
        found += lines(series, {"communication_ratio": ratio}, note="one microbatch to a rank")
    return found


def measure_held_bytes() -> list[Line]:
    """Bytes of parameters, gradients and optimizer state for each parameter of the model, the mean over ranks."""
    found: list[Line] = []
    names = ("data parallel", "ZeRO stage 1", "ZeRO stage 3")
    announce(f"{len(names)} layouts on 2 and 4 processes, an iteration each")
    for name in names:
        parallel = LAYOUTS[name]
        for ranks in (2, 4):
            held = sum(run_forked(held_bytes, ranks, parallel, "bf16")) / ranks
            state = fullest_rank(MODEL, TrainConfig(precision="bf16"), parallel, ranks).state
            note = f"{parameter_count(MODEL):,} parameters in bf16"
            place = {"x": float(ranks), "x_name": "dp", "note": note}
            quantity, count = "state_bytes_per_parameter", parameter_count(MODEL)
            found += lines(name, {quantity: held / count}, "scaled", **place)
            found += lines(name, {quantity: state / count}, "computed", **place)
    return found


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
