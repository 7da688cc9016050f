"""A model divided over the mesh, with one way to train it and one to evaluate it."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import torch

from engine.config import ModelConfig, ParallelConfig
from engine.family import family_of
from engine.model.microbatch import PipelineInput
from engine.model.stage_model import StageModel
from engine.optim.flat import FlatGroup
from engine.optim.gradients import GradientReducer, Reducer
from engine.parallel.layout import Stage, split_layers
from engine.parallel.mesh import Axis, ParallelMesh
from engine.parallel.sharding import sharded_parameters
from engine.pipeline.executor import PipelineExecutor
from engine.pipeline.lowering import Instruction, Interval, lower
from engine.pipeline.schedule import Compute, ScheduleName, compute_orders, forward_orders


class PartitionedModel:
    """This rank's stages of a model. On a mesh of one rank, the serial model."""

    def __init__(
        self, model: ModelConfig, parallel: ParallelConfig, mesh: ParallelMesh, dtype: torch.dtype, seed: int
    ) -> None:
        self.config, self.parallel, self.mesh = model, parallel, mesh
        stages = split_layers(model.num_layers, parallel.pp, parallel.chunks)
        mine = [stages[chunk * parallel.pp + mesh.pp.rank] for chunk in range(parallel.chunks)]
        self.is_zero3 = parallel.shard_parameters and mesh.dp.size > 1
        self.chunks = [self._build(stage, dtype) for stage in mine]
        for chunk in self.chunks:
            chunk.initialize(seed)
        self._by_chunk = [sharded_parameters(chunk, mesh) for chunk in self.chunks]
        self.parameters = [parameter for chunk in self._by_chunk for parameter in chunk]
        # optimizer and checkpoints: in ZeRO stage 3 the data axis divides as the tensor axis does
        self.storage_mesh = replace(mesh, tp=mesh.dp, dp=Axis()) if self.is_zero3 else mesh
        self._executor = PipelineExecutor(self.chunks, mesh, parallel.scatter_gather)

    def _build(self, stage: Stage, dtype: torch.dtype) -> StageModel:
        model_class = family_of(self.config).model_class()
        if not self.is_zero3:
            return model_class(self.config, self.mesh, stage, self.parallel).to(self.mesh.device, dtype)
        from engine.optim.zero3 import shard_zero3

        with torch.device("meta"):
            chunk = model_class(self.config, self.mesh, stage, self.parallel).to(dtype)
        shard_zero3(chunk, self.mesh)
        return chunk

    def reducer(self, groups: Sequence[FlatGroup], measures_noise: bool = False) -> Reducer:
        if self.is_zero3:
            from engine.optim.zero3 import ShardedReducer

            return ShardedReducer(self.chunks[0], groups)
        return GradientReducer(groups, self.mesh, measures_noise)

    def forward_backward(
        self,
        microbatches: Sequence[PipelineInput],
        reducer: Reducer,
        loss_scale: float = 1.0,
        timeline: list[Interval] | None = None,
    ) -> torch.Tensor:
        for chunk in self.chunks:
            if not chunk.training:  # said to every module
                chunk.train()
        sequences = sum(len(microbatch.tokens) for microbatch in microbatches)
        reducer.begin(sequences)
        left = [sequences if self.mesh.in_order else len(microbatches)] * len(self.chunks)

        def before_backward(compute: Compute) -> None:
            left[compute.chunk] -= 1
            if left[compute.chunk] == 0:
                reducer.arm(self._by_chunk[compute.chunk])

        program = self._program(len(microbatches), training=True)
        return self._executor.run(program, microbatches, loss_scale, before_backward, timeline)

    @torch.no_grad()
    def evaluate(self, microbatches: Sequence[PipelineInput]) -> torch.Tensor:
        """Sum of (loss × sequences), float64, zero off the last stage."""
        for chunk in self.chunks:
            chunk.eval()
        total = self._executor.run(self._program(len(microbatches), training=False), microbatches)
        for chunk in self.chunks:
            if reshard := getattr(chunk, "reshard", None):  # FSDP2's: the weights may be others when next used
                reshard()
        return total

    def _program(self, microbatches: int, training: bool) -> list[Instruction]:
        schedule = self.parallel.schedule if training else None
        return _programs(schedule, self.parallel.pp, self.parallel.chunks, microbatches)[self.mesh.pp.rank]


@cache
def _programs(schedule: ScheduleName | None, pp: int, chunks: int, microbatches: int) -> list[list[Instruction]]:
    every = pp, chunks, microbatches
    orders = compute_orders(schedule, *every) if schedule else forward_orders(*every)
    return lower(orders, chunks).programs
