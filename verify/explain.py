"""Find where two trainings part, and whether rounding or a fault explains it: a replay in float64
decides.

A run is at fault where it is farther from the float64 replay of its own settings than rounding
takes it. That distance is measured: the same iterations are trained once more on one rank in the
run's own number format, from weights moved by a rounding. `TAIL` times its distance from float64 is
allowed, the largest of all iterations so far and the next `SEEN_AHEAD`, because differences grow
and a single distance may be 0 by chance.
"""

import math
from collections import defaultdict
from collections.abc import Iterator
from statistics import median
from typing import NamedTuple

from mlm_repro.engine.compare.tensors import UNIT_FP32
from mlm_repro.engine.step import NotFinite
from mlm_repro.lineage.config import flatten
from mlm_repro.lineage.errors import BadInput, Diverged
from mlm_repro.lineage.progress import Progress, announce
from mlm_repro.verify.replay import other_tensors
from mlm_repro.verify.serial_replay import (
    KnownFault,
    Numbers,
    RecordedRun,
    SerialReplay,
    Start,
    known_faults,
)

TAIL = 10.0
SEEN_AHEAD = 2
OF_TENSORS = 256
"""Number of unit round-offs, relative to a tensor's norm, by which it may differ in any case: Adam
moves an element whose gradient is nearly 0 as far as any other, to a side that rounding
chooses."""
LAYOUT = ("parallel.", "record.", "name")
"""Beginnings of the settings that a replay on one rank does not follow."""
EXACT = ("batch_size", "samples", "loss_scale", "skipped")
"""Recorded quantities that no rounding changes."""
UNIT = 2.0**-53
"""Unit round-off of float64."""
SAME = 1e-10
"""Largest allowed relative difference between two float64 replays of the same computation."""
FAR = 20
"""Minimum number of iterations that are replayed beyond a fault to reach the next checkpoint; after
a late fault, as many are replayed as before it."""


class Beyond(NamedTuple):
    """A recorded number or tensor of an iteration that rounding does not explain: its name, its
    distance from the replay in float64, and the largest distance that rounding explains. As text it
    is a sentence that states them."""

    iteration: int
    what: str
    distance: float
    """Distance of the recorded value from float64; for a tensor, the norm of the difference."""
    allowed: float
    detail: str
    """End of the sentence about it: the recorded value and the due one, or their ratio."""
    row: int | None = None
    """Row of the word embedding that is farthest off; None for another value."""

    def __str__(self) -> str:
        return (
            f"{self.what} of iteration {self.iteration} is {self.distance:.2g} away from its replay"
            f" in float64, and rounding explains at most {self.allowed:.2g}{self.detail}"
        )


class Judged:
    """Comparison of a recorded run with the float64 replay of its own settings. Call the method
    `iterate` for each of `iterations` in order, or until `is_over` is True, then `end`. The
    attribute `number` is then the first recorded number that rounding does not explain, or None,
    and `tensors` has the tensors that rounding does not explain, of the first checkpoint with such
    tensors; `fault` is the earliest among `number` and `tensors`."""

    def __init__(self, run: RecordedRun, start: Start, native: SerialReplay | None = None) -> None:
        """Build the replays of `run` that begin at `start`, a Start: at a checkpoint of the run, or
        where the run itself began. One is in float64, the other in the run's own number format; in
        place of the second, `native` is taken if it is given: a replay in that format that another
        Judged has already, of a run with the same settings from the same start. No iteration is
        replayed yet. Raises the errors of SerialReplay, such as IntegrityFailure for a damaged
        checkpoint."""
        self.run = run
        self.start = start
        begun = start.iteration
        self.iterations = range(begun + bool(begun), run.iterations.stop)
        """Iterations to replay, with 0 if the replay begins there."""
        precision = run.config.train.precision
        self.truth = SerialReplay(run, start)
        # Not compared with the run itself, but a measure of how far rounding takes such a training.
        self.native = native or SerialReplay(run, start, precision, True)
        self.unit = UNIT if precision == "fp64" else UNIT_FP32
        self.numbers = self.truth.replayed
        """Numbers of the float64 replay, by iteration."""
        self.bounds: dict[int, Numbers] = {}
        """Largest relative distance so far from the float64 replay of the replay in the run's own
        format, by iteration."""
        self.number: Beyond | None = None
        """The first recorded number that rounding does not explain; None if there is no such
        number."""
        self.tensors: list[Beyond] = []
        """Tensors that rounding does not explain, in the order of computation, of the first
        checkpoint that has such tensors."""
        self.spread: dict[int, dict[str, float]] = {}
        """Relative difference that rounding explains, by iteration of a checkpoint and by
        tensor."""

    @property
    def last(self) -> int:
        """The number of the last iteration that was replayed so far. At least one must have been
        replayed."""
        return max(self.numbers)

    @property
    def fault(self) -> Beyond | None:
        """The Beyond of the earliest recorded number or tensor that rounding does not explain, as
        far as the methods `iterate` and `end` have judged; None if there is no such value."""
        beyond = filter(None, (self.number, *self.tensors[:1]))
        return min(beyond, key=lambda first: first.iteration, default=None)

    @property
    def is_over(self) -> bool:
        """True if the replay may end: a checkpoint has tensors that rounding does not explain, or a
        number was at fault at least `FAR` iterations ago, and at least as many iterations ago as
        were replayed before that number."""
        if self.tensors or not self.number:
            return bool(self.tensors)
        needed = max(FAR, self.number.iteration - self.start.iteration)
        return self.last >= self.number.iteration + needed

    def iterate(self, iteration: int) -> None:
        """Replay the iteration `iteration` in float64 and in the run's own format, and judge the
        numbers recorded `SEEN_AHEAD` iterations earlier: the first of them that rounding does not
        explain becomes the attribute `number`, unless an earlier iteration had one. Compare the
        checkpoint after `iteration`, if the run has one: its tensors that rounding does not explain
        become the attribute `tensors`, unless an earlier checkpoint had some. Call it for each
        iteration of the attribute `iterations`, in order."""
        numbers = self.truth.numbers(iteration)
        # Without validations: the training's losses, of fewer tokens, are no nearer to float64.
        loose = self.native.numbers(iteration, False)
        # Bounds never fall: what rounding has once moved stays moved.
        bounds = dict(self.bounds.get(iteration - 1, {}))
        # Without numbers that the run lacks: an overflow has no norm, and must leave no bound.
        for name in loose.keys() & self.run.numbers(iteration).keys():
            due = numbers[name]
            distance = abs(loose[name] - due) / abs(due) if due else 0.0
            bounds[name] = max(
                bounds.get(name, 0.0), math.inf if math.isnan(distance) else distance
            )
        self.bounds[iteration] = bounds
        # Later, because a distance that is 0 by chance is corrected by the iterations after it.
        self._judge(iteration - SEEN_AHEAD)
        if iteration in self.run.checkpoints:
            self._take_checkpoint(iteration)

    def end(self) -> None:
        """Judge the last `SEEN_AHEAD` replayed iterations, which the method `iterate` has not
        judged: it judges an iteration only when that many later ones were replayed. The first
        recorded number in them that rounding does not explain becomes the attribute `number`,
        unless `number` is set already. Call it after the last call of `iterate`."""
        for iteration in sorted(self.numbers)[-SEEN_AHEAD:]:
            self._judge(iteration)

    def _judge(self, iteration: int) -> None:
        if not self.number and iteration in self.numbers:
            self.number = next(self.beyond(iteration, self.numbers[iteration]), None)

    def beyond(self, iteration: int, numbers: Numbers) -> Iterator[Beyond]:
        """Yield a `Beyond` for each recorded number of an iteration that is farther from `numbers`,
        which have the names of the recorded ones, than rounding explains. The effect of rounding is
        measured up to `SEEN_AHEAD` iterations later, so `iterate` must have been called for these
        iterations already, as far as the replay has them."""
        recorded = self.run.numbers(iteration)
        bounds = self.bounds[min(iteration + SEEN_AHEAD, self.last)]
        for name in [name for name in numbers if name in recorded]:
            if name in EXACT:
                part = 0.0
            elif name == "learning_rate":
                part = TAIL * UNIT
            else:
                part = TAIL * max(
                    self.unit, bounds.get("loss" if "validation" in name else name, 0.0)
                )
            distance = abs(recorded[name] - numbers[name])
            allowed = part * abs(numbers[name])
            # Not `distance > allowed`, which a NaN would pass.
            if not distance <= allowed:
                detail = f": {recorded[name]:.9g} instead of {numbers[name]:.9g}"
                yield Beyond(iteration, name.replace("_", " "), distance, allowed, detail)

    def _take_checkpoint(self, iteration: int) -> None:
        """Compare the checkpoint after `iteration`, which must exist, with the float64 replay; both
        replays must have just reached this iteration. Set `self.spread[iteration]` to a dict
        tensor's name → distance that rounding explains, as a share of the tensor's norm, and
        `self.tensors` to a list of a Beyond for each tensor that is farther away, unless an earlier
        checkpoint had such tensors."""
        others = self.native.tensors()
        spread = {
            tensor: float((others[tensor].double() - true).norm() / true.norm())
            for tensor, true in self.truth.tensors().items()
            if true.any()
        }
        kinds = defaultdict(list)
        for tensor, own in spread.items():
            kinds[tensor.partition(" ")[0]].append(own)
        self.spread[iteration] = {
            # At least the median of its kind, because a single tensor may be near float64 by
            # chance.
            tensor: TAIL * max(own, median(kinds[tensor.partition(" ")[0]]))
            + OF_TENSORS * self.unit
            for tensor, own in spread.items()
        }
        self.tensors = self.tensors or list(self.off(iteration, self.truth))

    def off(self, iteration: int, replay: SerialReplay) -> Iterator[Beyond]:
        """Yield a `Beyond`, in the order of computation, for each tensor that in the run's
        checkpoint at this iteration is farther from the same tensor of `replay` than rounding
        explains. `replay` must have reached this iteration, and `iterate` must have compared this
        checkpoint before."""
        due = replay.tensors()
        recorded = SerialReplay(
            self.run, self.run.start_at(iteration), self.run.config.train.precision
        )
        for tensor, value in recorded.tensors().items():
            stored = value.double()
            true = due[tensor].double()
            size = float(true.norm())
            off = stored - true
            allowed = self.spread[iteration].get(tensor, 0.0) * size
            # Not `>`, which a NaN would pass.
            if not float(off.norm()) <= allowed:
                row = (
                    int(off.flatten(1).norm(dim=1).argmax())
                    if tensor.endswith("word_embeddings.weight")
                    else None
                )
                detail = (
                    f"; it is {float((stored * true).sum()) / (size * size or math.nan):.4g} × the"
                    " replay's"
                )
                yield Beyond(iteration, tensor, float(off.norm()), allowed, detail, row)

    def sentence(self) -> str:
        """Return a sentence about the property `fault`, which must not be None: the run's name, the
        number or tensor in which the fault is first seen, how many tensors of the checkpoint are
        off, if any, and the fault's kind, or that no known fault gives these numbers. To find the
        kind, replays the run's iterations with each known fault, and first prints how many replays
        that takes. Call it after `end`."""
        text = f"{self.run.name}: {self.fault}"
        if self.tensors:
            text += f"; of the checkpoint, {self.tensors[0]}" * (self.fault is not self.tensors[0])
            text += f"; {len(self.tensors)} tensors are off"
        kinds = self._kinds()
        return (
            f"{text};"
            f" {'kind: ' + ' or '.join(kinds) if kinds else 'no known fault gives these numbers'}"
        )

    def _kinds(self) -> list[str]:
        """Return a list of the kinds, in words, of the known faults with which a replay gives, but
        for rounding, all numbers and checkpoints that this object's `run` recorded in the replayed
        iterations, each kind once; empty if no fault does. The replays are made here, and their
        cost is printed first, to standard error, unless `--quiet` is given."""
        row = next((tensor.row for tensor in self.tensors if tensor.row is not None), None)
        known = list(known_faults(self.run, row))
        announce(
            f"{self.run.name}: tries {len(known)} known faults in up to {len(self.numbers)}"
            " iterations each"
        )
        return list(dict.fromkeys(fault.kind for fault in known if self._fits(fault)))

    def _fits(self, fault: KnownFault) -> bool:
        replay = SerialReplay(self.run, self.start, fault=fault)
        for number in sorted(self.numbers):
            try:
                numbers = replay.numbers(number)
            # A validation of the fault's weights, which the run itself passed.
            except NotFinite:
                return False
            if any(self.beyond(number, numbers)) or (
                number in self.spread and any(self.off(number, replay))
            ):
                return False
        return True


def explain(first: RecordedRun, second: RecordedRun) -> None:
    """Print where the trainings `first` and `second` begin to differ and why: both runs, the
    settings that differ, the first bits that differ, and what a replay of each run in float64
    finds, a fault or none; without faults also the reason for the difference. The replays begin at
    the newest checkpoint that both have before these bits, or at the beginning. If all that both
    have recorded is equal to the bit, print this after the settings, and replay nothing.

    Raises Diverged, after the findings are printed, if a run has a fault: its records differ from
    what its settings compute by more than rounding explains. Raises BadInput if the trainings have
    no iteration in common, IntegrityFailure if a checkpoint that is compared or begins a replay is
    damaged."""
    for run in (first, second):
        layout = run.run.layout
        train = run.config.train
        print(
            f"run: {run.name}, {len(run.steps)} iterations in {train.precision} on tp {layout.tp} ×"
            f" pp {layout.pp} × dp {layout.dp}, microbatches of {train.microbatch_size}"
        )
    mine, theirs = (
        flatten({**run.config.model_dump(mode="json"), "made of": run.run.parents})
        for run in (first, second)
    )
    changed = [key for key in sorted({**mine, **theirs}) if mine.get(key) != theirs.get(key)]
    for key in changed:
        print(f"settings: {key}: {mine.get(key)} → {theirs.get(key)}")
    parting = _first_bits(first, second)
    if parting is None:
        print("the same bits in all that both runs have")
        return
    begun = _common_start(first, second, parting)
    where = (
        "the beginning"
        if begun is None
        else f"the checkpoint at {begun}, which has the same bits in both,"
    )
    print(f"replay: from {where} on one rank in float64", flush=True)
    # Microbatches decide what a half format rounds, and may change a BERT's loss.
    same = (
        ("train.microbatch_size", *LAYOUT)
        if first.config.train.precision == "fp32" and first.config.model.family != "bert"
        else LAYOUT
    )
    shares = first.updates == second.updates and all(key.startswith(same) for key in changed)
    judged = _replayed(first, second, begun, shares)
    faults = []
    for replayed in judged:
        if replayed.fault:
            faults.append(replayed.run.name)
            print(f"fault: {replayed.sentence()}", flush=True)
        else:
            part = TAIL * max(replayed.unit, replayed.bounds[replayed.last]["loss"])
            print(
                f"no fault: {replayed.run.name} is what its settings compute up to iteration"
                f" {replayed.last}; there rounding explains {part:.1g} of the loss"
            )
    if faults:
        raise Diverged(
            f"{' and '.join(faults)}: what is recorded is not what the run's own settings compute;"
            " the lines `fault:` above say where"
        )
    print(_verdict(*judged))


def _first_bits(first: RecordedRun, second: RecordedRun) -> int | None:
    """Print, on one line, the first recorded number, or the first tensor or memory file of a
    checkpoint, that differs at all between the RecordedRuns `first` and `second`, with both values
    of a number, and return its iteration. The iterations that both have are compared in order:
    first the numbers that both recorded, then the checkpoints, if both have one. If all are equal,
    nothing is printed and None is returned. Raises BadInput if the runs have no iteration in
    common, IntegrityFailure if a checkpoint of theirs cannot be read."""
    common = [number for number in first.iterations if number in second.iterations]
    for number in common:
        mine = first.numbers(number)
        other = second.numbers(number)
        for name in [name for name in mine if name in other and mine[name] != other[name]]:
            print(
                f"first other bits: {name.replace('_', ' ')} of iteration {number},"
                f" {mine[name]:.9g} and {other[name]:.9g},"
                f" {abs(mine[name] - other[name]):.2g} apart"
            )
            return number
        theirs = first.checkpoints.get(number)
        ours = second.checkpoints.get(number)
        if theirs and ours and (differing := other_tensors(theirs, ours)):
            print(
                f"first other bits: {differing[0]}, in the checkpoint at {number}, where"
                f" {len(differing)} tensors differ"
            )
            return number
    if not common:
        raise BadInput(
            f"{first.name} and {second.name} cannot be compared, as no iteration is recorded in"
            " both: give two runs that trained some of the same iterations"
        )
    return None


def _common_start(first: RecordedRun, second: RecordedRun, parting: int) -> int | None:
    """Return the iteration of the newest checkpoint that both recorded runs, `first` and `second`,
    have before the iteration `parting`, where they part.

    None, for the beginning, if the runs share no checkpoint before it, and for a model with memory,
    because a replay does not load a checkpoint's memory.
    """
    has_memory = first.config.model.transformer_xl.memory_length
    same = (
        number
        for number in first.checkpoints.keys() & second.checkpoints.keys()
        if number < parting
    )
    return None if has_memory else max(same, default=None)


def _replayed(
    first: RecordedRun, second: RecordedRun, common: int | None, shares: bool
) -> list[Judged]:
    """Replay each run with its own settings, in float64 and in its own number format, side by
    side, until both end or one is over: at a checkpoint with faulty tensors, or well beyond a
    faulty number (`Judged.is_over`). Return a list of two, each run's Judged, ended. With `shares`
    the replay of `first` in its own format stands for that of `second` too. The replays begin at
    the checkpoint of iteration `common`, which both must have, or where the run itself began if it
    is None. Raises IntegrityFailure if a checkpoint that is compared or begins a replay is
    damaged."""
    announce(
        f"replays up to {len(first.steps) + len(second.steps)} iterations in float64 and at most as"
        " many in the runs' own format, on one rank"
    )
    ours = Judged(first, first.start_at(common))
    judged = [ours, Judged(second, second.start_at(common), ours.native if shares else None)]
    total = sum(len(replayed.iterations) for replayed in judged)
    with Progress("replay", total, "iterations") as progress:
        for number in range(max(first.iterations.stop, second.iterations.stop)):
            for replayed in judged:
                if number in replayed.iterations:
                    replayed.iterate(number)
                    progress.advance()
            if any(replayed.is_over for replayed in judged):
                break
    for replayed in judged:
        replayed.end()
    return judged


def _verdict(first: Judged, second: Judged) -> str:
    """Return a sentence with the reason that two runs without a fault differ. The reason follows
    from the earliest number, of an iteration that both have, by which their replays in float64
    differ by more than the share SAME; the loss scale is not compared. If that number tells that
    one run alone made an update, the sentence begins with `overflow`, or with `spike` if both
    records have a gradient norm. For any other number the sentence begins with `settings`, and with
    `rounding` if no number differs."""
    ours = first.run.steps
    theirs = second.run.steps
    common = sorted(first.numbers.keys() & second.numbers.keys())
    for number in common:
        mine = first.numbers[number]
        other = second.numbers[number]
        for name in [name for name in mine if name in other and name != "loss_scale"]:
            if abs(mine[name] - other[name]) > SAME * abs(mine[name]):
                if name == "skipped":
                    norms = (ours[number].gradient_norm, theirs[number].gradient_norm)
                    return (
                        f"{'overflow' if None in norms else 'spike'}: iteration {number} made no"
                        " update in one run, as its gradient or loss was too large"
                    )
                return (
                    f"settings: float64 too gives {name.replace('_', ' ')} {mine[name]:.9g} and"
                    f" {other[name]:.9g} in iteration {number}: the runs were told to compute"
                    " different things"
                )
    gaps = [
        abs(ours[number].loss - theirs[number].loss) / abs(ours[number].loss)
        for number in common
        if number
    ]
    return (
        "rounding: in float64 both runs compute the same; their records are at most"
        f" {max(gaps, default=0.0):.1g} of the loss apart"
    )
