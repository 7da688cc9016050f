"""The list of guards, and those that watch the numbers of a run: finite, spikes, noise scale, trust ratio, timeline."""

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from torch import nn

from engine.config import RunConfig
from engine.guard import Guard
from engine.guard import Iteration as Iteration
from engine.guard.memory import MemoryGuard
from engine.guard.memory import PeakMemory as PeakMemory
from engine.guard.ranks import ReplicaGuard, SlowRankGuard, joined
from engine.model.microbatch import PipelineInput
from engine.optim.flat import FlatOptimizer
from engine.pipeline.executor import PartitionedModel
from engine.pipeline.lowering import Interval, lower
from engine.pipeline.schedule import compute_orders
from engine.run.files import NORM_EDGES, TIMELINE, Computation, Timeline
from engine.step import NotFinite, TrainingStep
from lineage.atomic import write_text
from lineage.run import RunDirectory

SPIKE_WINDOW, LEAST = 128, 64
"""Iterations that are remembered, and how many must be known before anything is called a spike."""
DEVIATIONS = 6.0
NOISE_WINDOW = 100
"""Iterations over which the noise scale is averaged."""


def guards_of(
    config: RunConfig, run: RunDirectory, step: TrainingStep, memory: PeakMemory, recent: "RecentIterations"
) -> list[Guard]:
    """The guards of a run, in the order in which they are asked."""
    mesh = step.mesh
    guards: list[Guard] = [
        SlowRankGuard(mesh), SpikeGuard(recent, config.train.skip_spikes), FiniteGuard(step), MemoryGuard(memory),
        TimelineGuard(run.path, config, step), ReplicaGuard(step.model.parameters, step.model.storage_mesh),
    ]  # fmt: skip
    if config.record.noise_scale and mesh.dp.size > 1:
        guards.append(NoiseScaleGuard(mesh.dp.size))
    if config.record.trust_ratio:
        guards.append(TrustRatioGuard(step.optimizer))
    return guards


class RecentIterations:
    """Losses and gradient norms of the last iterations. Checkpoints keep them, so a resumed run decides alike.

    A spike is a loss or a gradient norm above the mean of the last 128 by more than 6 standard deviations, once 64 are
    known (OLMo-core, `optim/skip_step_optimizer.py`, which also counts leaps downwards). Spikes are remembered too, so
    a level that stays is soon no spike.
    """

    def __init__(self, seen: Iterable[Sequence[float]] = ()) -> None:
        self._seen = deque(((loss, norm) for loss, norm in seen), maxlen=SPIKE_WINDOW)

    def state(self) -> tuple[tuple[float, float], ...]:
        """(loss, gradient norm) of each, oldest first, as a checkpoint keeps them."""
        return tuple(self._seen)

    def add(self, loss: float, gradient_norm: float) -> dict[str, float]:
        """Remember an iteration. Returns the limit of each value that exceeds it: `loss`, `gradient_norm`.

        An iteration with a value that is not finite, such as an fp16 overflow, is not remembered.
        """
        if not (math.isfinite(loss) and math.isfinite(gradient_norm)):
            return {}
        values = {"loss": loss, "gradient_norm": gradient_norm}
        columns = zip(*self._seen, strict=True) if len(self._seen) >= LEAST else ()
        limits = {name: fmean(seen) + DEVIATIONS * stdev(seen) for name, seen in zip(values, columns, strict=False)}
        self._seen.append((loss, gradient_norm))
        return {name: limit for name, limit in limits.items() if values[name] > limit}


class SpikeGuard(Guard):
    """Notes spikes in the metrics, and leaves their updates out if `skip`."""

    def __init__(self, recent: RecentIterations, skip: bool) -> None:
        self._recent, self._skip = recent, skip
        self._spike: dict[str, float] = {}

    def skips(self, iteration: Iteration) -> bool:
        self._spike = self._recent.add(iteration.gradient.loss, iteration.gradient.norm)
        return self._skip and bool(self._spike)

    def after(self, iteration: Iteration) -> str:
        line = iteration.line
        line.spike = self._spike
        leaps = " and ".join(
            f"{name.replace('_', ' ')} {getattr(line, name):.4g} above {limit:.4g}"
            for name, limit in self._spike.items()
        )
        done = "no update was made" if line.skipped else "the update was made"
        return f"warning: iteration {line.iteration} is a spike, {leaps}; {done}" if leaps else ""


class NoiseScaleGuard(Guard):
    """Adds the gradient noise scale to the metrics (McCandlish et al. 2018, Appendix A.1).

    It is averaged over the last iterations of this session.
    """

    def __init__(self, dp: int) -> None:
        self._dp = dp
        self._last = deque[tuple[float, float]](maxlen=NOISE_WINDOW)

    def after(self, iteration: Iteration) -> str:
        """Estimate both moments from the gradients of each rank and of all ranks; none where they are not finite."""
        gradient, line, batch_size = iteration.gradient, iteration.line, iteration.batch_size
        square = variance = scale = None
        if math.isfinite(gradient.local_square) and math.isfinite(gradient.norm):
            small = batch_size // self._dp
            square, variance = gradient_moments(gradient.local_square, small, gradient.norm**2, batch_size)
            self._last.append((square, variance))
            scale = noise_scale(self._last)
        line.gradient_square, line.gradient_variance, line.noise_scale = square, variance, scale
        return ""


def gradient_moments(
    small_square: float, small_batch: int, large_square: float, large_batch: int
) -> tuple[float, float]:
    """|G|², the squared norm of the true gradient, and tr Σ, the variance of one sample's gradient, without bias.

    The arguments are squared norms of gradients averaged over each batch: E|G_B|² = |G|² + tr Σ / B.
    """
    square = (large_batch * large_square - small_batch * small_square) / (large_batch - small_batch)
    return square, (small_square - large_square) / (1 / small_batch - 1 / large_batch)


def noise_scale(moments: Iterable[tuple[float, float]]) -> float | None:
    """B_simple = tr Σ / |G|², in samples; None where the gradient drowns in the noise.

    Each moment is averaged over the iterations first, because a ratio of single estimates is biased.
    """
    square, variance = (math.fsum(values) for values in zip((0.0, 0.0), *moments, strict=True))
    return variance / square if square > 0 and variance > 0 else None


class TrustRatioGuard(Guard):
    """Counts the tensors of each step of LAMB by weight norm, update norm and trust ratio, over all stages."""

    def __init__(self, optimizer: FlatOptimizer) -> None:
        self._optimizer = optimizer

    def after(self, iteration: Iteration) -> str:
        line, groups = iteration.line, self._optimizer.groups
        if not line.skipped:
            owned = [torch.tensor([not p.is_copy for p in group.parameters]) for group in groups]
            norms = [group.norms[:, own] for group, own in zip(groups, owned, strict=True) if group.norms is not None]
            values = torch.cat(norms, dim=1)
            edges = torch.tensor(NORM_EDGES, dtype=values.dtype, device=values.device)
            places = torch.bucketize(values, edges, right=True)
            counts = torch.nn.functional.one_hot(places, len(edges) + 1).sum(dim=1)
            self._optimizer.mesh.pp.all_reduce(counts)
            line.weight_norms, line.update_norms, line.trust_ratios = counts.tolist()
        return ""


class TimelineGuard(Guard):
    """Times the last iteration, and writes the pipeline of the first tensor- and data-parallel ranks."""

    def __init__(self, run: Path, config: RunConfig, step: TrainingStep) -> None:
        self._path, self._config, self._step = run / TIMELINE, config, step

    def before(self, number: int) -> None:
        if number + 1 == self._config.train.iterations:
            self._step.timeline = []

    def after(self, iteration: Iteration) -> str:
        mine, mesh, parallel = self._step.timeline, self._step.mesh, self._config.parallel
        if mine is None:
            return ""
        self._step.timeline = None
        everyone, layout = mesh.world.gather_objects(mine), mesh.layout
        if mesh.is_first:
            measured = [everyone[layout.rank(0, rank, 0)] for rank in range(layout.pp)]
            begun = min(interval.start for rank in measured for interval in rank)
            count = len(iteration.microbatches)
            planned = lower(compute_orders(parallel.schedule, parallel.pp, parallel.chunks, count), parallel.chunks)
            timeline = Timeline(
                iteration=iteration.number + 1, schedule=parallel.schedule, pp=parallel.pp, chunks=parallel.chunks,
                microbatches=count, planned=[[_row(interval, 0.0) for interval in rank] for rank in planned.timeline],
                measured=[[_row(interval, begun) for interval in rank] for rank in measured],
            )  # fmt: skip
            write_text(self._path, timeline.to_line())
        return ""


def _row(interval: Interval, begun: float) -> Computation:
    op, microbatch, chunk = interval.compute
    return op.value, microbatch, chunk, round(interval.start - begun, 6), round(interval.end - begun, 6)


class FiniteGuard(Guard):
    """Ends a run whose loss or gradient is not finite; in fp16 an overflow only lowers the loss scale."""

    def __init__(self, step: TrainingStep) -> None:
        self._step = step

    def skips(self, iteration: Iteration) -> bool:
        """Raises NotFinite, on every rank, naming the first place; the weights have not changed."""
        gradient = iteration.gradient
        if gradient.is_finite or (self._step.scaler and math.isfinite(gradient.loss)):
            return False
        where = diagnose(self._step, iteration.microbatches)
        raise NotFinite(
            f"iteration {iteration.number + 1}: loss {gradient.loss}, gradient norm {gradient.norm}; "
            "the weights were not updated" + (f"; {where}" if where else "")
        )


def diagnose(step: TrainingStep, microbatches: Sequence[PipelineInput]) -> str:
    """Data-parallel ranks, samples and parameters that are not finite, in words. Every rank calls it.

    The iteration is computed again: its weights have not changed and all randomness is keyed, so the same values come
    up. Outputs are in the order of the forward pass, gradients in that of the backward pass.
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
    reports = mesh.world.gather_objects((mesh.dp.rank, mesh.pp.rank, outputs[:1], gradients[:1], samples))
    ranks = sorted({dp for dp, _, output, gradient, lost in reports if output or gradient or lost})
    parts = [f"data-parallel rank{'s' if len(ranks) > 1 else ''} {joined(ranks)}"] if ranks else []
    by_stage = sorted(reports, key=lambda report: report[1])
    if output := next((output[0] for *_, output, _, _ in by_stage if output), None):
        parts.append(f"first output that is not finite: {output}")
    if gradient := next((gradient[0] for *_, gradient, _ in reversed(by_stage) if gradient), None):
        parts.append(f"first gradient: {gradient}")
    if lost := sorted({place for *_, samples in reports for place in samples}):
        parts.append(f"samples of the global batch without a loss: {joined(lost)}")
    return "; ".join(parts)


def _note(names: list[str], name: str, tensor: torch.Tensor) -> None:
    if not torch.isfinite(tensor.to_dense()).all():  # a gradient may be sparse
        names.append(name)


def _note_output(names: list[str], name: str) -> Callable[[nn.Module, Any, torch.Tensor], None]:
    """A hook that looks at a module's output, and at its bias, which a later kernel may add."""

    def hook(module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        bias = getattr(module, "bias", None)
        _note(names, name, output if bias is None else torch.cat([output.flatten(), bias.flatten()]))

    return hook
