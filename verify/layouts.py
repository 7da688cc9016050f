"""Compare a program with its own serial run on every layout, probe by probe, and group the
differences into findings."""

import hashlib
import inspect
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from mlm_repro.engine.compare.tensors import (
    DRAWS,
    UNIT_FP32,
    Array,
    Key,
    TensorDifference,
    TensorPart,
    assemble,
)
from mlm_repro.lineage.errors import BadInput
from mlm_repro.verify.causes import LayoutFinding, fold, is_near, parameter_of, ratio_of
from mlm_repro.verify.engines import Engine, Kind, Weights, Work
from mlm_repro.verify.found import LayoutsReport
from mlm_repro.verify.parity import SERIAL, ParityLayout, parse_layout
from mlm_repro.verify.programs import EXACT, HeldTraining, Loss, own_loss
from mlm_repro.verify.runner import (
    TABLE_HEAD,
    UNKNOWN,
    Computed,
    Outcome,
    Reference,
    compare_layout,
    measured,
    table_row,
)
from mlm_repro.verify.subjects import Asked, small_work, subject

SECONDS = 120
NOISE = 0.1
"""Standard deviation of the noise added to constant weights, in which a wrong shard would not
show."""


class Examined(NamedTuple):
    """The results of one layout: `outcome`, its comparison with the serial run, and `findings`, the
    findings of all probes that could be made, one for each cause. A layout without findings has
    passed only if `cannot_run` and `not_asked`, the reasons that it or a part was not compared, are
    empty texts too. `lost` is True if a rank was lost."""

    outcome: Outcome
    findings: list[LayoutFinding]
    not_asked: str = ""
    """Reason that trainings across a checkpoint were not compared, in the program's own words or,
    where a rank was lost, in a sentence about that. Empty if they were, and if the layout did not
    run or its training differed already."""
    lost: bool = False
    """True if a rank was lost, on the layout or while its checkpoints were compared."""

    @property
    def name(self) -> str:
        """Name of the layout, such as `tp2-sp`."""
        return self.outcome.layout.name

    @property
    def cannot_run(self) -> str:
        """Reason that the layout did not run to its end, in the program's own words or, where a
        rank was lost, in a sentence about that; empty if it ran."""
        return reason(self.outcome.failure)


def run_layouts(asked: Asked, names: str, seed: int) -> LayoutsReport:
    """Run every probe of the program in `asked`, with random numbers drawn by `seed`, on the
    layouts that `names` stands for, names with commas between or `all` for the program's usual
    ones. Print a table of the results with the findings, and return the LayoutsReport; the serial
    run, repeated, is the first layout in it. Raises BadInput for an unknown program, field or
    layout, for a module that cannot be imported, for a number of microbatches that does not divide
    8, and if the serial run cannot run or be repeated. Sets torch to one thread."""
    # Ranks share the cores.
    torch.set_num_threads(1)
    with subject(asked, seed) as (kind, work, title, default):
        layouts = _layouts(default if names == "all" else names)
        print(f"{title}, {', '.join(asked.fields) or 'as it is'}, seed {seed}")
        print(TABLE_HEAD, flush=True)
        tried: list[Examined] = []
        for examined in examine(run_serial(kind, work), layouts):
            if examined.lost:
                result = "LOST"
            elif examined.findings:
                result = "DIFFERS"
            else:
                result = "no" if examined.cannot_run else "ok"
            print(table_row(examined.outcome, result))
            for what, why in (
                ("cannot run", examined.cannot_run),
                ("checkpoints were not compared", examined.not_asked),
            ):
                if why and not (tried and why == tried[0].not_asked):
                    print(f"  {what}: {why}")
            for finding in examined.findings:
                print(f"  {finding}")
            sys.stdout.flush()
            tried.append(examined)
    return LayoutsReport(
        subject=title,
        program=asked.program,
        spec=asked.spec,
        seed=seed,
        microbatches=asked.microbatches,
        fields=dict(text.partition("=")[::2] for text in asked.fields),
        findings=list(chain.from_iterable(examined.findings for examined in tried)),
        compared={examined.name: len(examined.outcome.rows) for examined in tried},
        cannot_run={
            examined.name: examined.cannot_run for examined in tried if examined.cannot_run
        },
        not_asked={examined.name: examined.not_asked for examined in tried if examined.not_asked},
        lost={
            examined.name: examined.cannot_run or examined.not_asked
            for examined in tried
            if examined.lost
        },
    )


def _layouts(names: str) -> list[ParityLayout]:
    layouts = [parse_layout(part.strip()) for part in names.split(",")]
    return [layout for layout in dict.fromkeys(layouts) if layout != SERIAL]


def check(
    build: Callable[[ParityLayout], Any],
    batch: Any = None,
    layouts: str = "tp2",
    *,
    loss: Loss = own_loss,
    microbatches: int = 1,
    seed: int = 1234,
) -> None:
    """Train a torch model for three iterations on each layout, from the weights of its own serial
    run, and compare losses, gradients, moments and weights with that run, in float64 on gloo ranks
    of this machine. The model itself must reduce its gradients unless a `Program` has a `gradient`.
    AdamW updates the weights if `build` gives neither an optimizer nor a `step`.

    `build(layout)` returns the model of this rank, a model and its optimizer, or a `Program`;
    `layout` has the sizes `tp`, `pp`, `dp`, `fsdp`, `cp`, `ep`, all 1 for the serial run, which
    alone has no process group. `batch` are tensors, or a dict of them, with equally many rows, of
    float64 or integers; data-parallel ranks take their rows, each in `microbatches`. `loss(model,
    rows)` is a mean over rows, by default the scalar or the `loss` that the model returns, or the
    mean square of its output. A `Program` with its own `gradient` uses neither. `layouts` are names
    such as "tp2,fsdp2". `seed` draws the noise that is added to weights whose elements are all
    equal, as in norms. Raises AssertionError with a line for each cause and each layout that cannot
    run; BadInput if nothing is found and a layout cannot run, if `layouts` has an unknown name, and
    if the serial run cannot run or be repeated. Checkpoints that cannot be compared are passed
    over.
    """
    sentences = []
    stopped = []
    for examined in examine(
        run_serial(HeldTraining(build, batch, loss, microbatches), small_work(seed, 3)),
        _layouts(layouts),
    ):
        if examined.cannot_run:
            stopped.append(f"{examined.name} cannot run: {examined.cannot_run}")
        sentences += [str(finding) for finding in examined.findings]
    assert not sentences, "\n".join(sentences + stopped)
    if stopped:
        raise BadInput("; ".join(stopped))


def probe(
    kind: Kind, work: Work, layout: ParityLayout, reference: Reference, draw: int = 0
) -> Computed:
    """Build this rank's engine, `kind(work, layout)`, train it, and return the rank's Computed:
    numbers of each iteration, recorded tensors, their differences from `reference`, the first
    output of each module, and the parameters before weights are loaded; of a serial program also
    the gradients after each microbatch. Without weights in `work` the training starts from the
    program's own, with noise where they are constant. If `draw` is not 0, weights are moved by up
    to a rounding before each iteration. Unless the reference is empty, the Computed has dropout
    masks too and, if the engine's `counts_norm` is True, planted gradients. Every rank calls it;
    without weights in `work` there must be one rank alone."""
    engine = kind(work, layout)
    seen = Computed()
    engine.show(engine.recorder(seen.initial.append), "", engine.parameters())
    weights = work.initial or with_noise(seen.initial, work.config.train.seed)
    engine.load(weights)
    for name, module in engine.module.named_modules():
        module.register_forward_hook(partial(_keep, seen.outputs, name))
    seen.steps = engine.run(engine.recorder(seen.take(engine, reference, keeps=True)), draw)
    seen.shares = dict(engine.shares)
    if reference.whole:
        if engine.counts_norm:
            seen.planted = {tensor: norm**2 for tensor, norm in engine.planted(weights).items()}
        # A pass of its own, because half of all activations are dropped in it.
        with Masks(engine) as masks:
            engine.backward(0, None)
        seen.masks = masks.seen
    return seen


def _keep(outputs: dict[str, Array], name: str, *called: Any) -> None:
    """Put a copy of the tensor that a call of the module `name` returned, or of the first one in a
    tuple, into `outputs` under that name, as an fp32 numpy array, unless the name is there already;
    another output is passed over. The output is the last of `called`, as torch gives it to a
    hook."""
    first = called[-1][0] if isinstance(called[-1], tuple) else called[-1]
    if type(first) is torch.Tensor and name not in outputs:
        outputs[name] = first.detach().float().numpy().copy()


class Masks(TorchFunctionMode):
    """Context manager that replaces `F.dropout` inside its block, in which the caller runs the
    model of `engine`: a call that would drop, or any call if the engine's `drops_at_zero` is set,
    sets half of its tensor to zero by torch's generator, whatever its probability, and multiplies
    the rest by 2. The attribute `seen`, a list, gets a tuple for each such call, in order: the name
    of the module that calls, empty if none does, and the SHA-256 of input and mask, as bytes."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self.modules = {id(module): name for name, module in engine.module.named_modules()}
        self.at_zero, self.seen = engine.drops_at_zero, list[tuple[str, bytes, bytes]]()
        """A tuple for every dropout: the module's name, the digests of its input and its mask."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.dropout:
            return func(*args, **(kwargs or {}))
        given = inspect.signature(F.dropout).bind(*args, **(kwargs or {}))
        given.apply_defaults()
        x, rate, trains = (given.arguments[name] for name in ("input", "p", "training"))
        if not self.at_zero and not (rate and trains):
            return func(*args, **(kwargs or {}))
        # By torch's own generator, whose state on each rank is the question.
        mask = F.dropout(torch.ones_like(x), 0.5)
        # F.dropout does not know who calls it; the nearest module on the stack does.
        frame: Any = sys._getframe()
        while frame and id(frame.f_locals.get("self")) not in self.modules:
            frame = frame.f_back
        digests = (
            hashlib.sha256(tensor.detach().float().contiguous().numpy()).digest()
            for tensor in (x, mask)
        )
        self.seen.append((self.modules[id(frame.f_locals["self"])] if frame else "", *digests))  # type: ignore[arg-type]
        return x * mask


def after_checkpoint(
    kind: Kind,
    work: Work,
    layout: ParityLayout,
    reference: Reference,
    begun: Path | None,
    saved: Path | None,
) -> Computed:
    """Build this rank's engine, `kind(work, layout)`, and train it on both sides of a checkpoint.
    Load the checkpoint directory `begun`, in which the first step is done, or if it is None take
    the first step from the weights in `work`, which must be there; save a checkpoint at `saved`
    unless that is None; then take the further steps. Return a Computed of the further steps: their
    numbers and their differences from `reference`, which must not have the first step. Every rank
    calls it."""
    engine = kind(work, layout)
    seen = Computed()
    if begun:
        engine.restore(begun)
    else:
        engine.load(work.initial or {})
        engine.step(0)
    if saved:
        engine.save(saved)
    seen.steps = engine.run(engine.recorder(seen.take(engine, reference)), begun=1)
    return seen


def with_noise(initial: Sequence[TensorPart], seed: int) -> Weights:
    """Return a dict name → initial weight, a whole tensor on the CPU. Tensors whose elements are
    all equal, such as norms and biases, have normal noise of deviation `NOISE` added, drawn by
    `seed`. `initial` has the parts of the weights that each rank holds."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for (_, name), value in assemble(initial).items():
        weights[name] = torch.from_numpy(value)
        if value.size and (value == value.flat[0]).all():
            moves = torch.randn(value.shape, generator=generator, dtype=torch.float64)
            weights[name] = (weights[name] + NOISE * moves).to(weights[name].dtype)
    return weights


def reason(sentence: str) -> str:
    """Return a sentence about failed ranks without the words before the program's own, up to
    `failed: ` or `failed: BadInput: `; a sentence without such words as it is."""
    return sentence.partition("failed: ")[2].removeprefix("BadInput: ") or sentence


class Serial(NamedTuple):
    """Serial run that every layout is compared with: `kind`, the function that builds the program's
    engine; `work`, the training as it is given to an engine; and `reference`, the tensors of that
    training on one rank, with the largest difference that each may have."""

    kind: Kind
    work: Work
    """The training, with the weights that every layout begins with."""
    reference: Reference


def run_serial(kind: Kind, work: Work) -> Serial:
    """Train a program on one rank and return the Serial that its layouts are compared with: its
    tensors with a tolerance of each, and the weights that it began with. In float64 a tolerance is
    a share of the tensor's largest element or, if that is larger, of the largest gradient: the
    share is the `tolerance` of `kind`, or else `EXACT`. In fp32 several more runs, with weights
    moved by rounding, give the tolerances. Raises BadInput if the program does not run."""
    first = _serially(kind, work)
    initial = first.ranks[0].initial
    work = replace(work, initial=with_noise(initial, work.config.train.seed))
    if all(part.value.dtype == np.float64 for part in initial):
        whole = first.whole
        # A gradient that is 0 in exact arithmetic needs a scale of its own: the largest gradient.
        size = max(
            float(np.abs(value).max(initial=0.0))
            for (_, name), value in whole.items()
            if "gradient" in name
        )
        most = getattr(kind, "tolerance", EXACT)
        allowed = {
            key: most * max(float(np.abs(value).max(initial=0.0)), size)
            for key, value in whole.items()
        }
        return Serial(kind, work, Reference(whole, allowed))
    draws = [_serially(kind, work, UNKNOWN, draw) for draw in range(1, DRAWS)]
    return Serial(kind, work, measured(first, draws, "fp32"))


def _serially(kind: Kind, work: Work, reference: Reference = UNKNOWN, draw: int = 0) -> Outcome:
    outcome = compare_layout(probe, kind, work, SERIAL, reference, draw, seconds=SECONDS)
    if outcome.failure:
        raise BadInput(
            "the serial run, the program on one rank, cannot run here; correct the program or its"
            f" fields: {reason(outcome.failure)}"
        )
    return outcome


def examine(serial: Serial, layouts: Sequence[ParityLayout]) -> Iterator[Examined]:
    """Yield an Examined, with the findings of all probes, first for the run of `serial`, which the
    function `run_serial` made and which is repeated here, and then for each of `layouts`, in order.
    A layout that cannot run gives one too; a rank that is not done within SECONDS counts as lost.

    Raises BadInput if the serial run, when it is repeated, cannot run, gives other bits or gives
    numbers that are not finite.
    """
    kind, work, reference = serial
    again = _serially(kind, work, Reference(reference.whole, dict.fromkeys(reference.whole, 0.0)))
    if again.beyond:
        why = "deterministic" if np.isfinite(again.beyond[0].largest) else "finite"
        raise BadInput(
            f"the serial run is not {why}: {again.beyond[0].tensor} is not finite, or differs when"
            " the run is repeated, so that no layout can be compared with it: correct the program,"
            " whose numbers must be finite and the same each time"
        )
    # Without iteration 0, which a training from a checkpoint does not have.
    later = Reference(
        {key: value for key, value in reference.whole.items() if key[0]}, reference.allowed
    )

    # Cached, because layouts begin with the same checkpoint, or are refused it for the same reason.
    @cache
    def attempt(layout: ParityLayout, begun: Path | None, saved: Path | None) -> Outcome:
        return compare_layout(
            after_checkpoint, kind, work, layout, later, begun, saved, seconds=SECONDS
        )

    def through_checkpoints(
        layout: ParityLayout, folder: Path
    ) -> tuple[list[LayoutFinding], str, bool]:
        """Compare trainings that go on from a checkpoint with the serial run: on `layout` from a
        serial checkpoint, and on one rank from a checkpoint of `layout`. Checkpoints are written
        below `folder`.

        Returns three values: a list of a LayoutFinding for each tensor beyond its tolerance, the
        reason if a training failed, so that checkpoints could not be compared, else "", and True if
        a rank was lost. Findings made before such a reason are returned with it.
        """
        # With the same kind of optimizer as the layout, because its checkpoint is loaded there.
        begin = ParityLayout(shard_optimizer=layout.shard_optimizer)
        findings = list[LayoutFinding]()
        first = folder / f"begun-{begin.name}"
        own = folder / layout.name
        there_and_back = (
            [(layout, first, None)]
            if layout == begin
            else [(layout, first, own), (begin, own, None)]
        )
        for goes_on, begun, saved in ((begin, None, first), *there_and_back):
            outcome = attempt(goes_on, begun, saved)
            if outcome.failure:
                shutil.rmtree(saved or own, ignore_errors=True)
                return findings, reason(outcome.failure), outcome.lost
            for row in outcome.beyond:
                where = f"{row.where}, on {goes_on.name} after a checkpoint"
                findings.append(
                    _finding(
                        layout.name, "checkpoint", row.tensor, row.largest, row.tolerance, where
                    )
                )
        return findings, "", False

    with tempfile.TemporaryDirectory() as folder:
        for layout in [SERIAL, *layouts]:
            outcome = again
            if layout != SERIAL:
                outcome = compare_layout(probe, kind, work, layout, reference, seconds=SECONDS)
            findings = _findings(outcome, serial)
            not_asked = ""
            lost = outcome.lost
            # A training that differs already would differ after a checkpoint for the same reason.
            if not outcome.failure and all(
                finding.probe in ("planted gradient", "dropout") for finding in findings
            ):
                more, not_asked, lost = through_checkpoints(layout, Path(folder))
                findings += more
            causes = _folded(findings, outcome, serial, again.ranks[0])
            yield Examined(outcome, causes, not_asked, lost)


def _findings(outcome: Outcome, serial: Serial) -> list[LayoutFinding]:
    """Return the findings of all probes but `checkpoint` in a layout's outcome, the first of each
    probe and parameter. Of the tensors that differ from the serial run, only those of the first
    iteration in which any differs are taken."""
    layout = outcome.layout
    ranks = outcome.ranks
    beyond = outcome.beyond
    initial = [rank.initial for rank in ranks]
    weights = serial.work.initial or {}
    dtypes = {part.value.dtype for part in chain.from_iterable(initial)}
    is_exact = dtypes == {np.dtype(np.float64)}
    allowed = {key: value if is_exact else 0.0 for key, value in serial.reference.allowed.items()}
    firsts: dict[tuple[str, str], LayoutFinding] = {}
    for finding in (
        *_unequal_copies(layout.name, "initial copies", initial),
        *_equal_parts(layout.name, initial, weights),
        *_unequal_copies(layout.name, "copies", [rank.parts for rank in ranks], allowed),
        *(_differs(layout.name, row) for row in beyond if row.iteration == beyond[0].iteration),
        *_planted(layout.name, ranks, weights),
        *_masks(layout, ranks),
    ):
        firsts.setdefault((finding.probe, finding.parameter), finding)
    return list(firsts.values())


def _folded(
    findings: list[LayoutFinding], outcome: Outcome, serial: Serial, alone: Computed
) -> list[LayoutFinding]:
    """Return a list of one LayoutFinding for each cause of a layout's `findings`, with the findings
    that follow from it folded into it, as `fold` does. `outcome` is what the layout's ranks
    computed, and `alone` what the repeated run of `serial` computed."""
    whole = serial.reference.whole
    order = [
        name.removeprefix("updated ")
        for iteration, name in whole
        if not iteration and name.startswith("updated ")
    ]
    begun = [
        [
            part
            for part in rank.parts
            if not part.iteration and part.tensor.startswith("gradient of ")
        ]
        for rank in outcome.ranks
    ]
    gradients = {
        name.removeprefix("gradient of "): value
        for (iteration, name), value in whole.items()
        if not iteration and name.startswith("gradient of ")
    }
    output = _first_output(outcome, alone.outputs, serial.work.initial or {})
    return fold(findings, order[::-1], gradients, begun, alone.shares, output)


def _first_output(outcome: Outcome, serial: Mapping[str, Array], weights: Weights) -> str:
    """Return a phrase, which begins with a comma, on which module's output is the first that
    differs from the serial run's, with the multiple of the module's bias that the difference is, if
    it is one; "" where none is known to differ.

    Only outputs of the serial shape are compared. A layout with more ranks than tensor-parallel
    ones is not asked: it gives "" too.
    """
    if outcome.layout.world_size > outcome.layout.tp:
        return ""
    for name, value in serial.items():
        held = [rank.outputs[name] for rank in outcome.ranks if name in rank.outputs]
        if {output.shape for output in held} != {value.shape}:
            continue
        # Ranks have copies, or else parts of a sum: whichever comes nearer.
        apart = min((held[0] - value, sum(held) - value), key=np.linalg.norm)
        if is_near(value + apart, value):
            continue
        bias = weights.get(f"{name}.bias")
        if bias is not None and bias.shape == value.shape[-1:]:
            added = np.broadcast_to(bias.numpy(), value.shape)
            times = ratio_of(apart, added)
            if is_near(apart, times * added):
                return f", first in {name}, whose output has {times:.3f} × {name}.bias more"
        return f", first in the output of {name or 'the model'}"
    return ""


def _finding(
    layout: str, probe: str, name: str, value: float, expected: float, where: str = ""
) -> LayoutFinding:
    return LayoutFinding(
        layout=layout, probe=probe, parameter=name, value=value, expected=expected, where=where
    )


def _differs(layout: str, row: TensorDifference) -> LayoutFinding:
    """Return the LayoutFinding of the layout called `layout` for `row`, a tensor that differs from
    the serial run's: the row's largest difference, the tolerance as the required value, and the
    place of that difference. The finding's `probe` is `loss` for a loss or an output, `gradient`
    for a gradient or the gradient norm, else `step`. Its `parameter` is the name of the parameter
    whose gradient, moment or weight the tensor is, or else the tensor's own name."""
    tensor = row.tensor
    probe = "gradient" if tensor.startswith("gradient") else "step"
    name = parameter_of(tensor)
    if "loss" in tensor or tensor.startswith("output"):
        probe = "loss"
        name = tensor
    return _finding(layout, probe, name, row.largest, row.tolerance, row.where)


def _equal_parts(
    layout: str, ranks: Sequence[Sequence[TensorPart]], weights: Weights
) -> Iterator[LayoutFinding]:
    """Yield a finding about the layout named `layout` for each part of a parameter whose initial
    values have the same bits as an earlier part at other indices of the whole, although `weights`,
    the serial run's initial weights by name, differ there. `ranks` has a list of initial parts for
    each rank. Parts that have one element, or only equal elements, are passed over."""
    seen: dict[tuple[str, bytes], tuple[int, TensorPart]] = {}
    for number, parts in enumerate(ranks):
        for part in parts:
            if part.value.size < 2 or (part.value == part.value.flat[0]).all():
                continue
            holder, other = seen.setdefault((part.tensor, part.value.tobytes()), (number, part))
            serial = [
                weights[part.tensor][tuple(map(slice, shard.start, shard.end))]
                for shard in (part, other)
            ]
            if other.start != part.start and not serial[0].equal(serial[1]):
                where = f"in the parts of rank {holder} and rank {number}"
                yield _finding(layout, "initial shards", part.tensor, 0.0, 0.0, where)


def _unequal_copies(
    layout: str,
    probe: str,
    ranks: Sequence[Sequence[TensorPart]],
    allowed: Mapping[Key, float] = MappingProxyType({}),
) -> Iterator[LayoutFinding]:
    """Yield a finding of the kind `probe` for each copy of a part of a tensor whose bits differ
    from the copy on the first rank that has this part, by more than is allowed for the tensor, 0 by
    default. `ranks` has a list of the parts of each rank, `allowed` the largest difference by
    iteration and tensor."""
    first: dict[Any, tuple[int, Array]] = {}
    for number, parts in enumerate(ranks):
        for iteration, tensor, start, value in parts:
            holder, other = first.setdefault((iteration, tensor, start), (number, value))
            if value.tobytes() != other.tobytes() or value.shape != other.shape:
                apart = float(np.abs(value - other).max()) if value.shape == other.shape else np.inf
                most = allowed.get((iteration, tensor), 0.0)
                # Not `>`, because NaN is a difference too.
                if not apart <= most or most == 0.0:
                    yield _finding(
                        layout,
                        probe,
                        tensor,
                        apart,
                        most,
                        f"between rank {holder} and rank {number}",
                    )


def _planted(layout: str, ranks: Sequence[Computed], weights: Weights) -> Iterator[LayoutFinding]:
    """Yield a LayoutFinding for each parameter and rank where the squared gradient norm, with a
    gradient of 1 in that parameter alone, is not the parameter's number of elements, but for
    rounding. `ranks` has a Computed of each rank, whose `planted` has the squared norms by name and
    is empty if none were measured; `weights` has the whole parameters by name, and `layout` is the
    layout's name.

    A sum of ones is exact in fp32. The root and the square of each rank and of the whole round four
    times.
    """
    for tensor, weight in weights.items():
        for value in (rank.planted[tensor] for rank in ranks if rank.planted):
            if abs(value - weight.numel()) > 8 * UNIT_FP32 * weight.numel():
                yield _finding(layout, "planted gradient", tensor, value, weight.numel())


def _masks(layout: ParityLayout, ranks: Sequence[Computed]) -> Iterator[LayoutFinding]:
    """Yield a LayoutFinding for each dropout mask of a rank that differs from the mask of the same
    dropout on the first rank of its tensor-parallel group although both have the same input, or
    that is the same although their inputs differ. `ranks` has a Computed of each rank of `layout`,
    in rank order, whose `masks` has the digests of inputs and masks and is empty if none were
    taken; dropouts are paired by their place in it."""
    for number, rank in enumerate(ranks):
        first = number - number % layout.tp
        for (name, x, mask), (_, other_x, other_mask) in zip(
            rank.masks, ranks[first].masks, strict=False
        ):
            if number != first and (x == other_x) != (mask == other_mask):
                what = (
                    "differ, though they drop the same tensor"
                    if x == other_x
                    else "are equal for different parts"
                )
                where = f"masks of rank {first} and rank {number} {what}"
                yield _finding(layout.name, "dropout", name, x != other_x, x == other_x, where)
