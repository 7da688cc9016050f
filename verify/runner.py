"""Train an engine on the ranks of a layout and compare every tensor with a reference."""

import os
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

import torch

from mlm_repro.engine.compare.tensors import (
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
from mlm_repro.engine.config import RunConfig
from mlm_repro.engine.costs import parameter_count
from mlm_repro.engine.launch.forked import run_forked
from mlm_repro.engine.launch.threads import RanksFailed, run_threads
from mlm_repro.lineage.environment import memory_bytes
from mlm_repro.lineage.errors import BadInput, Diverged
from mlm_repro.lineage.progress import announce
from mlm_repro.verify.engines import (
    Engine,
    Kind,
    Ours,
    StepResult,
    Work,
    with_samples,
    with_vocabulary,
)
from mlm_repro.verify.parity import SERIAL, TOLERANCE, ParityLayout, choose_layouts

PATIENCE = 20
"""Time limit of a layout in multiples of the serial run's time, in addition to two minutes."""
TABLE_HEAD = f"{'layout':30}  worst    result   seconds  tensor"


class Reference(NamedTuple):
    """Whole tensors of a training, `whole`, and the largest difference that each may have,
    `allowed`: two dicts whose keys are pairs of an iteration's number, from 0, and a tensor's name.
    `allowed` has every key of `whole`, and may have more."""

    whole: dict[Key, Array]
    allowed: dict[Key, float]


UNKNOWN = Reference({}, {})
"""Empty reference, for a training that gives the reference itself."""


@dataclass
class Computed:
    """Results of one rank in a check against a reference, all empty at first: `steps`, a StepResult
    for each iteration; `differences` of the rank's recorded tensors from the reference; and
    `parts`, the tensors themselves, if the reference is empty or the caller asks for them. The
    function that `take` returns adds to the last two. The function `probe` alone fills the other
    fields, such as the first output of each module."""

    steps: list[StepResult] = field(default_factory=list)
    parts: list[TensorPart] = field(default_factory=list)
    """Tensors of the rank, kept if the reference is empty or the caller asks for them."""
    differences: list[TensorDifference] = field(default_factory=list)
    initial: list[TensorPart] = field(default_factory=list)
    """Parameters of the rank before any weights are loaded."""
    planted: dict[str, float] = field(default_factory=dict)
    """Squared norm that the optimizer finds for a gradient that is 1 in one parameter, by
    parameter."""
    shares: Mapping[str, list[Array]] = field(default_factory=dict)
    """Gradient of each parameter as accumulated after each microbatch of the first iteration; only
    for a serial program."""
    outputs: dict[str, Array] = field(default_factory=dict)
    """First output of each module, in order of computation."""
    masks: list[tuple[str, bytes, bytes]] = field(default_factory=list)
    """A tuple for every dropout of an iteration: the module's name, the digests of its input and
    its mask."""

    def take(
        self, engine: Engine, reference: Reference, keeps: bool = False
    ) -> Callable[[TensorPart], None]:
        """Return a function that is given each recorded tensor. It adds to `differences` how far
        the tensor is from the reference, if the reference has that tensor, and to `parts` the
        tensor itself if `keeps` or if the reference is empty."""
        where = engine.where or f"rank {os.environ.get('RANK', 0)}"

        def take(part: TensorPart) -> None:
            if keeps or not reference.whole:
                self.parts.append(part)
            if (whole := reference.whole.get(part[:2])) is not None:
                self.differences.append(compare(part, whole, where, reference.allowed[part[:2]]))

        return take


def train(
    kind: Kind,
    work: Work,
    layout: ParityLayout,
    reference: Reference = UNKNOWN,
    draw: int = 0,
    at_the_end: bool = False,
) -> Computed:
    """Train, as one rank of a layout, the engine that `kind` builds for `work`, from the weights of
    `work` or else the engine's own, and compare this rank's part of every tensor with the
    reference, or with `at_the_end` the final weights alone. Return a Computed of this rank: the
    numbers of each iteration and the differences, or the tensors themselves if the reference is
    empty. If `draw` is not 0, weights are moved by up to a rounding before each iteration. Every
    rank of the layout calls it. Raises BadInput, as `kind` does, for an unsupported layout."""
    engine = kind(work, layout)
    computed = Computed()
    if work.initial:
        engine.load(work.initial)
    recorder = engine.recorder(computed.take(engine, reference))
    computed.steps = engine.run(None if at_the_end else recorder, draw)
    if at_the_end:
        engine.show(recorder, "updated ", engine.parameters())
    return computed


@dataclass(frozen=True)
class Outcome:
    """Results of one layout: `ranks`, a Computed of each rank; `rows`, the differences of their
    tensors from the reference; and `failure`, a sentence on ranks that failed, or an empty text. If
    a rank failed, `ranks` and `rows` are empty."""

    layout: ParityLayout
    ranks: list[Computed]
    rows: list[TensorDifference]
    """Differences of all tensors, in order of computation; infinite where no rank has a part."""
    failure: str
    """Sentence about failed ranks; empty if none failed."""
    seconds: float
    lost: bool = False
    """True if a rank ended or fell silent without an error of its program."""

    @property
    def beyond(self) -> list[TensorDifference]:
        """List of the differences that are not within their tensor's tolerance, in order of
        computation."""
        return [row for row in self.rows if not row.is_within]

    @property
    def whole(self) -> dict[Key, Array]:
        """Dict (number of the iteration, from 0, and name of the tensor) → undivided tensor, a
        numpy array assembled from the parts that the ranks kept; empty if they kept none. Raises
        IntegrityFailure if parts overlap or leave holes between them; parts that are missing at a
        tensor's end are not noticed."""
        return assemble(chain.from_iterable(rank.parts for rank in self.ranks))


def measured(first: Outcome, draws: Iterable[Outcome], precision: str) -> Reference:
    """Return a Reference from the Outcomes of trainings that kept their tensors. Its tensors are
    the undivided tensors of `first`. How much each may differ is computed from its distances in
    `draws`, the same training with perturbed weights, and from `precision`, the number format of
    the weights, such as bf16. Raises IntegrityFailure if parts make no whole tensor."""
    whole = first.whole
    return Reference(whole, tolerances(whole, [draw.whole for draw in draws], precision))


def compare_layout(
    program: Any,
    kind: Kind,
    work: Work,
    layout: ParityLayout,
    reference: Reference,
    *args: Any,
    run: Callable[..., list[Any]] = run_forked,
    seconds: float = 24 * 3600.0,
) -> Outcome:
    """Run `program(kind, work, layout, reference, *args)`, which returns a Computed, on every rank
    by `run`, which is `run_forked` or `run_threads`, for at most `seconds`, by default a day.
    Return an Outcome with the ranks' differences from the reference. The failure of a rank is
    recorded in the Outcome and raises nothing; a thread's traceback is also printed to stderr."""
    order = {
        tensor: number
        for number, tensor in enumerate(computation_order(name for _, name in reference.whole))
    }
    start = time.monotonic()
    ranks = []
    failure = ""
    lost = False
    try:
        ranks = run(
            program,
            layout.world_size,
            kind,
            work,
            layout,
            reference,
            *args,
            timeout_seconds=seconds,
        )
    except RanksFailed as raised:
        failure = raised.sentence
        lost = raised.lost
    # A rank that is a thread raises its own error here.
    except Exception as error:
        traceback.print_exc()
        notes = " ".join(getattr(error, "__notes__", ()))
        failure = f"{notes}: {type(error).__name__}: {error}".splitlines()[0]
    differences = chain.from_iterable(rank.differences for rank in ranks)
    rows = merge(differences, reference.whole) if ranks else []
    rows.sort(key=lambda row: (row.iteration, order[row.tensor]))
    return Outcome(layout, ranks, rows, failure, time.monotonic() - start, lost)


def on_ranks(
    program: Any,
    kind: Kind,
    work: Work,
    layout: ParityLayout,
    reference: Reference = UNKNOWN,
    *args: Any,
) -> Outcome:
    """Run `program(kind, work, layout, reference, *args)`, which returns a Computed, on the forked
    ranks of `layout`, and return an Outcome without a failure: its attribute `ranks` has the
    Computed of each rank, and `rows` the differences of the tensors from `reference`, none with the
    default. Raises BadInput if a rank raised it, because the engine, the class `kind`, refuses the
    configuration, and Diverged if a rank failed otherwise."""
    outcome = compare_layout(program, kind, work, layout, reference, *args)
    if refused := outcome.failure.partition("failed: BadInput: ")[2]:
        raise BadInput(refused)
    if outcome.failure:
        raise Diverged(
            f"{getattr(kind, '__name__', kind)}, the engine's class, did not end its training:"
            f" {outcome.failure}"
        )
    return outcome


def table_row(outcome: Outcome, result: str) -> str:
    """Return a layout's row below `TABLE_HEAD`, as text: its name, its largest difference, the word
    `result`, such as `ok`, its seconds, and the tensor that has that difference. A `-` stands for
    the tensor if nothing differs, and for the tensor and the difference if nothing was compared."""
    worst = max(outcome.rows, default=None)
    tensor = worst.tensor if worst and worst.largest else "-"
    largest = f"{worst.largest:.1e}" if worst else "-"
    return f"{outcome.layout.name:30}  {largest:7}  {result:7}  {outcome.seconds:7.1f}  {tensor}"


def run_parity(
    config: RunConfig, names: str, ranks: int, iterations: int, threads: bool = False
) -> None:
    """Train the configuration for `iterations` in float64, serially and on each layout that `names`
    stands for: names with commas between, or `all` for every layout of at most `ranks` ranks that
    fits. Compare every tensor with the serial run's and print the results of each layout. With
    `threads` ranks are threads and a microbatch is one sequence. Sets torch to one thread.

    Raises Diverged with the first layout that fails or is beyond the tolerance, after all layouts
    were run, or at once if the serial run fails. Raises BadInput if a layout that was named is
    unknown, is the serial run, does not fit or needs more than `ranks`, if for `all` no layout
    fits, if the tensors fill more than half of the memory, and if the engine refuses the
    configuration. Raises DataMissing or IntegrityFailure for a dataset that is missing or
    incomplete.
    """
    config = with_vocabulary(config)
    # Microbatches of one sequence, because more data-parallel ranks fit a batch then.
    changed = {"precision": "fp64"} | ({"microbatch_size": 1} if threads else {})
    config = config.model_copy(update={"train": config.train.model_copy(update=changed)})
    chosen, others = choose_layouts(names, ranks, config)
    for reason, layouts in others.items():
        print(f"does not fit: {reason}: {', '.join(layout.name for layout in layouts)}")
    if not chosen:
        raise BadInput(
            f"no layout of at most {ranks} ranks fits the configuration, for the reasons above:"
            " change it, or raise --ranks"
        )
    model = config.model
    half = (memory_bytes() or 0) / 2
    outputs = (
        (12 * model.num_layers + 2)
        * config.train.global_batch_size
        * model.seq_length
        * model.hidden_size
    )
    needed = 8 * iterations * (2 * outputs + 4 * parameter_count(model))
    if 0 < half < needed:
        raise BadInput(
            f"the tensors of {iterations} iterations take {needed / 2**30:,.0f} GiB and half of the"
            f" memory here is {half / 2**30:,.0f}: --twin, a smaller train.global_batch_size or"
            " fewer --iterations make it less"
        )
    most = max(layout.world_size for layout in chosen)
    announce(
        f"{1 + len(chosen)} trainings of {iterations} iterations in float64, on up to {most}"
        f" {'threads' if threads else 'processes'}"
    )
    # Ranks share the cores.
    torch.set_num_threads(1)
    wrong = []
    with with_samples(config, iterations) as work:
        serial = on_ranks(train, Ours, work, SERIAL)
        print(
            f"{config.name}: {iterations} iterations of {config.train.global_batch_size} sequences"
            f" in float64; the serial run took {serial.seconds:.1f} s, the tolerance is"
            f" {TOLERANCE:.0e}"
        )
        print(TABLE_HEAD, flush=True)
        reference = Reference(serial.whole, dict.fromkeys(serial.whole, TOLERANCE))
        patience = 120 + PATIENCE * serial.seconds
        run = run_threads if threads else run_forked
        for layout in chosen:
            outcome = compare_layout(
                train, Ours, work, layout, reference, run=run, seconds=patience
            )
            finding = outcome.failure or next(
                (row.sentence("the serial run") for row in outcome.beyond), ""
            )
            print(table_row(outcome, "DIFFERS" if finding else "ok"))
            if finding:
                print(f"{'':12}  first: {finding}")
                wrong.append(f"layout {outcome.layout.name}: {finding}")
    if wrong:
        raise Diverged(
            wrong[0]
            + f" ({len(wrong) - 1} more of {len(chosen)} layouts differ or fail, see above)"
            * (len(wrong) > 1)
        )
    print(
        f"{len(chosen)} layouts compute what the serial run computes, within {TOLERANCE:.0e} in"
        " float64"
    )
