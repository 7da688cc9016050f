"""Megatron-Core's `torch_dist` checkpoints: torch's distributed checkpoint (`.distcp`) with Megatron-Core's names.

Every tensor is whole, whatever layout wrote it. A parameter of all layers is one tensor, [num_layers, ...]. Layer norms
have Transformer Engine's names, in the linear layer that follows. Sources: megatron-core 0.16.1,
`dist_checkpointing/strategies/torch.py`; torch, `distributed/checkpoint/filesystem.py`.
"""

import argparse
import re
import warnings
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as distributed
from torch.distributed.checkpoint import filesystem, metadata

from engine.checkpoint.checkpoint import LoadedCheckpoint
from engine.compare.tensors import check_cover
from engine.config import ModelConfig
from engine.formats import describe_ours
from engine.formats.megatron_names import FUSED, IN_LAYER
from engine.formats.torch_files import first_line, read_pickle, read_torch_file
from engine.formats.vocabulary import write_vocabulary
from lineage.atomic import write_json, write_text
from lineage.errors import IntegrityFailure

METADATA, COMMON, CONFIG = ".metadata", "common.pt", "metadata.json"
TRACKER, RELEASE = "latest_checkpointed_iteration.txt", "release"
OURS = "mlm_repro.json"
"""Our own records of an exported checkpoint, beside it."""
CLASSES = (metadata.Metadata, metadata.MetadataIndex, metadata.TensorStorageMetadata, metadata.ChunkStorageMetadata,
           metadata.TensorProperties, metadata._MEM_FORMAT_ENCODING, metadata.BytesStorageMetadata,
           metadata.StorageMeta, filesystem._StorageInfo, torch.serialization._get_layout)  # fmt: skip
"""Classes of the metadata that say where each tensor lies."""
NUMBERS = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int16,
           torch.int8, torch.uint8, torch.bool)  # fmt: skip
KNOWN: dict[str, Any] = {f"{each.__module__}.{each.__qualname__}": each for each in CLASSES}
KNOWN |= {"torch.Size": torch.Size} | {str(each): each for each in NUMBERS}
UNREAD = re.compile(r"pathlib\.\w+|torch\.distributed\.checkpoint\.planner\.\w+|megatron\.core\.[\w.]+\.MCore\w+")
"""Other classes of the metadata: plans of the process that wrote it."""
STATEFUL = ("self_attention.linear_qkv", "self_attention.linear_proj", "self_attention.core_attention",
            "mlp.linear_fc1", "mlp.linear_fc2")  # fmt: skip
"""Modules of a layer for which Megatron-Core requires an `_extra_state`, which is empty without FP8."""
STACKED = re.compile(r"(.*\blayers)\.([a-z].*)")
OPTIMIZER = re.compile(r"(.*\.)?optimizer\..*")


class _Reader(distributed.FileSystemReader):
    """Torch's reader, with metadata already read. Torch would unpickle them without restriction."""

    def __init__(self, directory: Path, known: metadata.Metadata) -> None:
        super().__init__(directory)
        self.known = known

    def read_metadata(self, *args: Any, **kwargs: Any) -> metadata.Metadata:
        return self.known


def read_torch_dist(directory: Path) -> dict[str, Any]:
    """The weights in `directory`, in the form of one rank's Megatron-LM file: `model`, `args`, `iteration`.

    The optimizer's tensors and pickled objects are not read. Raises IntegrityFailure for damaged metadata and for
    shards that overlap, leave holes or are missing.
    """
    path = directory / METADATA
    known = read_pickle(path, KNOWN, UNREAD)
    if not isinstance(known, metadata.Metadata):
        raise IntegrityFailure(f"{path} cannot be read: it does not describe a checkpoint")
    try:
        for index, info in known.storage_data.items():
            if not re.fullmatch(r"\w[\w.-]*", info.relative_path):
                raise ValueError(f"{index.fqn} lies at {info.relative_path!r}, which is not a file of the directory")
        tensors = {}
        for name, tensor in known.state_dict_metadata.items():
            if isinstance(tensor, metadata.TensorStorageMetadata) and not OPTIMIZER.fullmatch(name):
                boxes = [
                    (tuple(part.offsets), tuple(map(sum, zip(part.offsets, part.sizes, strict=False))))
                    for part in tensor.chunks
                ]
                check_cover(f"tensor {name!r} in {directory}", boxes, tuple(tensor.size))
                tensors[name] = torch.empty(tensor.size, dtype=tensor.properties.dtype)
        with warnings.catch_warnings(action="ignore"):  # of a process that is not a rank
            distributed.load(dict(tensors), storage_reader=_Reader(directory, known), no_dist=True)
    except IntegrityFailure:
        raise
    except (Exception, distributed.CheckpointException) as error:  # a damaged file makes torch raise nearly anything
        cause = error.failures[0][0] if isinstance(error, distributed.CheckpointException) else error
        raise IntegrityFailure(f"{directory} cannot be read: {first_line(cause)}") from error
    common = read_torch_file(directory / COMMON) if (directory / COMMON).is_file() else {}
    common = {key: common[key] for key in ("args", "iteration") if key in common} if isinstance(common, dict) else {}
    return {"model": _unstack(tensors), "checkpoint_version": 3, **common}


def files_of(directory: Path) -> list[Path]:
    """The files of a distributed checkpoint."""
    return [path for path in (directory / METADATA, directory / COMMON) if path.is_file()] + sorted(
        directory.glob("*.distcp")
    )


def write_torch_dist(loaded: LoadedCheckpoint, directory: Path) -> None:
    """Write a GPT-2's weights into `directory`, as Megatron-Core's `--save` directory.

    Megatron-Core loads it at any layout as a released model, and so does torch's own loader. There is no optimizer
    state. Every weight keeps its value and number format.
    """
    config = loaded.config
    layers: dict[str, list[torch.Tensor]] = defaultdict(list)
    for name, weight in loaded.model.named_parameters():
        layers[_core_name(name)].append(weight.detach())
    weights = {name: torch.stack(each) if STACKED.match(name) else each[0] for name, each in layers.items()}
    extra = {
        f"decoder.layers.{module}._extra_state/shard_{layer}_{config.num_layers}": [None]
        for module in STATEFUL
        for layer in range(config.num_layers)
    }
    folder = directory / RELEASE
    folder.mkdir()
    with warnings.catch_warnings(action="ignore"):  # of a process that is not a rank
        distributed.save(weights | extra, storage_writer=distributed.FileSystemWriter(folder), no_dist=True)
    common = {"args": argparse.Namespace(**_arguments(config)), "checkpoint_version": 3.0, "iteration": 0}
    torch.save(common, folder / COMMON)
    write_json(folder / CONFIG, {"sharded_backend": "torch_dist", "sharded_backend_version": 1,
                                 "common_backend": "torch", "common_backend_version": 1})  # fmt: skip
    write_text(directory / TRACKER, RELEASE)
    write_json(directory / OURS, describe_ours(loaded.directory, loaded.digest))
    if (loaded.directory / "tokenizer").is_dir():
        write_vocabulary(loaded.directory / "tokenizer", directory, config.seq_length)


def _core_name(name: str) -> str:
    """Megatron-Core's name for one of ours. All layers share one."""
    if name.startswith("embedding."):
        return name
    inner = re.sub(r"^layers\.\d+\.", "", name)
    if inner == name:
        return f"decoder.{name}"
    module, _, kind = inner.rpartition(".")
    fused = {ours: theirs for theirs, ours in FUSED.items()}.get(f"{module}.")
    return f"decoder.layers.{fused}{kind}" if fused else f"decoder.layers.{IN_LAYER[module][-1]}.{kind}"


def _arguments(config: ModelConfig) -> dict[str, Any]:
    """Arguments that Megatron-LM reads from a checkpoint."""
    return {
        "num_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "ffn_hidden_size": config.inner_size,
        "num_attention_heads": config.num_heads,
        "seq_length": config.seq_length,
        "max_position_embeddings": config.seq_length,
        "padded_vocab_size": config.padded_vocab_size,
        "hidden_dropout": config.dropout,
        "attention_dropout": config.dropout,
        "init_method_std": config.init_std,
        "position_embedding_type": "learned_absolute",
        "add_position_embedding": True,
        "untie_embeddings_and_output_weights": False,
        "normalization": "LayerNorm",
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
    }


def _unstack(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Split stacked tensors into one for each layer."""
    single: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if match := STACKED.fullmatch(name):
            single |= {f"{match[1]}.{number}.{match[2]}": layer for number, layer in enumerate(tensor)}
        else:
            single[name] = tensor
    return single
