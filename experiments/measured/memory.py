"""Peak bytes that pipelines keep for backward if the stages recompute their layers in groups.

The schedule, messages and graphs are the engine's, the layers `activations`' own. Saved tensors are
counted while autograd holds them, each storage once.
"""

import math
import statistics
from collections.abc import Sequence
from typing import Any

import torch
import torch._dynamo  # checkpoint's first call imports it: once here, not on every rank
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mlm_repro.engine.config import ModelConfig
from mlm_repro.engine.launch.forked import run_forked
from mlm_repro.engine.launch.mesh import build_mesh
from mlm_repro.engine.model.microbatch import PipelineInput
from mlm_repro.engine.model.transformer import run_layers
from mlm_repro.engine.parallel.layout import Layout
from mlm_repro.engine.parallel.mesh import ParallelMesh
from mlm_repro.experiments.measured.activations import PlainLayer, SavedBytes, kept_bytes
from mlm_repro.experiments.measured.bubble import run_stages
from mlm_repro.experiments.sealed import Line, lines
from mlm_repro.lineage.progress import announce

CONFIG = ModelConfig(
    num_layers=8, hidden_size=32, num_heads=16, seq_length=32, vocab_size=8, padded_vocab_size=8
)
"""as/h of GPT-3 (175B), which is all that bytes per sbh depend on."""
SEQUENCES = 8
"""Number of sequences, N of GPipe's claim; L is the number of layers in `CONFIG`."""
PARTITIONS = (2, 4)
"""Numbers of pipeline stages, each K of GPipe's claim."""
MICROBATCHES = (2, 4, 8)
"""Numbers of microbatches, each M of GPipe's claim."""
STAGE_LAYERS = 24
LAYOUTS = {
    "no parallelism": ("none", 1, False),
    "tensor parallel, selective recomputation": ("selective", 2, False),
    "tensor and sequence parallel, selective recomputation": ("selective", 2, True),
}
"""Layouts by name: part of a layer that is always recomputed, number of ranks, and true if the
sequence is divided."""
IN_FLIGHT = (1, 4)
"""Microbatches whose checkpoints are kept at a time; the 2021 paper's formula has one."""


class GroupedStage(nn.Module):
    """A pipeline stage of PlainLayers that recomputes its layers in backward, in groups of as many
    as its attribute `at_once` says; the last group may have fewer. The attribute is 0, which
    recomputes nothing, until the caller sets it. The first stage begins with a parameter in place
    of an embedding, so of the token ids only the number of sequences is used."""

    at_once = 0

    def __init__(self, layers: int, form: str, mesh: ParallelMesh) -> None:
        super().__init__()
        self.config = CONFIG
        self.is_first = mesh.pp.rank == 0
        h = CONFIG.hidden_size
        heads = CONFIG.num_heads
        self.layers = nn.ModuleList([PlainLayer(h, heads, mesh, form) for _ in range(layers)])
        rows = CONFIG.seq_length // (mesh.tp.size if mesh.sequence_parallel else 1)
        self.start = nn.Parameter(torch.ones(rows, 1, h))

    def run_stage(self, inputs: Tensor, batch: PipelineInput) -> Tensor:
        """Return the output of the layers, [s, b, h] → [s, b, h], or [s/t, b, h] where the sequence
        is divided. The first stage begins with a parameter, repeated for each sequence of `inputs`.
        `batch` is not used."""
        x = self.start.repeat(1, len(inputs), 1) if self.is_first else inputs
        layers = list(self.layers)
        step = self.at_once or len(layers)
        for first in range(0, len(layers), step):
            group = layers[first : first + step]
            x = (
                checkpoint(run_layers, group, x, use_reentrant=True)
                if self.at_once
                else run_layers(group, x)
            )
        return x

    def batch_loss(self, hidden: Tensor, batch: PipelineInput) -> Tensor:
        """Return the mean of the states `hidden`, a scalar for which autograd saves nothing;
        `batch` is not used."""
        return hidden.mean()


def peaks(
    pp: int,
    layout: tuple[str, int, bool],
    layers: int,
    group_sizes: Sequence[int],
    counts: Sequence[int],
    sequences: int,
) -> list[int]:
    """Run an iteration in bf16 for each pair of one of `group_sizes` and one of `counts`, and
    return a flat list of the most bytes that autograd saves at a time in this rank's stage, without
    parameters: first for the first group size with every count in turn, then for the next one.

    A group size is the number of layers that are recomputed together, 0 for no recomputation, a
    count the number of equal microbatches that `sequences` are divided into. The pipeline has `pp`
    stages of `layers` layers and the schedule "gpipe"; `layout` is a value of `LAYOUTS`. Every rank
    calls this.
    """
    form, tp, divided = layout
    mesh = build_mesh(Layout(pp=pp, tp=tp), divided)
    stage: Any = GroupedStage(layers, form, mesh).bfloat16()
    most = []
    for stage.at_once in group_sizes:
        for count in counts:
            memory = SavedBytes(stage)
            with memory:
                run_stages([stage], mesh, "gpipe", count, sequences // count)
            most.append(memory.peak)
    return most


def layer_bytes(layout: tuple[str, int, bool]) -> tuple[int, int]:
    """Run one layer of `CONFIG` forward in bf16 on this rank, for one sequence, and return A_in and
    A_int, the bytes of its input and of all that it keeps for backward. `layout` is a value of
    `LAYOUTS`; every rank of it calls this."""
    form, tp, divided = layout
    mesh = build_mesh(Layout(tp=tp), divided)
    x = torch.zeros(
        CONFIG.seq_length // (tp if divided else 1), 1, CONFIG.hidden_size, dtype=torch.bfloat16
    )
    layer = PlainLayer(CONFIG.hidden_size, CONFIG.num_heads, mesh, form).bfloat16()
    return x.nbytes, kept_bytes(layer, x.requires_grad_())


def measure_memory() -> list[Line]:
    """Run GPipe's pipelines, whose peak memory is N + L/K · N/M, and return a list of lines, dicts
    with a record's fields: N as a number of layer inputs and L/K as a number of layers, both from a
    line through several M; the peak of one stage with all layers that recomputes nothing, N · L, as
    a multiple of what one layer keeps of one sequence; and, for each of `LAYOUTS`, the number of
    activation checkpoints that needs the least memory, measured and by the formula. Starts
    processes."""
    announce(
        f"pipelines of {', '.join(map(str, PARTITIONS))} processes, and stages of {STAGE_LAYERS}"
        " layers"
    )
    plain = LAYOUTS["no parallelism"]
    total = CONFIG.num_layers
    note = "saved bytes of the stage that keeps most"
    ((size_in, size_all),) = run_forked(layer_bytes, 1, plain)
    ((whole,),) = run_forked(peaks, 1, 1, plain, total, (0,), MICROBATCHES[:1], SEQUENCES)
    numbers = lines("nothing again, 1 partition", {"layers_kept": whole / size_all}, note=note)
    for pp in PARTITIONS:
        layers = total // pp
        of_ranks = run_forked(peaks, pp, pp, plain, layers, (layers,), MICROBATCHES, SEQUENCES)
        most = [max(of_run) for of_run in zip(*of_ranks, strict=True)]
        # The formula is linear in N/M: its slope is the recomputed layers, its intercept the
        # inputs.
        again, always = statistics.linear_regression(
            [SEQUENCES / count for count in MICROBATCHES], most
        )
        # the recomputed group's own input is one of the kept inputs
        values = {
            "inputs_kept": round(always / size_in, 9),
            "layers_again": round((again + size_in) / size_all, 9),
        }
        numbers += lines(
            f"{pp} partitions",
            values,
            note=f"{note}, by a line through {len(MICROBATCHES)} values of M",
        )
    for series in LAYOUTS:
        numbers += _checkpoints(series)
    return numbers


def _checkpoints(series: str) -> list[Line]:
    """Return a list of lines, dicts with a record's fields: two for each number of microbatches in
    `IN_FLIGHT`, which is their `x`. The quantity `checkpoints` is the number of equal groups of
    layers, each with one checkpoint, that by measurement needs the least memory in a stage of
    `STAGE_LAYERS` layers. `checkpoints_by_formula` is √(l · A_int / A_in): l are the stage's
    layers, A_int is measured as the bytes that one layer keeps, and A_in as the bytes of that
    layer's input, times the number of microbatches. `series` is a key of `LAYOUTS`. Starts
    processes."""
    layout = LAYOUTS[series]
    numbers = []
    size_in, size_all = run_forked(layer_bytes, layout[1], layout)[0]
    group_sizes = [layers for layers in range(STAGE_LAYERS, 0, -1) if STAGE_LAYERS % layers == 0]
    for flying in IN_FLIGHT:
        most = run_forked(
            peaks, layout[1], 1, layout, STAGE_LAYERS, group_sizes, (flying,), flying
        )[0]
        values = {
            "checkpoints": STAGE_LAYERS / group_sizes[most.index(min(most))],
            "checkpoints_by_formula": math.sqrt(STAGE_LAYERS * size_all / (flying * size_in)),
        }
        note = (
            f"saved bytes of {STAGE_LAYERS} layers in groups of {', '.join(map(str, group_sizes))}"
        )
        numbers += lines(series, values, x=flying, x_name="microbatches in flight", note=note)
    return numbers
