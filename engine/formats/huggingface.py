"""Hugging Face GPT-2 directories (`GPT2LMHeadModel`), read and written.

Their linear weights are [in, out] (Conv1D), ours [out, in]. The rows of their `c_attn` are [3, n, d], ours [n, 3, d]
(transformers, `models/gpt2/modeling_gpt2.py`). `engine/compare/names/transformers.toml` lists names and row orders.
Shapes: n heads, d head dim.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from data_pipeline.tokens.tokenizer import Tokenizer, padded_vocab_size
from engine.checkpoint.checkpoint import LoadedCheckpoint
from engine.compare.recorder import read_names
from engine.config import ModelConfig
from engine.formats import (
    Imported,
    check_settings,
    check_tensors,
    check_vocabulary,
    describe_ours,
    digests,
    is_tied,
    parameters_of,
    read_ours,
)
from engine.formats.vocabulary import read_vocabulary, read_vocabulary_files, write_vocabulary
from lineage.atomic import write_json
from lineage.config import parse_config
from lineage.errors import BadInput, IntegrityFailure
from lineage.files import read_object

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
OURS = "mlm_repro"
"""Key in an exported config.json for our own records."""

WORD_EMBEDDINGS = "embedding.word_embeddings.weight"
NAMES = read_names("transformers")
HEAD = "lm_head.weight"
PREFIX = "transformer."
WORDS = "wte.weight"
TIED = {HEAD: WORDS}
"""Copy → weight."""
OPTIONAL = ()
"""Beginnings of the names that a directory may lack."""
SIZES = ("n_layer", "n_embd", "n_head", "n_positions", "vocab_size")
"""Keys of config.json that must be numbers."""
WEIGHT_FILE = re.compile(r"[\w-][\w.-]*\.safetensors")
"""A plain name, which cannot lead out of the directory."""
BUFFER = re.compile(r"h\.\d+\.attn\.(bias|masked_bias)")
"""Tensors that are not weights: the causal mask, in old files."""

REQUIRED = {
    "model_type": ("gpt2",),
    "activation_function": ("gelu_new", "gelu_pytorch_tanh", "gelu_fast"),
    "layer_norm_epsilon": (1e-5,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
}
"""Allowed values of settings that would make another model, the default first."""


def write_huggingface(loaded: LoadedCheckpoint, directory: Path) -> None:
    """Write a GPT-2's weights into `directory`, in fp32 and without padding rows of the vocabulary, and its tokenizer.

    Raises IntegrityFailure if model and tokenizer differ in vocabulary size.
    """
    config = loaded.config
    tokenizer = Tokenizer.load(loaded.directory / "tokenizer")
    if tokenizer.vocab_size != config.vocab_size:
        raise IntegrityFailure(
            f"the tokenizer of {loaded.directory} has {tokenizer.vocab_size} entries, its model {config.vocab_size}"
        )
    weights = {
        their_name(name): to_theirs(name, tensor.detach().float(), config)
        for name, tensor in loaded.model.named_parameters()
    }
    end = {"bos_token_id": tokenizer.end_of_text, "eos_token_id": tokenizer.end_of_text}
    save_file(weights, directory / WEIGHTS, metadata={"format": "pt"})
    ours = {OURS: describe_ours(loaded.directory, loaded.digest)}
    write_json(directory / CONFIG, their_config(config) | end | ours)
    write_json(directory / "generation_config.json", {"_from_model_config": True, **end})
    write_vocabulary(loaded.directory / "tokenizer", directory, config.seq_length)


def their_config(config: ModelConfig) -> dict[str, Any]:
    """The model as transformers' `GPT2Config`."""
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "activation_function": "gelu_new",
        "n_layer": config.num_layers,
        "n_embd": config.hidden_size,
        "n_head": config.num_heads,
        "n_inner": None,
        "n_positions": config.seq_length,
        "n_ctx": config.seq_length,
        "vocab_size": config.vocab_size,
        "layer_norm_epsilon": 1e-5,
        "attn_pdrop": config.dropout,
        "embd_pdrop": config.dropout,
        "resid_pdrop": config.dropout,
        "initializer_range": config.init_std,
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
    }


def their_name(name: str) -> str:
    """Translate our name to Hugging Face's. Raises KeyError if GPT-2 has no such parameter."""
    if (theirs := NAMES.theirs(name)) is None:
        raise KeyError(name)
    return theirs


def to_theirs(name: str, tensor: torch.Tensor, config: ModelConfig) -> torch.Tensor:
    """Our whole tensor in their row order, without padding rows of the vocabulary."""
    if name == WORD_EMBEDDINGS:
        return tensor[: config.vocab_size].contiguous()
    return NAMES.in_their_order(name, tensor, config.num_heads).contiguous()


def from_theirs(name: str, tensor: torch.Tensor, config: ModelConfig) -> torch.Tensor:
    """The inverse of `to_theirs`. Padding rows of the vocabulary are zeros."""
    if name == WORD_EMBEDDINGS:
        padding = tensor.new_zeros(config.padded_vocab_size - config.vocab_size, tensor.size(1))
        return torch.cat([tensor[: config.vocab_size], padding])
    return NAMES.in_our_order(name, tensor, config.num_heads)


def their_names(name: str, config: ModelConfig) -> list[str]:
    """Names of Hugging Face's tensors that make up one of ours."""
    return [their_name(name).removeprefix(PREFIX)]


def join(name: str, parts: list[torch.Tensor], config: ModelConfig) -> torch.Tensor:
    """Our tensor from theirs."""
    return from_theirs(name, parts[0], config)


def split(name: str, tensor: torch.Tensor, config: ModelConfig) -> list[torch.Tensor]:
    """The inverse of `join`."""
    return [to_theirs(name, tensor, config)]


def read_huggingface(directory: Path, vocab: Path | None = None, heads: int | None = None) -> Imported:
    """Read a Hugging Face GPT-2 directory. `vocab` replaces its tokenizer.

    Embedding rows beyond the tokenizer's entries are padding and become zeros. Other values keep their bits. Raises
    BadInput for another model and IntegrityFailure for damaged files, naming the tensor or file.
    """
    values = read_config(directory / CONFIG, SIZES)
    tensors, files = read_weights(directory, PREFIX, BUFFER)
    tokenizer, tokenizer_files = read_vocabulary_files(vocab) if vocab else read_vocabulary(directory)
    rows = values["vocab_size"]
    ends = {"wpe.weight": (values["n_positions"], values["n_embd"]), WORDS: (rows, values["n_embd"])}
    check_tensors({name: tensors[name] for name in ends if name in tensors}, ends, directory)
    config = our_config(values, tokenizer.vocab_size, directory / CONFIG)
    if heads is not None and heads != config.num_heads:
        raise BadInput(f"{directory / CONFIG}: n_head is {config.num_heads}, but --heads says {heads}")
    layers = {int(match[1]) for name in tensors if (match := re.match(r"h\.(\d+)\.", name))}
    if len(layers) != config.num_layers:
        raise IntegrityFailure(f"{directory}: {CONFIG} says {config.num_layers} layers, the weights have {len(layers)}")
    parameters = {p.name: p.global_shape for p in parameters_of(config)}
    theirs = {name: their_name(name).removeprefix(PREFIX) for name in parameters}
    shapes = {theirs[name]: shape[::-1] if name.endswith(NAMES.transposed) else shape
              for name, shape in parameters.items()} | {WORDS: (rows, values["n_embd"])}  # fmt: skip
    head = tensors.pop(HEAD, None)
    check_tensors(tensors, shapes, directory)
    check_vocabulary(tokenizer, rows, directory)
    if head is not None and not is_tied(head, tensors[WORDS]):
        raise BadInput(f"{directory}: {HEAD} is not the word embedding; only tied models can be imported")
    name, twin = read_ours(values.get(OURS), "huggingface", directory / CONFIG)
    return Imported(
        name=name,
        model=config,
        tensors={name: from_theirs(name, tensors.pop(theirs[name]), config) for name in parameters},
        tokenizer=tokenizer,
        origin={
            "format": "Hugging Face GPT-2",
            "files": digests([directory / CONFIG, *files], directory) | digests(tokenizer_files, vocab or directory),
        },
        twin=twin,
    )


def our_config(values: dict[str, Any], vocab_size: int, path: Path) -> ModelConfig:
    """The model that a `GPT2Config` describes. Raises BadInput if a setting makes it another model."""
    check_settings(values, REQUIRED, path)
    if values.get("n_inner") not in (None, 4 * values["n_embd"]):
        raise BadInput(f"{path}: n_inner is {values['n_inner']!r}; four times n_embd can be imported")
    ours = {
        "num_layers": values["n_layer"],
        "hidden_size": values["n_embd"],
        "num_heads": values["n_head"],
        "seq_length": values["n_positions"],
        "vocab_size": vocab_size,
        "padded_vocab_size": padded_vocab_size(vocab_size),
        "dropout": values.get("resid_pdrop", 0.1),
        "init_std": values.get("initializer_range", 0.02),
    }
    return parse_config(ours, ModelConfig, str(path))


def read_config(path: Path, sizes: Sequence[str]) -> dict[str, Any]:
    """A directory's config.json. Raises IntegrityFailure if it cannot be read or one of `sizes` is not a number."""
    values = read_object(path)
    for key in sizes:
        if type(values.get(key)) is not int:
            raise IntegrityFailure(f"{path}: {key} is {values.get(key)!r}, not a number")
    return values


def read_weights(directory: Path, prefix: str, buffer: re.Pattern[str]) -> tuple[dict[str, torch.Tensor], list[Path]]:
    """All weights, by their names without `prefix`, and the files with them, the index first.

    Raises IntegrityFailure if a file is damaged or disagrees with the index.
    """
    tensors: dict[str, torch.Tensor] = {}
    single, index = directory / WEIGHTS, directory / INDEX
    if single.is_file():
        files, places = [single], None
    else:
        places = _read_index(index)
        files = [directory / name for name in sorted(set(places.values()))]
    for path in files:
        try:
            with safe_open(path, framework="pt") as file:
                names = set(file.keys())
                listed = names if places is None else {name for name, place in places.items() if place == path.name}
                if problem := sorted(names ^ listed):
                    which = "not in the index" if problem[0] in names else "missing"
                    raise IntegrityFailure(f"{path}: tensor {problem[0]!r} is {which}")
                for name in names:
                    short = name.removeprefix(prefix)
                    if short in tensors:
                        raise IntegrityFailure(f"{path}: tensor {name!r} is there twice")
                    if not buffer.fullmatch(short):
                        tensors[short] = file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise IntegrityFailure(f"{path} cannot be read: {error}") from error
    return tensors, files if places is None else [index, *files]


def _read_index(path: Path) -> dict[str, str]:
    """File name of each tensor. Raises IntegrityFailure for a path that leads out of the directory."""
    places = read_object(path).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise IntegrityFailure(f"{path} has no weight_map")
    for name in places.values():
        if not isinstance(name, str) or not WEIGHT_FILE.fullmatch(name):
            raise IntegrityFailure(f"{path} names {name!r}, which is not a file of the directory")
    return places
