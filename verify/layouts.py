"""Hold a program against its own serial run, on every layout, probe by probe; show what was found,
and how."""

import hashlib
import inspect
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
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
from mlm_repro.verify.causes import LayoutFinding, fold, parameter_of
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
    hold,
    measured,
    table_row,
)
from mlm_repro.verify.subjects import Asked, small_work, subject

SECONDS = 120
NUDGE = 0.1
"""Standard deviation of what is added to weights that begin all equal: there an error would not
show."""


class Examined(NamedTuple):
    """One layout under all probes."""

    outcome: Outcome
    findings: list[LayoutFinding]
    not_asked: str = ""
    lost: bool = False
    """True if a rank was lost, on the layout or where its checkpoints were asked."""

    @property
    def cannot_run(self) -> str:
        """Reason, in the words of the program; empty for a layout that ran."""
        return reason(self.outcome.failure)


def run_layouts(asked: Asked, names: str, seed: int) -> LayoutsReport:
    """Run every probe of a subject on the layouts that `names` stands for, a line each."""
    torch.set_num_threads(1)
    with subject(asked, seed) as (kind, work, title, default):
        layouts = _layouts(default if names == "all" else names)
        print(f"{title}, {', '.join(asked.fields) or 'as it is'}, seed {seed}")
        print(TABLE_HEAD, flush=True)
        tried: list[Examined] = []
        for each in examine(run_serial(kind, work), layouts):
            result = (
                "LOST"
                if each.lost
                else "DIFFERS"
                if each.findings
                else "no"
                if each.cannot_run
                else "ok"
            )
            print(table_row(each.outcome, result))
            for what, why in (
                ("cannot run", each.cannot_run),
                ("checkpoints were not asked", each.not_asked),
            ):
                if why and not (tried and why == tried[0].not_asked):
                    print(f"  {what}: {why}")
            for finding in each.findings:
                print(f"  {finding}")
            sys.stdout.flush()
            tried.append(each)
    return LayoutsReport(
        subject=title,
        program=asked.program,
        spec=asked.spec,
        seed=seed,
        microbatches=asked.microbatches,
        fields=dict(text.partition("=")[::2] for text in asked.fields),
        findings=[finding for each in tried for finding in each.findings],
        compared={each.outcome.layout.name: len(each.outcome.rows) for each in tried},
        cannot_run={each.outcome.layout.name: each.cannot_run for each in tried if each.cannot_run},
        not_asked={each.outcome.layout.name: each.not_asked for each in tried if each.not_asked},
        lost={
            each.outcome.layout.name: each.cannot_run or each.not_asked
            for each in tried
            if each.lost
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
    """Hold a model of torch on each layout against its own serial run, in float64 on gloo ranks of
    this machine.

    `build(layout)` returns the model of this rank, a model and its optimizer, or a `Program`; the
    process group is there, and `layout` has the sizes `tp`, `pp`, `dp`, `fsdp`, `ep`. `batch` are
    tensors, or a dict of them, of the same rows; data-parallel ranks take their rows, each in
    `microbatches`. `loss(model, rows)` is a mean over rows. Raises AssertionError with a line for
    each cause, BadInput for what cannot run.
    """
    sentences: list[str] = []
    for each in examine(
        run_serial(HeldTraining(build, batch, loss, microbatches), small_work(seed, 3)),
        _layouts(layouts),
    ):
        if each.cannot_run:
            raise BadInput(f"{each.outcome.layout.name} cannot run: {each.cannot_run}")
        sentences += [str(finding) for finding in each.findings]
    assert not sentences, "\n".join(sentences)


def probe(
    kind: Kind, work: Work, layout: ParityLayout, reference: Reference, draw: int = 0
) -> Computed:
    """Run one rank through the probes of a training; without weights in `work`, from those that it
    is built with."""
    engine, seen = kind(work, layout), Computed()
    engine.show(engine.recorder(seen.initial.append), "", engine.parameters())
    engine.load(weights := work.initial or nudged(seen.initial, work.config.train.seed))
    seen.steps = engine.run(engine.recorder(seen.take(engine, reference, keeps=True)), draw)
    seen.shares = dict(engine.shares)
    if reference.whole:
        if engine.counts_norm:
            seen.planted = {tensor: norm**2 for tensor, norm in engine.planted(weights).items()}
        with Masks(engine) as masks:
            engine.backward(0, None)
        seen.masks = masks.seen
    return seen


class Masks(TorchFunctionMode):
    """Drops half of whatever a program passes to dropout, and remembers the masks."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self.modules = {id(module): name for name, module in engine.module.named_modules()}
        self.at_zero, self.seen = engine.drops_at_zero, list[tuple[str, bytes, bytes]]()
        """Module, digest of the input and digest of the mask of every dropout."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.dropout:
            return func(*args, **(kwargs or {}))
        given = inspect.signature(F.dropout).bind(*args, **(kwargs or {}))
        given.apply_defaults()
        x, rate, trains = (given.arguments[name] for name in ("input", "p", "training"))
        if not self.at_zero and not (rate and trains):
            return func(*args, **(kwargs or {}))
        mask = F.dropout(torch.ones_like(x), 0.5)
        frame: Any = sys._getframe()
        while frame and id(frame.f_locals.get("self")) not in self.modules:
            frame = frame.f_back
        digests = (
            hashlib.sha256(each.detach().float().contiguous().numpy()).digest()
            for each in (x, mask)
        )
        self.seen.append((self.modules[id(frame.f_locals["self"])] if frame else "", *digests))  # type: ignore[arg-type]
        return x * mask


def go_on(
    kind: Kind,
    work: Work,
    layout: ParityLayout,
    reference: Reference,
    begun: Path | None,
    saved: Path | None,
) -> Computed:
    """Load a checkpoint or take one step, save a checkpoint, and take the further steps, on one
    rank."""
    engine, seen = kind(work, layout), Computed()
    if begun:
        engine.restore(begun)
    else:
        engine.load(work.initial or {})
        engine.step(0)
    if saved:
        engine.save(saved)
    seen.steps = engine.run(engine.recorder(seen.take(engine, reference)), begun=1)
    return seen


def nudged(initial: Sequence[TensorPart], seed: int) -> Weights:
    """Whole weights to begin with: those whose elements are all equal, as of norms and biases, are
    moved apart."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for (_, name), value in assemble(initial).items():
        weights[name] = torch.from_numpy(value)
        if value.size and (value == value.flat[0]).all():
            moves = torch.randn(value.shape, generator=generator, dtype=torch.float64)
            weights[name] = (weights[name] + NUDGE * moves).to(weights[name].dtype)
    return weights


def reason(sentence: str) -> str:
    """Sentence about failed ranks, in the words of the program."""
    return sentence.partition("failed: ")[2].removeprefix("BadInput: ") or sentence


class Serial(NamedTuple):
    """Tensors of a program on one rank, against which every layout is held."""

    kind: Kind
    work: Work
    """The training, with the weights that every layout begins with."""
    reference: Reference
    shares: Mapping[str, list[Array]]
    """Gradient of each parameter after each microbatch of the first iteration, of a Program."""


def run_serial(kind: Kind, work: Work) -> Serial:
    """Run a program serially, in fp32 again with weights moved by rounding. Raises BadInput if it
    does not run."""
    first = _serially(kind, work)
    initial, shares = first.ranks[0].initial, first.ranks[0].shares
    work = replace(work, initial=nudged(initial, work.config.train.seed))
    if all(part.value.dtype == np.float64 for part in initial):
        whole = first.whole
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
        return Serial(kind, work, Reference(whole, allowed), shares)
    draws = [_serially(kind, work, UNKNOWN, draw) for draw in range(1, DRAWS)]
    return Serial(kind, work, measured(first, draws, "fp32"), shares)


def _serially(kind: Kind, work: Work, reference: Reference = UNKNOWN, draw: int = 0) -> Outcome:
    outcome = hold(probe, kind, work, SERIAL, reference, draw, seconds=SECONDS)
    if outcome.failure:
        raise BadInput(f"the serial run cannot run here: {reason(outcome.failure)}")
    return outcome


def examine(serial: Serial, layouts: Sequence[ParityLayout]) -> Iterator[Examined]:
    """Hold the serial run, and then each layout, against the serial run.

    Raises BadInput if the serial run gives other bits when it is repeated.
    """
    kind, work, reference, _ = serial
    again = _serially(kind, work, Reference(reference.whole, dict.fromkeys(reference.whole, 0.0)))
    if again.beyond:
        why = "deterministic" if np.isfinite(again.beyond[0].largest) else "finite"
        raise BadInput(
            f"the serial run is not {why}: {again.beyond[0].tensor} differs when it is repeated"
        )
    later = Reference(
        {key: value for key, value in reference.whole.items() if key[0]}, reference.allowed
    )

    def through_checkpoints(
        layout: ParityLayout, folder: Path
    ) -> tuple[list[LayoutFinding], str, bool]:
        """Differences after a serial checkpoint on the layout, and after its own serially; the
        reason if not asked.

        The last is True if a rank was lost.
        """
        begin, findings = (
            ParityLayout(shard_optimizer=layout.shard_optimizer),
            list[LayoutFinding](),
        )
        first = folder / f"begun-{begin.name}"
        own = folder / layout.name
        before = [] if first.exists() else [(begin, None, first)]
        there_and_back = (
            [(layout, first, None)]
            if layout == begin
            else [(layout, first, own), (begin, own, None)]
        )
        for goes_on, begun, saved in (*before, *there_and_back):
            outcome = hold(go_on, kind, work, goes_on, later, begun, saved, seconds=SECONDS)
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
                outcome = hold(probe, kind, work, layout, reference, seconds=SECONDS)
            findings, not_asked, lost = _found(outcome, serial), "", outcome.lost
            if not outcome.failure and all(
                each.probe in ("planted gradient", "dropout") for each in findings
            ):
                more, not_asked, lost = through_checkpoints(layout, Path(folder))
                findings += more
            yield Examined(outcome, _folded(findings, outcome, serial), not_asked, lost)


def _found(outcome: Outcome, serial: Serial) -> list[LayoutFinding]:
    """The first finding of each probe and parameter; of tensors that differ, those of the first
    iteration with any."""
    layout, ranks, beyond = outcome.layout, outcome.ranks, outcome.beyond
    is_exact = {part.value.dtype for rank in ranks for part in rank.initial} == {
        np.dtype(np.float64)
    }
    allowed = {key: value if is_exact else 0.0 for key, value in serial.reference.allowed.items()}
    firsts: dict[tuple[str, str], LayoutFinding] = {}
    for each in (
        *_unequal(layout.name, "initial copies", [rank.initial for rank in ranks]),
        *_equal(layout.name, [rank.initial for rank in ranks], serial.work.initial or {}),
        *_unequal(layout.name, "copies", [rank.parts for rank in ranks], allowed),
        *(_differs(layout.name, row) for row in beyond if row.iteration == beyond[0].iteration),
        *_planted(layout.name, ranks, serial.work.initial or {}),
        *_masks(layout, ranks),
    ):
        firsts.setdefault((each.probe, each.parameter), each)
    return list(firsts.values())


def _folded(findings: list[LayoutFinding], outcome: Outcome, serial: Serial) -> list[LayoutFinding]:
    """A finding for each cause."""
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
    return fold(findings, order[::-1], gradients, begun, serial.shares)


def _finding(
    layout: str, probe: str, name: str, value: float, expected: float, where: str = ""
) -> LayoutFinding:
    return LayoutFinding(
        layout=layout, probe=probe, parameter=name, value=value, expected=expected, where=where
    )


def _differs(layout: str, row: TensorDifference) -> LayoutFinding:
    """A tensor that is not the serial one; of a gradient, a moment or a weight, its parameter is
    named."""
    probe, name = (
        "gradient" if row.tensor.startswith("gradient") else "step",
        parameter_of(row.tensor),
    )
    if "loss" in row.tensor or row.tensor.startswith("output"):
        probe = "loss"
        name = row.tensor
    return _finding(layout, probe, name, row.largest, row.tolerance, row.where)


def _equal(
    layout: str, ranks: Sequence[Sequence[TensorPart]], weights: Weights
) -> Iterator[LayoutFinding]:
    """Parts of a parameter that begin with the same bits, though they do not in the serial run."""
    seen: dict[tuple[str, bytes], tuple[int, TensorPart]] = {}
    for number, parts in enumerate(ranks):
        for part in parts:
            if part.value.size < 2 or (part.value == part.value.flat[0]).all():
                continue
            holder, other = seen.setdefault((part.tensor, part.value.tobytes()), (number, part))
            serial = [
                weights[part.tensor][tuple(map(slice, each.start, each.end))]
                for each in (part, other)
            ]
            if other.start != part.start and not serial[0].equal(serial[1]):
                where = f"in the parts of rank {holder} and rank {number}"
                yield _finding(layout, "initial shards", part.tensor, 0.0, 0.0, where)


def _unequal(
    layout: str,
    probe: str,
    ranks: Sequence[Sequence[TensorPart]],
    allowed: Mapping[Key, float] = MappingProxyType({}),
) -> Iterator[LayoutFinding]:
    """Copies of a part on several ranks whose bits differ, or that are further apart than is
    allowed."""
    first: dict[Any, tuple[int, Array]] = {}
    for number, parts in enumerate(ranks):
        for iteration, tensor, start, value in parts:
            holder, other = first.setdefault((iteration, tensor, start), (number, value))
            if value.tobytes() != other.tobytes() or value.shape != other.shape:
                apart = float(np.abs(value - other).max()) if value.shape == other.shape else np.inf
                if not apart <= (most := allowed.get((iteration, tensor), 0.0)) or most == 0.0:
                    yield _finding(
                        layout,
                        probe,
                        tensor,
                        apart,
                        most,
                        f"between rank {holder} and rank {number}",
                    )


def _planted(layout: str, ranks: Sequence[Computed], weights: Weights) -> Iterator[LayoutFinding]:
    """Parameters whose elements the optimizer's norm does not count.

    A sum of ones is exact in fp32. The root and the square of each rank and of the whole round four
    times.
    """
    for tensor, weight in weights.items():
        for value in (rank.planted[tensor] for rank in ranks if rank.planted):
            if abs(value - weight.numel()) > 8 * UNIT_FP32 * weight.numel():
                yield _finding(layout, "planted gradient", tensor, value, weight.numel())


def _masks(layout: ParityLayout, ranks: Sequence[Computed]) -> Iterator[LayoutFinding]:
    """Masks that differ for copies or are equal for different parts, among tensor-parallel
    ranks."""
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
