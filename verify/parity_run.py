"""Train a configuration serially and on layouts of ranks, processes or threads, and compare every tensor."""

import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from engine.compare.tensors import (
    Array,
    Key,
    TensorDifference,
    TensorPart,
    assemble,
    compare,
    computation_order,
    first_difference,
    merge,
)
from engine.config import RunConfig
from engine.costs import parameter_count
from engine.launch.forked import run_forked
from engine.launch.threads import RanksFailed, run_threads
from lineage.environment import memory_bytes
from lineage.errors import BadInput
from lineage.progress import announce
from verify.engines import Ours, Work
from verify.parity import SERIAL, TOLERANCE, LayoutDiffers, ParityLayout, choose_layouts
from verify.work import with_samples, with_vocabulary

PATIENCE = 20
"""Time limit of a layout in multiples of the serial run's time, in addition to two minutes."""

Reference = dict[Key, Array]
RunRanks = Callable[..., list[Any]]
"""`run_forked` or `run_threads`."""


@dataclass(frozen=True)
class Outcome:
    """Result of comparing one layout."""

    layout: ParityLayout
    worst: TensorDifference | None
    """Largest difference of all tensors; None if ranks failed."""
    finding: str | None
    """Sentence about the first tensor beyond the tolerance or about failed ranks; None if neither."""
    seconds: float


def run_parity(config: RunConfig, names: str, ranks: int, iterations: int, threads: bool = False) -> None:
    """Compare the layouts `names` stands for with the serial run, a line each. Ranks are processes or `threads`.

    Threads take microbatches of one sequence.

    Raises LayoutDiffers for the first that is beyond the tolerance, BadInput for a layout that does not fit.
    """
    config, facts = with_vocabulary(config)
    changed = {"precision": "fp64"} | ({"microbatch_size": 1} if threads else {})  # more data-parallel ranks fit
    config = config.model_copy(update={"train": config.train.model_copy(update=changed)})
    chosen, others = choose_layouts(names, ranks, config, threads)
    for reason, layouts in others.items():
        print(f"does not fit: {reason}: {', '.join(layout.name for layout in layouts)}")
    if not chosen:
        raise BadInput(f"no layout of at most {ranks} ranks fits but the serial run")
    _check_memory(config, iterations)
    most = max(layout.world_size for layout in chosen)
    kind = "threads" if threads else "processes"
    announce(f"{1 + len(chosen)} trainings of {iterations} iterations in float64, on up to {most} {kind}")
    torch.set_num_threads(1)
    with with_samples(config, facts, iterations) as work:
        outcomes = list(_compare_all(work, chosen, run_threads if threads else run_forked))
    wrong = [outcome for outcome in outcomes if outcome.finding]
    if wrong:
        more = f" ({len(wrong) - 1} more of {len(outcomes)} layouts differ)" if len(wrong) > 1 else ""
        raise LayoutDiffers(f"layout {wrong[0].layout.name}: {wrong[0].finding}{more}")
    print(f"{len(outcomes)} layouts compute what the serial run computes, within {TOLERANCE:.0e} in float64")


def _compare_all(work: Work, layouts: Sequence[ParityLayout], run: RunRanks) -> Iterator[Outcome]:
    """Compare layout after layout, and print each outcome."""
    start = time.monotonic()
    try:
        reference = assemble(run_forked(_serial_pieces, 1, work, timeout_seconds=24 * 3600)[0])
    except RanksFailed as failure:
        raise LayoutDiffers(f"the serial run itself failed: {failure.sentence}") from failure
    serial_seconds = time.monotonic() - start
    order = computation_order(tensor for _, tensor in reference)
    width = max(12, *(len(layout.name) for layout in layouts))
    batch = work.config.train.global_batch_size
    print(
        f"{work.config.name}: {work.iterations} iterations of {batch} sequences in float64; "
        f"the serial run took {serial_seconds:.1f} s, the tolerance is {TOLERANCE:.0e}"
    )
    print(f"{'layout':{width}}  worst    result   seconds  tensor", flush=True)
    for layout in layouts:
        outcome = _compare_one(work, layout, reference, order, run, 120 + PATIENCE * serial_seconds)
        worst = f"{outcome.worst.largest:.1e}" if outcome.worst else "-"
        tensor = outcome.worst.tensor if outcome.worst and outcome.worst.largest else "-"
        result = "DIFFERS" if outcome.finding else "ok"
        print(f"{layout.name:{width}}  {worst:7}  {result:7}  {outcome.seconds:7.1f}  {tensor}")
        if outcome.finding:
            print(f"{'':{width}}  first: {outcome.finding}")
        yield outcome


def _compare_one(
    work: Work, layout: ParityLayout, reference: Reference, order: Sequence[str], run: RunRanks, timeout_seconds: float
) -> Outcome:
    start = time.monotonic()
    try:
        by_rank = run(_differences, layout.world_size, work, layout, reference, timeout_seconds=timeout_seconds)
    except RanksFailed as failure:
        return Outcome(layout, None, failure.sentence, time.monotonic() - start)
    except Exception as error:  # of a thread
        traceback.print_exc()
        sentence = f"{' '.join(getattr(error, '__notes__', ()))}: {type(error).__name__}: {error}".splitlines()[0]
        return Outcome(layout, None, sentence, time.monotonic() - start)
    differences = merge([difference for rank in by_rank for difference in rank], reference)
    first = first_difference(differences, order)
    finding = first.sentence("the serial run") if first else None
    return Outcome(layout, max(differences), finding, time.monotonic() - start)


def _serial_pieces(work: Work) -> list[TensorPart]:
    engine, pieces = Ours(work, SERIAL), list[TensorPart]()
    engine.run(engine.recorder(pieces.append))
    return pieces


def _differences(work: Work, layout: ParityLayout, reference: Reference) -> list[TensorDifference]:
    """Train on one rank and compare each part with the serial run. Forked ranks inherit the reference."""
    engine, differences = Ours(work, layout), list[TensorDifference]()
    mesh = engine.mesh
    rank = f"tp {mesh.tp.rank}, pp {mesh.pp.rank}, dp {mesh.dp.rank}"

    def take(piece: TensorPart) -> None:
        differences.append(compare(piece, reference[piece.iteration, piece.tensor], rank, TOLERANCE))

    engine.run(engine.recorder(take))
    return differences


def _check_memory(config: RunConfig, iterations: int) -> None:
    """Raise BadInput if the serial run's tensors would not fit in half of the memory."""
    model, available = config.model, memory_bytes()
    outputs = (12 * model.num_layers + 2) * config.train.global_batch_size * model.seq_length * model.hidden_size
    needed = 8 * iterations * (2 * outputs + 4 * parameter_count(model))
    if available and needed > available / 2:
        raise BadInput(
            f"the tensors of {iterations} iterations take {needed / 2**30:,.0f} GiB and half of the memory here is "
            f"{available / 2**31:,.0f}: --twin, a smaller train.global_batch_size or fewer --iterations make it less"
        )
