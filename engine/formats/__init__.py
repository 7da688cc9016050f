"""Weights in published formats: Hugging Face GPT-2 directories in and out, Megatron-LM checkpoints in.

Every import ends in `write_checkpoint`, the one place where a checkpoint is made from whole tensors.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from data_pipeline.tokens.tokenizer import Tokenizer
from engine.config import ModelConfig, TwinScale
from engine.model.gpt2 import GPT2
from engine.parallel.mesh import serial_mesh
from engine.parallel.sharding import ShardedParameter, sharded_parameters
from engine.shards import INDEX, whole_index, write_shard
from lineage.atomic import new_directory, write_json
from lineage.digest import is_sealed, seal, sha256_file
from lineage.errors import BadInput, IntegrityFailure

MODEL_FILE = "model-tp00-pp000.safetensors"


@dataclass(frozen=True)
class Imported:
    """A model read from another format: whole tensors by our global names, and what they belong to."""

    name: str
    model: ModelConfig
    tensors: dict[str, torch.Tensor]
    tokenizer: Tokenizer
    origin: dict[str, Any]
    """Format and SHA-256 of each file it was read from; becomes `origin.json`."""
    twin: TwinScale | None = None
    """Set when the exported model was a shrunk twin, so that its numbers stay scaled ones."""


def write_checkpoint(out: Path, imported: Imported) -> str:
    """Write a sealed checkpoint that `load_for_inference` reads, in fp32, and return its digest.

    It has no optimizer state, so no run goes on from it. Raises IntegrityFailure naming a tensor that is missing,
    unexpected or misshapen, and BadInput if `out` cannot be made; nothing is left there then.
    """
    shapes = {p.name: p.global_shape for p in parameters_of(imported.model)}
    check_tensors(imported.tensors, shapes, imported.name)
    with new_output(out) as temporary:
        weights = {name: imported.tensors[name].to("cpu", torch.float32).contiguous() for name in shapes}
        write_shard(temporary / MODEL_FILE, weights)
        write_json(temporary / INDEX, whole_index(shapes, MODEL_FILE))
        described = {
            "name": imported.name,
            "model": imported.model.model_dump(mode="json"),
            "twin": imported.twin.model_dump(mode="json") if imported.twin else None,
        }
        write_json(temporary / "config.json", described)
        write_json(temporary / "origin.json", imported.origin)
        imported.tokenizer.save(temporary / "tokenizer")
        return seal(temporary)


def parameters_of(config: ModelConfig) -> list[ShardedParameter]:
    """Name, global shape and divided dim of every parameter of the model, without its values."""
    with torch.device("meta"):
        model = GPT2(config, serial_mesh("meta"))
    return sharded_parameters(model, model.mesh)


def check_tensors(found: Mapping[str, torch.Tensor], expected: Mapping[str, tuple[int, ...]], where: object) -> None:
    """Raise IntegrityFailure naming the first tensor that is missing, unexpected, misshapen or not of numbers."""
    if problem := sorted(found.keys() ^ expected.keys()):
        which = "unexpected" if problem[0] in found else "missing"
        raise IntegrityFailure(f"{where}: tensor {problem[0]!r} is {which} ({len(problem)} such tensors)")
    for name, shape in expected.items():
        if tuple(found[name].shape) != shape:
            raise IntegrityFailure(
                f"{where}: tensor {name!r} has shape {list(found[name].shape)}, the model's is {list(shape)}"
            )
        if not found[name].is_floating_point():
            raise IntegrityFailure(f"{where}: tensor {name!r} holds {found[name].dtype}, not weights")


def check_vocabulary(tokenizer: Tokenizer, rows: int, where: object) -> None:
    """Raise IntegrityFailure if the tokenizer has more entries than the word embedding has rows."""
    if tokenizer.vocab_size > rows:
        raise IntegrityFailure(
            f"{where}: the tokenizer has {tokenizer.vocab_size} entries, the word embedding only {rows} rows"
        )


def is_tied(head: torch.Tensor, words: torch.Tensor) -> bool:
    """Whether an output layer is the word embedding, bit for bit."""
    return head.dtype == words.dtype and torch.equal(head, words)


def digests(files: list[Path], directory: Path) -> dict[str, str]:
    """SHA-256 of each file by its name below `directory`."""
    return {path.relative_to(directory).as_posix(): sha256_file(path) for path in files}


def check_output(out: Path) -> None:
    """Raise BadInput if something is at `out` already or if writing there would change a sealed directory."""
    if out.exists() or out.is_symlink():
        raise BadInput(f"{out} exists already: name a new directory")
    for parent in out.resolve().parents:
        if is_sealed(parent):
            raise BadInput(f"{out} would lie in {parent}, which is complete: name another directory")


@contextmanager
def new_output(out: Path) -> Iterator[Path]:
    """A temporary directory that becomes `out` at the end. Raises BadInput if it cannot be written."""
    check_output(out)
    try:
        with new_directory(out) as temporary:
            yield temporary
    except (OSError, SafetensorError) as error:
        raise BadInput(f"{out} cannot be written: {getattr(error, 'strerror', None) or error}") from error
