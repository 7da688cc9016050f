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
        saved: dict[tuple[int, int], list[tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]]] = {}
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
            parts = batch.sequences() if self._mesh.in_order else [batch]
            if op is Op.FORWARD:
                taken = [part.tokens for part in parts]
                if stage > 0:
                    taken = self._take(inbox, (Op.FORWARD, number, stage), batch, len(parts))
                    for inputs in taken:
                        inputs.requires_grad_(torch.is_grad_enabled())
                start = self._now(timeline is not None)
                made = [self._chunks[chunk].run_stage(*part) for part in zip(taken, parts, strict=True)]
                arrivals: list[list[torch.Tensor]] = [[] for _ in parts]
                if stage == self._last:
                    losses = [self._chunks[chunk].batch_loss(*part) for part in zip(made, parts, strict=True)]
                    total += self._sum(losses, parts)
                    outputs = [loss * loss_scale for loss in losses]
                else:
                    self._put(inbox, outbox, (Op.FORWARD, number, stage + 1), [hidden.detach() for hidden in made])
                    outputs = [_HandOn.apply(*part) for part in zip(made, arrivals, strict=True)]
                if torch.is_grad_enabled():
                    saved[number, stage] = list(zip(taken, outputs, arrivals, strict=True))
            else:
                graphs = saved.pop((number, stage))
                if stage != self._last:
                    gradients = self._take(inbox, (Op.BACKWARD, number, stage), batch, len(parts))
                    for (_, _, arrived), gradient in zip(graphs, gradients, strict=True):
                        arrived.append(gradient)
                start = self._now(timeline is not None)
                for _, output, _ in graphs:
                    if before_backward:
                        before_backward(instruction)
                    output.backward()
                if stage > 0:
                    to_inputs = [inputs.grad for inputs, _, _ in graphs if inputs.grad is not None]
                    self._put(inbox, outbox, (Op.BACKWARD, number, stage - 1), to_inputs)
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

    def _sum(self, losses: Sequence[torch.Tensor], parts: Sequence[PipelineInput]) -> torch.Tensor:
        """Of loss × sequences, float64. Where the order must not matter, of losses in steps of 2⁻³²: exact."""
        total = torch.stack(
            [loss.detach().double() * len(part.tokens) for loss, part in zip(losses, parts, strict=True)]
        )
        return (total.mul_(2.0**32).round_().mul_(2.0**-32) if self._mesh.in_order else total).sum()

    def _put(self, inbox: Inbox, outbox: Outbox, key: Key, parts: Sequence[torch.Tensor]) -> None:
        """Leave a payload for the message that sends it, or for this rank's own next chunk."""
        payload = parts[0] if len(parts) == 1 else torch.cat(list(parts), dim=1)
        if key[2] % self._pp == self._mesh.pp.rank:
            inbox[key] = (None, payload)
        else:
            flat = payload.contiguous().view(-1)
            outbox[key] = flat.chunk(self._mesh.tp.size)[self._mesh.tp.rank].contiguous() if self._divides else flat

    def _take(self, inbox: Inbox, key: Key, batch: PipelineInput, count: int) -> list[torch.Tensor]:
        """A payload in so many parts of the microbatch."""
        work, payload = inbox.pop(key)
        if work is not None:
            with self._mesh.waiting:
                work.wait()
            if self._divides:
                payload = self._mesh.tp.all_gather(payload, dim=0)
        return [part.contiguous() for part in payload.view(self._shape(batch)).chunk(count, dim=1)]

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

    def _shape(self, batch: PipelineInput) -> tuple[int, int, int]:
        rows, columns = batch.tokens.shape
        parts = self._mesh.tp.size if self._mesh.sequence_parallel else 1
        return columns // parts, rows, self._chunks[0].config.hidden_size

    def _tag(self, message: Message) -> int:
        return (message.microbatch * (self._last + 1) + message.stage) * 2 + (message.payload is Op.BACKWARD)
