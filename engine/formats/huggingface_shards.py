"""Hugging Face models divided over tensor-parallel ranks (`shard-hf`), and merged again (`export`).

The checkpoint has one file per rank, as every checkpoint here. Its folder `huggingface/` keeps the rest of the original
directory: the other files, the tensor names of each weight file, and the tensors that are not weights. Merging gives
the original files, byte for byte.
"""

import re
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from data_pipeline.tokens.tokenizer import Tokenizer, padded_vocab_size
from engine.formats import (
    Imported,
    check_output,
    digests,
    huggingface_bert,
    huggingface_gpt2,
    new_output,
    write_checkpoint,
)
from engine.formats.huggingface import (
    CONFIG,
    INDEX,
    WEIGHT_FILE,
    WEIGHTS,
    our_tensors,
    read_config,
    read_weights,
    their_tensors,
)
from engine.formats.vocabulary import read_vocabulary
from engine.inference import read_model_config, read_whole
from engine.parallel.layout import check_tensor_parallel
from lineage.atomic import write_json
from lineage.chain import INDEX as OUR_INDEX
from lineage.digest import check_seal
from lineage.errors import BadInput, IntegrityFailure
from lineage.files import FileSchema, parse_document, read_object

FOLDER = "huggingface"
"""Folder of the checkpoint with the rest of the original directory."""
WRITTEN, BUFFERS = "written.json", "buffers.safetensors"
COMPANIONS = ("*.json", "*.txt", "*.model", "*.md", "*.jinja", "LICENSE*")
FORMATS = {"gpt2": huggingface_gpt2, "bert": huggingface_bert}
"""`model_type` → the module that knows its names and row orders. Both modules have the same functions."""


class WeightFile(FileSchema):
    """Content of an original weight file, by its name in `WRITTEN`."""

    tensors: list[str]
    metadata: dict[str, str] | None = None


def shard_huggingface(directory: Path, out: Path, tp: int) -> Path:
    """Write a Hugging Face model as the checkpoint `out`, one file for each of `tp` ranks, and return `out`.

    Every weight keeps its value and number format. The vocabulary is padded until `tp` divides it. Raises BadInput for
    another kind of model or if `tp` does not divide its heads, IntegrityFailure for damaged files.
    """
    check_output(out)
    if (kind := _kind(directory)) not in FORMATS:
        raise BadInput(f"{directory / CONFIG}: model_type is {kind!r}; this engine runs {' and '.join(FORMATS)}")
    theirs = FORMATS[kind]
    values = read_config(directory / CONFIG, theirs.SIZES)
    tensors, files = read_weights(directory, theirs.PREFIX, theirs.BUFFER)
    tensors = {current_name(name): tensor for name, tensor in tensors.items()}
    config = theirs.our_config(values, values["vocab_size"], directory / CONFIG)
    config = config.model_copy(update={"padded_vocab_size": padded_vocab_size(config.vocab_size, tp=tp)})
    check_tensor_parallel(config, tp, directory)
    ours = our_tensors(tensors, config, theirs, directory)
    try:
        tokenizer: Tokenizer | None = read_vocabulary(directory)[0]
    except BadInput:  # such a model takes token ids
        tokenizer = None
    with tempfile.TemporaryDirectory() as folder:
        rest = _write_rest(Path(folder), [path for path in files if path.name != INDEX], theirs)
        imported = Imported(
            name=directory.resolve().name,
            model=config,
            tensors=ours,
            tokenizer=tokenizer,
            origin={
                "format": f"Hugging Face {kind}",
                "files": digests([directory / CONFIG, *files], directory),
            },
            files={f"{FOLDER}/{name}": path for name, path in (companions(directory) | rest).items()},
        )
        write_checkpoint(out, imported, tp, dtype=None)
    return out


def can_be_ours(directory: Path) -> bool:
    """True for a model that this engine runs. Raises BadInput for what is no Hugging Face model with safetensors."""
    return _kind(directory) in FORMATS


def _kind(directory: Path) -> str:
    if not directory.is_dir():
        raise BadInput(f"there is no directory {directory}")
    if not any((directory / name).is_file() for name in (WEIGHTS, INDEX)):
        raise BadInput(f"{directory} is not a Hugging Face model: it has no {WEIGHTS}")
    return str(read_config(directory / CONFIG, ()).get("model_type", "gpt2"))


def is_sharded(checkpoint: Path) -> bool:
    """True if `shard_huggingface` made the checkpoint."""
    return (checkpoint / FOLDER / WRITTEN).is_file()


def merge_huggingface(checkpoint: Path, out: Path) -> Path:
    """Write a checkpoint from `shard_huggingface` as the Hugging Face directory `out`, and return `out`.

    The files are the original ones, byte for byte. Raises BadInput if `out` exists or cannot be written,
    IntegrityFailure if the checkpoint is incomplete or changed.
    """
    check_output(out)
    check_seal(checkpoint)
    folder = checkpoint / FOLDER
    index = read_object(checkpoint / OUR_INDEX)
    theirs = FORMATS.get(str(read_object(folder / CONFIG).get("model_type", "gpt2")))
    if theirs is None:
        raise IntegrityFailure(f"{folder / CONFIG}: `shard-hf` does not divide models of this type")
    config, buffers = read_model_config(checkpoint), load_file(folder / BUFFERS)
    tensors = their_tensors({name: read_whole(checkpoint, index, name) for name in index}, config, theirs)
    tensors |= {name: tensors[weight].clone() for name, weight in theirs.TIED.items()}
    with new_output(out) as temporary:
        save_as_written(
            folder, tensors | buffers, lambda name: current_name(name.removeprefix(theirs.PREFIX)), temporary
        )
        for path in folder.iterdir():
            if path.name not in (WRITTEN, BUFFERS):
                shutil.copyfile(path, temporary / path.name)
    return out


def companions(directory: Path) -> dict[str, Path]:
    """The files beside the weights that `export` gives back, by name."""
    return {path.name: path for pattern in COMPANIONS for path in sorted(directory.glob(pattern))}


def current_name(name: str) -> str:
    """Today's name of a tensor. Old BERTs say gamma and beta."""
    return re.sub(r"LayerNorm\.gamma$", "LayerNorm.weight", re.sub(r"\.beta$", ".bias", name))


def describe_files(weights: list[Path]) -> dict[str, dict[str, Any]]:
    """Tensor names and metadata of each weight file, by its name: what `WRITTEN` holds."""
    described = {}
    for path in weights:
        with safe_open(path, framework="pt") as file:
            described[path.name] = {"tensors": sorted(file.keys()), "metadata": file.metadata()}
    return described


def save_as_written(folder: Path, tensors: Mapping[str, torch.Tensor], rename: Callable[[str], str], out: Path) -> None:
    """Write the weight files that `folder` describes into `out`, of tensors by their renamed names.

    Raises IntegrityFailure for a file or tensor that cannot be.
    """
    for file, content in read_object(folder / WRITTEN).items():
        described = parse_document(content, WeightFile, f"{folder / WRITTEN}, {file}")
        try:
            if not WEIGHT_FILE.fullmatch(file):
                raise KeyError(file)
            chosen = {name: tensors[name if name in tensors else rename(name)] for name in described.tensors}
        except KeyError as error:
            raise IntegrityFailure(f"{folder / WRITTEN} names {error}, which the checkpoint lacks") from error
        save_file(chosen, out / file, metadata=described.metadata)


def _write_rest(folder: Path, weights: list[Path], theirs: ModuleType) -> dict[str, Path]:
    """Write names and metadata of each weight file and all buffers into `folder`; return the files by name."""
    buffers = {}
    for path in weights:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                if theirs.BUFFER.fullmatch(name.removeprefix(theirs.PREFIX)):
                    buffers[name] = file.get_tensor(name)
    write_json(folder / WRITTEN, describe_files(weights))
    save_file(buffers, folder / BUFFERS)
    return {name: folder / name for name in (WRITTEN, BUFFERS)}
