"""Checkpoints: tensors by global name in safetensors, sealed last, loadable at any layout.

`iter_0000500/` holds model-*.safetensors and optimizer-*.safetensors (one pair per model-parallel
rank), index.json, memory-*.safetensors (for a model with memory), config.json (model, twin rule,
layout), state.json (iteration, optimizer steps, loss scale, recent losses, elapsed time),
statistics.json (five numbers for each tensor), probe.json (the loss on a few samples), lineage.json
(the run, its inputs, the earlier checkpoints), tokenizer/ and the completion marker.
"""

import math
import os
import shutil
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, NamedTuple, cast

import torch
from pydantic import Field, NonNegativeInt, field_validator
from torch import Tensor

from mlm_repro.engine.checkpoint import shards, statistics
from mlm_repro.engine.checkpoint.statistics import NOTHING, Loaded
from mlm_repro.engine.checkpoint.stream_memory import StreamMemory
from mlm_repro.engine.config import RunConfig
from mlm_repro.engine.kernels.identity import numerics_identity
from mlm_repro.engine.optim.flat import FlatOptimizer, Written
from mlm_repro.engine.parallel.layout import Layout
from mlm_repro.engine.parallel.mesh import ParallelMesh
from mlm_repro.engine.parallel.sharding import ShardedParameter
from mlm_repro.lineage.atomic import JSON, hidden_beside, publish_directory, write_json
from mlm_repro.lineage.chain import CONFIG, INDEX, LINEAGE, STATE, checkpoint_path, own_checkpoints
from mlm_repro.lineage.digest import (
    check_seal,
    content_digest,
    read_digest,
    seal,
    sealed_files,
    sha256_json,
)
from mlm_repro.lineage.errors import Diverged, IntegrityFailure, Interrupted
from mlm_repro.lineage.files import FileSchema, parse_document, read_object
from mlm_repro.lineage.lock import check_held
from mlm_repro.lineage.run import MANIFEST, RunDirectory

PROBE = "probe.json"
SAMPLES, LENGTH = 8, 64
"""Largest number of the probe's samples, which are the first validation sequences, and of tokens of
each sample."""
TOLERANCE = {"fp64": 1e-9, "fp32": 1e-4, "bf16": 3e-2, "fp16": 1e-2, "fp16-pure": 1e-2}
"""Dict number format → largest allowed relative difference between the probe's stored loss and the
loss of another layout, machine or library."""

WrittenFile = tuple[str, str, JSON]
"""Tuple about a file that a rank has written into a checkpoint: its name, its SHA-256, and a dict
tensor name → description of each tensor in it, from `shards.describe`."""


class Probe(FileSchema):
    """probe.json of a checkpoint: a few samples as token ids, the saved model's loss on them, its
    number format, and what computed the loss."""

    tokens: Annotated[
        tuple[tuple[NonNegativeInt, ...], ...], Field(min_length=1, max_length=SAMPLES)
    ]
    """Token ids, [samples, length + 1], with at most 8 samples and a length of at most 64: each
    sample's inputs, and its targets, which are the next tokens."""
    loss: float
    """Mean cross-entropy of the samples, without dropout."""
    precision: str
    computed_on: JSON
    """Dict, as `describe_computation` returns it, of layout, numerics identity and threads, on
    which the bits of the loss may depend."""

    @field_validator("tokens")
    @classmethod
    def _is_a_batch(cls, tokens: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
        if len(set(map(len, tokens))) != 1 or not 2 <= len(tokens[0]) <= LENGTH + 1:
            raise ValueError(
                f"the token sequences of a probe must all have one length, from 2 to {LENGTH + 1}"
                " tokens"
            )
        return tokens

    def compare(self, loss: float, where: object, computed_on: JSON | None = None) -> str | None:
        """Compare `loss`, which the loaded model has on the samples, with the stored loss. Return
        a warning as text if the losses are near but not equal although `computed_on`
        (`describe_computation` here) equals the stored one, else None. Without `computed_on` no
        warning is given.

        Raises IntegrityFailure, with `where` first in its message, if the losses differ,
        relatively, by more than `TOLERANCE` allows for the stored number format: the weights
        changed, or this machine miscomputes.
        """
        if not math.isclose(loss, self.loss, rel_tol=TOLERANCE.get(self.precision, 1e-4)):
            raise IntegrityFailure(
                f"{where}: the model's loss on the samples in {PROBE} is {loss!r}, and was"
                f" {self.loss!r} when the checkpoint was saved: the weights changed, or"
                " this machine miscomputes: restore the checkpoint, or load it on another machine"
            )
        if computed_on == self.computed_on and loss != self.loss:
            return (
                f"the model's loss on the samples in {PROBE} is {loss!r}, and was {self.loss!r}"
                " when the checkpoint was saved, on the same layout and machine: training will not"
                " go on bit for bit as before"
            )
        return None


def describe_computation(layout: Layout, device: torch.device) -> JSON:
    """Return, as one flat dict, what the bits of a loss depend on: the layout (`tp`, `pp`, `dp`),
    the numerics identity (`processor`, `instructions`, `blas`, `torch`, `kernels`), in which this
    machine's first GPU and CUDA replace processor and BLAS if `device` is a GPU, and `threads`,
    this process's number of torch threads."""
    return {
        **vars(layout),
        **numerics_identity(device.type == "cuda"),
        "threads": torch.get_num_threads(),
    }


class Ancestor(NamedTuple):
    """An earlier checkpoint that this one's training went through: its iteration, the digest of all
    its files, and the digest of its model files."""

    iteration: int
    digest: str
    weights: str
    """Digest of the checkpoint's model files alone."""


@dataclass(frozen=True)
class TrainingState:
    """Progress of a run as state.json of a checkpoint stores it: iteration, updates, time, loss
    scale and recent losses; and the earlier checkpoints that its training went through."""

    iteration: int = 0
    """Number of iterations finished."""
    optimizer_steps: int = 0
    """Number of updates made; fewer than iterations where fp16 overflowed or a spike was
    skipped."""
    seconds: float = 0.0
    """Training time so far in seconds, over all sessions."""
    loss_scaler: JSON | None = None
    """Dict of the fields of the LossScaler in fp16: the scale and its counters; None in another
    format."""
    recent: tuple[tuple[float, float], ...] = ()
    """Pairs (loss, gradient norm) of the last iterations, oldest first, by which spikes are
    told."""
    ancestors: tuple[Ancestor, ...] = ()
    """Ancestor of every earlier checkpoint, oldest first, removed ones included; the last is the
    parent."""
    updated_samples: int | None = None
    """Number of samples in the updates; None where an earlier release wrote the checkpoint."""


class CheckpointWriter:
    """Writer of a training's checkpoints, one at a time, beside the training.

    Every rank has one, and calls its methods at the same moments: `begin`, then `go_on` until it
    returns an Ancestor; before that, no other checkpoint may begin. Training waits while the state
    is copied to the host and for what ranks tell each other; a thread writes, syncs, reads back and
    seals.
    """

    def __init__(
        self,
        parameters: Sequence[ShardedParameter],
        optimizer: FlatOptimizer,
        mesh: ParallelMesh,
        streams: StreamMemory | None = None,
    ) -> None:
        """Choose the tensors that this rank writes, of `parameters` and of the optimizer's state,
        and allocate host memory for their copies, which every checkpoint reuses. `mesh` is the
        model's `storage_mesh`. `streams`, the memory of a Transformer-XL, is written too unless it
        is None. Shortens the thread switch interval of this Python process."""
        # The thread that trains asks for the interpreter at each operation. Python's own 5 ms
        # would pass each time while the writer forms its JSON.
        sys.setswitchinterval(1e-4)
        self._optimizer = optimizer
        self._mesh = mesh
        self._streams = streams
        # Replicas hold the same weights; the optimizer's state is divided, so every rank writes its
        # own part. The tied embedding's copy is left out, or two files would hold one tensor and
        # might disagree.
        own = [p for p in parameters if not p.is_copy and mesh.dp.rank == 0]
        self._weights: Written = [(p.name, p, 0, partial(getattr, p.local, "data")) for p in own]
        place = f"tp{mesh.tp.rank:02d}-pp{mesh.pp.rank:03d}"
        part = f"-dp{mesh.dp.rank:03d}" * (mesh.dp.size > 1)
        self._files = [
            (
                f"{file}.safetensors",
                dtype,
                {name: p for name, p, writer, _ in written if writer == mesh.dp.rank},
            )
            for file, dtype, written in [
                (f"optimizer-{place}{part}", optimizer.groups[0].master.dtype, optimizer.written()),
                (f"model-{place}", parameters[0].local.dtype, self._weights),
            ]
            if written
        ]
        tensors = []
        for _, dtype, mine in self._files:
            tensors.extend([(name, dtype, p.local.shape) for name, p in mine.items()])
        sizes = [dtype.itemsize * math.prod(shape) for _, dtype, shape in tensors]
        # One buffer, the wider numbers first: page-locked by torch, each tensor would take a power
        # of two of bytes.
        room = torch.empty(sum(sizes), dtype=torch.uint8)
        if mesh.device.type == "cuda":
            torch.cuda.cudart().cudaHostRegister(room.data_ptr(), len(room), 0)
        self._copies = {
            name: bits.view(dtype).view(shape)
            for (name, dtype, shape), bits in zip(tensors, room.split(sizes), strict=True)
        }
        self._steps: Generator[Future[Any], None, Ancestor] | None = None
        self._is_given_up = False

    @property
    def is_writing(self) -> bool:
        """True while a checkpoint is in progress: from `begin` until `go_on` returns an Ancestor or
        raises, or `close` is called."""
        return self._steps is not None

    @property
    def is_ready(self) -> bool:
        """True if a checkpoint is being written and this rank's thread has finished the current
        step of writing it. When every rank's thread has, `go_on` does not wait."""
        return self.is_writing and self._work.done()

    def copy(self) -> None:
        """Copy weights and optimizer state to the host memory of the ranks that write them, over
        the earlier copies. Every rank calls this, because ranks send their parts of a tensor to the
        rank that writes it."""
        for name, _, _, whole in [*self._optimizer.written(), *self._weights]:
            if (tensor := whole()) is not None:
                self._copies[name].copy_(tensor)

    def begin(
        self,
        run: Path,
        config: RunConfig,
        state: TrainingState,
        tokenizer: Path,
        probe: Probe | None = None,
    ) -> None:
        """Copy weights and optimizer state, and begin to write the checkpoint of `state`, a
        TrainingState, below the run directory `run`, with the RunConfig, the probe, and a copy of
        the directory `tokenizer`; the caller then calls the method `go_on`, which completes it,
        until it returns an Ancestor. No other checkpoint may be in progress.

        Every rank calls it. Raises Interrupted, on every rank, if the checkpoint's directory cannot
        be made, or if the run directory was moved or replaced.
        """
        self._steps = self._saving(run, config, state, tokenizer, probe)
        self._work = next(self._steps)

    def go_on(self) -> Ancestor | None:
        """Wait until every rank has finished the current step of writing the checkpoint in
        progress, which `begin` began, and start the next step; every rank calls it, until it
        returns an Ancestor. That is the checkpoint's iteration and digests, after the last step,
        which also removes checkpoints beyond `train.keep_checkpoints`. Before, it returns None.

        Raises, on every rank and with the earlier checkpoints untouched, Interrupted if the disk
        cannot take it or the run's directory was moved, Diverged for a tensor that is not finite,
        IntegrityFailure for a tensor that was not written as it was copied, and BadInput, when the
        new checkpoint is already in its place, if the run has another run's checkpoint.
        """
        steps = self._steps
        self._steps = None
        assert steps is not None
        try:
            self._work = next(steps)
        except StopIteration as end:
            return cast(Ancestor, end.value)
        self._steps = steps
        return None

    def close(self) -> None:
        """Give up a checkpoint in progress, if there is one, and remove its files, after waiting
        for the thread; if it is already being sealed, it is finished instead. In both cases the
        writer can then write no other."""
        if self._steps:
            self._is_given_up = True
            self._steps.close()
            self._steps = None

    def _saving(
        self,
        run: Path,
        config: RunConfig,
        state: TrainingState,
        tokenizer: Path,
        probe: Probe | None,
    ) -> Generator[Future[Any], None, Ancestor]:
        path = checkpoint_path(run, state.iteration)
        mesh = self._mesh
        # Hidden until it is whole: no command takes a directory for a checkpoint that a kill has
        # cut short.
        unfinished = path.with_name(f".{path.name}.partial")
        try:
            with ThreadPoolExecutor(1, "checkpoint") as beside:
                with mesh.all_or_none():
                    if mesh.is_first:
                        check_held(run)
                        shutil.rmtree(unfinished, ignore_errors=True)
                        unfinished.mkdir(parents=True)
                self.copy()
                streams = self._streams.states() if self._streams else {}
                yield (work := beside.submit(self._write_files, unfinished, streams))
                with mesh.all_or_none():
                    written = work.result()
                everyone = list(chain.from_iterable(mesh.world.gather_objects(written)))
                about = partial(
                    _complete, run, path, unfinished, config, state, tokenizer, probe, everyone
                )
                yield (sealed := beside.submit(about if mesh.is_first else type(None)))
                with mesh.all_or_none():
                    ancestor = sealed.result()
                return cast(Ancestor, mesh.world.gather_objects(ancestor)[0])
        except OSError as error:
            raise Interrupted(
                f"the checkpoint {path} cannot be written ({error.strerror}): make room or mend the"
                " cause, and give the same command again; earlier checkpoints are kept"
            ) from error
        finally:
            if mesh.is_first:
                shutil.rmtree(unfinished, ignore_errors=True)

    def _write_files(self, directory: Path, streams: dict[str, Tensor]) -> list[WrittenFile]:
        if self._streams:
            self._streams.save(directory, streams)
        return [self._write(directory / name, dtype, own) for name, dtype, own in self._files]

    def _write(
        self, path: Path, dtype: torch.dtype, own: dict[str, ShardedParameter]
    ) -> WrittenFile:
        numbers = {}

        def measured() -> Iterator[Tensor]:
            for name in sorted(own):  # the order of a file; the index has the model's
                if self._is_given_up:
                    raise Interrupted(
                        f"{path} is left unfinished, because training has ended with an error; this"
                        " checkpoint is not kept"
                    )
                numbers[name] = statistics.measure(self._copies[name], own[name])
                if lost := numbers[name][3]:
                    raise Diverged(
                        f"tensor {name!r} holds {lost} numbers that are not finite: this checkpoint"
                        " is not written, and earlier ones are kept; a new run with a lower"
                        " train.learning_rate may avoid it"
                    )
                yield self._copies[name]

        sha256 = shards.write_shard(
            path, {name: (dtype, own[name].local.shape) for name in sorted(own)}, measured()
        )
        statistics.check_written(path, numbers, own)
        return path.name, sha256, shards.describe(own.items(), path.name, numbers)


def _complete(
    run: Path,
    path: Path,
    unfinished: Path,
    config: RunConfig,
    state: TrainingState,
    tokenizer: Path,
    probe: Probe | None,
    everyone: list[WrittenFile],
) -> Ancestor:
    """Write the files of a checkpoint other than its tensors into `unfinished`, its hidden
    directory: what `config` and `state` say, the index of the tensors, the lineage, the `probe`
    unless it is None, and a copy of the directory `tokenizer`. Seal it, rename it to `path`, and
    remove checkpoints of the run directory `run` beyond `train.keep_checkpoints`. `everyone` has a
    WrittenFile for each tensor file that a rank wrote. Return the checkpoint's iteration and
    digests as an Ancestor.

    If the run has a manifest, the lineage takes the run's identity, its parents and the digest of
    its last attempt from the manifest, and the name, model and twin that the manifest states
    replace `config`'s.

    Only the first rank calls it, after all ranks have written their tensors. Raises Interrupted if
    the run's directory was moved or replaced and, after the renaming, the errors of `remove_old`.
    """
    check_held(run)
    shards.write_index(unfinished, [described for *_, described in everyone])
    begun = RunDirectory(run).manifest if (run / MANIFEST).is_file() else {}
    about = config.model_dump(mode="json", include={"name", "model", "twin", "parallel"})
    # Otherwise the checkpoints of one run would state two configurations where a release came
    # between them.
    # By the release that began the run; this one may have more keys.
    stated = begun.get("config", {})
    about |= {key: stated[key] for key in ("name", "model", "twin") if key in stated}
    write_json(unfinished / CONFIG, about)
    write_json(
        unfinished / STATE,
        {name: value for name, value in vars(state).items() if name != "ancestors"},
    )
    origin = {"run": begun.get("identity"), "parents": begun.get("parents")}
    origin |= {"attempt": sha256_json(attempts[-1])} if (attempts := begun.get("attempts")) else {}
    write_json(
        unfinished / LINEAGE,
        {**origin, "ancestors": [ancestor._asdict() for ancestor in state.ancestors]},
    )
    if probe:
        write_json(unfinished / PROBE, probe.to_json())
    shutil.copytree(tokenizer, unfinished / "tokenizer")
    # Last: what has a seal is complete. The digests were taken while the files were written, so
    # nothing is read again.
    seal(unfinished, {name: sha256 for name, sha256, _ in everyone})
    publish_directory(unfinished, path)
    # After the new one is in its place, so that at any moment one complete checkpoint exists.
    remove_old(run, config.train.keep_checkpoints)
    return as_ancestor(path, state.iteration)


def save_checkpoint(
    run: Path,
    config: RunConfig,
    state: TrainingState,
    parameters: Sequence[ShardedParameter],
    optimizer: FlatOptimizer,
    mesh: ParallelMesh,
    tokenizer: Path,
) -> None:
    """Write the checkpoint of `state`, a TrainingState, below the run directory `run`, with the
    tensors of `parameters` and of the optimizer's state, the RunConfig and a copy of the directory
    `tokenizer`, but without a probe or a memory of streams, and return when it is sealed. It
    removes old checkpoints as a training does. `mesh` is the model's `storage_mesh`. Every rank
    calls it.

    Raises Interrupted if the checkpoint cannot be written or the run's directory was moved,
    Diverged for a tensor that is not finite, IntegrityFailure for a tensor that was not written as
    it was copied and, once the new checkpoint is in its place, BadInput if the run has another
    run's checkpoint.
    """
    writer = CheckpointWriter(parameters, optimizer, mesh)
    writer.begin(run, config, state, tokenizer)
    while writer.is_writing:
        writer.go_on()


def as_ancestor(path: Path, iteration: int) -> Ancestor:
    """Return the Ancestor by which later checkpoints name the sealed checkpoint `path`: the
    argument `iteration`, and two digests from the completion marker, of all files and of the model
    files alone. Raises IntegrityFailure if there is no readable marker."""
    others = {name for name in sealed_files(path) if not name.startswith("model-")}
    return Ancestor(iteration, read_digest(path), content_digest(path, without=others))


def remove_old(run: Path, keep: int) -> None:
    """Remove all complete checkpoints of the run directory `run` but the newest `keep`, at least 1.
    Each is first renamed to a hidden name, so that a kill leaves no half checkpoint under its own
    name. Raises the errors of `own_checkpoints`, such as BadInput if one belongs to another run,
    and then removes none."""
    for old in own_checkpoints(run)[:-keep]:
        hidden = hidden_beside(old, "old")
        # Renamed first: a kill while files are being removed must not leave half a checkpoint under
        # its name.
        os.replace(old, hidden)
        shutil.rmtree(hidden)


def resume(
    run: Path,
    parameters: list[ShardedParameter],
    optimizer: FlatOptimizer,
    probe_loss: Callable[[Probe], float],
) -> TrainingState:
    """Load weights and optimizer state into `parameters` and `optimizer` from the newest checkpoint
    of the run directory `run` that can be trusted, and return that checkpoint's progress, a
    TrainingState. If the run has no checkpoint, load nothing and return the state at iteration 0.

    Compared are statistics, digests (of the tensors' files only if the statistics have no
    checksums), and the loss that the function `probe_loss` computes on the Probe, if there is one,
    with the loaded model. If a checkpoint fails, the next older one is loaded; then the failed ones
    are set aside under hidden names, with warnings on stderr. Raises IntegrityFailure if every
    checkpoint fails, and leaves them all; and the errors of `own_checkpoints`, such as BadInput if
    one belongs to another run. A Transformer-XL's memory of its streams is not loaded. Every rank
    calls it.
    """
    mesh = optimizer.mesh
    damaged = []
    for path in reversed(own_checkpoints(run)):
        try:
            state, probe = load_checkpoint(path, parameters, optimizer)
            # Digests show that the files are what was written; the probe shows that this machine
            # computes with them what the other did.
            loss = probe_loss(probe) if probe else 0.0
            with mesh.all_or_none():
                warning = probe and probe.compare(
                    loss, path, describe_computation(mesh.layout, mesh.device)
                )
        except IntegrityFailure as error:
            # Not fatal yet: an older checkpoint costs some iterations, an end of the run costs all.
            damaged.append((path, error))
            continue
        if mesh.is_first:
            if warning:
                print(f"warning: {path.name}: {warning}", file=sys.stderr)
            for bad, failure in damaged:
                aside = bad.with_name(f".{bad.name}.damaged")
                shutil.rmtree(aside, ignore_errors=True)
                # Set aside and not deleted: it is the only evidence of what a disk or a memory did.
                os.replace(bad, aside)
                said = (
                    f"warning: {failure}; that checkpoint is kept as {aside.name}, and training"
                    f" goes on from {path.name}"
                )
                print(said, file=sys.stderr)
        mesh.world.barrier()
        return state
    if damaged:
        raise damaged[0][1]
    return TrainingState()


def start_from(
    path: Path,
    digest: str,
    parameters: Sequence[ShardedParameter],
    optimizer: FlatOptimizer,
    is_whole: bool,
) -> TrainingState:
    """Load the weights of the checkpoint `path`, from which a new run starts, into the model's
    `parameters` and the master weights of `optimizer`, both in place, from the checkpoint's master
    weights if it has them. Return the TrainingState at iteration 0. If `is_whole`, load moments and
    step count too, and return the checkpoint's TrainingState instead. A memory of streams is not
    loaded.

    Every rank calls it. Raises IntegrityFailure if the checkpoint is damaged, or no longer the one
    with `digest` that the run began with.
    """
    with optimizer.mesh.all_or_none():
        if read_digest(path) != digest:
            raise IntegrityFailure(
                f"the checkpoint {path} is not the one that this run began from: put that one back"
                " to resume, or begin a new run with `mlm-train run`"
            )
    if is_whole:
        return load_checkpoint(path, parameters, optimizer)[0]
    _check_files(path, optimizer.mesh, is_read=lambda name: True)
    with optimizer.mesh.all_or_none(), torch.no_grad():
        index = read_object(path / INDEX)

        def fill(tensors: Sequence[tuple[ShardedParameter, str, int, Tensor]]) -> None:
            named = []
            for p, _, start, tensor in tensors:
                precise = f"master.{p.name}"
                named.append((precise if precise in index else p.name, p, start, tensor))
            shards.read_into(path, index, named)

        fill([(p, "", 0, p.local.data) for p in parameters])
        optimizer.restore(0, fill, ("master",))
    return TrainingState()


def load_checkpoint(
    path: Path, parameters: Sequence[ShardedParameter], optimizer: FlatOptimizer
) -> tuple[TrainingState, Probe | None]:
    """Fill parameters and optimizer from the checkpoint `path`, of any layout, but not a
    Transformer-XL's memory of its streams. Return a pair (TrainingState, Probe or None): the
    progress, whose last ancestor is this checkpoint, and the samples with their loss, which are not
    compared here.

    Every rank calls it. Raises IntegrityFailure, on every rank, if files or tensors differ from the
    saved ones. Parameters and optimizer may then be partly overwritten.
    """
    mesh = optimizer.mesh
    weights = Loaded()
    moments = Loaded()
    is_checked = statistics.has_checksums(path)
    _check_files(
        path, mesh, is_read=lambda name: not (is_checked and name.endswith(".safetensors"))
    )
    with mesh.all_or_none():
        state = _read_state(path)
        index = read_object(path / INDEX)

        def fill(
            loaded: Loaded, tensors: Sequence[tuple[str, ShardedParameter, int, Tensor]]
        ) -> None:
            shards.read_into(path, index, tensors)
            stored = shards.stored_dtype(path, {name: index[name] for name, *_ in tensors[:1]})
            for name, parameter, start, part in tensors:
                loaded[name] = parameter, NOTHING
                if len(part):
                    own = statistics.measure(part.to(stored), parameter, start)
                    loaded[name] = parameter, own

        with torch.no_grad():
            fill(weights, [(p.name, p, 0, p.local.data) for p in parameters])
            optimizer.restore(
                state.optimizer_steps,
                lambda tensors: fill(
                    moments, [(f"{what}.{p.name}", p, i, part) for p, what, i, part in tensors]
                ),
            )
    # Stages of a pipeline read different tensors, and one stage must not go on alone. A block for
    # each, because a comparison raises after its own collectives.
    with mesh.all_or_none():
        statistics.check_loaded(path, weights)
    with mesh.all_or_none():
        statistics.check_loaded(path, moments, optimizer.groups[0].owners)
    own = as_ancestor(path, state.iteration)
    return replace(state, ancestors=(*state.ancestors, own)), read_probe(path)


def _check_files(path: Path, mesh: ParallelMesh, is_read: Callable[[str], bool]) -> None:
    """Compare a checkpoint's files with its seal. Every rank compares the sizes of all files. The
    files whose names `is_read` accepts are divided among the ranks, and each rank reads its share
    and compares the digests. Every rank calls it. Raises IntegrityFailure, on every rank, for a
    file that was changed, added or removed."""
    with mesh.all_or_none():
        mine = set(sorted(filter(is_read, sealed_files(path)))[mesh.world.rank :: mesh.world.size])
        check_seal(path, mine.__contains__)


def _read_state(path: Path) -> TrainingState:
    values = read_object(path / STATE)
    ancestors = read_object(path / LINEAGE).get("ancestors") if (path / LINEAGE).is_file() else ()
    try:
        values["recent"] = tuple(map(tuple, values["recent"]))
        return TrainingState(
            **values, ancestors=tuple(Ancestor(**ancestor) for ancestor in ancestors or ())
        )
    except (TypeError, KeyError) as error:
        raise IntegrityFailure(
            f"{path / STATE} does not have the values of a training's progress ({error}): the"
            " checkpoint is damaged, so copy or save it again"
        ) from error


def read_probe(path: Path) -> Probe | None:
    """Return the Probe in the probe.json of the checkpoint `path`: samples and the saved model's
    loss on them. None if the checkpoint has no such file, as one of imported weights. Raises
    IntegrityFailure if the file cannot be read or is malformed."""
    place = path / PROBE
    return parse_document(read_object(place), Probe, str(place)) if place.is_file() else None
