"""Trains segments of a run again, from one kept checkpoint to the next, and compares them with it bit for bit."""

import hashlib
import math
import secrets
import tempfile
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch

from engine.checkpoint.checkpoint import INDEX, OPTIMIZER_STATE, read_probe
from engine.checkpoint.shards import read_whole
from engine.config import RecordConfig, RunConfig
from engine.launch.local import launch
from engine.launch.mesh import local_device
from engine.launch.rendezvous import leave_ranks
from engine.run.directory import read_metrics
from engine.run.numerics import numerics_identity
from engine.run.resolved import resolve, resolve_begun
from engine.train import train
from lineage.chain import checkpoint_path, complete_checkpoints, iteration_of
from lineage.digest import check_seal, is_sealed
from lineage.errors import BadInput, HardwareMissing, Interrupted
from lineage.files import read_object
from lineage.progress import announce
from lineage.receipt import Audit, Segment
from lineage.run import RunDirectory
from verify.parity import SERIAL, TOLERANCE, ParityLayout, misfit, parse_layout

NOT_COMPUTED = ("seconds", "tokens_per_second", "model_tflops", "warning")
"""What lines of the metrics say of the machine: times, speeds and what memory it lacked."""
AT_MOST = 3
"""Segments that are drawn unless more are asked for."""
SHARES = (0.1, 0.5)
"""Of the segments, for which the chance that a forgery escapes is said."""


def replay(run: Path, count: int | None, layout_name: str) -> Audit:
    """Draw `count` segments of a sealed run, train each again at the layout, and say of each what differs.

    Raises BadInput for a run or a layout that cannot be replayed, HardwareMissing for a checkpoint that was computed
    where the numerics identity is another.
    """
    directory = RunDirectory.open(run)
    if directory.manifest["kind"] != "training":
        raise BadInput(f"{run} is not a training run")
    config = resolve_begun(directory).config
    if not config.train.invariant:
        raise BadInput(
            f"{run} was trained with train.invariant = 0, so its bits depend on its layout and cannot be compared; "
            f"`mlm-verify parallel` compares layouts of its configuration in float64 within {TOLERANCE:.0e}"
        )
    layout = SERIAL if layout_name == "serial" else parse_layout(layout_name)
    if reason := misfit(layout, config):
        raise BadInput(f"{layout.name} does not fit: {reason}")
    check_seal(directory.path)
    ends = [iteration_of(path) for path in complete_checkpoints(directory.path)]
    whole = list(zip([0, *ends], ends, strict=False))
    wanted = min(AT_MOST, len(whole)) if count is None else count
    if not 0 < wanted <= len(whole):
        raise BadInput(f"{run} has {len(whole)} segments, from one kept checkpoint to the next: not {wanted} or more")
    here = numerics_identity(local_device().type == "cuda")
    seed = secrets.token_hex(16)
    drawn = draw(seed, whole, wanted)
    for _, end in drawn:
        _check_numerics(checkpoint_path(directory.path, end), here)
    iterations = sum(end - start for start, end in drawn)
    announce(f"trains {iterations} iterations of {wanted} segments again, on {layout.world_size} processes")
    print(f"seed {seed} draws {wanted} of {len(whole)} segments")
    for what, chance in chances(len(whole), wanted):
        print(f"a forgery in {what} is missed with probability {chance:.3g}")
    segments = []
    torch.set_num_threads(1)
    for start, end in drawn:
        with tempfile.TemporaryDirectory() as folder:
            again = _train_again(config, layout, directory.path, Path(folder), start, end)
            found = [
                *_metrics_that_differ(directory.path, again, start, end),
                *_tensors_that_differ(directory.path, again, end),
            ]
        segments.append(Segment(start=start, end=end, differs=found))
        print(f"iterations {start + 1} to {end}: {'; '.join(found) or 'the same bits'}", flush=True)
    return Audit(
        verb="replay",
        differs=[
            f"iterations {each.start + 1} to {each.end}: {sentence}" for each in segments for sentence in each.differs
        ],
        seed=seed,
        segments_in_all=len(whole),
        segments=segments,
        layout=layout.name,
        numerics=here,
    )


def draw(seed: str, segments: list[tuple[int, int]], count: int) -> list[tuple[int, int]]:
    """So many segments in their order: those whose digests with the seed are the lowest."""

    def lot(segment: tuple[int, int]) -> str:
        return hashlib.sha256(f"{seed} {segment[1]}".encode()).hexdigest()

    return sorted(sorted(segments, key=lot)[:count])


def chances(segments: int, drawn: int) -> Iterator[tuple[str, float]]:
    """How probably none of some forged segments is among those drawn."""
    for what, forged in (
        ("one segment", 1), *((f"{share:.0%} of the segments", math.ceil(share * segments)) for share in SHARES)
    ):  # fmt: skip
        yield what, math.comb(segments - forged, drawn) / math.comb(segments, drawn)


def _check_numerics(checkpoint: Path, here: dict[str, str]) -> None:
    probe = read_probe(checkpoint)
    there: dict[str, Any] = probe.computed_on if probe else {}
    for name, value in here.items():
        if there.get(name) != value:
            raise HardwareMissing(
                f"{checkpoint.name} was computed with the {name} {there.get(name)!r} and here it is {value!r}: "
                "the same bits are promised for one numerics identity"
            )


def _train_again(config: RunConfig, layout: ParityLayout, run: Path, root: Path, start: int, end: int) -> Path:
    """A run directory below `root` that was trained from the run's checkpoint at `start` to `end`."""
    config = layout.configure(config)
    kept = {"checkpoint_interval": config.train.iterations, "keep_checkpoints": 2}
    config = config.model_copy(update={"train": config.train.model_copy(update=kept), "record": RecordConfig()})
    resolved = resolve(config, layout.world_size)
    again = resolved.begin(root)
    if start:
        checkpoint_path(again.path, start).parent.mkdir()
        checkpoint_path(again.path, start).symlink_to(checkpoint_path(run, start))

    def train_segment() -> None:
        try:
            train(resolved, root, until=end)
        except Interrupted:
            pass  # as was asked, if the checkpoint is there
        finally:
            leave_ranks()

    if layout.world_size > 1:
        if code := launch(train_segment, layout.world_size):
            raise SystemExit(code)
    else:
        train_segment()
    if not is_sealed(checkpoint_path(again.path, end)):
        raise Interrupted("stopped before all segments were trained again")
    return again.path


def _metrics_that_differ(run: Path, again: Path, start: int, end: int) -> Iterator[str]:
    """The first line of the metrics that is another, and in what."""
    within = range(start + 1 if start else 0, end + 1)
    stated, computed = (
        [
            {name: value for name, value in line.items() if name not in NOT_COMPUTED}
            for line in read_metrics(directory)
            if line["iteration"] in within
        ]
        for directory in (run, again)
    )
    nothing: dict[str, Any] = {}
    for line, true in zip_longest(stated, computed, fillvalue=nothing):
        if line != true:
            name = next(name for name in {**true, **line} if line.get(name) != true.get(name))
            at = f"{(true or line)['kind']} at iteration {(true or line)['iteration']}"
            yield f"the metrics first differ in {name} of {at}, {line.get(name)!r} for {true.get(name)!r}"
            return


def _tensors_that_differ(run: Path, again: Path, end: int) -> Iterator[str]:
    """The first tensor of the checkpoint that is another: weights in the order of the model, then what Adam keeps."""
    ours, theirs = checkpoint_path(again, end), checkpoint_path(run, end)
    check_seal(theirs)
    computed, stated = read_object(ours / INDEX), read_object(theirs / INDEX)
    names = sorted({**computed, **stated}, key=lambda name: name.startswith(OPTIMIZER_STATE))
    found = []
    for name in names:
        if name not in computed or name not in stated:
            found.append(f"{name}, which only one of the two has")
            continue
        one, other = read_whole(theirs, stated, name).reshape(-1), read_whole(ours, computed, name).reshape(-1)
        if (one.dtype, one.shape) != (other.dtype, other.shape):
            found.append(f"{name}, {one.dtype} {list(one.shape)} for {other.dtype} {list(other.shape)}")
        elif different := int((_bits(one) != _bits(other)).any(-1).sum()):
            found.append(f"{name}, in {different:,} of {one.numel():,} numbers")
    state = [
        {name: value for name, value in read_object(each / "state.json").items() if name != "seconds"}
        for each in (theirs, ours)
    ]
    if found:
        yield f"the checkpoint at iteration {end} first differs in {found[0]} ({len(found)} of {len(names)} tensors do)"
    elif state[0] != state[1]:
        yield f"state.json of the checkpoint at iteration {end} is another"


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8).view(len(tensor), tensor.element_size())
