"""The one runner: trains an engine on the ranks of a layout and holds every tensor against a reference."""

import os
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from engine.compare.tensors import (
    Array,
    Key,
    TensorDifference,
    TensorPart,
    assemble,
    compare,
    computation_order,
    merge,
    tolerances,
)
from engine.launch.forked import run_forked
from engine.launch.threads import RanksFailed
from lineage.errors import BadInput, UserError
from verify.engines import Engine, StepResult, Work
from verify.parity import LayoutDiffers, ParityLayout

LONGEST_SECONDS = 24 * 3600
RunRanks = Callable[..., list[Any]]
"""`run_forked` or `run_threads`."""


class Reference(NamedTuple):
    """Whole tensors of a training, and the largest difference that each may have."""

    whole: dict[Key, Array]
    allowed: dict[Key, float]


@dataclass
class Computed:
    """Results of one rank."""

    steps: list[StepResult] = field(default_factory=list)
    parts: list[TensorPart] = field(default_factory=list)
    """The tensors themselves, where there is no reference or they are asked for."""
    differences: list[TensorDifference] = field(default_factory=list)
    """Distances of the tensors from the reference."""
    extra: list[str] = field(default_factory=list)
    """Tensors that the reference does not have."""
    unnamed: list[str] = field(default_factory=list)
    """Parameters left out because the name map does not name them."""
    initial: list[TensorPart] = field(default_factory=list)
    """Parameters as they were built."""
    planted: dict[str, float] = field(default_factory=dict)
    """Squared norm that the optimizer finds of a gradient that is 1 in one parameter, by parameter."""
    masks: list[tuple[str, bytes, bytes]] = field(default_factory=list)
    """Module, digest of the input and digest of the mask of every dropout of an iteration."""

    def take(self, engine: Engine, reference: Reference | None, keeps: bool = False) -> Callable[[TensorPart], None]:
        """A function for a recorder of the engine."""
        where = engine.where or f"rank {os.environ.get('RANK', 0)}"

        def take(part: TensorPart) -> None:
            if keeps or not reference:
                self.parts.append(part)
            if reference and (whole := reference.whole.get(part[:2])) is not None:
                self.differences.append(compare(part, whole, where, reference.allowed[part[:2]]))
            elif reference:
                self.extra.append(part.tensor)

        return take


def train(
    kind: type[Engine], work: Work, layout: ParityLayout, reference: Reference | None = None, draw: int = 0,
    at_the_end: bool = False,
) -> Computed:  # fmt: skip
    """Train on one rank; record every tensor, or the weights at the end alone. Forked ranks inherit the reference."""
    engine, computed = kind(work, layout), Computed()
    recorder = engine.recorder(computed.take(engine, reference))
    computed.steps = engine.run(None if at_the_end else recorder, draw)
    if at_the_end:
        engine.show(recorder, "updated ", engine.parameters())
    computed.unnamed = [name for name, _ in engine.parameters() if recorder.ours(name) is None]
    return computed


def on_ranks(program: Any, kind: type[Engine], work: Work, layout: ParityLayout, *args: Any) -> list[Any]:
    """Run the program of a rank on forked ranks; return their results.

    Raises LayoutDiffers if a rank fails, BadInput if the engine refuses the configuration.
    """
    try:
        return run_forked(program, layout.world_size, kind, work, layout, *args, timeout_seconds=LONGEST_SECONDS)
    except RanksFailed as failure:
        raise failed(kind, failure.sentence) from failure


def failed(kind: type[Engine], sentence: str) -> UserError:
    """The error for failed ranks: BadInput if the engine refused, else LayoutDiffers."""
    refused = sentence.partition("failed: BadInput: ")[2]
    return BadInput(refused) if refused else LayoutDiffers(f"{kind.__name__}: {sentence}")


def whole(ranks: Iterable[Computed]) -> dict[Key, Array]:
    """Whole tensors that ranks computed. Raises IntegrityFailure if parts overlap or leave holes."""
    return assemble(part for rank in ranks for part in rank.parts)


def measured(trainings: Sequence[list[Computed]], precision: str) -> Reference:
    """The first of the trainings; the others, with perturbed weights, give the tolerances."""
    first, *draws = map(whole, trainings)
    return Reference(first, tolerances(first, draws, precision))


@dataclass(frozen=True)
class Outcome:
    """Result of holding one layout against a reference."""

    layout: ParityLayout
    ranks: list[Computed]
    rows: list[TensorDifference]
    """Differences of all tensors, in order of computation; infinite where no rank has a part."""
    failure: str
    """Sentence about failed ranks; empty if none failed."""
    seconds: float

    @property
    def absent(self) -> list[str]:
        """Tensors of the reference that no rank has."""
        seen = {(each.iteration, each.tensor) for rank in self.ranks for each in rank.differences}
        return list(dict.fromkeys(row.tensor for row in self.rows if (row.iteration, row.tensor) not in seen))

    @property
    def beyond(self) -> list[TensorDifference]:
        """Tensors beyond their tolerance, in order of computation."""
        return [row for row in self.rows if not row.is_within]


def hold(
    program: Any, kind: type[Engine], work: Work, layouts: Iterable[ParityLayout], reference: Reference, *args: Any,
    run: RunRanks = run_forked, seconds: float = LONGEST_SECONDS,
) -> Iterator[Outcome]:  # fmt: skip
    """Run the program of a rank on each layout and hold what it computes against the reference."""
    place = {tensor: number for number, tensor in enumerate(computation_order(name for _, name in reference.whole))}
    for layout in layouts:
        start, ranks, failure = time.monotonic(), list[Computed](), ""
        try:
            ranks = run(program, layout.world_size, kind, work, layout, reference, *args, timeout_seconds=seconds)
        except RanksFailed as raised:
            failure = raised.sentence
        except Exception as error:  # of a thread
            traceback.print_exc()
            failure = f"{' '.join(getattr(error, '__notes__', ()))}: {type(error).__name__}: {error}".splitlines()[0]
        rows = merge((each for rank in ranks for each in rank.differences), reference.whole) if ranks else []
        rows.sort(key=lambda row: (row.iteration, place[row.tensor]))
        yield Outcome(layout, ranks, rows, failure, time.monotonic() - start)


def table_head(layouts: Sequence[ParityLayout]) -> str:
    """Heads of the table of layouts."""
    return f"{'layout':{_width(layouts)}}  worst    result   seconds  tensor"


def table_row(outcome: Outcome, layouts: Sequence[ParityLayout], result: str) -> str:
    """A layout with its largest difference and the tensor that has it."""
    worst = max(outcome.rows, default=None)
    tensor = worst.tensor if worst and worst.largest else "-"
    largest = f"{worst.largest:.1e}" if worst else "-"
    return f"{outcome.layout.name:{_width(layouts)}}  {largest:7}  {result:7}  {outcome.seconds:7.1f}  {tensor}"


def _width(layouts: Sequence[ParityLayout]) -> int:
    return max(12, *(len(layout.name) for layout in layouts))
