"""Train segments of a run again, each at its own layout, and compare the results bit for bit."""

import random
import tempfile
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import torch

from mlm_repro.engine.checkpoint.checkpoint import read_probe
from mlm_repro.engine.config import ParallelConfig, RunConfig
from mlm_repro.engine.inference import OPTIMIZER_STATE, read_whole
from mlm_repro.engine.kernels.identity import numerics_identity
from mlm_repro.engine.launch.local import launch
from mlm_repro.engine.launch.mesh import leave_ranks, local_device
from mlm_repro.engine.parallel.layout import Layout
from mlm_repro.engine.run.files import read_metrics
from mlm_repro.engine.run.resolved import resolve, resolve_begun
from mlm_repro.engine.train import train
from mlm_repro.lineage.chain import (
    CONFIG,
    INDEX,
    STATE,
    checkpoint_path,
    complete_checkpoints,
    iteration_of,
)
from mlm_repro.lineage.config import parse_config
from mlm_repro.lineage.digest import check_seal, is_sealed, sealed_files
from mlm_repro.lineage.errors import (
    BadInput,
    Diverged,
    HardwareMissing,
    IntegrityFailure,
    Interrupted,
)
from mlm_repro.lineage.files import read_object
from mlm_repro.lineage.progress import announce
from mlm_repro.lineage.run import RunDirectory

NOT_COMPUTED = ("seconds", "tokens_per_second", "model_tflops", "warning")
"""Keys of a metrics line that describe the machine: times, speeds and warnings."""
NO_TIME = {"seconds": 0.0}
DEFAULT_SEGMENTS = 3


class Segment(NamedTuple):
    """A part of a training that can be trained again: the iterations after the kept checkpoint at
    iteration `start`, or from the beginning if `start` is 0, up to the next kept checkpoint, at
    iteration `end`; with their configuration, layout and threads."""

    start: int
    end: int
    config: RunConfig
    layout: Layout
    threads: int


def replay(run: Path, count: int | None) -> None:
    """Draw `count` segments of a sealed run at random, by default 3, or all if it has fewer, train
    each again and print the differences. A segment is from one kept checkpoint, or the beginning,
    to the next.

    Raises BadInput for a run that cannot be replayed, or that has fewer than `count` segments,
    DataMissing without its dataset, IntegrityFailure for a broken seal or another dataset, and
    HardwareMissing for a checkpoint of another numerics identity or without one. Raises Interrupted
    if it is stopped, and SystemExit with a rank's code if ranks fail. Raises Diverged where a
    metric, a weight or the optimizer's state differs, or where a segment cannot begin because its
    checkpoint is damaged.
    """
    directory = RunDirectory.open(run, "training")
    config = resolve_begun(directory).config
    check_seal(directory.path)
    ends = [iteration_of(path) for path in complete_checkpoints(directory.path)]
    every = list(zip([0, *ends], ends, strict=False))
    wanted = min(DEFAULT_SEGMENTS, len(every)) if count is None else count
    if not 0 < wanted <= len(every):
        raise BadInput(
            f"{run} has {len(every)} segments, from one kept checkpoint to the next: give"
            " --segments from 1 to this number, or name a run with more"
        )
    # Not by a seed, which somebody who forges a run could know.
    drawn = sorted(random.SystemRandom().sample(every, wanted))
    segments = [_read_segment(directory.path, config, start, end) for start, end in drawn]
    announce(
        f"trains {sum(end - start for start, end in drawn)} iterations of {wanted} segments again,"
        f" on up to {max(segment.layout.world_size for segment in segments)} processes"
    )
    print(
        f"draws {wanted} of {len(every)} segments; misses a single forged one with probability "
        f"{1 - wanted / len(every):.3g}"
    )
    differences = []
    for segment in segments:
        differs = _replay_segment(directory.path, segment)
        where = f"iterations {segment.start + 1} to {segment.end}"
        print(f"{where}: {'; '.join(differs) or 'the same bits'}", flush=True)
        differences += [f"{where}: {difference}" for difference in differs]
    if differences:
        raise Diverged(
            f"{directory.path.name}, {differences[0]}"
            + f" ({len(differences) - 1} more differences)" * (len(differences) > 1)
        )
    print(f"ok {wanted} of {len(every)} segments have the same bits")


def _read_segment(run: Path, config: RunConfig, start: int, end: int) -> Segment:
    """Return the segment of the run directory `run` between two numbers of finished iterations: its
    first iteration is `start` + 1, or the run's first if `start` is 0, and its last is `end`. The
    sizes tp, pp and dp and the threads are the ones that the run's checkpoint at iteration `end`
    records. The rest of `[parallel]` is taken from this checkpoint or, if an earlier version wrote
    it, from `config`; settings outside `[parallel]` always come from `config`. Raises
    HardwareMissing if the checkpoint records another numerics identity or none, IntegrityFailure
    without a layout or threads."""
    path = checkpoint_path(run, end)
    probe = read_probe(path)
    recorded = probe.computed_on if probe else {}
    for name, value in numerics_identity(local_device().type == "cuda").items():
        if recorded.get(name) != value:
            raise HardwareMissing(
                f"{path.name} records the {name} {recorded.get(name)!r}, and here it is {value!r}:"
                " the same bits are promised for one numerics identity, so replay the run where it"
                " is the same"
            )
    try:
        layout = Layout(**{axis: int(recorded[axis]) for axis in ("tp", "pp", "dp")})
        threads = int(recorded["threads"])
    except (KeyError, TypeError, ValueError) as error:
        raise IntegrityFailure(
            f"{path} does not record its layout and threads ({error}), so the iterations up to it"
            " cannot be replayed: if it is damaged, copy the run again, else replay another run"
        ) from error
    stored = read_object(path / CONFIG).get("parallel") or config.parallel.model_dump()
    parallel = parse_config({**stored, "tp": layout.tp, "pp": layout.pp}, ParallelConfig, str(path))
    return Segment(start, end, config.model_copy(update={"parallel": parallel}), layout, threads)


def _replay_segment(run: Path, segment: Segment) -> list[str]:
    """Train a segment again in a temporary folder. Return a list of a sentence on the first
    difference of the metrics and one on the first difference of the checkpoint at the segment's
    end; empty for the same bits. If the checkpoint at the segment's start is damaged, a sentence on
    that is the only one. Raises IntegrityFailure if the checkpoint at the end is damaged,
    Interrupted if the training stopped before the end, and SystemExit if ranks failed otherwise."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            again = _train_again(run, segment, Path(folder))
        except IntegrityFailure as error:
            return [
                f"training cannot go on from the checkpoint at iteration {segment.start}: {error}"
            ]
        return [
            *_compare_metrics(run, again, segment),
            *_compare_checkpoints(run, again, segment.end),
        ]


def _train_again(run: Path, segment: Segment, root: Path) -> Path:
    """Train a segment again, from the run's checkpoint at its start, or from the beginning if it
    starts at 0, to its end; return the new run directory below `root`. One rank trains in this
    process, which keeps the segment's number of threads, and raises what a training raises; several
    are started as processes. Raises IntegrityFailure if the checkpoint or another file that it
    needs is damaged, Interrupted if the training stopped before the end, and SystemExit with a
    rank's code if one of several ranks failed otherwise."""
    config = segment.config
    start = segment.start
    end = segment.end
    schedule = {"checkpoint_interval": config.train.iterations, "keep_checkpoints": 2}
    record = config.record.model_copy(update={"loggers": (), "evaluate": ()})
    config = config.model_copy(
        update={"train": config.train.model_copy(update=schedule), "record": record}
    )
    resolved = resolve(config, segment.layout.world_size)
    again = resolved.begin(root)
    if start:
        checkpoint_path(again.path, start).parent.mkdir()
        checkpoint_path(again.path, start).symlink_to(checkpoint_path(run, start))

    def train_segment() -> None:
        try:
            train(resolved, root, until=end)
        except Interrupted:
            # Raised after iteration `until`, as was asked; whether the checkpoint is there is
            # looked at below.
            pass
        finally:
            leave_ranks()

    if segment.layout.world_size == 1:
        torch.set_num_threads(segment.threads)
        train_segment()
    elif code := launch(train_segment, segment.layout.world_size):
        if code == IntegrityFailure.exit_code:
            raise IntegrityFailure(
                "a file that the replay needs is damaged: put back an undamaged copy of the one"
                " that a rank's message above names"
            )
        raise SystemExit(code)
    if not is_sealed(checkpoint_path(again.path, end)):
        raise Interrupted(
            "the replay was stopped before it had trained the drawn parts of the run again: nothing"
            " of it is kept, and the same command draws parts anew"
        )
    return again.path


def _compare_metrics(run: Path, again: Path, segment: Segment) -> Iterator[str]:
    """Yield a sentence for the first line of the segment's metrics in which the run and its replay
    differ, with the key; nothing if all lines are equal. Times, speeds and warnings are not
    compared."""
    within = range(segment.start + bool(segment.start), segment.end + 1)
    stated, computed = (
        [line for line in read_metrics(path) if line["iteration"] in within]
        for path in (run, again)
    )
    for line, true in zip_longest(stated, computed, fillvalue=dict[str, Any]()):
        for name in {**true, **line}:
            if name not in NOT_COMPUTED and line.get(name) != true.get(name):
                at = "{kind} at iteration {iteration}".format(**(true or line))
                yield (
                    f"the metrics first differ in {name} of {at}, {line.get(name)!r} for"
                    f" {true.get(name)!r}"
                )
                return


def _compare_checkpoints(run: Path, again: Path, end: int) -> Iterator[str]:
    """Yield one sentence if the checkpoints of two runs at iteration `end` differ, on the first
    tensor, or file of a Transformer-XL's memory, that does, or else on the training's state, whose
    seconds are not compared; nothing if they are equal. Raises IntegrityFailure if the seal of the
    checkpoint in `run` is broken, or a file of the checkpoint in `again` cannot be read."""
    theirs = checkpoint_path(run, end)
    ours = checkpoint_path(again, end)
    check_seal(theirs)
    if differing := other_tensors(theirs, ours):
        many = f"{len(differing)} of {len(read_object(ours / INDEX))} tensors do"
        yield f"the checkpoint at iteration {end} first differs in {differing[0]} ({many})"
    elif read_object(theirs / STATE) | NO_TIME != read_object(ours / STATE) | NO_TIME:
        yield f"{STATE} of the checkpoint at iteration {end} differs"


def other_tensors(theirs: Path, ours: Path) -> list[str]:
    """Return a list of phrases on the differences of two checkpoint directories; it is empty for
    the same bits. The phrase for a tensor is its name and how it differs, for a file `memory-…` its
    name alone. Weights come first, in the order of the index, then the optimizer's state, then
    files. Raises IntegrityFailure if an index, a tensor or a seal cannot be read."""
    stated = read_object(theirs / INDEX)
    computed = read_object(ours / INDEX)
    differing = []
    for name in sorted({**computed, **stated}, key=lambda name: name.startswith(OPTIMIZER_STATE)):
        if name not in computed or name not in stated:
            differing.append(f"{name}, which only one of the two has")
            continue
        tensor = read_whole(theirs, stated, name).reshape(-1)
        true = read_whole(ours, computed, name).reshape(-1)
        if (tensor.dtype, tensor.shape) != (true.dtype, true.shape):
            differing.append(
                f"{name}, {tensor.dtype} {list(tensor.shape)} for {true.dtype} {list(true.shape)}"
            )
        elif count := int((_bytes(tensor) != _bytes(true)).any(-1).sum()):
            differing.append(f"{name}, in {count:,} of {tensor.numel():,} numbers")
    files = sealed_files(theirs)
    true_files = sealed_files(ours)
    memory = sorted(name for name in {*files, *true_files} if name.startswith("memory-"))
    return differing + [name for name in memory if files.get(name) != true_files.get(name)]


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8).view(len(tensor), tensor.element_size())
