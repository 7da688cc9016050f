"""Megatron-LM checkpoints (`mp_rank_*/model_optim_rng.pt`), checkpoint versions 0 to 3, any tp and
pp.

`torch_files.py` gives a Megatron-Core checkpoint the form of one such file. Undivided tensors come
from the first tensor-parallel rank. Layer numbers are local to a pipeline stage. Sources:
Megatron-LM `megatron/checkpointing.py` (checkpoint versions), `tools/checkpoint_util.py`,
`model/language_model.py` and `model/transformer.py` of v1.0, v2.6 and 2023,
`megatron/core/models/gpt`.
"""

import re
from argparse import Namespace
from dataclasses import dataclass
from itertools import chain, product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mlm_repro.data_pipeline.tokens.tokenizer import Tokenizer
from mlm_repro.engine.checkpoint.shards import reading
from mlm_repro.engine.compare.recorder import read_names
from mlm_repro.engine.config import ModelConfig
from mlm_repro.engine.formats import Imported, check_settings, check_tensors, digests, is_tied
from mlm_repro.engine.formats.torch_files import files_of, read_torch_dist, read_torch_file
from mlm_repro.engine.formats.vocabulary import VOCABULARY, check_vocabulary, read_vocabulary_files
from mlm_repro.engine.inference import parameters_of
from mlm_repro.engine.parallel.layout import PipelineStage
from mlm_repro.engine.published import METADATA, TRACKER
from mlm_repro.lineage.atomic import JSON, read_bytes
from mlm_repro.lineage.config import parse_config
from mlm_repro.lineage.errors import BadInput, IntegrityFailure

FILE = "model_optim_rng.pt"
WORDS = "embedding.word_embeddings.weight"
POSITIONS = "embedding.position_embeddings.weight"
NAMES = read_names(str(Path(__file__).with_suffix(".toml")))
STACK = re.compile(r"^(transformer|encoder)\.")
"""Regular expression of older names of the module `decoder`, which has the layers, at the beginning
of a tensor's name."""
HEAD = "head"
"""Our name for the last pipeline stage's copy of the word embedding."""
REQUIRED = {
    "swiglu": (False,),
    "squared_relu": (False,),
    "normalization": ("LayerNorm",),
    "apply_layernorm_1p": (False,),
    "layernorm_epsilon": (1e-5,),
    "norm_epsilon": (1e-5,),
    "apply_residual_connection_post_layernorm": (False,),
    "position_embedding_type": ("learned_absolute",),
    "add_position_embedding": (True,),
    "untie_embeddings_and_output_weights": (False,),
    "group_query_attention": (False,),
    "multi_latent_attention": (False,),
    "add_bias_linear": (True,),
}
"""Name of an argument of Megatron-LM → tuple of its values with which a model is our GPT-2, the
default first."""


@dataclass(frozen=True)
class RankFile:
    """Content of one rank's Megatron-LM file, or of a distributed checkpoint, at `path`: checkpoint
    `version`; `args`, a dict of arguments by name; `tensors`, a dict from this suite's names, with
    layers numbered within the pipeline stage, to the tensors; and `iteration`. Arguments and
    iteration are None if the file does not state them."""

    path: Path
    version: int
    args: JSON | None
    tensors: dict[str, Tensor]
    """Dict our name → tensor, with layers numbered within the pipeline stage."""
    iteration: Any

    @property
    def layers(self) -> int:
        """Number of transformer layers among the file's tensors, which are the layers of one
        pipeline stage."""
        return len({name.split(".")[1] for name in self.tensors if name.startswith("layers.")})


def read_megatron(directory: Path, vocab: Path | None, heads: int | None = None) -> Imported:
    """Return the model in one checkpoint as an Imported. `directory` is Megatron-LM's `--save`
    directory, of which the checkpoint that its tracker file names is read, or one `torch_dist`
    directory.

    GPT-2's vocabulary comes from the directory `vocab`, or without it from `directory` itself.
    Sizes come from the tensors and must agree with the file's arguments. `heads`, the number of
    attention heads, is needed for a file whose arguments do not state it (2019, NVIDIA's released
    models), and must agree with a file that states it. All rows of the word embedding are kept;
    rows beyond the vocabulary are padding. Raises BadInput for another model, for a missing number
    of heads or vocabulary, and for a number of heads that disagrees with the file's or that its
    ranks do not divide; IntegrityFailure, naming file and tensor, for files that are damaged or do
    not fit together.
    """
    if vocab is None and (directory / VOCABULARY).is_file():
        vocab = directory
    if vocab is None:
        raise BadInput(
            f"{directory} is a Megatron-LM checkpoint and has no vocabulary: name a directory with"
            " vocab.json and merges.txt (--vocab, or --set vocab=)"
        )
    tokenizer, vocabulary_files = read_vocabulary_files(vocab)
    newest = directory if (directory / METADATA).is_file() else _newest(directory)
    grid = _find_files(newest)
    files = [[_read_rank(path) for path in stage] for stage in grid]
    first = files[0][0]
    paths = files_of(newest) or list(chain.from_iterable(grid))
    for file in chain.from_iterable(files):
        if (file.version, file.args is None) != (first.version, first.args is None):
            raise IntegrityFailure(
                f"{file.path} and {first.path} are not of one checkpoint: their checkpoint versions"
                " differ, or only one has arguments; copy the checkpoint again"
            )
        if file.args is not None:
            require_gpt2(file.args, file.path)
    config = _read_config(files, tokenizer, heads)
    tensors = _merge(files, config)
    version = f"version {first.version}" if first.path.name == FILE else "torch_dist"
    origin = {
        "format": f"Megatron-LM checkpoint {version}",
        "tp": len(files[0]),
        "pp": len(files),
        "iteration": first.iteration,
        "files": digests(paths, directory) | digests(vocabulary_files, vocab),
    }
    return Imported("megatron", config, tensors, tokenizer, origin)


def _newest(directory: Path) -> Path:
    """Return the path of the checkpoint's directory that the tracker file
    (`latest_checkpointed_iteration.txt`) in `directory`, Megatron-LM's `--save` directory, names.
    Raises IntegrityFailure if the file cannot be read, or names no checkpoint that exists."""
    path = directory / TRACKER
    with reading(path):
        word = read_bytes(path, 1000).decode("utf-8").strip()
    if word != "release" and not re.fullmatch(r"[0-9]{1,9}", word):
        raise IntegrityFailure(
            f"{path} holds {word[:40]!r}, and not the number of an iteration or `release`: write"
            " there one that has a directory beside it"
        )
    iteration = directory / (word if word == "release" else f"iter_{int(word):07d}")
    if not iteration.is_dir():
        raise IntegrityFailure(
            f"{path} names {iteration.name}, which is not a directory beside it: write there the"
            " number of one that is"
        )
    return iteration


def _find_files(directory: Path) -> list[list[Path]]:
    """Return the paths of the files in a checkpoint's directory: a list for each pipeline stage, in
    order, with one file for each tensor-parallel rank. For a distributed checkpoint there is a
    single inner list, with the checkpoint's metadata as its only file.

    Raises IntegrityFailure if a rank's file is missing or there twice, or if there is no rank.
    """
    if (directory / METADATA).is_file():
        return [[directory / METADATA]]
    ranks: dict[tuple[int, int], Path] = {}
    for folder in directory.iterdir():
        if match := re.fullmatch(r"mp_rank_([0-9]{2,3})(?:_([0-9]{3}))?", folder.name):
            key = int(match[2] or 0), int(match[1])
            if key in ranks:
                raise IntegrityFailure(
                    f"{folder} and {ranks[key].parent} are both the directory of one rank: take one"
                    " of them away"
                )
            ranks[key] = folder / FILE
    if not ranks:
        raise IntegrityFailure(
            f"{directory} has neither mp_rank_* directories nor {METADATA}, so it is no whole"
            f" Megatron-LM checkpoint: copy it again, or name another iteration in {TRACKER}"
        )
    pp, tp = (max(key[i] for key in ranks) + 1 for i in (0, 1))
    for key in product(range(pp), range(tp)):
        if key not in ranks or not ranks[key].is_file():
            raise IntegrityFailure(
                f"{directory} is not whole, so copy it again: it has no {FILE} of tensor-parallel"
                f" rank {key[1]}, pipeline stage {key[0]}"
            )
    return [[ranks[stage, rank] for rank in range(tp)] for stage in range(pp)]


def _read_rank(path: Path) -> RankFile:
    """Return a RankFile of the content of `path`, one rank's file, or, if `path` is the metadata of
    a distributed checkpoint, of the whole checkpoint: the version, 0 if it is not stated;
    Megatron-LM's arguments that are numbers, texts or booleans, and the iteration, each None if not
    stated; and the tensors by our names.

    Raises BadInput for interleaved stages or an unknown checkpoint version, IntegrityFailure if the
    file is damaged, is not a checkpoint, or has a tensor that is not a GPT-2's.
    """
    content = read_torch_dist(path.parent) if path.name == METADATA else read_torch_file(path)
    if not isinstance(content, dict):
        raise IntegrityFailure(
            f"{path} does not hold a dict, as a file of a Megatron-LM checkpoint does: copy or save"
            " it again"
        )
    if "model" not in content:
        if "model0" in content:
            raise BadInput(
                f"{path} is divided into interleaved pipeline stages, which cannot be imported:"
                " save it with one stage a rank"
            )
        raise IntegrityFailure(
            f"{path} has no entry 'model', so it is not a Megatron-LM checkpoint: copy or save it"
            " again"
        )
    version = content.get("checkpoint_version", 0)
    if not isinstance(version, int | float) or version not in (0, 1, 2, 3):
        raise BadInput(
            f"{path} has checkpoint version {version!r}, but only 0 to 3 can be imported: save it"
            " with a release of Megatron-LM that writes one of these"
        )
    args = content.get("args")
    if args is not None and not isinstance(args, Namespace):
        raise IntegrityFailure(
            f"{path}: its entry 'args' is not an argparse.Namespace, as which Megatron-LM stores"
            " its arguments: copy or save it again"
        )
    if args is not None:
        args = {
            name: value
            for name, value in vars(args).items()
            if isinstance(value, bool | int | float | str)
        }
    iteration = content.get("iteration", content.get("total_iters"))
    tensors = our_names(content["model"], path)
    return RankFile(
        path, int(version), args, tensors, iteration if isinstance(iteration, int) else None
    )


def _read_config(
    files: list[list[RankFile]], tokenizer: Tokenizer, heads: int | None
) -> ModelConfig:
    """Return the ModelConfig of all ranks' files together, which come as lists
    [stage][tensor-parallel rank]: sizes from the tensors, the vocabulary from the tokenizer, and
    the number of heads, dropout and `init_std` from the first file's arguments. Where the arguments
    lack a value, `heads` gives the number of heads, and dropout and `init_std` are 0.1 and 0.02.

    Raises BadInput if neither the arguments nor `heads` state the number of heads, or if the
    tensor-parallel ranks do not divide it, IntegrityFailure if a file of the first stage lacks the
    embedding of words or of positions, and BadInput or IntegrityFailure if tensors, arguments,
    `heads` and tokenizer contradict each other.
    """
    first = files[0][0]
    stages = files[0]
    for file in stages:
        for name in (WORDS, POSITIONS):
            if name not in file.tensors or file.tensors[name].dim() != 2:
                raise IntegrityFailure(
                    f"{file.path}: tensor {name!r} is missing or is not a matrix: copy or save the"
                    " checkpoint again, if its model is a GPT-2, which alone can be imported"
                )
    sizes = {
        "num_layers": sum(stage[0].layers for stage in files),
        "hidden_size": first.tensors[WORDS].size(1),
        "max_position_embeddings": first.tensors[POSITIONS].size(0),
        "padded_vocab_size": sum(file.tensors[WORDS].size(0) for file in stages),
    }
    args = first.args or {}
    for name, size in sizes.items():
        if args.get(name, size) != size:
            raise IntegrityFailure(
                f"{first.path}: {name} is {args[name]!r} in the arguments that Megatron-LM stored,"
                f" and {size} in the tensors: they are not of one model, or directories of"
                " ranks are missing: copy the checkpoint again"
            )
    written = args.get("num_attention_heads")
    if written is None and heads is None:
        raise BadInput(
            f"{first.path} does not say how many attention heads its model has: give the number"
            " (--heads, or --set heads=)"
        )
    if written is not None and heads is not None and written != heads:
        raise BadInput(
            f"{first.path} has {written} attention heads, and --heads or --set heads= says {heads}:"
            " leave that out"
        )
    num_heads = heads if written is None else written
    values = {
        "num_layers": sizes["num_layers"],
        "hidden_size": sizes["hidden_size"],
        "num_heads": num_heads,
        "seq_length": sizes["max_position_embeddings"],
        "vocab_size": tokenizer.vocab_size,
        "padded_vocab_size": sizes["padded_vocab_size"],
        "dropout": args.get("hidden_dropout", 0.1),
        "init_std": args.get("init_method_std", 0.02),
    }
    check_vocabulary(tokenizer, sizes["padded_vocab_size"], first.path)
    config = parse_config(values, ModelConfig, str(first.path))
    if config.num_heads % len(stages):
        raise BadInput(
            f"{first.path}: {config.num_heads} attention heads cannot be divided over its"
            f" {len(stages)} tensor-parallel ranks: the number of heads is wrong, in --heads, in"
            " --set heads= or in the file's own arguments"
        )
    return config


def _merge(files: list[list[RankFile]], config: ModelConfig) -> dict[str, Tensor]:
    """Join the tensors of all ranks' `files`, lists of RankFiles [stage][tensor-parallel rank], and
    return a dict our name, with the whole model's layer numbers, → whole tensor, its rows in our
    order. An undivided tensor is the first tensor-parallel rank's. `config` is the whole model's.

    Raises IntegrityFailure naming file and tensor if a tensor is missing, unexpected or misshapen,
    and BadInput if the output layer is not the word embedding.
    """
    tp = len(files[0])
    merged = {}
    offset = 0
    for number, stage in enumerate(files):
        pipeline_stage = PipelineStage(
            range(stage[0].layers), is_first=number == 0, is_last=number == len(files) - 1
        )
        wanted = {p.name: p for p in parameters_of(config, pipeline_stage, tp) if not p.is_copy}
        for file, words in zip(stage, files[0], strict=True):
            shapes = {local: tuple(p.local.shape) for local, p in wanted.items()}
            tensors = dict(file.tensors)
            head = tensors.pop(HEAD, None)
            check_tensors(tensors, shapes, file.path)
            if head is not None and not is_tied(head, words.tensors[WORDS]):
                raise BadInput(
                    f"{file.path}: its output layer is not the word embedding; only a model in"
                    " which they are one can be imported"
                )
        for local, parameter in wanted.items():
            shards = [file.tensors[local] for file in stage]
            if "query_key_value" in local:
                heads = config.num_heads // tp
                shards = [
                    reorder_query_key_value(shard, stage[0].version, heads) for shard in shards
                ]
            layer, _, rest = local.removeprefix("layers.").partition(".")
            name = f"layers.{int(layer) + offset}.{rest}" if layer.isdigit() else local
            merged[name] = shards[0] if parameter.dim is None else torch.cat(shards, parameter.dim)
        offset += stage[0].layers
    return merged


def flatten(values: dict[Any, Any], prefix: str = "", depth: int = 5) -> JSON:
    """Return nested dicts as one flat dict, dotted name → value, such as `encoder.layers.0.weight`,
    without `module.`, `model.` and `language_model.` at the beginning. `prefix` is put before every
    name, and loses these words too. A dict more than `depth` levels down is a value itself."""
    named: JSON = {}
    for key, value in values.items():
        if isinstance(value, dict) and depth:
            named |= flatten(value, f"{prefix}{key}.", depth - 1)
        else:
            named[re.sub(r"^((module|model|language_model)\.)+", "", f"{prefix}{key}")] = value
    return named


def our_names(model: Any, where: object) -> dict[str, Tensor]:
    """Return a dict our name → tensor of `model`, the entry `model` of one Megatron-LM file, nested
    dicts of tensors, with layers numbered within the stage. Entries `_extra_state` are left out;
    `where` begins the messages.

    Raises IntegrityFailure if `model` is not a dict, for a name that no version of Megatron-LM's
    GPT-2 had, for two names of one tensor, and for a value that is not a dense tensor with values.
    """
    if not isinstance(model, dict):
        raise IntegrityFailure(
            f"{where}: its entry 'model' is not a dict of tensors, as in a file of a Megatron-LM"
            " checkpoint: copy or save it again"
        )
    tensors = {}
    for name, value in flatten(model).items():
        if name.endswith("_extra_state"):
            continue
        ours = NAMES.ours(STACK.sub("decoder.", name), NAMES.parameters, 0)
        if ours is None:
            raise IntegrityFailure(
                f"{where}: tensor {name!r} is not one of Megatron-LM's GPT-2, which alone can be"
                " imported: give a checkpoint of a GPT-2"
            )
        if ours in tensors:
            raise IntegrityFailure(
                f"{where}: tensor {name!r} is there a second time, under another name, so it cannot"
                " be imported: save the checkpoint again with one of the two"
            )
        if (
            not isinstance(value, Tensor)
            or value.layout != torch.strided
            or value.device.type != "cpu"
        ):
            raise IntegrityFailure(
                f"{where}: the checkpoint's entry {name!r} is not a dense tensor with values, so it"
                " cannot be imported: save the checkpoint again with one"
            )
        tensors[ours] = value.detach()
    return tensors


def reorder_query_key_value(local: Tensor, version: int, heads: int) -> Tensor:
    """Return `local`, a tensor-parallel rank's weight [3nd, h] or bias [3nd] of the query-key-value
    product, with the rows in our order, [n, 3, d].

    `heads` is n, the rank's heads; `version` is the checkpoint version of the file. In version 0
    the rows are [3, n, d] and in version 1 [n, d, 3]; a later version has our order, and `local`
    itself is returned.
    """
    d = local.size(0) // (3 * heads)
    if version == 0:
        return local.unflatten(0, (3, heads, d)).transpose(0, 1).flatten(0, 2)
    if version == 1:
        return local.unflatten(0, (heads, d, 3)).transpose(1, 2).flatten(0, 2)
    return local


def require_gpt2(args: JSON, where: object) -> None:
    """Raise BadInput if `args`, a dict of the arguments of Megatron-LM in a file, describes a model
    other than our GPT-2; `where` begins the message. An argument that is not given counts as
    GPT-2's.

    If either of `bias_gelu_fusion` and `openai_gelu` is given and neither is set, the model has the
    exact GeLU, not GPT-2's tanh.
    """
    check_settings(args, REQUIRED, where)
    if args.get("num_experts"):
        raise BadInput(
            f"{where}: num_experts is {args['num_experts']!r}; only a model without experts can be"
            " imported"
        )
    choices = [args[name] for name in ("bias_gelu_fusion", "openai_gelu") if name in args]
    if choices and not any(choices):
        raise BadInput(
            f"{where}: the model was trained with the exact GeLU; only one with GPT-2's tanh can be"
            " imported"
        )
