"""Hold a program against its own serial run, on every layout, probe by probe; show what was found, and how."""

import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from jinja2 import Environment, PackageLoader, StrictUndefined

from mlm_repro.engine.compare.tensors import DRAWS, UNIT_FP32, Array, TensorDifference, TensorPart, assemble
from mlm_repro.lineage.atomic import write_text
from mlm_repro.lineage.config import Config
from mlm_repro.lineage.errors import BadInput
from mlm_repro.verify import alone
from mlm_repro.verify.alone import Masks
from mlm_repro.verify.engines import Engine, Weights, Work
from mlm_repro.verify.megatron_core import MegatronCore, values_of
from mlm_repro.verify.parity import SERIAL, ParityLayout, parse_layout
from mlm_repro.verify.runner import TABLE_HEAD, UNKNOWN, Computed, Outcome, Reference, hold, measured, table_row
from mlm_repro.verify.subjects import core_fields, small_work, subject

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
COLOURS = ("#cc79a7", "#d55e00", "#e69f00", "#f0e442", "#2fb48a", "#56b4e9", "#b0b0b0", "#7fa3e0")
DEFAULT = "tp2,tp2-sp,pp2,dp2,dp2-zero1"
"""Layouts of two ranks that `all` stands for."""
SECONDS = 120
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

    @property
    def cannot_run(self) -> str:
        """Reason, in the words of the program; empty for a layout that ran."""
        return reason(self.outcome.failure)


def run_layouts(name: str, given: Sequence[str], names: str, seed: int) -> LayoutsReport:
    """Run every probe of a subject on the layouts that `names` stands for, a line each."""
    layouts = [parse_layout(part.strip()) for part in (DEFAULT if names == "all" else names).split(",")]
    layouts = [layout for layout in dict.fromkeys(layouts) if layout != SERIAL]
    torch.set_num_threads(1)
    with subject(name, given, seed) as (kind, work):
        title = f"{name} {version(name)}" if kind is MegatronCore else name
        fields = dict(text.partition("=")[::2] for text in given)
        print(f"{title}, {', '.join(given) or 'as it is'}, seed {seed}")
        print(TABLE_HEAD, flush=True)
        tried = []
        for each in examine(run_serial(kind, work), layouts):
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


def probe(kind: type[Engine], work: Work, layout: ParityLayout, reference: Reference, draw: int = 0) -> Computed:
    """Run one rank through the probes of a training; without weights in `work`, from those that it is built with."""
    engine, seen = kind(work, layout), Computed()
    engine.show(engine.recorder(seen.initial.append), "", engine.parameters())
    engine.load(weights := work.initial or nudged(seen.initial, work.config.train.seed))
    seen.steps = engine.run(engine.recorder(seen.take(engine, reference, keeps=True)), draw)
    if reference.whole:
        seen.planted = {tensor: norm**2 for tensor, norm in engine.planted(weights).items()}
        with Masks({id(each): name for name, each in engine.module.named_modules()}) as masks:
            engine.backward(0, None)
        seen.masks = masks.seen
    return seen


def go_on(
    kind: type[Engine], work: Work, layout: ParityLayout, reference: Reference, begun: Path | None, saved: Path | None
) -> Computed:  # fmt: skip
    """Load a checkpoint or take one step, save a checkpoint, and take the further steps, on one rank."""
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


class Serial(NamedTuple):
    """Tensors of a program on one rank, against which every layout is held."""

    kind: type[Engine]
    work: Work
    """The training, with the weights that every layout begins with."""
    reference: Reference


def run_serial(kind: type[Engine], work: Work) -> Serial:
    """Run a program serially, and again with weights moved by rounding. Raises BadInput if it does not run."""
    first = _serially(kind, work)
    work = replace(work, initial=nudged(first.ranks[0].initial, work.config.train.seed))
    draws = [_serially(kind, work, UNKNOWN, draw) for draw in range(1, DRAWS)]
    return Serial(kind, work, measured(first, draws, "fp32"))


def _serially(kind: type[Engine], work: Work, reference: Reference = UNKNOWN, draw: int = 0) -> Outcome:
    outcome = hold(probe, kind, work, SERIAL, reference, draw, seconds=SECONDS)
    if outcome.failure:
        raise BadInput(f"the serial run cannot run here: {reason(outcome.failure)}")
    return outcome


def examine(serial: Serial, layouts: Sequence[ParityLayout]) -> Iterator[Examined]:
    """Hold the serial run, and then each layout, against the serial run.

    Raises BadInput if the serial run gives other bits when it is repeated.
    """
    kind, work, reference = serial
    again = _serially(kind, work, Reference(reference.whole, dict.fromkeys(reference.whole, 0.0)))
    if again.beyond:
        why = "deterministic" if np.isfinite(again.beyond[0].largest) else "finite"
        raise BadInput(f"the serial run is not {why}: {again.beyond[0].tensor} differs when it is repeated")
    later = Reference({key: value for key, value in reference.whole.items() if key[0]}, reference.allowed)

    def through_checkpoints(layout: ParityLayout, folder: Path) -> tuple[list[LayoutFinding], str]:
        """Differences after a serial checkpoint on the layout, and after its own serially; the reason if not asked."""
        begin, findings = ParityLayout(shard_optimizer=layout.shard_optimizer), list[LayoutFinding]()
        serial, own = folder / f"begun-{begin.name}", folder / layout.name
        before = [] if serial.exists() else [(begin, None, serial)]
        there_and_back = [(layout, serial, None)] if layout == begin else [(layout, serial, own), (begin, own, None)]
        for goes_on, begun, saved in (*before, *there_and_back):
            outcome = hold(go_on, kind, work, goes_on, later, begun, saved, seconds=SECONDS)
            if outcome.failure:
                shutil.rmtree(saved or own, ignore_errors=True)
                return findings, reason(outcome.failure)
            for row in outcome.beyond:
                where = f"{row.where}, on {goes_on.name} after a checkpoint"
                findings.append(_finding(layout.name, "checkpoint", row.tensor, row.largest, row.tolerance, where))
        return findings, ""

    with tempfile.TemporaryDirectory() as folder:
        for layout in [SERIAL, *layouts]:
            outcome = again
            if layout != SERIAL:
                outcome = hold(probe, kind, work, layout, reference, seconds=SECONDS)
            findings, not_asked = _found(outcome, work.initial or {}), ""
            if not outcome.failure and all(each.probe in ("planted gradient", "dropout") for each in findings):
                more, not_asked = through_checkpoints(layout, Path(folder))
                findings += more
            yield Examined(outcome, findings, not_asked)


def _found(outcome: Outcome, weights: Weights) -> list[LayoutFinding]:
    """The first finding of each probe and parameter; of tensors that differ, those of the first iteration with any."""
    layout, ranks, beyond = outcome.layout, outcome.ranks, outcome.beyond
    firsts: dict[tuple[str, str], LayoutFinding] = {}
    for each in (
        *_unequal(layout.name, "initial copies", [rank.initial for rank in ranks]),
        *_unequal(layout.name, "copies", [rank.parts for rank in ranks]),
        *(_differs(layout.name, row) for row in beyond if row.iteration == beyond[0].iteration),
        *_planted(layout.name, ranks, weights),
        *_masks(layout, ranks),
    ):
        firsts.setdefault((each.probe, each.parameter), each)
    return list(firsts.values())


def _finding(layout: str, probe: str, name: str, value: float, expected: float, where: str = "") -> LayoutFinding:
    return LayoutFinding(layout=layout, probe=probe, parameter=name, value=value, expected=expected, where=where)


def _differs(layout: str, row: TensorDifference) -> LayoutFinding:
    """A tensor that is not the serial one; of a gradient, a moment or a weight, its parameter is named."""
    probe, name = "gradient" if row.tensor.startswith("gradient") else "step", parameter_of(row.tensor)
    if "loss" in row.tensor or row.tensor.startswith("output"):
        probe, name = "loss", row.tensor
    return _finding(layout, probe, name, row.largest, row.tolerance, row.where)


def parameter_of(tensor: str) -> str:
    """The parameter that a tensor belongs to."""
    return re.sub("^(updated|(gradient|exp_avg|exp_avg_sq) of) ", "", tensor)


def _unequal(layout: str, probe: str, ranks: Sequence[Sequence[TensorPart]]) -> Iterator[LayoutFinding]:
    """Copies of a part on several ranks whose bits differ."""
    first: dict[Any, tuple[int, Array]] = {}
    for number, parts in enumerate(ranks):
        for iteration, tensor, start, value in parts:
            holder, other = first.setdefault((iteration, tensor, start), (number, value))
            if value.tobytes() != other.tobytes() or value.shape != other.shape:
                apart = float(np.abs(value - other).max()) if value.shape == other.shape else np.inf
                yield _finding(layout, probe, tensor, apart, 0.0, f"between rank {holder} and rank {number}")


def _planted(layout: str, ranks: Sequence[Computed], weights: Weights) -> Iterator[LayoutFinding]:
    """Parameters whose elements the optimizer's norm does not count.

    A sum of ones is exact in fp32. The root and the square of each rank and of the whole round four times.
    """
    for tensor, weight in weights.items():
        for value in (rank.planted[tensor] for rank in ranks):
            if abs(value - weight.numel()) > 8 * UNIT_FP32 * weight.numel():
                yield _finding(layout, "planted gradient", tensor, value, weight.numel())


def _masks(layout: ParityLayout, ranks: Sequence[Computed]) -> Iterator[LayoutFinding]:
    """Masks that differ for copies or are equal for different parts, among tensor-parallel ranks."""
    for number, rank in enumerate(ranks):
        first = number - number % layout.tp
        for (name, x, mask), (_, other_x, other_mask) in zip(rank.masks, ranks[first].masks, strict=False):
            if number != first and (x == other_x) != (mask == other_mask):
                what = "differ, though they drop the same tensor" if x == other_x else "are equal for different parts"
                where = f"masks of rank {first} and rank {number} {what}"
                yield _finding(layout.name, "dropout", name, x != other_x, x == other_x, where)


def write_page(report: LayoutsReport, directory: Path) -> Path:
    """Write `index.html`; return its path."""
    numbers = {probe: number for number, probe in enumerate(PROBES, 1)}
    cells: dict[tuple[str, str], dict[int, LayoutFinding]] = {}
    for finding in report.findings:
        cell = cells.setdefault((parameter_of(finding.parameter), finding.layout), {})
        cell.setdefault(numbers[finding.probe], finding)
    template = Environment(loader=PackageLoader("mlm_repro.verify"), autoescape=True, undefined=StrictUndefined)
    page = template.get_template("findings.html").render(
        report=report, cells=cells, colours=COLOURS, probes=PROBES,
        rows=dict.fromkeys([*report.parameters, *(row for row, _ in cells)]),
        fields=", ".join(f"{name}={value}" for name, value in report.fields.items()),
    )  # fmt: skip
    write_text(path := directory / "index.html", page)
    return path


def write_reproductions(report: LayoutsReport, directory: Path) -> list[Path]:
    """Write a program for each finding; return their paths."""
    paths = []
    for finding in report.findings:
        name = re.sub(r"[^\w.-]", "-", f"{finding.layout}-{finding.probe}-{finding.parameter}")
        paths.append(directory / f"{name}.py")
        write_text(paths[-1], _program(finding, report))
    return paths


def _program(finding: LayoutFinding, report: LayoutsReport) -> str:
    work = small_work(report.seed, core_fields([f"{name}={value}" for name, value in report.fields.items()]))
    saves = finding.probe == "checkpoint"
    layout = parse_layout(finding.layout)

    def run(layout: ParityLayout, restores: str = "", saves: bool = saves) -> dict[str, Any]:
        train = work.config.train
        batch = (train.global_batch_size, train.microbatch_size, work.config.model.seq_length)
        return values_of(work, layout) | {
            "ranks": layout.world_size, "batch": batch, "restores": restores, "saves": saves
        }  # fmt: skip

    runs = {"serial": run(SERIAL), layout.name: run(layout, "serial" * saves)}
    if saves:
        runs["serial again"] = run(SERIAL, layout.name, False)
    text = Path(alone.__file__).read_text(encoding="utf-8")
    text = re.sub(r"(?m)^RUNS: .*$", lambda _: f"RUNS: dict[str, Any] = {_source(runs)}", text)
    text = re.sub(r'(?m)^KEY = ""$', lambda _: f"KEY = {parameter_of(finding.parameter)!r}", text)
    return f'"""{report.subject}: {finding}"""\n\n' + text.partition('"""\n\n')[2]


def _source(value: Any) -> str:
    """Python text of a value; functions are those of torch.nn.functional."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name!r}: {_source(each)}" for name, each in value.items()) + "}"
    return f"F.{value.__name__}" if callable(value) else repr(value)
