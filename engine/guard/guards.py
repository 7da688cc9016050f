"""The guards of a training run: for non-finite values, spikes and memory, and for ranks that are
slow or whose replicas drift apart."""

import time
from collections import Counter, deque
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from itertools import chain
from math import isfinite
from statistics import fmean, median, stdev
from typing import Any

import torch
from torch import Tensor, nn

from mlm_repro.engine.checkpoint.statistics import BITS
from mlm_repro.engine.config import RunConfig
from mlm_repro.engine.guard import Guard, Iteration
from mlm_repro.engine.guard.memory import MemoryGuard, PeakMemory
from mlm_repro.engine.model.microbatch import PipelineInput
from mlm_repro.engine.parallel.layout import Layout
from mlm_repro.engine.parallel.mesh import ParallelMesh
from mlm_repro.engine.parallel.sharding import Role, ShardedParameter
from mlm_repro.engine.step import NotFinite, TrainingStep
from mlm_repro.lineage.errors import Diverged

SPIKE_WINDOW = 128
"""Largest number of recent iterations from whose mean and deviation a spike is measured."""
LEAST = 64
"""Number of recent iterations whose values must be known before a value is called a spike."""
DEVIATIONS = 6.0
"""Number of standard deviations above the mean of the recent iterations beyond which a value is a
spike."""


def guards_of(
    config: RunConfig, step: TrainingStep, memory: PeakMemory, recent: "RecentIterations"
) -> list[Guard]:
    """Return a list of one rank's guards for a training run, in the order in which they are called:
    slow ranks, spikes, values that are not finite, memory, replicas. They watch the model of
    `step`; `config` says if the updates of spikes are skipped. `memory` measures this process;
    `recent` holds the last losses and gradient norms, and the spike guard adds to it."""
    return [
        # A spike is judged before the finite guard may end the run, so that its line of the metrics
        # names both.
        SlowRankGuard(step.mesh),
        SpikeGuard(recent, config.train.skip_spikes),
        FiniteGuard(step),
        MemoryGuard(memory),
        ReplicaGuard(step.model.parameters, step.model.storage_mesh),
    ]


class RecentIterations:
    """Losses and gradient norms of the last 128 iterations that had both finite: the method `add`
    is given each iteration's, remembers them, and returns which of the two are spikes. Checkpoints
    keep the attribute `seen`, so a resumed run decides alike.

    A spike is a loss or a gradient norm above the mean of the ones before it by more than 6
    standard deviations, once 64 iterations are remembered (OLMo-core,
    `optim/skip_step_optimizer.py`, which also counts leaps downwards). Spikes are remembered too,
    so a lasting level soon stops being a spike.
    """

    def __init__(self) -> None:
        self.seen = deque[tuple[float, float]](maxlen=SPIKE_WINDOW)
        """Pairs (loss, gradient norm) of the last iterations, at most 128, oldest first, as a
        checkpoint keeps them."""

    def add(self, loss: float, gradient_norm: float) -> dict[str, float]:
        """Remember an iteration's loss and gradient norm, and return which of the two are spikes,
        as a dict: `loss` or `gradient_norm` → the limit that the value exceeds, 6 standard
        deviations above the mean of the iterations remembered before, at most the last 128. The
        dict is empty if neither is a spike, and if fewer than 64 iterations were remembered before.

        A spike is remembered too. An iteration with a value that is not finite, such as an fp16
        overflow, is not remembered and is no spike.
        """
        # An fp16 run overflows while its loss scale is found; remembered, such an iteration would
        # hide every later spike.
        if not (isfinite(loss) and isfinite(gradient_norm)):
            return {}
        values = {"loss": loss, "gradient_norm": gradient_norm}
        columns = zip(*self.seen, strict=True) if len(self.seen) >= LEAST else ()
        limits = {
            name: fmean(seen) + DEVIATIONS * stdev(seen)
            for name, seen in zip(values, columns, strict=False)
        }
        self.seen.append((loss, gradient_norm))
        return {name: limit for name, limit in limits.items() if values[name] > limit}


class SpikeGuard(Guard):
    """Guard that adds each iteration's loss and gradient norm to `recent`, a RecentIterations,
    which tells if they are spikes. It notes spikes in `spike` of the metrics' line and warns of
    each. With `skip` the update of an iteration with a spike is skipped."""

    def __init__(self, recent: RecentIterations, skip: bool) -> None:
        self._recent = recent
        self._skip = skip
        self._spike: dict[str, float] = {}

    def skips(self, iteration: Iteration) -> bool:
        self._spike = self._recent.add(iteration.gradient.loss, iteration.gradient.norm)
        return self._skip and bool(self._spike)

    def after(self, iteration: Iteration) -> str:
        line = iteration.line
        line.spike = self._spike
        rows = [
            (name.replace("_", " "), getattr(line, name), limit)
            for name, limit in self._spike.items()
        ]
        leaps = " and ".join(f"{name} {value:.4g} above {limit:.4g}" for name, value, limit in rows)
        done = "no update was made" if line.skipped else "the update was made"
        return f"warning: iteration {line.iteration} is a spike, {leaps}; {done}" if leaps else ""


class FiniteGuard(Guard):
    """Guard whose method `skips` ends a run, with NotFinite and before the update, if the loss or
    the gradient of an iteration is not finite. In fp16 a gradient that overflows with a finite loss
    ends nothing, because the loss scale is lowered for it. The guard itself skips no update."""

    def __init__(self, step: TrainingStep) -> None:
        self._step = step

    def skips(self, iteration: Iteration) -> bool:
        """Return False if loss and gradient of the iteration are finite, or if only the gradient of
        an fp16 run overflowed. Otherwise raise NotFinite on every rank, naming the first values
        that are not finite; the weights have not changed. Every rank calls it, because the search
        computes the iteration again."""
        gradient = iteration.gradient
        # In fp16 an infinite norm is ordinary and halves the scale; an infinite loss is not, for
        # the scale is applied after it.
        if gradient.is_finite or (self._step.scaler and isfinite(gradient.loss)):
            return False
        where = diagnose(self._step, iteration.microbatches)
        raise NotFinite(
            f"training ends at iteration {iteration.number + 1}: loss {gradient.loss}, gradient"
            f" norm {gradient.norm}; the weights were not updated, and earlier checkpoints are kept"
            + (f"; {where}" if where else "")
        )


def diagnose(step: TrainingStep, microbatches: Sequence[PipelineInput]) -> str:
    """Compute the iteration's gradient again with `step`, a TrainingStep, from this rank's
    `microbatches`, and return as text a phrase that names what is not finite: data-parallel ranks,
    the first output, the first gradient, and samples by their index in the global batch; an empty
    text if all is finite. Every rank calls it, and all get the same phrase. Overwrites the
    gradients.

    The weights must be the ones that the iteration ran with; as all randomness is keyed, the same
    values come up. Outputs are named in the order of the forward pass, gradients in the order of
    the backward pass.
    """
    model = step.model
    mesh = step.mesh
    outputs: list[str] = []
    gradients: list[str] = []
    with ExitStack() as hooks:
        for parameter in model.parameters:
            hooks.enter_context(
                parameter.local.register_hook(partial(_note, gradients, parameter.name))
            )
        modules = chain.from_iterable(chunk.named_modules() for chunk in model.chunks)
        for name, module in modules:
            if next(module.parameters(recurse=False), None) is not None:
                hooks.enter_context(
                    module.register_forward_hook(partial(_note_output, outputs, name))
                )
        # Computed once more with hooks, and not with hooks from the start: they would slow every
        # iteration for one that fails.
        step.gradient(microbatches)
    samples = list[int]()
    for microbatch in microbatches:
        if not isfinite(mesh.pp.all_reduce(model.evaluate([microbatch])).item()):
            samples += microbatch.places
    reports = mesh.world.gather_objects(
        (mesh.dp.rank, mesh.pp.rank, outputs[:1], gradients[:1], samples)
    )
    ranks = sorted({dp for dp, _, output, gradient, lost in reports if output or gradient or lost})
    phrases = (
        [f"data-parallel rank{'s' if len(ranks) > 1 else ''} {joined(ranks)}"] if ranks else []
    )
    by_stage = sorted(reports, key=lambda report: report[1])
    output = next((names[0] for *_, names, _, _ in by_stage if names), None)
    if output:
        phrases.append(f"first output that is not finite: {output}")
    # A backward pass begins at the last stage.
    gradient = next((names[0] for *_, names, _ in reversed(by_stage) if names), None)
    if gradient:
        phrases.append(f"first gradient: {gradient}")
    lost = sorted(set(chain.from_iterable(samples for *_, samples in reports)))
    if lost:
        phrases.append(f"samples of the global batch without a loss: {joined(lost)}")
    return "; ".join(phrases)


def _note(names: list[str], name: str, *tensors: Tensor) -> None:
    # To dense, because a gradient may be sparse.
    if not all(torch.isfinite(tensor.to_dense()).all() for tensor in tensors):
        names.append(name)


def _note_output(
    names: list[str], name: str, module: nn.Module, inputs: Any, output: Tensor
) -> None:
    """Forward hook of a module: append `name` to the list `names` if the module's output, or one of
    its own parameters, is not finite. Parameters count because a later kernel may add the module's
    bias. Nothing is returned, so the output stays."""
    _note(names, name, output, *module.parameters(recurse=False))


SHOWN = 8
"""Largest number of ranks or samples that a sentence lists by number; of the others it gives the
count."""
WINDOW = 10
"""Number of iterations over which the times of each rank's own work are added up before ranks are
compared."""
RATIO = 1.5
"""Factor for slow ranks: a rank is slow only if its own work takes more than this many times the
median of the other ranks of its pipeline stage."""
LEAST_SECONDS = 0.5
"""Seconds for slow ranks: a rank is slow only if its own work in a window takes at least this many
seconds more than the median of the other ranks of its pipeline stage."""
INTERVAL = 100
"""Number of iterations between comparisons of replicas; they are also compared before every
checkpoint."""


class SlowRankGuard(Guard):
    """Guard whose method `after` returns, every 10 iterations and on every rank, a text that warns
    of each rank that has newly become slow, else an empty one. A rank is slow if its own work in
    these iterations, without communication, takes more than 1.5 times the median of the other
    ranks of its pipeline stage, and at least 0.5 seconds more. Every rank must have such a guard,
    because the guards gather the ranks' times.

    The guard sees no difference on GPUs, where communication is not waited for, and none with ZeRO
    stage 3.
    """

    def __init__(self, mesh: ParallelMesh) -> None:
        self._mesh = mesh
        self._iterations = 0
        self._own = 0.0
        self._start = 0.0
        self._known: set[int] = set()

    def before(self, number: int) -> None:
        self._start = time.monotonic() - self._mesh.waiting.seconds

    def after(self, iteration: Iteration) -> str:
        self._own += time.monotonic() - self._mesh.waiting.seconds - self._start
        self._iterations += 1
        # Added up over several iterations: a single one is too short to be told from the noise of
        # the system.
        if self._mesh.layout.world_size == 1 or self._iterations % WINDOW:
            return ""
        seconds = self._mesh.world.gather_objects(self._own)
        self._own = 0.0
        slow = slow_ranks(seconds, self._mesh.layout)
        new = slow.keys() - self._known
        self._known = set(slow)
        return "; ".join(
            f"warning: rank {rank} is slow and holds up the others:"
            f" {1000 * seconds[rank] / WINDOW:.0f} ms an iteration for its own work, the others"
            f" take {1000 * slow[rank] / WINDOW:.0f}"
            for rank in sorted(new)
        )


def slow_ranks(seconds: Sequence[float], layout: Layout) -> dict[int, float]:
    """Return a dict of the slow ranks: global rank → median seconds of the other ranks of its
    pipeline stage, which `layout` tells. A rank is slow if it takes more than 1.5 times this median
    (`RATIO`), and at least 0.5 seconds more (`LEAST_SECONDS`). A rank alone in its stage is never
    slow.

    `seconds` has the seconds of every rank's own work in one window, in the order of global ranks.
    """
    slow = {}
    together = layout.tp * layout.dp
    for rank, own in enumerate(seconds):
        first = rank // together * together
        # Only with ranks of its own stage: first and last stages have more to do than the others.
        others = [*seconds[first:rank], *seconds[rank + 1 : first + together]]
        if others and own > RATIO * median(others) and own - median(others) >= LEAST_SECONDS:
            slow[rank] = median(others)
    return slow


class ReplicaGuard(Guard):
    """Guard that compares, every 100 iterations and before each checkpoint, the bits of parameters
    that several ranks hold: undivided ones among tensor-parallel ranks, all among data-parallel
    ones, the tied embedding between first and last stage. Raises Diverged, on every rank, if they
    differ.

    BLOOM's layer norms drifted apart between tensor-parallel ranks for weeks before anyone looked
    (bigscience, tr11 chronicles, March 2022).
    """

    def __init__(self, parameters: Sequence[ShardedParameter], mesh: ParallelMesh) -> None:
        self._parameters = parameters
        self._mesh = mesh

    def before(self, number: int) -> None:
        if number and number % INTERVAL == 0:
            self.before_checkpoint()

    def before_checkpoint(self) -> None:
        """Compare the bit patterns of this rank's parameters, by their sums, with the other ranks
        that hold the same ones. Every rank calls it. Raises Diverged, on every rank, naming the
        first tensor that differs, and its ranks; nothing is returned.

        Undivided parameters are compared over the tensor-parallel axis, all parameters over the
        data-parallel axis, the tied embedding also between first and last stage.
        """
        mesh = self._mesh
        layout = self._mesh.layout
        if layout.world_size == 1:
            return
        by_tensor, _, by_data, ends = layout.lines(mesh.world.rank)
        # Bits and not values: a sum of values would hide a NaN beside a NaN, and is slower.
        sums = {
            parameter.name: _sum_of_bits(parameter.local.data) for parameter in self._parameters
        }
        undivided = [parameter.name for parameter in self._parameters if parameter.dim is None]
        shared = [
            ("tensor-parallel", mesh.tp, by_tensor, undivided),
            ("data-parallel", mesh.dp, by_data, list(sums)),
        ]
        tied = [
            parameter.name
            for parameter in self._parameters
            if parameter.role is Role.TIED_EMBEDDING
        ]
        if tied:
            shared.append(("first and last pipeline", mesh.embedding, ends, tied))
        difference = ""
        for kind, axis, ranks, names in shared:
            own = torch.tensor(
                [[sums[name] for name in names]], dtype=torch.int64, device=mesh.device
            )
            everyone = axis.all_gather(own, dim=0)
            differing = (everyone != everyone[0]).any(dim=0).nonzero().flatten().tolist()
            if differing and not difference:
                more = (
                    f" and {len(differing) - 1} more tensors are" if len(differing) > 1 else " is"
                )
                who = _describe_parting(ranks, everyone[:, differing[0]].tolist())
                difference = (
                    f"{names[differing[0]]}{more} no longer the same on {kind} ranks: {who}; this"
                    " is in no checkpoint"
                )
        differences = list(filter(None, mesh.world.gather_objects(difference)))
        if differences:
            raise Diverged(differences[0])


def _sum_of_bits(weight: Tensor) -> int:
    return int(weight.contiguous().view(BITS[weight.element_size()]).sum(dtype=torch.int64))


def _describe_parting(ranks: Sequence[int], sums: Sequence[int]) -> str:
    """Return a phrase that says which of the global ranks `ranks` differ from which, by `sums`, one
    sum of a tensor's bits for each of them in the same order. The ranks without the most frequent
    sum count as those that differ; if no sum has a majority, the phrase says that the right one
    cannot be told."""
    # The majority is taken for right. Of two replicas that differ nobody can say which one changed.
    usual, count = Counter(sums).most_common(1)[0]
    same = [rank for rank, value in zip(ranks, sums, strict=True) if value == usual]
    others = [rank for rank in ranks if rank not in same]
    doubt = "" if count > len(others) else "; which of them is right cannot be told"
    return f"rank {joined(others)} differs from rank {joined(same)}{doubt}"


def joined(numbers: Sequence[int]) -> str:
    """Return numbers, such as ranks, as text, separated by commas: the first 8 and, if there are
    others, "and" with the count of the others, as in "and 3 more"."""
    shown = ", ".join(str(number) for number in numbers[:SHOWN])
    return shown + (f" and {len(numbers) - SHOWN} more" if len(numbers) > SHOWN else "")
