"""Weights in other programs' formats: Hugging Face in and out, Megatron-LM in.

Every import ends in `write_checkpoint`.
"""

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mlm_repro.data_pipeline.tokens.tokenizer import Tokenizer
from mlm_repro.engine.checkpoint.shards import describe, write_index, write_shard
from mlm_repro.engine.checkpoint.statistics import check_written, measure
from mlm_repro.engine.config import ModelConfig, TwinScale
from mlm_repro.engine.inference import parameters_of
from mlm_repro.lineage.atomic import JSON, write_json
from mlm_repro.lineage.digest import seal, sha256_file
from mlm_repro.lineage.errors import BadInput, IntegrityFailure
from mlm_repro.lineage.lock import new_output
from mlm_repro.lineage.progress import Progress

FILE = "model-tp00-pp000.safetensors"


@dataclass(frozen=True)
class Imported:
    """A model read from another program's files: its name, its ModelConfig, its whole tensors by
    our global names, its tokenizer or None, where it came from, the factors by which a twin was
    shrunk, and files to copy beside it."""

    name: str
    model: ModelConfig
    tensors: dict[str, Tensor]
    tokenizer: Tokenizer | None
    """Tokenizer that came with the weights; None for a BERT without a tokenizer.json. A model
    without it takes token ids."""
    origin: JSON
    """Dict that becomes `origin.json`: the format, the SHA-256 by path of each file from which
    weights, settings or a GPT-2's vocabulary were read, and further facts that the format has, such
    as an iteration."""
    twin: TwinScale | None = None
    """A TwinScale, the factors by which the model was shrunk, if it is a twin, else None; results
    of a twin are called scaled ones."""
    files: Mapping[str, Path] = field(default_factory=dict)
    """Files to copy into the checkpoint, as a dict: path in the checkpoint → the file's own
    path."""


def write_checkpoint(out: Path, imported: Imported) -> str:
    """Write the model in `imported` as the new sealed checkpoint directory `out`, in fp32, which
    `load_for_inference` reads, and return the directory's digest as text. The tensors in `imported`
    are replaced by fp32 ones. Prints the progress to standard error.

    There is no optimizer state, so no run can resume from it. Raises IntegrityFailure naming a
    tensor that is missing, unexpected, misshapen or not floating-point, or that was written
    otherwise than it was in memory. Raises BadInput if `out` exists, lies in a sealed directory, is
    reserved by another command or cannot be written, or if a file to copy cannot be read. A failure
    leaves no part of `out`.
    """
    parameters = {p.name: p for p in parameters_of(imported.model)}
    check_tensors(
        imported.tensors,
        {name: parameter.global_shape for name, parameter in parameters.items()},
        imported.name,
    )
    with new_output(out) as temporary:
        numbers = {}
        with Progress(imported.name, len(parameters), "tensors") as progress:
            for name, parameter in parameters.items():
                imported.tensors[name] = imported.tensors[name].float()
                numbers[name] = measure(imported.tensors[name], parameter)
                progress.advance()
        shapes = {
            name: (torch.float32, parameters[name].global_shape) for name in sorted(parameters)
        }
        write_shard(temporary / FILE, shapes, (imported.tensors[name] for name in shapes))
        check_written(temporary / FILE, numbers, parameters)
        write_index(temporary, [describe(parameters.items(), FILE, numbers)])
        twin = imported.twin and imported.twin.model_dump(mode="json")
        model = imported.model.model_dump(mode="json")
        write_json(temporary / "config.json", {"name": imported.name, "model": model, "twin": twin})
        write_json(temporary / "origin.json", imported.origin)
        if imported.tokenizer:
            imported.tokenizer.save(temporary / "tokenizer")
        for name, source in imported.files.items():
            (temporary / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, temporary / name)
        return seal(temporary)


def check_tensors(
    tensors: Mapping[str, Tensor], expected: Mapping[str, tuple[int, ...]], where: object
) -> None:
    """Compare `tensors`, name → tensor, with `expected`, name → shape; the two must have the same
    names. Raise IntegrityFailure naming a tensor that is missing, unexpected, misshapen or not
    floating-point; `where` begins the message. Nothing is returned."""
    if problem := sorted(tensors.keys() ^ expected.keys()):
        which = "unexpected" if problem[0] in tensors else "missing"
        raise IntegrityFailure(
            f"{where}: tensor {problem[0]!r} is {which} for a model of these settings"
            f" ({len(problem)} are missing or unexpected): copy or save the checkpoint again, with"
            " the settings and the weights of one model"
        )
    for name, shape in expected.items():
        if tuple(tensors[name].shape) != shape:
            raise IntegrityFailure(
                f"{where}: tensor {name!r} has shape {list(tensors[name].shape)}, and a model of"
                f" these settings has {list(shape)}: take files and settings of one model, or copy"
                " the files again"
            )
        if not tensors[name].is_floating_point():
            raise IntegrityFailure(
                f"{where}: tensor {name!r} holds {tensors[name].dtype}, not floating-point numbers,"
                " so it cannot be imported: save the checkpoint again with such numbers"
            )


def check_settings(
    values: Mapping[str, Any], required: Mapping[str, Sequence[Any]], where: object
) -> None:
    """Raise BadInput if a setting in `values`, key → value, is not one of the values that
    `required` allows for its key; `where` begins the message. A setting that is not given counts as
    the first allowed one; settings outside `required` are not looked at."""
    for key, allowed in required.items():
        if (value := values.get(key, allowed[0])) not in allowed:
            raise BadInput(
                f"{where}: {key} is {value!r}; only a model with one of {list(allowed)} can be"
                " imported"
            )


def is_tied(head: Tensor, words: Tensor) -> bool:
    """Return True if `head`, the weight of an output layer, equals the word embedding `words`: in
    number format, shape and values. The two need not share memory."""
    return head.dtype == words.dtype and torch.equal(head, words)


def digests(files: list[Path], directory: Path) -> dict[str, str]:
    """Return a dict path of each of `files`, relative to `directory` and with `/`, → its SHA-256 as
    text. Every file must exist and lie below `directory`."""
    return {path.relative_to(directory).as_posix(): sha256_file(path) for path in files}
