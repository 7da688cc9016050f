"""Checkpoints: tensors by global name in safetensors, sealed last, loadable at any layout.

`iter_0000500/` holds model-*.safetensors and optimizer-*.safetensors (one pair per model-parallel rank), index.json,
config.json (model, twin rule), state.json (iteration, optimizer steps, loss scale, elapsed time), tokenizer/ and the
completion marker.
"""

import json
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from engine.config import ModelConfig, RunConfig
from engine.model.gpt2 import GPT2
from engine.optim.flat import FlatOptimizer
from engine.parallel.layout import check_tensor_parallel
from engine.parallel.mesh import ParallelMesh, serial_mesh
from engine.parallel.sharding import ShardedParameter, sharded_parameters
from engine.pipeline.stages import split_layers
from engine.shards import INDEX, check_entries, describe, merge_descriptions, read_into, stored_dtype, write_shard
from lineage.atomic import publish_directory, write_json
from lineage.config import parse_config
from lineage.digest import check_seal, is_sealed, seal
from lineage.errors import BadInput, IntegrityFailure

FOLDER = "checkpoints"
OPTIMIZER_STATE = ("exp_avg.", "exp_avg_sq.", "master.")


@dataclass(frozen=True)
class TrainingState:
    """Where a run is."""

    iteration: int = 0
    """Iterations finished."""
    optimizer_steps: int = 0
    """Updates made; fewer than iterations where fp16 overflowed."""
    seconds: float = 0.0
    """Training time so far, over all sessions."""
    loss_scaler: dict[str, Any] | None = None


@dataclass(frozen=True)
class LoadedCheckpoint:
    """A model ready to evaluate."""

    model: GPT2
    config: ModelConfig
    directory: Path
    digest: str


def save_checkpoint(
    run: Path,
    config: RunConfig,
    state: TrainingState,
    parameters: Sequence[ShardedParameter],
    optimizer: FlatOptimizer,
    mesh: ParallelMesh,
    tokenizer: Path,
) -> None:
    """Write the checkpoint of `state.iteration`; every rank calls it, each model-parallel rank writes its parts.

    Only the newest `train.keep_checkpoints` stay.
    """
    path = run / FOLDER / f"iter_{state.iteration:07d}"
    partial = path.with_name(f".{path.name}.partial")
    if mesh.is_first:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    mesh.barrier()
    suffix = f"tp{mesh.tp.rank:02d}-pp{mesh.pp.rank:03d}.safetensors"
    weights = {p.name: (p, p.local.data) for p in parameters if not p.is_copy}
    moments = {f"{what}.{p.name}": (p, local) for p, what, local in optimizer.state() if not p.is_copy}
    described: dict[str, Any] = {}
    for kind, parts in (("model", weights), ("optimizer", moments)):
        if mesh.dp.rank == 0:
            write_shard(partial / f"{kind}-{suffix}", {name: tensor for name, (_, tensor) in parts.items()})
            described |= describe(((name, p) for name, (p, _) in parts.items()), f"{kind}-{suffix}")
    descriptions = mesh.gather_objects(described)
    if mesh.is_first:
        write_json(partial / INDEX, merge_descriptions(descriptions))
        write_json(partial / "config.json", config.model_dump(mode="json", include={"name", "model", "twin"}))
        write_json(partial / "state.json", vars(state))
        shutil.copytree(tokenizer, partial / "tokenizer")
        seal(partial)
        publish_directory(partial, path)
        for old in complete_checkpoints(run)[: -config.train.keep_checkpoints]:
            shutil.rmtree(old)
    mesh.barrier()


def load_checkpoint(path: Path, parameters: Sequence[ShardedParameter], optimizer: FlatOptimizer) -> TrainingState:
    """Fill parameters and optimizer from the checkpoint, written at any layout, and return where the run was."""
    check_seal(path)
    state = TrainingState(**_read_json(path / "state.json"))
    index = _read_json(path / INDEX)

    def fill(tensors: Iterable[tuple[ShardedParameter, str, torch.Tensor]]) -> None:
        read_into(path, index, {f"{what}.{p.name}": (p, tensor) for p, what, tensor in tensors})

    with torch.no_grad():
        read_into(path, index, {p.name: (p, p.local.data) for p in parameters})
        optimizer.restore(state.optimizer_steps, fill)
    return state


def load_for_inference(path: Path, mesh: ParallelMesh | None = None, as_stored: bool = False) -> LoadedCheckpoint:
    """The model of a checkpoint or run directory in evaluation mode, its digest checked.

    With a mesh, this rank's part of it on the mesh's device. In fp32, or `as_stored` in the format it was trained in.
    Raises BadInput for a directory that is neither or a mesh that does not divide the model, IntegrityFailure for a
    directory that is incomplete or changed.
    """
    mesh = mesh or serial_mesh()
    directory = resolve_checkpoint(path)
    if link := next((entry for entry in directory.rglob("*") if entry.is_symlink()), None):
        raise IntegrityFailure(f"{link} is a symbolic link, which no checkpoint has")
    digest = check_seal(directory)
    config = read_model_config(directory)
    check_tensor_parallel(config, mesh.tp.size, directory)
    index = {n: e for n, e in _read_json(directory / INDEX).items() if not n.startswith(OPTIMIZER_STATE)}
    if len(index) < config.num_layers:  # before a model of that size is made
        raise IntegrityFailure(f"{directory} has {len(index)} tensors, too few for its {config.num_layers} layers")
    stage = split_layers(config.num_layers, mesh.layout.pp, chunks=1)[mesh.pp.rank]
    with torch.device("meta"):
        whole = sharded_parameters(GPT2(config, serial_mesh()), serial_mesh())
    check_entries(directory, index, {parameter.name: parameter.global_shape for parameter in whole})
    dtype = stored_dtype(directory, index) if as_stored else torch.float32
    model = GPT2(config, mesh, stage).to(mesh.device, dtype)
    with torch.no_grad():
        read_into(directory, index, {p.name: (p, p.local.data) for p in sharded_parameters(model, mesh)})
    return LoadedCheckpoint(model.eval(), config, directory, digest)


def read_model_config(directory: Path) -> ModelConfig:
    """The model of a checkpoint. Raises IntegrityFailure if its config.json cannot be read, BadInput if it is wrong."""
    path = directory / "config.json"
    return parse_config(_read_json(path).get("model", {}), ModelConfig, str(path))


def resolve_checkpoint(path: Path) -> Path:
    """The checkpoint itself, or the newest complete one of a run directory."""
    if not path.is_dir():
        raise BadInput(f"there is no checkpoint directory {path}")
    path = path.resolve()
    folder = path if path.name == FOLDER else path / FOLDER
    if folder.is_dir():
        found = complete_checkpoints(folder.parent)
        if not found:
            raise IntegrityFailure(f"{path} has no complete checkpoint")
        return found[-1]
    if not is_sealed(path):
        raise IntegrityFailure(f"{path} has no COMPLETE file: it is not a finished checkpoint")
    if not (path / INDEX).is_file():
        raise BadInput(f"{path} is complete but is not a checkpoint: it has no {INDEX}")
    return path


def complete_checkpoints(run: Path) -> list[Path]:
    """Sealed checkpoints of a run, oldest first."""
    return sorted(path for path in (run / FOLDER).glob("iter_*") if is_sealed(path))


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise IntegrityFailure(f"{path} cannot be read: {error}") from error
