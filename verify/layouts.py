"""Hold a program against its own serial run, on every layout, probe by probe."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

import numpy as np
import torch

from engine.compare.recorder import moved
from engine.compare.tensors import DRAWS, UNIT_FP32, TensorPart, assemble, compare_all
from engine.launch.forked import run_forked
from engine.launch.threads import RanksFailed
from lineage.config import Config
from lineage.errors import BadInput
from verify.engines import Engine, Weights, Work
from verify.parity import SERIAL, ParityLayout, parse_layout
from verify.subjects import subject

PROBES = {
    "initial copies": "every copy of a parameter begins with the same bits",
    "copies": "after a step, every copy of a parameter, its gradient and its moments has the same bits",
    "loss": "the loss of every microbatch is the serial one",
    "gradient": "the gradient of every parameter, and its norm, are the serial ones",
    "step": "a clipped step with weight decay leaves the serial weights and moments",
    "planted gradient": "of a gradient that is 1 in one parameter, the squared norm counts its elements",
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
        must = "must be" if self.probe == "planted gradient" else "may differ by"
        value = f"{self.value:.6g}" if self.probe == "planted gradient" else f"differs by {self.value:.2g}"
        return f"{self.layout}: {self.probe}: {self.parameter} {value}, {must} {self.expected:.6g} {self.where}".strip()


class LayoutsReport(Config):
    """Results of the probes on each layout."""

    subject: str
    fields: dict[str, str]
    seed: int
    probes: dict[str, str] = PROBES
    compared: dict[str, int]
    """Number of compared tensors by layout."""
    findings: list[LayoutFinding]
    cannot_run: dict[str, str]
    """Reason by layout, in the program's own words."""


@dataclass
class RankResult:
    """Tensors and norms that one rank computed."""

    initial: list[TensorPart]
    parts: list[TensorPart] = field(default_factory=list)
    planted: dict[str, float] = field(default_factory=dict)
    """Squared norm that the optimizer found, by parameter."""


class _Losses:
    """Takes an engine's losses, microbatch by microbatch."""

    def __init__(self, engine: Engine) -> None:
        self.recorder = engine.recorder((parts := list[TensorPart]()).append)
        self.parts, self.loss = parts, self.recorder.loss

    def watch(self, *_: Any) -> Any:
        return lambda: None


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
        findings: list[LayoutFinding] = []
        counts: dict[str, int] = {}
        cannot_run: dict[str, str] = {}
        print(f"{title}, {', '.join(given) or 'as it is'}, seed {seed}")
        print(f"{'layout':20}  tensors  findings  seconds", flush=True)
        for layout, compared, wrong, refused, seconds in examine(kind, work, layouts):
            shown = "-" if refused else str(len(wrong))
            why = f"  cannot run: {refused}" if refused else ""
            print(f"{layout.name:20}  {compared:7}  {shown:>8}  {seconds:7.1f}{why}", flush=True)
            for finding in wrong:
                print(f"  {finding}", flush=True)
            findings += wrong
            counts[layout.name] = compared
            if refused:
                cannot_run[layout.name] = refused
    return LayoutsReport(
        subject=title, fields=fields, seed=seed, compared=counts, findings=findings, cannot_run=cannot_run
    )


def probe(kind: type[Engine], work: Work, layout: ParityLayout, weights: Weights | None) -> RankResult:
    """Run one rank through all probes; without weights, only build it."""
    engine = kind(work, layout)
    seen = RankResult(engine.parts("", engine.parameters()))
    if weights is None:
        return seen
    engine.load(weights)
    losses: Any = _Losses(engine)
    losses.recorder.show("mean loss", engine.backward(0, losses))
    parts = losses.parts + engine.parts("gradient of ", engine.gradients())
    norm, _ = engine.update(0)
    losses.recorder.show("gradient norm", norm)
    for kind_of in ("exp_avg", "exp_avg_sq"):
        named = [(name, value) for name, what, value in engine.state() if what == kind_of]
        parts += engine.parts(f"{kind_of} of ", named)
    seen.parts = parts + engine.parts("updated ", engine.parameters())
    seen.planted = {tensor: engine.planted(tensor) ** 2 for tensor in weights}
    return seen


class Serial:
    """The serial run, its weights, and how far rounding takes it."""

    def __init__(self, kind: type[Engine], work: Work) -> None:
        self.kind, self.work = kind, work
        self.weights = nudged(assemble(self._run(None).initial), work.config.train.seed)
        self.seen = self._run(self.weights)
        self.whole = assemble(self.seen.parts)
        again = assemble(self._run(self.weights).parts)
        self.unsteady = [key[1] for key, value in self.whole.items() if value.tobytes() != again[key].tobytes()]
        moves = [{name: moved(weight, name, draw) for name, weight in self.weights.items()} for draw in range(1, DRAWS)]
        self.draws = [again] + [assemble(self._run(weights).parts) for weights in moves]

    def _run(self, weights: Weights | None) -> RankResult:
        try:
            seen: RankResult = run_forked(probe, 1, self.kind, self.work, SERIAL, weights, timeout_seconds=SECONDS)[0]
        except RanksFailed as failure:
            raise BadInput(f"the serial run cannot run here: {reason(failure)}") from failure
        return seen


def nudged(whole: Mapping[Any, Any], seed: int) -> Weights:
    """Weights to begin with: those whose elements are all equal, as of norms and biases, are moved apart."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for (_, name), value in whole.items():
        weight = torch.from_numpy(value)
        if weight.numel() and bool((weight == weight.flatten()[0]).all()):
            weight = weight + NUDGE * torch.randn(weight.shape, generator=generator)
        weights[name] = weight
    return weights


def reason(failure: RanksFailed) -> str:
    """Sentence about the failed ranks, in the words of the program."""
    return failure.sentence.partition("failed: ")[2].removeprefix("BadInput: ") or failure.sentence


def examine(
    kind: type[Engine], work: Work, layouts: Sequence[ParityLayout]
) -> Iterator[tuple[ParityLayout, int, list[LayoutFinding], str, float]]:
    """Hold each layout against the serial run: tensors compared, findings, why it cannot run, seconds.

    Raises BadInput if the serial run does not run, or gives other bits when it is repeated.
    """
    start = time.monotonic()
    serial = Serial(kind, work)
    if serial.unsteady:
        raise BadInput(f"the serial run is not deterministic: {serial.unsteady[0]} has other bits when it is repeated")
    yield SERIAL, len(serial.whole), _planted(SERIAL.name, [serial.seen], serial), "", time.monotonic() - start
    for layout in layouts:
        start = time.monotonic()
        try:
            ranks = run_forked(
                probe, layout.world_size, kind, work, layout, serial.weights, timeout_seconds=SECONDS
            )  # fmt: skip
        except RanksFailed as failure:
            yield layout, 0, [], reason(failure), time.monotonic() - start
            continue
        compared, findings = _compared(layout.name, ranks, serial)
        yield layout, compared, findings, "", time.monotonic() - start


def _compared(layout: str, ranks: Sequence[RankResult], serial: Serial) -> tuple[int, list[LayoutFinding]]:
    findings = [
        *_unequal(layout, "initial copies", [rank.initial for rank in ranks]),
        *_unequal(layout, "copies", [rank.parts for rank in ranks]),
    ]
    by_rank = {f"rank {number}": rank.parts for number, rank in enumerate(ranks)}
    _, rows = compare_all(serial.whole, serial.draws, by_rank, "fp32")
    beyond: dict[tuple[str, str], LayoutFinding] = {}
    for row in rows:
        if not row.is_within:
            key = _probe_of(row.tensor), row.tensor.rpartition(" of ")[2].removeprefix("updated ")
            beyond.setdefault(key, _finding(layout, *key, row.largest, row.tolerance, row.where))
    missing = {tensor for _, tensor in serial.whole.keys() - {(row.iteration, row.tensor) for row in rows}}
    for tensor in sorted(missing):
        if tensor.startswith("updated "):  # gradients and moments are not whole under a distributed optimizer
            findings.append(_finding(layout, "step", tensor[8:], np.inf, 0.0, "as no rank has it"))
    findings += beyond.values()
    return len(rows), findings + _planted(layout, ranks, serial)


def _finding(layout: str, probe: str, name: str, value: float, expected: float, where: str = "") -> LayoutFinding:
    return LayoutFinding(layout=layout, probe=probe, parameter=name, value=value, expected=expected, where=where)


def _probe_of(tensor: str) -> str:
    return "loss" if tensor.endswith("loss") else "gradient" if tensor.startswith("gradient") else "step"


def _unequal(layout: str, probe: str, ranks: Sequence[Sequence[TensorPart]]) -> list[LayoutFinding]:
    """Copies of a part on several ranks whose bits differ; one for each tensor."""
    first: dict[Any, tuple[int, TensorPart]] = {}
    unequal: dict[str, LayoutFinding] = {}
    for number, parts in enumerate(ranks):
        for part in parts:
            holder, other = first.setdefault((part.tensor, part.start), (number, part))
            if part.value.shape != other.value.shape or part.value.tobytes() != other.value.tobytes():
                same = part.value.shape == other.value.shape
                apart = float(np.abs(part.value - other.value).max()) if same else np.inf
                unequal.setdefault(part.tensor, _finding(
                    layout, probe, part.tensor, apart, 0.0, f"between rank {holder} and rank {number}"
                ))  # fmt: skip
    return list(unequal.values())


def _planted(layout: str, ranks: Sequence[RankResult], serial: Serial) -> list[LayoutFinding]:
    """Parameters whose elements the optimizer's norm does not count.

    A sum of ones is exact in fp32. The root and the square of each rank and of the whole round four times.
    """
    findings = []
    for tensor, weight in serial.weights.items():
        for rank in ranks:
            if abs(rank.planted[tensor] - weight.numel()) > 8 * UNIT_FP32 * weight.numel():
                findings.append(_finding(layout, "planted gradient", tensor, rank.planted[tensor], weight.numel()))
                break
    return findings
