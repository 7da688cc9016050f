"""Where an iteration stopped being a number: computed again, watched closely, once it has gone wrong."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from engine.guard import Guard, Iteration
from engine.model.microbatch import PipelineInput
from engine.pipeline.partition import PartitionedModel
from engine.step import NotFinite, TrainingStep

SHOWN = 8
"""Most places of the global batch that the sentence lists."""


class FiniteGuard(Guard):
    """Ends a run whose loss or gradient is no longer a number; in fp16 an overflow only lowers the loss scale."""

    def __init__(self, step: TrainingStep) -> None:
        self._step = step

    def skips(self, iteration: Iteration) -> bool:
        """Raises NotFinite, on every rank, naming where it began; the weights have not changed."""
        gradient = iteration.gradient
        if gradient.is_finite or (self._step.scaler and math.isfinite(gradient.loss)):
            return False
        where = diagnose(self._step, iteration.microbatches)
        raise NotFinite(
            f"iteration {iteration.number + 1}: loss {gradient.loss}, gradient norm {gradient.norm}; "
            "the weights were not updated" + (f"; {where}" if where else "")
        )


def diagnose(step: TrainingStep, microbatches: Sequence[PipelineInput]) -> str:
    """Which data-parallel ranks, samples and parameters are not finite, in words. Every rank calls it.

    The weights are still those of the failed iteration and all randomness is keyed, so a second pass meets the same
    values. The first output is the first in the order of the forward pass, the first gradient in that of the backward
    pass.
    """
    model, mesh = step.model, step.mesh
    assert isinstance(model, PartitionedModel)
    outputs: list[str] = []
    gradients: list[str] = []
    hooks: list[Any] = [p.local.register_hook(partial(_note, gradients, p.name)) for p in model.parameters]
    for name, module in (pair for chunk in model.chunks for pair in chunk.named_modules()):
        if next(module.parameters(recurse=False), None) is not None:
            hooks.append(module.register_forward_hook(_note_output(outputs, name)))
    step.gradient(microbatches)
    for hook in hooks:
        hook.remove()
    losses = [mesh.pp.all_reduce(model.evaluate([microbatch])).item() for microbatch in microbatches]
    samples = [
        place
        for loss, microbatch in zip(losses, microbatches, strict=True)
        for place in microbatch.places
        if not math.isfinite(loss)
    ]
    reports = mesh.gather_objects((mesh.dp.rank, mesh.pp.rank, outputs[:1], gradients[:1], samples))
    ranks = sorted({dp for dp, _, output, gradient, lost in reports if output or gradient or lost})
    parts = [f"data-parallel rank{'s' if len(ranks) > 1 else ''} {_join(ranks)}"] if ranks else []
    by_stage = sorted(reports, key=lambda report: report[1])
    if output := next((output[0] for *_, output, _, _ in by_stage if output), None):
        parts.append(f"first output that is not finite: {output}")
    if gradient := next((gradient[0] for *_, gradient, _ in reversed(by_stage) if gradient), None):
        parts.append(f"first gradient: {gradient}")
    if lost := sorted({place for *_, samples in reports for place in samples}):
        parts.append(f"samples of the global batch without a loss: {_join(lost)}")
    return "; ".join(parts)


def _note(names: list[str], name: str, tensor: torch.Tensor) -> None:
    if not torch.isfinite(tensor.to_dense()).all():  # a gradient may be sparse
        names.append(name)


def _note_output(names: list[str], name: str) -> Callable[[nn.Module, Any, torch.Tensor], None]:
    """A module's bias is part of its output, also where a later kernel adds it."""

    def hook(module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        bias = getattr(module, "bias", None)
        _note(names, name, output if bias is None else torch.cat([output.flatten(), bias.flatten()]))

    return hook


def _join(numbers: Sequence[int]) -> str:
    shown = ", ".join(str(number) for number in numbers[:SHOWN])
    return shown + (f" and {len(numbers) - SHOWN} more" if len(numbers) > SHOWN else "")
