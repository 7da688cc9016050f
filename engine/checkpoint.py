"""Checkpoints: tensors by global name in safetensors, sealed last, loadable at any layout.

`iter_0000500/` holds model.safetensors, optimizer.safetensors, config.json (model, twin rule), state.json (iteration,
optimizer steps, loss scale, elapsed time), tokenizer/ and the completion marker.
"""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from engine.config import ModelConfig, RunConfig
from engine.model.gpt2 import GPT2
from engine.optim.adam import FlatAdamW
from engine.parallel.mesh import ParallelMesh, serial_mesh
from engine.parallel.sharding import ShardedParameter, sharded_parameters
from lineage.atomic import new_directory, write_json
from lineage.config import parse_config
from lineage.digest import check_seal, is_sealed, seal
from lineage.errors import BadInput, IntegrityFailure

FOLDER = "checkpoints"


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
    run: Path, config: RunConfig, state: TrainingState, model: GPT2, optimizer: FlatAdamW, tokenizer: Path
) -> None:
    """Write the checkpoint of `state.iteration`; every rank calls it, the first rank writes.

    Only the newest `train.keep_checkpoints` stay.
    """
    mesh = model.mesh
    weights = {p.name: _whole(p, p.local.data, mesh) for p in sharded_parameters(model, mesh)}
    moments = {f"{what}.{p.name}": _whole(p, local, mesh) for p, what, local in optimizer.state()}
    if mesh.is_first:
        path = run / FOLDER / f"iter_{state.iteration:07d}"
        with new_directory(path) as temporary:
            save_file(_present(weights), temporary / "model.safetensors")
            save_file(_present(moments), temporary / "optimizer.safetensors")
            described = config.model_dump(mode="json", include={"name", "model", "twin"})
            write_json(temporary / "config.json", described)
            write_json(temporary / "state.json", vars(state))
            shutil.copytree(tokenizer, temporary / "tokenizer")
            seal(temporary)
        for old in complete_checkpoints(run)[: -config.train.keep_checkpoints]:
            shutil.rmtree(old)
    mesh.barrier()


def load_checkpoint(path: Path, model: GPT2, optimizer: FlatAdamW) -> TrainingState:
    """Fill model and optimizer from the checkpoint and return where the run was."""
    check_seal(path)
    state = TrainingState(**_read_json(path / "state.json"))
    with torch.no_grad():
        _fill(
            path / "model.safetensors",
            {p.name: (p, p.local.data) for p in sharded_parameters(model, model.mesh)},
        )
        moments = {f"{what}.{p.name}": (p, local) for p, what, local in optimizer.state()}
        _fill(path / "optimizer.safetensors", moments)
    optimizer.restore_steps(state.optimizer_steps)
    return state


def load_for_inference(path: Path, device: str = "cpu") -> LoadedCheckpoint:
    """The model of a checkpoint or run directory in fp32 and evaluation mode, its digest checked.

    Raises BadInput for a directory that is neither, IntegrityFailure for one that is incomplete or changed.
    """
    directory = resolve_checkpoint(path)
    digest = check_seal(directory)
    values = _read_json(directory / "config.json")
    config = parse_config(values.get("model", {}), ModelConfig, str(directory / "config.json"))
    model = GPT2(config, serial_mesh(device)).to(device)
    with torch.no_grad():
        parameters = sharded_parameters(model, model.mesh)
        _fill(directory / "model.safetensors", {p.name: (p, p.local.data) for p in parameters})
    return LoadedCheckpoint(model.eval(), config, directory, digest)


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
    if not (path / "model.safetensors").is_file():
        raise BadInput(f"{path} is complete but is not a checkpoint: it has no model.safetensors")
    return path


def complete_checkpoints(run: Path) -> list[Path]:
    """Sealed checkpoints of a run, oldest first."""
    return sorted(path for path in (run / FOLDER).glob("iter_*") if is_sealed(path))


def _whole(parameter: ShardedParameter, local: torch.Tensor, mesh: ParallelMesh) -> torch.Tensor | None:
    whole = parameter.gather(local)
    return whole.to("cpu", copy=True).contiguous() if mesh.is_first else None


def _present(tensors: dict[str, torch.Tensor | None]) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def _fill(path: Path, wanted: dict[str, tuple[ShardedParameter, torch.Tensor]]) -> None:
    """Copy each named tensor's shard into place; missing, unexpected or misshapen tensors are an error."""
    try:
        with safe_open(path, framework="pt") as file:
            names = set(file.keys())
            if problem := sorted(names ^ wanted.keys()):
                which = "unexpected" if problem[0] in names else "missing"
                raise IntegrityFailure(f"{path}: tensor {problem[0]!r} is {which} ({len(problem)} such tensors)")
            for name, (parameter, target) in wanted.items():
                whole = file.get_tensor(name)
                if tuple(whole.shape) != parameter.global_shape:
                    raise IntegrityFailure(
                        f"{path}: {name} has shape {list(whole.shape)}, the model's is {list(parameter.global_shape)}"
                    )
                target.copy_(parameter.shard(whole))
    except (SafetensorError, OSError) as error:
        raise IntegrityFailure(f"{path} cannot be read: {error}") from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise IntegrityFailure(f"{path} cannot be read: {error}") from error
