"""Weights in published formats: Hugging Face directories in and out, Megatron-LM checkpoints in.

Every import ends in `write_checkpoint`, the one place where a checkpoint is made from whole tensors.
"""

import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from data_pipeline.tokens.tokenizer import Tokenizer
from engine.checkpoint.shards import INDEX, describe, merge_descriptions, write_shard
from engine.checkpoint.statistics import FILE as STATISTICS
from engine.checkpoint.statistics import check_written, measure
from engine.config import ModelConfig, TwinScale
from engine.family import family_of
from engine.parallel.layout import Layout
from engine.parallel.mesh import Axis, ParallelMesh
from engine.parallel.sharding import ShardedParameter, sharded_parameters
from lineage.atomic import new_directory, write_json
from lineage.config import parse_config
from lineage.digest import is_sealed, seal, sha256_file
from lineage.errors import BadInput, IntegrityFailure
from lineage.files import read_object
from lineage.progress import Progress


@dataclass(frozen=True)
class Imported:
    """A model read from another format: whole tensors by our global names, and what they belong to."""

    name: str
    model: ModelConfig
    tensors: dict[str, torch.Tensor]
    tokenizer: Tokenizer | None
    """None where the files have none that this suite reads; such a model takes token ids."""
    origin: dict[str, Any]
    """Format and SHA-256 of each file it was read from; becomes `origin.json`."""
    twin: TwinScale | None = None
    """Set when the exported model was a shrunk twin, so that its numbers stay scaled ones."""
    files: Mapping[str, Path] = field(default_factory=dict)
    """Files that are kept with the checkpoint unread, by their place in it."""


def describe_ours(directory: Path, digest: str) -> dict[str, Any]:
    """What only we record of a checkpoint, for an export to keep: its name, its digest and whether it is a twin."""
    described = read_object(directory / "config.json")
    return {"name": described.get("name"), "twin": described.get("twin"), "checkpoint": digest}


def read_ours(values: Any, otherwise: str, where: object) -> tuple[str, TwinScale | None]:
    """Name and twin of what `describe_ours` gave, if it did. Raises BadInput for a twin that is none."""
    values = values if isinstance(values, dict) else {}
    name, twin = values.get("name"), values.get("twin")
    known = isinstance(name, str) and re.fullmatch(r"\w[\w.-]{0,99}", name)
    return name if known else otherwise, parse_config(twin, TwinScale, str(where)) if twin else None


def write_checkpoint(out: Path, imported: Imported, tp: int = 1, dtype: torch.dtype | None = torch.float32) -> str:
    """Write a sealed checkpoint that `load_for_inference` reads, in the files of `tp` ranks, and return its digest.

    Weights are turned into `dtype`; with None each keeps its number format. It has no optimizer state, so no run goes
    on from it. Raises IntegrityFailure naming a tensor that is missing, unexpected or misshapen, and BadInput if `out`
    cannot be made; nothing is left there then.
    """
    check_tensors(imported.tensors, {p.name: p.global_shape for p in parameters_of(imported.model)}, imported.name)
    with new_output(out) as temporary:
        descriptions = []
        for rank in range(tp):
            parts = {p.name: p for p in parameters_of(imported.model, tp, rank)}
            weights = {name: part.shard(imported.tensors[name]).to("cpu", dtype) for name, part in parts.items()}
            file = f"model-tp{rank:02d}-pp000.safetensors"
            numbers = {}
            with Progress(f"{imported.name}, rank {rank} of {tp}", len(weights), "tensors") as progress:
                for name, tensor in weights.items():
                    numbers[name] = measure(tensor)
                    progress.advance()
            write_shard(temporary / file, weights)
            check_written(temporary / file, numbers)
            descriptions.append(describe(parts.items(), file, numbers))
        index, statistics = merge_descriptions(descriptions)
        write_json(temporary / INDEX, index)
        write_json(temporary / STATISTICS, statistics)
        described = {
            "name": imported.name,
            "model": imported.model.model_dump(mode="json"),
            "twin": imported.twin.model_dump(mode="json") if imported.twin else None,
        }
        write_json(temporary / "config.json", described)
        write_json(temporary / "origin.json", imported.origin)
        if imported.tokenizer:
            imported.tokenizer.save(temporary / "tokenizer")
        for name, source in imported.files.items():
            (temporary / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, temporary / name)
        return seal(temporary)


def parameters_of(config: ModelConfig, tp: int = 1, rank: int = 0) -> list[ShardedParameter]:
    """Name, global shape and divided dim of every parameter, without its values, on a rank of `tp`."""
    mesh = ParallelMesh(Layout(tp=tp), Axis(tp, rank), Axis(), Axis(), Axis(), torch.device("meta"))
    with torch.device("meta"):
        return sharded_parameters(family_of(config).model_class()(config, mesh), mesh)


def check_tensors(tensors: Mapping[str, torch.Tensor], expected: Mapping[str, tuple[int, ...]], where: object) -> None:
    """Raise IntegrityFailure naming the first tensor that is missing, unexpected, misshapen or not of numbers."""
    if problem := sorted(tensors.keys() ^ expected.keys()):
        which = "unexpected" if problem[0] in tensors else "missing"
        raise IntegrityFailure(f"{where}: tensor {problem[0]!r} is {which} ({len(problem)} such tensors)")
    for name, shape in expected.items():
        if tuple(tensors[name].shape) != shape:
            raise IntegrityFailure(
                f"{where}: tensor {name!r} has shape {list(tensors[name].shape)}, the model's is {list(shape)}"
            )
        if not tensors[name].is_floating_point():
            raise IntegrityFailure(f"{where}: tensor {name!r} holds {tensors[name].dtype}, not weights")


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
