"""Runs a rank's program: the only place that knows messages and stage autograd.

Shapes: activations between stages are [s, b, h]; with scatter/gather each tensor-parallel rank sends s·b·h/t elements.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from engine.model.microbatch import PipelineInput
from engine.model.stage_model import StageModel
from engine.parallel.mesh import ParallelMesh
from engine.pipeline.lowering import Instruction, Interval, Message
from engine.pipeline.schedule import Compute, Op

Key = tuple[Op, int, int]
"""Payload, microbatch, and the stage that consumes it."""
Inbox = dict[Key, tuple[dist.Work | None, torch.Tensor]]
"""What is on its way to this rank, or handed on by its chunk before."""
Outbox = dict[Key, torch.Tensor]


class _HandOn(torch.autograd.Function):
    """Stands for a stage's output in the graph without keeping it: the gradient is put in when it has arrived."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, arrived: list[torch.Tensor]) -> torch.Tensor:
        ctx.arrived = arrived
        return output.new_zeros(())

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.arrived.pop(), None


class PipelineExecutor:
    """One rank's chunks and the programs they run."""

    def __init__(self, chunks: Sequence[StageModel], mesh: ParallelMesh, scatter_gather: bool) -> None:
        self._chunks, self._mesh = chunks, mesh
        self._pp = mesh.pp.size
        self._last = self._pp * len(chunks) - 1
        self._divides = scatter_gather and mesh.tp.size > 1 and not mesh.sequence_parallel

    def run(
        self,
        program: Sequence[Instruction],
        microbatches: Sequence[PipelineInput],
        loss_scale: float = 1.0,
        before_backward: Callable[[Compute], None] | None = None,
        timeline: list[Interval] | None = None,
    ) -> torch.Tensor:
        """Sum over microbatches of (loss × sequences), float64; zero on ranks without the last stage.

        Gradients of `loss_scale` × loss, summed over microbatches, are added to the parameters'. With `timeline`, what
        was computed is added to it with its seconds of the clock, which ranks of one machine share; waiting for a
        message is no part of a computation. A GPU is then waited for after each.
        """
        total = torch.zeros((), dtype=torch.float64, device=self._mesh.device)
        inbox: Inbox = {}
        outbox: Outbox = {}
        saved: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]] = {}
        sends: list[tuple[dist.Work, torch.Tensor]] = []
        for instruction in program:
            if isinstance(instruction, Message):
                key = (instruction.payload, instruction.microbatch, instruction.stage)
                if instruction.send:
                    sends = [pending for pending in sends if not pending[0].is_completed()]
                    sends.append(self._send(outbox.pop(key), instruction))
                else:
                    inbox[key] = self._receive(microbatches[instruction.microbatch], instruction)
                continue
            op, number, chunk = instruction
            stage = chunk * self._pp + self._mesh.pp.rank
            batch = microbatches[number]
            if op is Op.FORWARD:
                if stage == 0:
                    inputs = batch.tokens
                else:
                    inputs = self._take(inbox, (Op.FORWARD, number, stage), batch)
                    inputs.requires_grad_(torch.is_grad_enabled())
                start = self._now(timeline is not None)
                hidden = self._chunks[chunk].run_stage(inputs, batch)
                arrived: list[torch.Tensor] = []
                if stage == self._last:
                    loss = self._chunks[chunk].batch_loss(hidden, batch)
                    total += loss.detach().double() * len(batch.tokens)
                    output = loss * loss_scale
                else:
                    self._put(inbox, outbox, (Op.FORWARD, number, stage + 1), hidden.detach())
                    output = _HandOn.apply(hidden, arrived)
                if torch.is_grad_enabled():
                    saved[number, stage] = (inputs, output, arrived)
            else:
                inputs, output, arrived = saved.pop((number, stage))
                if stage != self._last:
                    arrived.append(self._take(inbox, (Op.BACKWARD, number, stage), batch))
                start = self._now(timeline is not None)
                if before_backward:
                    before_backward(instruction)
                output.backward()
                if stage > 0:
                    assert inputs.grad is not None
                    self._put(inbox, outbox, (Op.BACKWARD, number, stage - 1), inputs.grad)
            if timeline is not None:
                timeline.append(Interval(instruction, start, self._now(True)))
        with self._mesh.waiting:
            for work, _ in sends:
                work.wait()
        return total

    def _now(self, timed: bool) -> float:
        """The clock; if it matters, once what was asked of a GPU is done."""
        if timed and self._mesh.device.type == "cuda":
            torch.cuda.synchronize(self._mesh.device)
        return time.time()

    def _put(self, inbox: Inbox, outbox: Outbox, key: Key, payload: torch.Tensor) -> None:
        """Leave a payload for the message that sends it, or for this rank's own next chunk."""
        if key[2] % self._pp == self._mesh.pp.rank:
            inbox[key] = (None, payload)
        else:
            outbox[key] = self._divide(payload)

    def _take(self, inbox: Inbox, key: Key, batch: PipelineInput) -> torch.Tensor:
        work, payload = inbox.pop(key)
        if work is None:
            return payload
        with self._mesh.waiting:
            work.wait()
        if self._divides:
            payload = self._mesh.tp.all_gather(payload, dim=0)
        return payload.view(self._shape(batch))

    def _send(self, payload: torch.Tensor, message: Message) -> tuple[dist.Work, torch.Tensor]:
        work = dist.isend(payload, self._mesh.pipeline_peer(message.peer), self._mesh.pp.group, self._tag(message))
        assert work is not None
        return work, payload

    def _receive(self, batch: PipelineInput, message: Message) -> tuple[dist.Work | None, torch.Tensor]:
        parameter = next(self._chunks[0].parameters())
        count = torch.Size(self._shape(batch)).numel() // (self._mesh.tp.size if self._divides else 1)
        payload = torch.empty(count, dtype=parameter.dtype, device=parameter.device)
        peer = self._mesh.pipeline_peer(message.peer)
        return dist.irecv(payload, peer, self._mesh.pp.group, self._tag(message)), payload

    def _divide(self, payload: torch.Tensor) -> torch.Tensor:
        flat = payload.contiguous().view(-1)
        return flat.chunk(self._mesh.tp.size)[self._mesh.tp.rank].contiguous() if self._divides else flat

    def _shape(self, batch: PipelineInput) -> tuple[int, int, int]:
        rows, columns = batch.tokens.shape
        parts = self._mesh.tp.size if self._mesh.sequence_parallel else 1
        return columns // parts, rows, self._chunks[0].config.hidden_size

    def _tag(self, message: Message) -> int:
        return (message.microbatch * (self._last + 1) + message.stage) * 2 + (message.payload is Op.BACKWARD)
