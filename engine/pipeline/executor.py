"""A model divided over the mesh, and the execution of each rank's pipeline program on it.

Shapes: activations between stages are [s, b, h]; with scatter/gather each tensor-parallel rank
sends s·b·h/t elements.
"""

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import cache
from itertools import chain

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from mlm_repro.engine.config import ModelConfig, ParallelConfig
from mlm_repro.engine.family import family_of
from mlm_repro.engine.kernels import registry
from mlm_repro.engine.kernels.graphs import Captured
from mlm_repro.engine.model.microbatch import PipelineInput
from mlm_repro.engine.model.stage_model import StageModel
from mlm_repro.engine.optim.flat import FlatGroup
from mlm_repro.engine.optim.gradients import GradientReducer
from mlm_repro.engine.parallel.layout import split_layers
from mlm_repro.engine.parallel.mesh import DONE, LoneAxis, ParallelMesh, Pending
from mlm_repro.engine.parallel.sharding import sharded_parameters
from mlm_repro.engine.pipeline.lowering import Instruction, Message, lower
from mlm_repro.engine.pipeline.schedule import (
    Compute,
    Op,
    ScheduleName,
    compute_orders,
    forward_orders,
)


class PartitionedModel:
    """This rank's stages of a model, `chunks`, with methods that run microbatches through the
    stages of all pipeline ranks: `forward_backward` in training, for the loss and gradients, and
    `evaluate` for the loss alone. The attribute `parameters` has its ShardedParameters. On a mesh
    of one rank it is the whole model."""

    def __init__(
        self, chunks: Sequence[StageModel], parallel: ParallelConfig, mesh: ParallelMesh
    ) -> None:
        self.chunks = chunks
        self.parallel = parallel
        self.mesh = mesh
        self.sites: dict[str, int] = {}
        """Dict name of a dropout site → its row in the table of keys on a GPU. A site gets its row
        at its first use."""
        self.graphs: Captured | None = None
        self.is_zero3 = parallel.shard_parameters and mesh.dp.size > 1
        self._by_chunk = [sharded_parameters(chunk, mesh) for chunk in chunks]
        self.parameters = list(chain.from_iterable(self._by_chunk))
        # For optimizer and checkpoints: in ZeRO stage 3 the data axis divides parameters as the
        # tensor axis does, so both need no code for it.
        self.storage_mesh = replace(mesh, tp=mesh.dp, dp=LoneAxis()) if self.is_zero3 else mesh

    def reducer(self, groups: Sequence[FlatGroup]) -> GradientReducer:
        """Return a new GradientReducer, which sums gradients over ranks and brings them to
        `groups`, the optimizer's flat groups. It puts hooks on the parameters, and in ZeRO stage 3
        replaces the model's parameters by new ones, so one model gets one reducer."""
        if self.is_zero3:
            from mlm_repro.engine.optim.zero3 import ShardedReducer

            return ShardedReducer(self.chunks[0], groups)
        return GradientReducer(groups, self.mesh)

    def forward_backward(
        self,
        microbatches: Sequence[PipelineInput],
        reducer: GradientReducer,
        loss_scale: float = 1.0,
    ) -> Tensor:
        """Run forward and backward over this rank's microbatches in training mode and return this
        rank's sum of (loss × sequences), without the loss scale, a float64 scalar tensor, zero off
        the last stage. The reducer adds up the gradients of each microbatch's loss × `loss_scale`,
        1 by default. Its `begin` is called here; the caller has to call its `finish` with the
        divisor of this sum: for the mean loss the number of microbatches times `loss_scale`. Every
        rank calls it."""
        for chunk in self.chunks:
            # Asked first, because the flag is set on every module, which takes time.
            if not chunk.training:
                chunk.train()
        if registry.on_gpu(self.mesh.device):
            microbatches = [self.with_keys(batch) for batch in microbatches]
        reducer.begin()
        calls = [batch.tensors() for batch in microbatches]
        if self.graphs and all(map(self.graphs.fits, calls)):
            # A replay runs no hooks, by which the reducer would learn of the gradients.
            reducer.arrived.update(self._graded)
            return self.graphs.total(calls, loss_scale)
        # The reduction of a chunk may begin only with its last backward pass; before it, gradients
        # still grow.
        left = [len(microbatches)] * len(self.chunks)

        def before_backward(chunk: int) -> None:
            left[chunk] -= 1
            if left[chunk] == 0:
                reducer.arm(self._by_chunk[chunk])

        # One executor an iteration: what is in flight belongs to it, so a failed iteration leaves
        # nothing behind.
        executor = PipelineExecutor(
            self.chunks, self.mesh, self.parallel.scatter_gather, microbatches, loss_scale
        )
        return executor.run(self._program(len(microbatches), training=True), before_backward)

    def capture(self, batch: PipelineInput, reducer: GradientReducer) -> None:
        """Capture CUDA graphs of forward and backward, which the method `forward_backward` replays
        from now on if all microbatches of its call have the shape of `batch`, and else runs without
        them. Gradients go through `reducer`. Only for a mesh of one rank, a GPU, and a model
        without sentence pairs or memory, which the caller checks. Runs passes over zeros, which
        overwrite the gradients. An earlier pass must have used every dropout site. Raises torch's
        RuntimeError if CUDA cannot capture them; then no new graphs are replayed."""
        # A copy of the batch: the graphs read these very tensors at each replay.
        program = self._program(1, training=True)
        own = deepcopy(self.with_keys(batch))

        def run(loss_scale: Tensor) -> Tensor:
            return PipelineExecutor(self.chunks, self.mesh, False, [own], loss_scale).run(program)

        self.graphs = Captured(reducer.begin, run, own.tensors())
        self._graded = set(reducer.arrived)

    def with_keys(self, batch: PipelineInput) -> PipelineInput:
        """Return a copy of `batch`, the PipelineInput of a microbatch, whose attribute `dropout`
        has, on this rank's GPU, the random keys of the dropout sites, the points of the model at
        which dropout was used so far. If that attribute is None, `batch` itself is returned."""
        dropout = batch.dropout
        return (
            replace(batch, dropout=dropout.on_device(self.mesh.device, self.sites))
            if dropout
            else batch
        )

    @torch.no_grad()
    def evaluate(self, microbatches: Sequence[PipelineInput]) -> Tensor:
        """Run forward alone over this rank's microbatches, without gradients, in evaluation mode,
        which stays on, and return this rank's sum of (loss × sequences), a float64 scalar tensor,
        zero off the last stage. Every rank calls it."""
        for chunk in self.chunks:
            chunk.eval()
        executor = PipelineExecutor(
            self.chunks, self.mesh, self.parallel.scatter_gather, microbatches
        )
        total = executor.run(self._program(len(microbatches), training=False))
        for chunk in self.chunks:
            # FSDP2's: without a backward pass gathered weights may stay, which an update would not
            # reach.
            if reshard := getattr(chunk, "reshard", None):
                reshard()
        return total

    def _program(self, microbatches: int, training: bool) -> list[Instruction]:
        # Validation has no backward passes; the schedules' warm-up would only delay it.
        schedule = self.parallel.schedule if training else None
        return _programs(schedule, self.parallel.pp, self.parallel.chunks, microbatches)[
            self.mesh.pp.rank
        ]


def partition(
    model: ModelConfig, parallel: ParallelConfig, mesh: ParallelMesh, dtype: torch.dtype, seed: int
) -> PartitionedModel:
    """Return a PartitionedModel of this rank's stages of the model that `model` describes, divided
    by `parallel` and the mesh, with initial values drawn from `seed`, the same in every layout, in
    the number format `dtype` on the mesh's device. Raises BadInput for fewer layers than stages,
    and for ZeRO stage 3 over several data-parallel ranks that are threads."""
    stages = split_layers(model.num_layers, parallel.pp, parallel.chunks)
    model_class = family_of(model).model_class()
    chunks = []
    for stage in stages[mesh.pp.rank :: parallel.pp]:
        if parallel.shard_parameters and mesh.dp.size > 1:
            from mlm_repro.engine.optim.zero3 import shard_zero3

            # FSDP divides the parameters first and `initialize` fills the shards, so that no rank
            # ever holds the whole model.
            with torch.device("meta"):
                chunk = model_class(model, mesh, stage, parallel).to(dtype)
            shard_zero3(chunk, mesh)
        else:
            chunk = model_class(model, mesh, stage, parallel).to(mesh.device, dtype)
        # Values are drawn by global name and cut, not drawn by shard: every layout begins with the
        # same model.
        chunk.initialize(seed)
        chunks.append(chunk)
    return PartitionedModel(chunks, parallel, mesh)


# Iterations of one size run one program, and a growing batch has few sizes.
@cache
def _programs(
    schedule: ScheduleName | None, pp: int, chunks: int, microbatches: int
) -> list[list[Instruction]]:
    sizes = pp, chunks, microbatches
    return lower(
        compute_orders(schedule, *sizes) if schedule else forward_orders(*sizes), chunks
    ).programs


class PipelineExecutor:
    """Executor of one rank's program, a list of passes, sends and receives, which its method `run`
    takes, once; the constructor takes the microbatches of the iteration. It alone sends messages,
    and keeps each forward pass's graph for the backward pass."""

    def __init__(
        self,
        chunks: Sequence[StageModel],
        mesh: ParallelMesh,
        scatter_gather: bool,
        microbatches: Sequence[PipelineInput],
        loss_scale: float | Tensor = 1.0,
    ) -> None:
        self._chunks = chunks
        self._mesh = mesh
        self._microbatches = microbatches
        self._loss_scale = loss_scale
        self._last = mesh.pp.size * len(chunks) - 1
        # Tensor-parallel ranks hold equal activations, so each sends its part alone (2021 paper,
        # Section 4.1); with sequence parallelism they are divided already.
        self._divides = (
            scatter_gather and mesh.tp.size > 1 and mesh.pp.size > 1 and not mesh.sequence_parallel
        )
        self._payloads: dict[tuple[Op, int, int], tuple[Pending, Tensor]] = {}
        """Activations and gradients that wait for their consumer, whole or as sent, each after the
        Pending to wait for, by direction, microbatch and the stage that consumes them."""
        self._graphs: dict[tuple[int, int], tuple[Tensor, GradientEdge]] = {}
        """Forward passes whose backward pass is still to come, by (microbatch, chunk): a pair of
        the input and the edge of the output in autograd's graph, which does not keep the output."""
        # With the tensors, which would otherwise be freed before they have left.
        self._sends: list[tuple[Pending, Tensor]] = []
        self._total = torch.zeros((), dtype=torch.float64, device=mesh.device)

    def run(
        self,
        program: Sequence[Instruction],
        before_backward: Callable[[int], None] = lambda chunk: None,
    ) -> Tensor:
        """Execute the program, a list of passes, sends and receives, and return the sum of (loss ×
        sequences), without the loss scale, a float64 scalar tensor; zero on ranks without the last
        stage. `before_backward`, which does nothing by default, is called before each backward pass
        with the index, on this rank, of the chunk, the stage, that it goes through.

        Gradients of the loss scale × loss, summed over microbatches, are added to the parameters'.
        Every pipeline rank executes its own program at the same time. Call it once, because a
        second sum would contain the first.
        """
        # The order was made for all ranks at once; a rank only obeys, so no two ranks can disagree
        # about the next message.
        for instruction in program:
            if isinstance(instruction, Message):
                self._send(instruction) if instruction.send else self._receive(instruction)
                continue
            payload = self._take(instruction)
            if instruction.op is Op.FORWARD:
                result = self._forward(instruction, payload)
            else:
                before_backward(instruction.chunk)
                result = self._backward(instruction, payload)
            self._put(instruction, result)
        with self._mesh.waiting:
            for work, _ in self._sends:
                work.wait()
        return self._total

    def _forward(self, compute: Compute, inputs: Tensor | None) -> Tensor | None:
        """Run the forward pass of the microbatch and chunk that `compute` names, keep its graph for
        the backward pass unless gradients are off, and return the stage's output, detached, for the
        next stage. `inputs` is the previous stage's output, None on the first stage, which reads
        the token ids. The last stage adds its loss × sequences to the total and returns None."""
        chunk = self._chunks[compute.chunk]
        batch = self._microbatches[compute.microbatch]
        # A received activation is a leaf of this rank's graph; its gradient is what the stage
        # before waits for.
        inputs = batch.tokens if inputs is None else inputs.requires_grad_(torch.is_grad_enabled())
        output = chunk.run_stage(inputs, batch)
        if is_last := self._stage(compute) == self._last:
            loss = chunk.batch_loss(output, batch)
            # Double, so that the mean over thousands of microbatches does not depend on their
            # number in the last digits.
            self._total += loss.detach().double() * len(batch.tokens)
            output = loss * self._loss_scale
        if torch.is_grad_enabled():
            # The output itself has been sent and may be freed: Megatron-LM replaces its data by a
            # single element for the same reason.
            self._graphs[compute.microbatch, compute.chunk] = inputs, get_gradient_edge(output)
        return None if is_last else output.detach()

    def _backward(self, compute: Compute, gradient: Tensor | None) -> Tensor | None:
        """Run the backward pass of the microbatch and stage that `compute` gives as numbers, after
        their forward pass; it adds to the parameters' gradients and frees the forward pass's graph.
        `gradient` is the gradient of the stage's output, None on the last stage. Return the
        gradient of the stage's input for the previous stage; None on the first stage."""
        # Popped, so that the activations are freed as the backward pass walks through them.
        inputs, output = self._graphs.pop((compute.microbatch, compute.chunk))
        torch.autograd.backward(output, gradient)
        return inputs.grad

    def _put(self, compute: Compute, payload: Tensor | None) -> None:
        """Store `payload`, the result of the pass `compute`, unless it is None, under the stage
        that consumes it, from where the message that sends it, or this rank's own next chunk, takes
        it. If messages are divided, only this rank's part is stored, as a flat tensor."""
        if payload is not None:
            stage = self._stage(compute) + (1 if compute.op is Op.FORWARD else -1)
            flat = payload.contiguous().view(-1)
            tp = self._mesh.tp
            # A copy: a view would keep the whole activation in memory until its message has left.
            part = flat.chunk(tp.size)[tp.rank].contiguous() if self._divides else flat
            self._payloads[compute.op, compute.microbatch, stage] = DONE, part

    def _take(self, compute: Compute) -> Tensor | None:
        """Return the input of the pass `compute`, an activation or a gradient [s, b, h], once it
        has come, and remove it from the stored payloads. None for a forward pass of the first
        stage, and for a backward pass of the last stage. Every tensor-parallel rank calls it if
        messages are divided."""
        stage = self._stage(compute)
        if stage == (0 if compute.op is Op.FORWARD else self._last):
            return None
        work, payload = self._payloads.pop((compute.op, compute.microbatch, stage))
        with self._mesh.waiting:
            work.wait()
        if self._divides:
            payload = self._mesh.tp.all_gather(payload, dim=0)
        return payload.view(self._shape(compute.microbatch))

    def _send(self, message: Message) -> None:
        _, payload = self._payloads.pop((message.payload, message.microbatch, message.stage))
        # gloo reads the buffer until the message has left. Holding all of them to the end would
        # cost one activation a message.
        self._sends = [pending for pending in self._sends if not pending[0].is_completed()]
        self._sends.append((self._mesh.pp.start_send(payload, message.peer), payload))

    def _receive(self, message: Message) -> None:
        parameter = next(self._chunks[0].parameters())
        count = self._shape(message.microbatch).numel() // (
            self._mesh.tp.size if self._divides else 1
        )
        # Both ends compute the shape, so no message is needed to announce it.
        payload = torch.empty(count, dtype=parameter.dtype, device=parameter.device)
        work = self._mesh.pp.start_receive(payload, message.peer)
        self._payloads[message.payload, message.microbatch, message.stage] = work, payload

    def _stage(self, compute: Compute) -> int:
        return compute.chunk * self._mesh.pp.size + self._mesh.pp.rank

    def _shape(self, microbatch: int) -> torch.Size:
        b, s = self._microbatches[microbatch].tokens.shape
        parts = self._mesh.tp.size if self._mesh.sequence_parallel else 1
        return torch.Size((s // parts, b, self._chunks[0].config.hidden_size))
