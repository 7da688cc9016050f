"""Hold a program against its own serial run, on every layout, probe by probe."""

import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from engine.compare.tensors import DRAWS, UNIT_FP32, TensorPart, assemble
from lineage.config import Config
from lineage.errors import BadInput
from verify.alone import Masks
from verify.engines import Engine, Weights, Work
from verify.parity import SERIAL, ParityLayout, parse_layout
from verify.runner import TABLE_HEAD, UNKNOWN, Computed, Outcome, Reference, hold, measured, table_row, whole
from verify.subjects import subject

PROBES = {
    "initial copies": "every copy of a parameter begins with the same bits",
    "copies": "after a step, every copy of a parameter, its gradient and its moments has the same bits",
    "loss": "the loss of every microbatch and token, and every output that the program shows, is the serial one",
    "gradient": "the gradient of every parameter, and its norm, are the serial ones",
    "step": "clipped steps with weight decay leave the serial weights and moments, at the serial rate",
    "planted gradient": "of a gradient that is 1 in one parameter, the squared norm counts its elements",
    "dropout": "tensor-parallel ranks drop the same elements of a copy, and others of their own parts",
    "checkpoint": "a serial checkpoint goes on at this layout, and its own goes on serially, as without a stop",
}
"""Statement that each probe proves where it finds nothing."""
DEFAULT = "tp2,tp2-sp,pp2,dp2,dp2-zero1"
"""Layouts of two ranks that `all` stands for."""
SECONDS = 120
"""Time limit of the ranks of a layout."""
NUDGE = 0.1
"""Standard deviation of what is added to weights that begin all equal: there an error would not show."""


class LayoutFinding(Config):
    """A number of one layout that is not what the serial run says."""

    layout: str
    probe: str
    parameter: str
    value: float
    """Measured number: a count of elements, or the largest difference from the serial run or another copy."""
    expected: float
    """The count that it must be, or the largest difference that rounding explains."""
    where: str = ""

    def __str__(self) -> str:
        if self.probe == "dropout":
            return f"{self.layout}: dropout: {self.parameter}: {self.where}"
        must = "must be" if self.probe == "planted gradient" else "may differ by"
        value = f"{self.value:.6g}" if self.probe == "planted gradient" else f"differs by {self.value:.2g}"
        return f"{self.layout}: {self.probe}: {self.parameter} {value}, {must} {self.expected:.6g} {self.where}".strip()


class LayoutsReport(Config):
    """Results of the probes on each layout."""

    subject: str
    fields: dict[str, str]
    seed: int
    probes: dict[str, str] = PROBES
    parameters: list[str]
    compared: dict[str, int]
    """Number of compared tensors by layout."""
    findings: list[LayoutFinding]
    cannot_run: dict[str, str]
    """Reason by layout, in the program's own words."""
    not_asked: dict[str, str]
    """Reason by layout that its checkpoints were not compared."""


class Examined(NamedTuple):
    """One layout under all probes."""

    outcome: Outcome
    findings: list[LayoutFinding]
    not_asked: str = ""
    """Reason that checkpoints were not compared."""

    @property
    def cannot_run(self) -> str:
        """Reason, in the words of the program; empty for a layout that ran."""
        return reason(self.outcome.failure)


def run_layouts(name: str, given: Sequence[str], names: str, seed: int) -> LayoutsReport:
    """Run every probe of a subject on the layouts that `names` stands for, a line each.

    Raises BadInput if the serial run does not run, or if no layout does.
    """
    layouts = [parse_layout(part.strip()) for part in (DEFAULT if names == "all" else names).split(",")]
    layouts = [layout for layout in dict.fromkeys(layouts) if layout != SERIAL]
    torch.set_num_threads(1)
    with subject(name, given, seed) as (kind, work):
        title = f"{name} {version(kind.package)}" if kind.package else name
        fields = dict(text.partition("=")[::2] for text in given)
        print(f"{title}, {', '.join(given) or 'as it is'}, seed {seed}")
        print(TABLE_HEAD, flush=True)
        tried = []
        for each in examine(kind, work, layouts):
            result = "DIFFERS" if each.findings else "no" if each.cannot_run else "ok"
            print(table_row(each.outcome, result))
            for what, why in (("cannot run", each.cannot_run), ("checkpoints were not asked", each.not_asked)):
                if why:
                    print(f"  {what}: {why}")
            for finding in each.findings:
                print(f"  {finding}")
            sys.stdout.flush()
            tried.append(each)
    return LayoutsReport(
        subject=title, fields=fields, seed=seed, findings=[finding for each in tried for finding in each.findings],
        compared={each.outcome.layout.name: len(each.outcome.rows) for each in tried},
        parameters=sorted(tried[0].outcome.ranks[0].planted),
        cannot_run={each.outcome.layout.name: each.cannot_run for each in tried if each.cannot_run},
        not_asked={each.outcome.layout.name: each.not_asked for each in tried if each.not_asked},
    )  # fmt: skip


def probe(
    kind: type[Engine], work: Work, layout: ParityLayout, reference: Reference, weights: Weights | None = None,
    draw: int = 0,
) -> Computed:  # fmt: skip
    """Run one rank through the probes of a training; without weights, from those that it is built with."""
    engine, seen = kind(work, layout), Computed()
    engine.show(engine.recorder(seen.initial.append), "", engine.parameters())
    engine.load(weights := weights or nudged(seen.initial, work.config.train.seed))
    seen.steps = engine.run(engine.recorder(seen.take(engine, reference, keeps=True)), draw)
    if not draw:
        seen.planted = {tensor: engine.planted(tensor) ** 2 for tensor in weights}
        with Masks({id(each): name for name, each in engine.modules()}) as masks:
            engine.backward(0, None)
        seen.masks = masks.seen
    return seen


def go_on(
    kind: type[Engine], work: Work, layout: ParityLayout, reference: Reference, begun: Weights | Path,
    saved: Path | None,
) -> Computed:  # fmt: skip
    """Take one step from weights or load a checkpoint, save another, and take the further steps, on one rank."""
    engine, seen = kind(work, layout), Computed()
    if isinstance(begun, Path):
        engine.restore(begun)
    else:
        engine.load(begun)
        engine.step(0)
    if saved:
        engine.save(saved)
    seen.steps = engine.run(engine.recorder(seen.take(engine, reference)), begun=1)
    return seen


def nudged(initial: Sequence[TensorPart], seed: int) -> Weights:
    """Whole weights to begin with: those whose elements are all equal, as of norms and biases, are moved apart."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for (_, name), value in assemble(initial).items():
        weights[name] = torch.from_numpy(value)
        if value.size and (value == value.flat[0]).all():
            weights[name] = weights[name] + NUDGE * torch.randn(value.shape, generator=generator)
    return weights


def reason(sentence: str) -> str:
    """Sentence about failed ranks, in the words of the program."""
    return sentence.partition("failed: ")[2].removeprefix("BadInput: ") or sentence


def examine(kind: type[Engine], work: Work, layouts: Sequence[ParityLayout]) -> Iterator[Examined]:
    """Hold the serial run, and then each layout, against the serial run.

    Raises BadInput if the serial run does not run, or gives other bits when it is repeated.
    """
    start = time.monotonic()

    def held(program: Any, layout: ParityLayout, reference: Reference, *args: Any) -> Outcome:
        return next(hold(program, kind, work, [layout], reference, *args, seconds=SECONDS))

    def serially(reference: Reference, *args: Any) -> Outcome:
        outcome = held(probe, SERIAL, reference, *args)
        if outcome.failure:
            raise BadInput(f"the serial run cannot run here: {reason(outcome.failure)}")
        return outcome

    first = serially(UNKNOWN).ranks
    weights = nudged(first[0].initial, work.config.train.seed)
    again = serially(Reference(values := whole(first), dict.fromkeys(values, 0.0)), weights)
    if again.beyond:
        why = "deterministic" if np.isfinite(again.beyond[0].largest) else "finite"
        raise BadInput(f"the serial run is not {why}: {again.beyond[0].tensor} differs when it is repeated")
    draws = [serially(UNKNOWN, weights, draw).ranks for draw in range(1, DRAWS)]
    reference = measured([first, again.ranks, *draws], "fp32")
    later = Reference({key: value for key, value in reference.whole.items() if key[0]}, reference.allowed)

    def through_checkpoints(layout: ParityLayout, folder: Path) -> tuple[list[LayoutFinding], str]:
        """Differences after a serial checkpoint on the layout, and after its own serially; the reason if not asked."""
        begin, findings = ParityLayout(shard_optimizer=layout.shard_optimizer), list[LayoutFinding]()
        serial, own = folder / f"begun-{begin.name}", folder / layout.name
        ways: list[tuple[ParityLayout, Any, Path | None]] = [(layout, serial, own), (begin, own, None)]
        if not serial.exists():
            ways.insert(0, (begin, weights, serial))
        for goes_on, begun, saved in ways:
            outcome = held(go_on, goes_on, later, begun, saved)
            if outcome.failure:
                shutil.rmtree(saved or own, ignore_errors=True)
                return findings, reason(outcome.failure)
            for row in outcome.beyond:
                where = f"{row.where}, on {goes_on.name} after a checkpoint"
                findings.append(_finding(layout.name, "checkpoint", row.tensor, row.largest, row.tolerance, where))
        return findings, ""

    with tempfile.TemporaryDirectory() as folder:
        for layout in [SERIAL, *layouts]:
            outcome = again if layout == SERIAL else held(probe, layout, reference, weights)
            findings, not_asked = list(_found(outcome, weights)), ""
            if not outcome.failure and all(each.probe in ("planted gradient", "dropout") for each in findings):
                more, not_asked = through_checkpoints(layout, Path(folder))
                findings += more
            yield Examined(replace(outcome, seconds=time.monotonic() - start), findings, not_asked)
            start = time.monotonic()


def _found(outcome: Outcome, weights: Weights) -> Iterator[LayoutFinding]:
    """Findings of a layout; of the tensors that differ, those of the first iteration that has any."""
    layout, ranks = outcome.layout, outcome.ranks
    yield from _unequal(layout.name, "initial copies", [rank.initial for rank in ranks])
    yield from _unequal(layout.name, "copies", [rank.parts for rank in ranks])
    beyond: dict[tuple[str, str], LayoutFinding] = {}
    for row in outcome.beyond:
        if row.iteration == outcome.beyond[0].iteration:
            key = _probe_of(row.tensor)
            beyond.setdefault(key, _finding(layout.name, *key, row.largest, row.tolerance, row.where))
    yield from beyond.values()
    yield from _planted(layout.name, ranks, weights)
    yield from _masks(layout, ranks)


def _finding(layout: str, probe: str, name: str, value: float, expected: float, where: str = "") -> LayoutFinding:
    return LayoutFinding(layout=layout, probe=probe, parameter=name, value=value, expected=expected, where=where)


def _probe_of(tensor: str) -> tuple[str, str]:
    """The probe that a tensor belongs to, and its parameter."""
    if "loss" in tensor or tensor.startswith("output"):
        return "loss", tensor
    parameter = tensor.rpartition(" of ")[2].removeprefix("updated ")
    return "gradient" if tensor.startswith("gradient") else "step", parameter


def _unequal(layout: str, probe: str, ranks: Sequence[Sequence[TensorPart]]) -> list[LayoutFinding]:
    """Copies of a part on several ranks whose bits differ; one for each tensor."""
    first: dict[Any, tuple[int, TensorPart]] = {}
    unequal: dict[str, LayoutFinding] = {}
    for number, parts in enumerate(ranks):
        for part in parts:
            holder, other = first.setdefault((part.iteration, part.tensor, part.start), (number, part))
            if part.value.shape != other.value.shape or part.value.tobytes() != other.value.tobytes():
                same = part.value.shape == other.value.shape
                apart = float(np.abs(part.value - other.value).max()) if same else np.inf
                unequal.setdefault(part.tensor, _finding(
                    layout, probe, part.tensor, apart, 0.0, f"between rank {holder} and rank {number}"
                ))  # fmt: skip
    return list(unequal.values())


def _planted(layout: str, ranks: Sequence[Computed], weights: Weights) -> Iterator[LayoutFinding]:
    """Parameters whose elements the optimizer's norm does not count.

    A sum of ones is exact in fp32. The root and the square of each rank and of the whole round four times.
    """
    for tensor, count in ((tensor, weight.numel()) for tensor, weight in weights.items()):
        if wrong := [value for rank in ranks if abs((value := rank.planted[tensor]) - count) > 8 * UNIT_FP32 * count]:
            yield _finding(layout, "planted gradient", tensor, wrong[0], count)


def _masks(layout: ParityLayout, ranks: Sequence[Computed]) -> Iterator[LayoutFinding]:
    """Masks that differ for copies or are equal for different parts, among tensor-parallel ranks; one for a module."""
    wrong: dict[str, LayoutFinding] = {}
    for number, rank in enumerate(ranks):
        first = number - number % layout.tp
        for (name, x, mask), (_, other_x, other_mask) in zip(rank.masks, ranks[first].masks, strict=False):
            if number != first and (x == other_x) != (mask == other_mask):
                what = ("differ, though they drop the same tensor" if x == other_x else
                        "are equal, though they drop different parts")  # fmt: skip
                where = f"masks of rank {first} and rank {number} {what}"
                wrong.setdefault(name, _finding(layout.name, "dropout", name, x != other_x, x == other_x, where))
    yield from wrong.values()
