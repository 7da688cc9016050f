"""Loads the model of a checkpoint for evaluation, and reads whole tensors."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from mlm_repro.engine.checkpoint import shards
from mlm_repro.engine.checkpoint.checkpoint import PROBE, read_probe
from mlm_repro.engine.checkpoint.statistics import check_loaded, measure
from mlm_repro.engine.config import ModelConfig
from mlm_repro.engine.family import family_of
from mlm_repro.engine.model.microbatch import PipelineInput
from mlm_repro.engine.model.stage_model import StageModel
from mlm_repro.engine.parallel.layout import PipelineStage, check_tensor_parallel, split_layers
from mlm_repro.engine.parallel.mesh import LoneAxis, ParallelMesh, serial_mesh
from mlm_repro.engine.parallel.sharding import ShardedParameter, sharded_parameters
from mlm_repro.lineage.chain import CONFIG, INDEX, resolve_checkpoint
from mlm_repro.lineage.config import parse_config
from mlm_repro.lineage.digest import check_seal
from mlm_repro.lineage.errors import IntegrityFailure, cause
from mlm_repro.lineage.files import read_object

OPTIMIZER_STATE = ("exp_avg.", "exp_avg_sq.", "master.")


@dataclass(frozen=True)
class LoadedCheckpoint:
    """Model of a checkpoint, a StageModel in evaluation mode, with its ModelConfig, its directory
    and the digest of all its files."""

    model: StageModel
    config: ModelConfig
    directory: Path
    digest: str


def load_for_inference(
    path: Path, mesh: ParallelMesh | None = None, as_stored: bool = False
) -> LoadedCheckpoint:
    """Return the LoadedCheckpoint of `path`, a checkpoint's directory, or a run's with its newest
    checkpoint: the model in evaluation mode, with the digests of all files checked.

    Without a mesh the whole model is on the CPU. With one, it is this rank's part, on the mesh's
    device, and every rank calls this. The model is in fp32, or with `as_stored` in the number
    format of the checkpoint's weights. If statistics of the tensors are stored, the loaded tensors
    must agree with them; a checkpoint in fp64 is exempt. If a probe is stored and the model is not
    divided into stages, the loss on it must agree with the stored loss within a tolerance. Raises
    BadInput if `path` is no directory or a complete one of another kind, for a configuration that
    is refused, or for a mesh that does not divide the model; IntegrityFailure for a directory that
    is incomplete or changed.
    """
    mesh = mesh or serial_mesh()
    directory = resolve_checkpoint(path)
    if link := next((entry for entry in directory.rglob("*") if entry.is_symlink()), None):
        raise IntegrityFailure(
            f"{link} is a symbolic link, and a checkpoint has none: put there what it leads to"
        )
    digest = check_seal(directory)
    config = parse_config(
        read_object(directory / CONFIG).get("model", {}), ModelConfig, str(directory / CONFIG)
    )
    check_tensor_parallel(config, mesh.tp.size)
    index = {
        n: e for n, e in read_object(directory / INDEX).items() if not n.startswith(OPTIMIZER_STATE)
    }
    # Checked before a model of that size is built: a damaged number could ask for any memory.
    if len(index) < config.num_layers:
        raise IntegrityFailure(
            f"{directory}: {INDEX} has {len(index)} weights, fewer than the {config.num_layers}"
            f" layers that {CONFIG} states: the checkpoint is damaged, so copy or save it again"
        )
    stage = split_layers(config.num_layers, mesh.layout.pp, chunks=1)[mesh.pp.rank]
    check_entries(
        directory,
        index,
        {parameter.name: parameter.global_shape for parameter in parameters_of(config)},
    )
    stored = shards.stored_dtype(directory, index)
    model = (
        family_of(config)
        .model_class()(config, mesh, stage)
        .to(mesh.device, stored if as_stored else torch.float32)
    )
    parameters = sharded_parameters(model, mesh)
    with torch.no_grad():
        shards.read_into(directory, index, [(p.name, p, 0, p.local.data) for p in parameters])
    if stored != torch.float64:
        check_loaded(
            directory, {p.name: (p, measure(p.local.data.to(stored), p)) for p in parameters}
        )
    model.eval()
    if (probe := read_probe(directory)) and mesh.pp.size == 1:
        if max(map(max, probe.tokens)) >= config.vocab_size:
            raise IntegrityFailure(
                f"{directory / PROBE} is damaged, so copy or save the checkpoint again: it has a"
                f" token id outside the model's vocabulary of {config.vocab_size}"
            )
        tokens = torch.tensor(probe.tokens, device=mesh.device)
        batch = PipelineInput(tokens[:, :-1], tokens[:, 1:])
        with torch.no_grad():
            probe.compare(
                model.batch_loss(model.run_stage(batch.tokens, batch), batch).item(), directory
            )
    return LoadedCheckpoint(model, config, directory, digest)


def parameters_of(
    config: ModelConfig, stage: PipelineStage | None = None, tp: int = 1
) -> list[ShardedParameter]:
    """Return a list of the ShardedParameters of a whole model, or of the pipeline stage `stage`, as
    one of `tp` tensor-parallel ranks has them: with name and shape but without values, on torch's
    device `meta`."""
    mesh = replace(serial_mesh(), tp=LoneAxis(tp))
    with torch.device("meta"):
        return sharded_parameters(family_of(config).model_class()(config, mesh, stage), mesh)


def check_entries(
    directory: Path, index: dict[str, shards.Entry], shapes: Mapping[str, tuple[int, ...]]
) -> None:
    """Raise IntegrityFailure unless `index`, entries of the index.json in the checkpoint
    `directory` by tensor name, describes exactly the tensors of `shapes`, name → shape. Entries of
    the optimizer's state must have been left out of `index`. No tensor's file is opened."""
    if unexpected := sorted(index.keys() - shapes.keys()):
        raise IntegrityFailure(
            f"{directory}: {INDEX} has tensor {unexpected[0]!r}, which the model does not have"
            f" ({len(unexpected)} such tensors): the index is damaged or of another model, so copy"
            " or save the checkpoint again"
        )
    for name, shape in shapes.items():
        shards.entry_of(directory, index, name, shape)


def read_whole(directory: Path, index: dict[str, shards.Entry], name: str) -> torch.Tensor:
    """Return the whole tensor `name` of the checkpoint `directory`, joined on the CPU, in the
    tensor's own number format. `index` is the checkpoint's index.json as a dict, and names the
    files.

    Raises IntegrityFailure if the index or a file lacks the tensor, if a file cannot be read, or if
    the tensor's shape is not the index's.
    """
    parts = []
    try:
        for file in index[name]["files"]:
            shards.check_file_name(directory, file)
            with safe_open(directory / file, framework="pt") as opened:
                parts.append(opened.get_tensor(name))
        whole = torch.cat(parts, index[name]["dim"]) if len(parts) > 1 else parts[0]
    except (SafetensorError, OSError, KeyError, TypeError, RuntimeError, IndexError) as error:
        raise IntegrityFailure(
            f"{directory}: tensor {name!r} cannot be read, so copy or save the checkpoint again:"
            f" {cause(error)}"
        ) from error
    if list(whole.shape) != index[name]["shape"]:
        raise IntegrityFailure(
            f"{directory} is damaged, so copy or save it again: tensor {name!r} has shape"
            f" {list(whole.shape)} in its files, and {index[name]['shape']} in {INDEX}"
        )
    return whole
