"""A model divided over the mesh, with one way to train it and one to evaluate it."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import torch

from engine.config import ModelConfig, ParallelConfig
from engine.family import family_of
from engine.model.microbatch import PipelineInput
from engine.model.stage_model import StageModel
from engine.model.stages import Stage, split_layers
from engine.optim.flat import FlatGroup
from engine.optim.gradients import GradientReducer, Reducer
from engine.parallel.mesh import Axis, ParallelMesh
from engine.parallel.sharding import ShardedParameter, sharded_parameters
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
        self._executor = PipelineExecutor(self.chunks, mesh, parallel.scatter_gather)

    def _build(self, stage: Stage, dtype: torch.dtype) -> StageModel:
        model_class, recomputation = family_of(self.config).model_class(), self.parallel.recomputation
        if not self.is_zero3:
            return model_class(self.config, self.mesh, stage, recomputation).to(self.mesh.device, dtype)
        from engine.optim.zero3 import shard_zero3

        with torch.device("meta"):
            chunk = model_class(self.config, self.mesh, stage, recomputation).to(dtype)
        shard_zero3(chunk, self.mesh)
        return chunk

    @property
    def storage_mesh(self) -> ParallelMesh:
        """The mesh of optimizer and checkpoints: in ZeRO stage 3 the data axis divides as the tensor axis does."""
        return replace(self.mesh, tp=self.mesh.dp, dp=Axis()) if self.is_zero3 else self.mesh

    @property
    def parameters(self) -> list[ShardedParameter]:
        """Parameters of all this rank's stages."""
        return [parameter for chunk in self._by_chunk for parameter in chunk]

    def reducer(self, groups: Sequence[FlatGroup], measures_noise: bool = False) -> Reducer:
        """What takes this model's gradients to the optimizer's flat groups."""
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
        """Sum of (loss × sequences) over the microbatches, float64, zero off the last stage; adds to gradients.

        With `timeline`, this rank's computations are added to it as they end.
        """
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
        if self.is_zero3:
            from engine.optim.zero3 import release

            release(self.chunks[0])
        return total

    def _program(self, microbatches: int, training: bool) -> list[Instruction]:
        parallel = self.parallel
        return _programs(parallel.schedule if training else None, parallel.pp, parallel.chunks, microbatches)[
            self.mesh.pp.rank
        ]


@cache
def _programs(schedule: ScheduleName | None, pp: int, chunks: int, microbatches: int) -> list[list[Instruction]]:
    if schedule is None:
        orders = forward_orders(pp, chunks, microbatches)
    else:
        orders = compute_orders(schedule, pp, chunks, microbatches)
    return lower(orders, chunks).programs
