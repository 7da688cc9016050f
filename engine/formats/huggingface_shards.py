"""Hugging Face models divided over tensor-parallel ranks, and back: `shard-hf` and the `export` of what it made.

A checkpoint of this suite has a file per rank and an index by global name, so dividing is importing with `tp` files
and merging is reading whole tensors. Its folder `huggingface/` keeps what a model does not need of the directory
it came from: the other files, the names in each weight file and the tensors that are no weights. So the way back gives
the same files.
"""

import re
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from data_pipeline.tokens.tokenizer import Tokenizer, padded_vocab_size
from engine.checkpoint.checkpoint import read_model_config
from engine.checkpoint.shards import INDEX as OUR_INDEX
from engine.checkpoint.shards import read_whole
from engine.config import ModelConfig
from engine.formats import Imported, check_output, digests, is_tied, new_output, parameters_of, write_checkpoint
from engine.formats import huggingface as gpt2
from engine.formats import huggingface_bert as bert
from engine.formats.huggingface import CONFIG, INDEX, WEIGHT_FILE, WEIGHTS, read_config, read_weights
from engine.formats.vocabulary import read_vocabulary
from engine.parallel.layout import check_tensor_parallel
from lineage.atomic import write_json
from lineage.digest import check_seal
from lineage.errors import BadInput, IntegrityFailure
from lineage.files import FileSchema, parse_document, read_object

FOLDER = "huggingface"
"""Folder of a checkpoint that keeps the rest of the directory it was made from."""
WRITTEN, BUFFERS = "written.json", "buffers.safetensors"
COMPANIONS = ("*.json", "*.txt", "*.model", "*.md", "*.jinja", "LICENSE*")


class WeightFile(FileSchema):
    """What a file of a model held that was divided, in the file of that name in `WRITTEN`."""

    tensors: list[str]
    metadata: dict[str, str] | None = None


@dataclass(frozen=True)
class TheirModel:
    """How one of their models becomes one of ours and back; their names are without `prefix`."""

    prefix: str
    sizes: tuple[str, ...]
    """Keys of config.json that are numbers."""
    buffer: re.Pattern[str]
    """Tensors that are no weights."""
    words: str
    """The word embedding."""
    tied: Mapping[str, str]
    """Names under which a weight may be there again."""
    optional: tuple[str, ...]
    """Beginnings of the names of heads that may be missing."""
    model: Callable[[dict[str, Any], int, Path], ModelConfig]
    """(config.json, rows of the word embedding, its path) → the model."""
    theirs: Callable[[str, ModelConfig], list[str]]
    """Their tensors of which one of ours is made."""
    join: Callable[[str, list[torch.Tensor], ModelConfig], torch.Tensor]
    split: Callable[[str, torch.Tensor, ModelConfig], list[torch.Tensor]]


THEIR_MODELS = {
    "gpt2": TheirModel(
        prefix=gpt2.PREFIX,
        sizes=gpt2.SIZES,
        buffer=gpt2.BUFFER,
        words="wte.weight",
        tied={gpt2.HEAD: "wte.weight"},
        optional=(),
        model=gpt2.our_config,
        theirs=lambda name, config: [gpt2.their_name(name).removeprefix(gpt2.PREFIX)],
        join=lambda name, parts, config: gpt2.from_theirs(name, parts[0], config),
        split=lambda name, tensor, config: [gpt2.to_theirs(name, tensor, config)],
    ),
    "bert": TheirModel(
        prefix=bert.PREFIX,
        sizes=bert.SIZES,
        buffer=bert.BUFFER,
        words=bert.WORDS,
        tied=bert.TIED,
        optional=bert.OPTIONAL,
        model=bert.our_config,
        theirs=bert.their_names,
        join=bert.join,
        split=bert.split,
    ),
}
"""By `model_type`."""


def shard_huggingface(directory: Path, out: Path, tp: int) -> Path:
    """Write a Hugging Face model as the checkpoint `out` with a file for each of `tp` ranks, and return `out`.

    Every weight keeps its value and number format; rows are added to the vocabulary so that `tp` divides it. Raises
    BadInput for a model of another kind or a `tp` that does not divide its heads, IntegrityFailure for damaged files.
    """
    if not directory.is_dir():
        raise BadInput(f"there is no directory {directory}")
    if not any((directory / name).is_file() for name in (WEIGHTS, INDEX)):
        raise BadInput(f"{directory} is not a Hugging Face model: it has no {WEIGHTS}")
    check_output(out)
    values = read_config(directory / CONFIG, ())
    kind = values.get("model_type", "gpt2")
    if kind not in THEIR_MODELS:
        raise BadInput(f"{directory / CONFIG}: model_type is {kind!r}; {' and '.join(THEIR_MODELS)} can be divided")
    family = THEIR_MODELS[kind]
    values = read_config(directory / CONFIG, family.sizes)
    tensors, files = read_weights(directory, family.prefix, family.buffer)
    tensors = {_current_name(name): tensor for name, tensor in tensors.items()}
    config = family.model(values, values["vocab_size"], directory / CONFIG)
    config = config.model_copy(update={"padded_vocab_size": padded_vocab_size(config.vocab_size, tp=tp)})
    check_tensor_parallel(config, tp, directory)
    ours = _take(tensors, config, family, directory)
    companions = {path.name: path for pattern in COMPANIONS for path in sorted(directory.glob(pattern))}
    with tempfile.TemporaryDirectory() as name:
        kept = _keep_aside(Path(name), [path for path in files if path.name != INDEX], family)
        imported = Imported(
            name=directory.resolve().name,
            model=config,
            tensors=ours,
            tokenizer=_tokenizer(directory),
            origin={"format": f"Hugging Face {kind}", "files": digests([directory / CONFIG, *files], directory)},
            files={f"{FOLDER}/{name}": path for name, path in (companions | kept).items()},
        )
        write_checkpoint(out, imported, tp, dtype=None)
    return out


def is_sharded(checkpoint: Path) -> bool:
    """Whether `shard_huggingface` made the checkpoint."""
    return (checkpoint / FOLDER / WRITTEN).is_file()


def merge_huggingface(checkpoint: Path, out: Path) -> Path:
    """Write a checkpoint that `shard_huggingface` made as the Hugging Face directory `out`, and return `out`.

    The files are those it was made from, bit for bit. Raises BadInput if `out` exists or cannot be written,
    IntegrityFailure if the checkpoint is incomplete or changed.
    """
    check_output(out)
    check_seal(checkpoint)
    kept = checkpoint / FOLDER
    written, index = read_object(kept / WRITTEN), read_object(checkpoint / OUR_INDEX)
    if (family := THEIR_MODELS.get(str(read_object(kept / CONFIG).get("model_type", "gpt2")))) is None:
        raise IntegrityFailure(f"{kept / CONFIG} is not of a model that was divided")
    config = read_model_config(checkpoint)
    buffers = load_file(kept / BUFFERS)
    tensors: dict[str, torch.Tensor] = {}
    for name in index:
        parts = family.split(name, read_whole(checkpoint, index, name), config)
        tensors |= dict(zip(family.theirs(name, config), parts, strict=True))
    tensors |= {name: tensors[weight].clone() for name, weight in family.tied.items()}
    with new_output(out) as temporary:
        for file, content in written.items():
            one = parse_document(content, WeightFile, f"{kept / WRITTEN}, {file}")
            try:
                if not WEIGHT_FILE.fullmatch(file):
                    raise KeyError(file)
                held = {
                    name: buffers[name] if name in buffers else tensors[_current_name(name.removeprefix(family.prefix))]
                    for name in one.tensors
                }
            except KeyError as error:
                raise IntegrityFailure(f"{kept / WRITTEN} names {error}, which the checkpoint has not") from error
            save_file(held, temporary / file, metadata=one.metadata)
        for path in kept.iterdir():
            if path.name not in (WRITTEN, BUFFERS):
                shutil.copyfile(path, temporary / path.name)
    return out


def _current_name(name: str) -> str:
    """The name that a tensor has now, of the one that an old BERT gives it."""
    return re.sub(r"LayerNorm\.gamma$", "LayerNorm.weight", re.sub(r"\.beta$", ".bias", name))


def _keep_aside(folder: Path, weights: list[Path], family: TheirModel) -> dict[str, Path]:
    """Write what the files hold beside weights into `folder`: names and metadata of each, and buffers."""
    written, buffers = {}, {}
    for path in weights:
        with safe_open(path, framework="pt") as file:
            written[path.name] = {"tensors": sorted(file.keys()), "metadata": file.metadata()}
            for name in file.keys():  # noqa: SIM118
                if family.buffer.fullmatch(name.removeprefix(family.prefix)):
                    buffers[name] = file.get_tensor(name)
    write_json(folder / WRITTEN, written)
    save_file(buffers, folder / BUFFERS)
    return {name: folder / name for name in (WRITTEN, BUFFERS)}


def _take(
    tensors: dict[str, torch.Tensor], config: ModelConfig, family: TheirModel, directory: Path
) -> dict[str, torch.Tensor]:
    """Our tensors made of theirs, which are all used up."""
    words = tensors.get(family.words)
    if words is None or words.size(0) != config.vocab_size or len(tensors) < config.num_layers:
        raise IntegrityFailure(f"{directory}: the weights are not those of a model as {CONFIG} describes it")
    for name, weight in family.tied.items():
        if (other := tensors.pop(name, None)) is not None and not is_tied(other, tensors[weight]):
            raise BadInput(f"{directory}: {name} is not {weight}; only tied models can be divided")
    shapes = {p.name: p.global_shape for p in parameters_of(config)}
    names = {name: family.theirs(name, config) for name in shapes}
    problems = tensors.keys() ^ {part for parts in names.values() for part in parts}
    if problem := sorted(name for name in problems if name in tensors or not name.startswith(family.optional)):
        which = "unexpected" if problem[0] in tensors else "missing"
        raise IntegrityFailure(f"{directory}: tensor {problem[0]!r} is {which} ({len(problem)} such tensors)")
    ours = {}
    for name, parts in names.items():
        if parts[0] not in tensors:
            ours[name] = words.new_zeros(shapes[name])
            continue
        try:
            ours[name] = family.join(name, [tensors.pop(part) for part in parts], config)
        except RuntimeError as error:
            raise IntegrityFailure(f"{directory}: tensor {parts[0]!r} is misshapen") from error
    return ours


def _tokenizer(directory: Path) -> Tokenizer | None:
    """The directory's tokenizer if it is one that this suite reads."""
    try:
        return read_vocabulary(directory)[0]
    except BadInput:
        return None
