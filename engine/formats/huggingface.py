"""Hugging Face directories of GPT-2 and BERT, read and written. Each format's TOML file has its
names, row orders and settings.

Shapes: n heads, d head dim.
"""

import re
from collections.abc import Mapping
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from mlm_repro.data_pipeline.tokens.tokenizer import FILE_NAME, Tokenizer, padded_vocab_size
from mlm_repro.engine.checkpoint.shards import reading
from mlm_repro.engine.compare.recorder import NameMap
from mlm_repro.engine.config import ModelConfig, TwinScale
from mlm_repro.engine.formats import Imported, check_settings, check_tensors, digests, is_tied
from mlm_repro.engine.formats.vocabulary import (
    check_vocabulary,
    read_vocabulary,
    read_vocabulary_files,
    write_vocabulary,
)
from mlm_repro.engine.inference import LoadedCheckpoint, parameters_of
from mlm_repro.engine.published import CONFIG, INDEX, WEIGHTS
from mlm_repro.lineage.atomic import JSON, write_json
from mlm_repro.lineage.config import load_config, parse_config
from mlm_repro.lineage.errors import BadInput, IntegrityFailure
from mlm_repro.lineage.files import read_object

OURS = "mlm_repro"
"""Key of this suite's own records in an exported config.json."""
WEIGHT_FILE = re.compile(r"[\w-][\w.-]*\.safetensors")
"""Regular expression of the plain name of a file of weights, which cannot lead out of the
directory."""
HEADS = "cls."
"""Text with which the names of the tensors of a BERT's heads begin, which lie beside its body and
lack its prefix."""
FOLDER = "huggingface"
"""Name of the folder, in a checkpoint imported from a BERT's Hugging Face directory and in a
divided model, for those of that directory's files that match COMPANIONS, which its weights do
not."""
SEPARATOR = "[SEP]"
"""Token that ends a document in an imported BERT's tokenizer, which has no end-of-text token."""
COMPANIONS = ("*.json", "*.txt", "*.model", "*.md", "*.jinja", "LICENSE*")
OVER_VOCABULARY = ("embedding.word_embeddings.weight", "masked_head.bias")
"""Names of our tensors with a row per vocabulary entry. Rows beyond the vocabulary are padding."""


class Format(NameMap):
    """Names, row orders and settings of one `model_type` of Hugging Face, such as `gpt2`, read from
    a TOML file. The methods turn our names, whole tensors and configuration into Hugging Face's,
    and tensors back. Tensor names, which the methods return too, are without the field `prefix`,
    with which the names of the body's tensors begin in Hugging Face's files."""

    prefix: str
    """Text with which the names of the body's tensors begin in Hugging Face's files, such as
    `bert.`."""
    words: str
    """Name, without `prefix`, of the word embedding in the files."""
    buffers: str
    """Regular expression of the names, without `prefix`, of tensors in the files that are not
    weights; these are not read."""
    optional: tuple[str, ...] = ()
    """Texts with which the names begin of heads' tensors, without `prefix`, that a directory may
    lack; such a tensor becomes zeros."""
    first_norm: str = ""
    """Name in this format of the norm that our first layer begins with, with `{0}` in place of
    weight or bias; empty if the layers' norms match ours."""
    closing_norm: str = ""
    """Name in this format of a layer's last norm, with which our next layer begins, with `{0}` in
    place of weight or bias and `{1}` in place of the layer's number; empty if the layers' norms
    match ours."""
    inner: str
    """Key in config.json of the width between the MLP's two products, which must be four times the
    hidden size."""
    default_inner: int | None = None
    dropout: str
    """Key of config.json for the dropout probability."""
    sizes: dict[str, str]
    """Name of one of our sizes in ModelConfig → the key of this size in config.json."""
    tied: dict[str, str]
    """Name of a tensor that repeats a weight → name of that weight, each without `prefix`. An
    import drops the first after comparing the two."""
    required: dict[str, tuple[Any, ...]]
    """Key of config.json → tuple of the values with which the model is one of ours, the default
    first."""
    constants: JSON
    written: dict[str, str]
    """Key of an exported config.json → dotted attribute of our ModelConfig that gives its value.
    All other keys are `constants`."""

    def their_names(self, name: str, config: ModelConfig) -> list[str]:
        """Return a list of the names, without this format's `prefix`, of the Hugging Face tensors
        that together are our tensor `name`: one, or three for query, key and value, in this order.
        `config`, the model's, gives the number of layers, by which a BERT's last norm is named.
        Raises KeyError if the format has no such tensor."""
        norm = re.fullmatch(r"(?:layers\.(\d+)\.input|final)_layernorm\.(\w+)", name)
        if self.closing_norm and norm:
            before = int(norm[1] or config.num_layers) - 1
            # Layer 0's first norm closes no layer, so the format has a name of its own for it.
            theirs = self.first_norm if before < 0 else self.closing_norm
            return [theirs.format(norm[2], before)]
        if (named := self.theirs(name)) is None:
            raise KeyError(name)
        named = named.removeprefix(self.prefix)
        # A name with `query` stands for three tensors, which are one of ours.
        parts = ("query", "key", "value") if ".query." in named else ("query",)
        return [named.replace(".query.", f".{part}.") for part in parts]

    def join(self, name: str, parts: list[Tensor], config: ModelConfig) -> Tensor:
        """Return our whole tensor `name`, made of `parts`, its Hugging Face tensors in the order of
        the method `their_names`, with rows and dims in our order. Rows of the padded vocabulary
        beyond the real vocabulary become zeros. `config`, our model's, gives the heads and both
        sizes of the vocabulary."""
        tensor = self.in_our_order(
            name, torch.cat(parts) if len(parts) > 1 else parts[0], config.num_heads
        )
        if name in OVER_VOCABULARY:
            padding = tensor.new_zeros(
                config.padded_vocab_size - config.vocab_size, *tensor.shape[1:]
            )
            tensor = torch.cat([tensor[: config.vocab_size], padding])
        return tensor

    def split(self, name: str, tensor: Tensor, config: ModelConfig) -> list[Tensor]:
        """Return our whole tensor `name`, given as `tensor`, as a list of contiguous Hugging Face
        tensors, in the order of the method `their_names` and with rows and dims in Hugging Face's
        order; the inverse of `join`, without padding rows. `config`, our model's, gives the heads
        and the vocabulary."""
        tensor = tensor[: config.vocab_size] if name in OVER_VOCABULARY else tensor
        parts = self.in_their_order(name, tensor, config.num_heads).chunk(
            len(self.their_names(name, config))
        )
        return [part.contiguous() for part in parts]

    def their_tensors(
        self, tensors: Mapping[str, Tensor], config: ModelConfig
    ) -> dict[str, Tensor]:
        """Return a dict Hugging Face name, without this format's `prefix`, → tensor, made of
        `tensors`, whole tensors by our names of the model that `config` describes. A tensor of
        query, key and value becomes three if the format has three. Padding rows of the vocabulary
        are left out. Raises KeyError for a tensor that the format does not have."""
        made: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            made |= dict(
                zip(self.their_names(name, config), self.split(name, tensor, config), strict=True)
            )
        return made

    def their_config(self, config: ModelConfig) -> JSON:
        """Return as a dict the settings that transformers' config.json has for the model of the
        ModelConfig `config`, without the ids of special tokens."""
        return self.constants | {
            theirs: attrgetter(ours)(config) for theirs, ours in self.written.items()
        }


FORMATS = {
    kind: load_config(Path(__file__).with_name(f"huggingface_{kind}.toml"), Format)
    for kind in ("gpt2", "bert")
}


def format_of(config: ModelConfig, where: Path) -> Format:
    """Return the Format with which the model of the ModelConfig `config` is written for
    transformers; `where` names the model in errors. Raises BadInput for a family other than GPT-2
    and BERT, or for options of the family that its config.json cannot state."""
    if (theirs := FORMATS.get(config.family)) is None:
        raise BadInput(
            f"{where} is a {config.family}; only {' and '.join(FORMATS)} can be written in Hugging"
            " Face's format"
        )
    # Asked of what an import would read, so that a new option is refused until a format has it.
    section = our_config(
        theirs.their_config(config), config.family, config.vocab_size, where
    ).section
    if section != config.section:
        raise BadInput(
            f"{where} cannot be written for transformers: its options are {config.section}, and a"
            f" model of transformers has {section}"
        )
    return theirs


def write_huggingface(loaded: LoadedCheckpoint, directory: Path) -> None:
    """Write the model of the LoadedCheckpoint `loaded` into the existing folder `directory` as a
    Hugging Face directory: model.safetensors in fp32 without padding rows of the vocabulary,
    config.json, the tokenizer's files and, for a GPT-2, generation_config.json. `loaded.model`
    itself becomes fp32.

    Raises BadInput for a model that transformers does not have and for a checkpoint without a
    tokenizer, and IntegrityFailure if model and tokenizer differ in vocabulary size.
    """
    config = loaded.config
    is_bert = config.family == "bert"
    theirs = format_of(config, loaded.directory)
    tokenizer = Tokenizer.load(loaded.directory / "tokenizer")
    entries = tokenizer.vocab_size
    if is_bert:
        # A tokenizer without BERT's special tokens has them after its last entry.
        entries = max(entries, tokenizer.special_ids[-1] + 1)
    if entries != config.vocab_size:
        raise IntegrityFailure(
            f"{loaded.directory} cannot be exported: its tokenizer has {entries} entries, and its"
            f" model's vocabulary {config.vocab_size}: the two do not belong together, so copy or"
            " save the checkpoint again"
        )
    tensors = dict(loaded.model.float().named_parameters())
    save_file(named_as_theirs(tensors, config), directory / WEIGHTS, metadata={"format": "pt"})
    described = read_object(loaded.directory / "config.json")
    ours = {
        "name": described.get("name"),
        "twin": described.get("twin"),
        "checkpoint": loaded.digest,
    }
    end = {"bos_token_id": tokenizer.end_of_text, "eos_token_id": tokenizer.end_of_text}
    ids = {"pad_token_id": tokenizer.special_ids[3]} if is_bert else end
    write_json(directory / CONFIG, theirs.their_config(config) | ids | {OURS: ours})
    if not is_bert:
        write_json(directory / "generation_config.json", {"_from_model_config": True, **end})
    write_vocabulary(tokenizer, directory, config.seq_length, is_bert)


def read_ours(values: Any, otherwise: str, where: object) -> tuple[str, TwinScale | None]:
    """Return a pair (name, TwinScale) of a model from `values`, a dict (this suite's own records in
    a config.json), or anything else if there are no such records. The name is the text `otherwise`
    if `values` lacks a name or has one that is no plain word; the TwinScale is None if `values`
    lacks one.

    Raises BadInput, which names `where`, for an invalid twin scale.
    """
    values = values if isinstance(values, dict) else {}
    name = values.get("name")
    twin = values.get("twin")
    # Anyone may have written the file: only a plain word is taken over as a name.
    if not isinstance(name, str) or not re.fullmatch(r"\w[\w.-]{0,99}", name):
        name = otherwise
    return name, parse_config(twin, TwinScale, str(where)) if twin else None


def named_as_theirs(tensors: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Return a dict transformers' full name → tensor of the whole model that `config` describes,
    made of `tensors`, its tensors by our names: in transformers' row order, and without padding
    rows of the vocabulary. Raises KeyError for a family or a tensor that transformers does not
    have."""
    theirs = FORMATS[config.family]
    converted = theirs.their_tensors(
        {name: tensor.detach() for name, tensor in tensors.items()}, config
    )
    return {
        name if name.startswith(HEADS) else theirs.prefix + name: tensor
        for name, tensor in converted.items()
    }


def our_tensors(
    tensors: dict[str, Tensor],
    stored: ModelConfig,
    config: ModelConfig,
    theirs: Format,
    directory: Path,
) -> dict[str, Tensor]:
    """Return a dict our name → whole tensor of the model `config`, converted from Hugging Face's
    `tensors`, a dict by their names without prefix, which is emptied. Embedding rows beyond the
    vocabulary of `config` become zeros, up to its padded size. `stored` is the same model, but with
    as many words as the files' embedding has rows; `theirs` is the Format.

    A missing tensor that the directory may lack, of a head or of BERT's pooler, becomes zeros.
    Raises BadInput for an output head that is not tied, and IntegrityFailure for a tensor or a
    number of layers that does not fit the model; `directory` is only named there.
    """
    matches = [re.match(r"(?:h|encoder\.layer)\.(\d+)\.", name) for name in tensors]
    layers = {int(match[1]) for match in matches if match}
    if len(layers) != config.num_layers:
        raise IntegrityFailure(
            f"{directory} is damaged, so copy or save it again: {CONFIG} says"
            f" {config.num_layers} layers, the weights have {len(layers)}"
        )
    shapes = {p.name: p.global_shape for p in parameters_of(stored)}
    empty = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    expected = theirs.their_tensors(empty, stored)
    copies = {name: tensors.pop(name) for name in theirs.tied if name in tensors}
    lacking = {
        name for name in expected if name not in tensors and name.startswith(theirs.optional)
    }
    check_tensors(
        tensors,
        {name: tuple(e.shape) for name, e in expected.items() if name not in lacking},
        directory,
    )
    for name, copy in copies.items():
        if not is_tied(copy, tensors[theirs.tied[name]]):
            raise BadInput(
                f"{directory}: {name} differs from {theirs.tied[name]}; only a model in which the"
                " two are equal can be imported"
            )
    ours = {}
    words = tensors[theirs.words]
    for name, shape in shapes.items():
        parts = theirs.their_names(name, config)
        if lacking.isdisjoint(parts):
            ours[name] = theirs.join(name, [tensors.pop(part) for part in parts], config)
        else:
            ours[name] = words.new_zeros(shape)
    return ours


def read_huggingface(
    directory: Path, vocab: Path | None = None, heads: int | None = None
) -> Imported:
    """Return the model in a Hugging Face directory of a GPT-2 or BERT as an Imported. The tokenizer
    is the directory's or, for a GPT-2, the one in the directory `vocab` if it is given; a BERT may
    have none, and `vocab` is not used for it. `heads` may be None or the model's number of
    attention heads.

    Embedding rows beyond a GPT-2's entries are padding and become zeros, as do tensors of a BERT's
    output heads that the directory lacks; all other values keep their bits. A BERT's other files
    are listed to be copied into the folder `huggingface` of the checkpoint. Raises BadInput for
    another model, for another number of heads, without a GPT-2's vocabulary, and for a
    tokenizer.json of a BERT that cannot be used; IntegrityFailure for other damaged files, naming
    the tensor or file, and for a tokenizer with more entries than the embedding has rows.
    """
    path = directory / CONFIG
    values = read_object(path)
    kind = str(values.get("model_type", "gpt2"))
    if (theirs := FORMATS.get(kind)) is None:
        raise BadInput(
            f"{path}: model_type is {kind!r}; only {' and '.join(FORMATS)} can be imported"
        )
    for key in (*theirs.sizes.values(), "vocab_size"):
        if type(values.get(key)) is not int:
            raise IntegrityFailure(
                f"{path}: {key} is {values.get(key)!r}, not a whole number: copy or save it again"
            )
    tensors, files = read_weights(directory, theirs.prefix, theirs.buffers)
    rows = values["vocab_size"]
    is_gpt2 = kind == "gpt2"
    tokenizer = None
    sources = list[Path]()
    companion_files = {}
    if is_gpt2:
        tokenizer, sources = read_vocabulary_files(vocab) if vocab else read_vocabulary(directory)
    else:
        tensors = {current_name(name): tensor for name, tensor in tensors.items()}
        companion_files = {
            f"{FOLDER}/{name}": source for name, source in companions(directory).items()
        }
        if (directory / FILE_NAME).is_file():
            tokenizer = Tokenizer.open(directory, SEPARATOR)
    config = our_config(values, kind, tokenizer.vocab_size if tokenizer and is_gpt2 else rows, path)
    if heads is not None and heads != config.num_heads:
        raise BadInput(
            f"{path}: {theirs.sizes['num_heads']} is {config.num_heads}, and --heads or --set"
            f" heads= says {heads}: leave that out"
        )
    stored = (
        config.model_copy(update={"vocab_size": rows, "padded_vocab_size": rows})
        if is_gpt2
        else config
    )
    if tokenizer:
        check_vocabulary(tokenizer, rows, directory)
    ours = our_tensors(tensors, stored, config, theirs, directory)
    name, twin = read_ours(values.get(OURS), "huggingface", path)
    origin = {
        "format": f"Hugging Face {'GPT-2' if is_gpt2 else 'BERT'}",
        "files": digests([path, *files], directory) | digests(sources, vocab or directory),
    }
    return Imported(name, config, ours, tokenizer, origin, twin, companion_files)


def our_config(values: JSON, kind: str, vocab_size: int, path: Path) -> ModelConfig:
    """Return the ModelConfig that `values`, the content of a config.json, describes, with
    `vocab_size` tokens and the usual padding of the vocabulary. The caller has checked that
    `values` has the sizes, such as the number of layers; other settings have transformers' defaults
    if they are missing. `kind` is the family, `gpt2` or `bert`; `path` is named in errors. Raises
    BadInput if a setting makes it another model or is invalid."""
    theirs = FORMATS[kind]
    check_settings(values, theirs.required, path)
    sizes = {name: values[key] for name, key in theirs.sizes.items()}
    inner = values.get(theirs.inner, theirs.default_inner)
    if inner not in (None, 4 * sizes["hidden_size"]):
        raise BadInput(
            f"{path}: {theirs.inner} is {inner!r}; it must be four times"
            f" {theirs.sizes['hidden_size']} to be imported"
        )
    ours = sizes | {
        "family": kind,
        "vocab_size": vocab_size,
        "padded_vocab_size": padded_vocab_size(vocab_size),
        "dropout": values.get(theirs.dropout, 0.1),
        "init_std": values.get("initializer_range", 0.02),
    }
    if kind == "bert":
        ours["bert"] = {
            "layer_norm_order": "original",
            "layer_norm_epsilon": values.get("layer_norm_eps", 1e-12),
        }
    return parse_config(ours, ModelConfig, str(path))


def companions(directory: Path) -> dict[str, Path]:
    """Return a dict file name → path of the files directly in a Hugging Face directory that match
    `*.json`, `*.txt`, `*.model`, `*.md`, `*.jinja` or `LICENSE*` (COMPANIONS): configuration,
    tokenizer, licence and the like, and the JSON index of the weights, but no weights. The dict is
    empty if there is no such directory."""
    paths = chain.from_iterable(sorted(directory.glob(pattern)) for pattern in COMPANIONS)
    return {path.name: path for path in paths}


def current_name(name: str) -> str:
    """Return a tensor's name as today's transformers has it. Old BERTs have `beta` at the end,
    which becomes `bias`, and `LayerNorm.gamma`, which becomes `LayerNorm.weight`; any other name is
    returned as it is."""
    name = re.sub(r"\.beta$", ".bias", name)
    return re.sub(r"LayerNorm\.gamma$", "LayerNorm.weight", name)


def read_weights(
    directory: Path, prefix: str, buffers: str
) -> tuple[dict[str, Tensor], list[Path]]:
    """Read all weights of a Hugging Face directory, from model.safetensors or, without it, from the
    files that the index names. Return a pair: a dict name → tensor, on the CPU, and the list of the
    paths read. The list has model.safetensors alone, or the index and then its files, sorted by
    name.

    A tensor's name is shortened. `_orig_mod.`, which torch.compile puts before every name, is
    removed first, and then `prefix`; each is removed only where the name begins with it. A tensor
    is left out if its shortened name matches the regular expression `buffers` from end to end.

    Raises IntegrityFailure if a file is missing, damaged or disagrees with the index, or if two
    tensors that are not left out get the same name.
    """
    tensors = {}
    single = directory / WEIGHTS
    index = directory / INDEX
    # A single file has no index: then `file_of` is empty, and every tensor of the file is read.
    file_of = {} if single.is_file() else _read_index(index)
    files = [directory / name for name in sorted(set(file_of.values()))] or [single]
    for path in files:
        with reading(path), safe_open(path, framework="pt") as file:
            names = set(file.keys())
            listed = {name for name, listed_file in file_of.items() if listed_file == path.name}
            problem = sorted(names ^ listed)
            if file_of and problem:
                which = "in the file alone" if problem[0] in names else "in the index alone"
                raise IntegrityFailure(
                    f"{path} and the index of the weights do not agree, so copy both again: tensor"
                    f" {problem[0]!r} is {which}"
                )
            for name in names:
                # torch.compile puts `_orig_mod.` before every name.
                short = name.removeprefix("_orig_mod.").removeprefix(prefix)
                if short in tensors:
                    raise IntegrityFailure(
                        f"{path}: tensor {name!r} is there a second time, perhaps under a name with"
                        " another prefix: save the model again with each tensor once"
                    )
                if not re.fullmatch(buffers, short):
                    tensors[short] = file.get_tensor(name)
    return tensors, [index, *files] if file_of else files


def _read_index(path: Path) -> dict[str, str]:
    """Return a dict tensor name → name of its file, from `path`, the file that indexes a
    directory's weights. Raises IntegrityFailure if it cannot be read, is empty, or names anything
    but a plain name of a `.safetensors` file."""
    file_of = read_object(path).get("weight_map")
    if not isinstance(file_of, dict) or not file_of:
        raise IntegrityFailure(
            f"{path} is not an index of weights: it has no weight_map, or an empty one: copy or"
            " save it again"
        )
    for name in file_of.values():
        if not isinstance(name, str) or not WEIGHT_FILE.fullmatch(name):
            raise IntegrityFailure(
                f"{path} names {name!r}, which is not a plain name of a .safetensors file: copy or"
                " save the model again, with weights in such files beside their index"
            )
    return file_of
