"""A Hugging Face model divided over tensor-parallel ranks (`shard-hf`), run, and merged (`export`).

transformers has a plan for many of its models: layers by columns, layers by rows, and copied
parameters whose gradients are summed. NAMES has the layers of models without one. Whatever the plan
says, the ranks' outputs are compared with the undivided model's, if memory suffices, before
anything is kept.

The directory has `plan.json`, a file of tensors for each rank, and in `huggingface/` the rest of
the original one.
"""

import copy
import os
import re
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from pydantic import PositiveInt
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from mlm_repro.engine.checkpoint.shards import reading
from mlm_repro.engine.formats import digests
from mlm_repro.engine.formats.huggingface import FOLDER, companions
from mlm_repro.engine.launch.mesh import build_mesh
from mlm_repro.engine.launch.threads import run_threads
from mlm_repro.engine.parallel.collectives import (
    enter_tensor_parallel,
    gather_features,
    leave_tensor_parallel,
)
from mlm_repro.engine.parallel.layout import Layout
from mlm_repro.engine.parallel.mesh import Axis
from mlm_repro.engine.published import CONFIG, INDEX, PLAN, WEIGHTS
from mlm_repro.lineage.atomic import write_json
from mlm_repro.lineage.digest import check_seal, seal
from mlm_repro.lineage.errors import BadInput, IntegrityFailure
from mlm_repro.lineage.extras import import_extra
from mlm_repro.lineage.files import FileSchema, one_line, read_document, write_document
from mlm_repro.lineage.lock import check_is_there, check_output, new_output

BART = {"columns": "[qkv]_proj|fc1", "rows": "out_proj|fc2"}
NAMES = {
    "gpt2": {"columns": "c_attn|c_fc", "rows": "c_proj"},
    "bart": BART,
    "opt": BART,
    "bert": {"columns": r"query|key|value|intermediate\.dense", "rows": r"output\.dense"},
    "t5": {"columns": r"[qkv]|wi(_\d)?", "rows": "o|wo", "heads": "relative_attention_bias"},
}
"""Model type → way of dividing → regular expression of the ends of the names of the layers that are
divided so, for models of which transformers has no plan. Attention divides its heads, an MLP its
width."""
STYLES = {"colwise": "columns", "rowwise": "rows", "replicated_with_grad_allreduce": "summed"}
"""transformers' words for ways of dividing → the field `how` of a Division. Layers with another
word stay whole on every rank, except embeddings of the vocabulary and the output head, which are
divided by vocabulary in any case."""
FUSED = {"c_attn": 3}
"""Last part of the name of a layer that holds several products side by side → the number of
products."""
HEADS = frozenset(
    {
        "num_heads",
        "num_attention_heads",
        "num_key_value_heads",
        "num_kv_heads",
        "n_heads",
        "n_head",
        "encoder_attention_heads",
        "decoder_attention_heads",
    }
)
"""Names of the attributes in which models store the number of attention heads."""
WIDTHS = frozenset({"inner_dim", "all_head_size", "split_size", "embed_dim", "hidden_size"})
"""Names of the attributes in which an attention module stores the width of all its heads
together."""
TOLERANCE = 1e-10
"""Largest allowed difference between outputs in float64, relative to the largest output or, if that
is smaller, to 1."""
TOKENS = 24
"""Length of the two random sequences on which outputs are compared, unless the model's context is
shorter."""


class Division(NamedTuple):
    """Division of a parameter over the ranks, in the way that `how` names: by `columns`, the
    outputs of its layer, by `rows`, the inputs of its layer, by `heads` or by `vocabulary`; or
    `summed`. The parameter consists of `pieces` equal pieces side by side along `dim`, and each
    piece is divided along `dim`, as evenly as it goes. A `summed` one is whole on every rank, and
    its gradient is summed."""

    how: Literal["columns", "rows", "heads", "vocabulary", "summed"]
    dim: int = 0
    pieces: int = 1


class TensorPlan(FileSchema):
    """plan.json of a divided model: the number of ranks `tp`, and how each parameter is divided
    over them."""

    tp: PositiveInt
    parameters: dict[str, Division]
    """Name of a parameter → its Division; parameters without an entry are copied to every rank."""

    def part(self, name: str, whole: Tensor, rank: int) -> Tensor:
        """Return the part that rank `rank` holds of the parameter `name`, cut from its whole value
        `whole`: a new tensor, or `whole` itself if the parameter is copied or summed."""
        if name not in self.parameters or self.parameters[name].how == "summed":
            return whole
        _, dim, pieces = self.parameters[name]
        own = [piece.tensor_split(self.tp, dim)[rank] for piece in whole.chunk(pieces, dim)]
        return torch.cat(own, dim)

    def merge(self, name: str, parts: Sequence[Tensor]) -> Tensor:
        """Return the whole value of the parameter `name`, a new tensor joined from `parts`, the
        tensors of all ranks in rank order. If every rank holds the whole parameter, because it is
        copied or its Division says `summed`, the value is the first of `parts` itself."""
        if name not in self.parameters or self.parameters[name].how == "summed":
            return parts[0]
        _, dim, pieces = self.parameters[name]
        by_piece = zip(*(part.chunk(pieces, dim) for part in parts), strict=True)
        return torch.cat([torch.cat(piece, dim) for piece in by_piece], dim)


def make_plan(model: nn.Module, tp: int) -> TensorPlan:
    """Return the TensorPlan of a transformers model, which is not changed, for `tp` ranks: by
    transformers' own plan or, if the model has none, by the names of layers that NAMES has for its
    type. In either case, and without both, embeddings with a row for each word and the output head
    are divided by vocabulary. Parameters that are not named in the plan are to be copied."""
    theirs: dict[str, str] = getattr(model, "_tp_plan", None) or {}
    names: dict[str, str] = NAMES.get(model.config.model_type, {})  # type: ignore[union-attr, arg-type]
    vocabulary = model.get_input_embeddings().weight.shape[0]  # type: ignore[operator]
    head = model.get_output_embeddings()  # type: ignore[operator]
    divisions = {}
    for module_name, module in model.named_modules():
        style = STYLES.get(theirs.get(kind_of(module_name), ""))
        if not theirs:
            style = next(
                (how for how, ends in names.items() if re.search(rf"\.({ends})$", module_name)),
                None,
            )
        # The dim of outputs; a Conv1D is [in, out].
        outputs = int(not isinstance(module, nn.Linear))
        for parameter in module.parameters(recurse=False):
            key = id(parameter)
            is_matrix = parameter.dim() == 2
            if module is head or (
                isinstance(module, nn.Embedding) and len(parameter) == vocabulary
            ):
                divisions[key] = Division("vocabulary")
            elif style == "columns":
                divisions[key] = Division(
                    "columns", outputs * is_matrix, FUSED.get(module_name.rpartition(".")[2], 1)
                )
            elif style == "rows" and is_matrix:
                divisions[key] = Division("rows", 1 - outputs)
            elif style == "heads":
                divisions[key] = Division("heads", 1)
            elif style == "summed":
                divisions[key] = Division("summed")
    named = model.named_parameters(remove_duplicate=False)
    return TensorPlan(
        tp=tp,
        parameters={
            name: divisions[id(tensor)] for name, tensor in named if id(tensor) in divisions
        },
    )


def kind_of(name: str) -> str:
    """Return the name of a module or parameter with each whole number between dots replaced by `*`,
    as in transformers' plans, so that equal layers share one name."""
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", name)


def shard_model(directory: Path, out: Path, tp: int) -> list[str]:
    """Write the model of a Hugging Face directory as the new sealed directory `out`, one file for
    each of `tp` ranks, and return a list of lines of text for the user: the way in which each kind
    of parameter is divided, and, last, the comparison of the outputs.

    Every weight keeps its value and number format, whatever format config.json names, if the files
    have one format; of several, `read_model` takes one. The ranks are run as threads in float64;
    the last line has the largest difference of their outputs from the undivided model's, or says
    that memory is too small to compare. Raises BadInput if outputs differ by more than rounding,
    if `out` exists or cannot be written, if there is no such directory or no transformers, and for
    a model that transformers cannot build with the weights there or that cannot be divided over
    `tp` ranks; nothing is then written.
    """
    check_output(out)
    check_is_there(directory, "directory")
    model = read_model(directory)
    plan = make_plan(model, tp)
    if not any(division.how == "columns" for division in plan.parameters.values()):
        raise BadInput(
            f"{directory}: transformers has no plan of columns and rows for a"
            f" {type(model).__name__}; without one only {', '.join(NAMES)} can be divided:"
            " use this model undivided"
        )
    repeated = (
        dict(model.named_parameters(remove_duplicate=False)).keys()
        - dict(model.named_parameters()).keys()
    )
    tensors = {name: tensor for name, tensor in model.state_dict().items() if name not in repeated}
    with new_output(out) as temporary:
        for rank in range(tp):
            parts = {
                name: plan.part(name, tensor, rank).contiguous() for name, tensor in tensors.items()
            }
            save_file(parts, temporary / _file(rank))
        write_document(temporary / PLAN, plan)
        files = [directory / CONFIG, *sorted(directory.glob("*.safetensors*"))]
        write_json(temporary / "origin.json", {"files": digests(files, directory)})
        (temporary / FOLDER).mkdir()
        for name, path in companions(directory).items():
            if name != INDEX:
                shutil.copyfile(path, temporary / FOLDER / name)
        checked = _check(temporary, model, tp)
        seal(temporary)
    ways = dict.fromkeys(
        f"{kind_of(name)}: {division.how}" for name, division in plan.parameters.items()
    )
    return [*ways, "all others: copied", checked]


def read_model(directory: Path, has_weights: bool = True) -> Any:
    """Return the transformers model of a Hugging Face directory, on the CPU and in evaluation mode,
    with its weights from files of safetensors, in the number format that transformers finds first
    there; without `has_weights`, one with random weights, made from config.json alone. Runs no code
    from the directory.

    Raises BadInput if transformers is missing or cannot build the model, or if tensors are missing,
    unexpected or misshapen.
    """
    transformers: Any = import_extra("transformers", "bench")
    transformers.utils.logging.disable_progress_bar()
    try:
        config = transformers.AutoConfig.from_pretrained(directory, local_files_only=True)
        kind = getattr(transformers, (config.architectures or ["none"])[0])
        if not issubclass(kind, transformers.PreTrainedModel):
            raise TypeError(
                f"`architectures` names {kind.__name__}, which is not a model of transformers"
            )
        if not has_weights:
            return kind(config).eval()
        config.dtype = None  # the files' format is kept, whatever config.json states
        model, report = kind.from_pretrained(
            directory, config=config, use_safetensors=True, dtype="auto", output_loading_info=True
        )
    except Exception as error:  # the library raises errors of many kinds
        raise BadInput(
            f"transformers cannot build the model of {directory / CONFIG} with its weights"
            f" ({one_line(error)}): copy the directory again, or install a version of transformers"
            " that has this model"
        ) from error
    kinds = ("missing_keys", "unexpected_keys", "mismatched_keys")
    wrong = sorted(map(str, chain.from_iterable(report[kind] for kind in kinds)))
    if wrong:
        raise BadInput(
            f"{directory}: tensor {wrong[0]} is missing, unexpected or of another shape than"
            f" {CONFIG} gives ({len(wrong)} such tensors): the weights or that file are damaged or"
            " another model's, so copy both again"
        )
    return model.eval()


def load_rank(
    directory: Path, axis: Axis, seed: int = 0, dtype: torch.dtype | None = None
) -> nn.Module:
    """Return this rank's part of a model that `shard_model` wrote to `directory`, as a transformers
    model on the CPU, in evaluation mode, that is used like the whole one. `axis` is this rank's
    tensor-parallel axis, whose ranks all call the model together.

    `dtype` None keeps the files' number format, or takes fp32 if they have several. `seed` seeds
    dropout in divided layers. Raises BadInput if transformers is missing or cannot build the model,
    or if the axis has another number of ranks than there are files, IntegrityFailure if the plan
    cannot be read or a file lacks a parameter. The seal is not checked, and an error of safetensors
    for a missing or damaged file passes.
    """
    plan = read_document(directory / PLAN, TensorPlan)
    if axis.size != plan.tp:
        raise BadInput(
            f"{directory} is divided over {plan.tp} ranks, and {axis.size} were started: start as"
            " many, or divide the model again (mlm-train shard-hf --tp)"
        )
    tensors = load_file(directory / _file(axis.rank))
    whole = read_model(directory / FOLDER, has_weights=False)
    formats = {tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()}
    whole = whole.to(dtype or (formats.pop() if len(formats) == 1 else torch.float32))
    if missing := dict(whole.named_parameters()).keys() - tensors.keys():
        raise IntegrityFailure(
            f"{directory / _file(axis.rank)} has no tensor {min(missing)}, which the model needs:"
            " divide the model again (mlm-train shard-hf)"
        )
    model = divide(whole, plan, axis, seed)
    model.load_state_dict(tensors, strict=False)  # a parameter of several names has one tensor
    return model


def merge_model(checkpoint: Path, out: Path) -> Path:
    """Write the divided model in `checkpoint`, a directory that `shard_model` made, as the new
    Hugging Face directory `out`, and return the path `out`.

    Every tensor has the bits that its parts have in `checkpoint`; all tensors are in one file,
    model.safetensors. Raises BadInput if `out` exists or cannot be written, IntegrityFailure if the
    checkpoint is missing, incomplete or changed.
    """
    check_output(out)
    check_seal(checkpoint)
    plan = read_document(checkpoint / PLAN, TensorPlan)
    with reading(checkpoint):
        ranks = [load_file(checkpoint / _file(rank)) for rank in range(plan.tp)]
        whole = {name: plan.merge(name, [tensors[name] for tensors in ranks]) for name in ranks[0]}
    with new_output(out) as temporary:
        save_file(whole, temporary / WEIGHTS, metadata={"format": "pt"})
        for path in (checkpoint / FOLDER).iterdir():
            shutil.copyfile(path, temporary / path.name)
    return out


def _file(rank: int) -> str:
    return f"model-tp{rank:02d}.safetensors"


def _check(directory: Path, model: nn.Module, tp: int) -> str:
    """Load the tensor-parallel parts of a model that lie in `directory` on `tp` ranks, which are
    threads, run them and `model`, the undivided model, on the same token ids in float64, and return
    a sentence with the largest difference of their outputs. `model` itself becomes float64.

    If less memory is free than this needs, nothing is run or changed, and the sentence says so.
    Raises BadInput if outputs differ by more than TOLERANCE, relative to the largest output or, if
    that is smaller, to 1, or if the parts do not run.
    """
    needed = 24 * sum(parameter.numel() for parameter in model.parameters())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    if needed > memory:
        return (
            f"not compared with the whole model: this needs {needed / 1e9:.0f} GB,"
            f" {memory / 1e9:.0f} GB are free"
        )
    whole = outputs(model.double())
    try:
        ranks = run_threads(
            lambda: outputs(
                load_rank(directory, build_mesh(Layout(tp=tp)).tp, dtype=torch.float64)
            ),
            tp,
        )
        difference = max(float((output - whole).abs().max()) for output in ranks)
    except (RuntimeError, ValueError) as error:
        raise BadInput(
            f"a {type(model).__name__} cannot be divided over {tp} ranks, and nothing was written:"
            f" its parts do not run ({error}); use it undivided, or choose another tp"
        ) from error
    if not difference <= TOLERANCE * max(1.0, float(whole.abs().max())):
        raise BadInput(
            f"a {type(model).__name__} cannot be divided over {tp} ranks, and nothing was written:"
            f" its parts give other outputs than the whole, by {difference:.3g}; use it undivided"
        )
    return (
        f"{tp} ranks answer as the whole model does in float64: largest difference {difference:.1e}"
    )


def some_tokens(model: nn.Module) -> dict[str, Tensor]:
    """Return a transformers model's keyword arguments for a forward pass as a dict: `input_ids`
    and, for an encoder-decoder, `decoder_input_ids`, the same int64 tensor [2, n] of random token
    ids on the CPU, equal in every call. n is 24, or the model's context if that is shorter."""
    config: Any = model.config
    length = min(TOKENS, getattr(config, "max_position_embeddings", None) or TOKENS)
    tokens = torch.randint(
        0, config.vocab_size, (2, length), generator=torch.Generator().manual_seed(1)
    )
    names = ("input_ids", "decoder_input_ids") if config.is_encoder_decoder else ("input_ids",)
    return dict.fromkeys(names, tokens)


def outputs(model: nn.Module) -> Tensor:
    """Return the logits [2, n, v] that a transformers model gives for two fixed sequences of random
    token ids (`some_tokens`), or its last hidden states [2, n, h] if it has no head, without
    gradients."""
    with torch.no_grad():
        answer: Tensor = model(**some_tokens(model))[0]
    return answer


def divide(model: nn.Module, plan: TensorPlan, axis: Axis, seed: int = 0) -> nn.Module:
    """Turn `model`, a whole transformers model, into this rank's part of it by the plan, in place,
    and return it. All ranks of `axis`, the tensor-parallel one, call the divided model together.

    Inputs, outputs and gradients of copied parameters are whole on every rank. Between layers by
    columns and the layer by rows, dropout on the CPU differs on each rank (by `seed`); elsewhere it
    is equal on ranks with equal random state. A GPU's random state is not exchanged.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    parts = {}
    region = _Region(axis, seed)
    attention: dict[nn.Module, None] = {}
    for name, division in plan.parameters.items():
        whole, (module_name, _, attribute) = parameters[name], name.rpartition(".")
        module: Any = model.get_submodule(module_name)
        if division.how == "summed":
            whole.register_hook(axis.all_reduce)
            continue
        if id(whole) not in parts:
            parts[id(whole)] = nn.Parameter(
                plan.part(name, whole.data, axis.rank), whole.requires_grad
            )
        setattr(module, attribute, parts[id(whole)])
        if division.how == "columns":
            attention[model.get_submodule(module_name.rpartition(".")[0])] = None
        if attribute == "weight":
            region.divide(module, division.how, len(whole))
    for parent in attention:
        _divide_heads(parent, plan.tp)
    return model


class _Region:
    """Region of the divided layers in one rank's part of a transformers model, one object for all
    of them. The caller puts this rank's parameters into a layer and gives it to the method
    `divide`, which changes the layer's pass in place. Where a pass goes from undivided layers to a
    layer by columns, torch's random state of the CPU is exchanged for the region's own, which
    `seed` and the rank in `axis` determine; at the layer by rows, which sums the ranks' results, it
    is exchanged back, so that dropout inside differs by rank."""

    def __init__(self, axis: Axis, seed: int) -> None:
        self.axis = axis
        self.is_inside = False
        self.other = torch.Generator().manual_seed(seed + 1 + axis.rank).get_state()
        """Torch's random state for the other side of the border: the divided layers' while a pass
        is among undivided ones, and the undivided layers' while it is among divided ones."""

    def divide(self, module: Any, how: str, rows: int) -> None:
        """Change `module` in place so that it computes with this rank's part of its parameters,
        which it has already. `how` says how they are divided. By `columns`, its input is whole, and
        its output is this rank's columns. By `rows`, its input is this rank's part, and its output
        is the ranks' sum, whole on every rank. By `vocabulary`, an embedding table or an output
        head gives the whole result on every rank. `heads` needs no change. The argument `rows` is
        the number of rows of its whole weight."""
        if how == "columns":
            if hasattr(module, "nf"):
                module.nf = module.weight.shape[1]
            module.register_forward_pre_hook(self.enter)
        elif how == "rows":
            module.forward = partial(self.leave, module)
        elif how == "vocabulary":
            start = int(torch.arange(rows).tensor_split(self.axis.size)[self.axis.rank][0])
            stop = start + len(module.weight)
            whole = module.forward
            module.forward = partial(_score, whole, self.axis, start, rows)
            if hasattr(module, "padding_idx"):  # a table that is looked up
                padding = module.padding_idx
                module.padding_idx = padding - start if padding in range(start, stop) else None
                module.forward = partial(_look_up, whole, start, stop, self.axis)

    def swap(self) -> None:
        """Cross the border between undivided and divided layers, in either direction: keep torch's
        random state of the CPU, and set the state that was kept at the last crossing, at the first
        one a state of this rank's own. Nothing is returned."""
        current = torch.get_rng_state()
        self.is_inside = not self.is_inside
        torch.set_rng_state(self.other)
        self.other = current

    def enter(self, column: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
        """Act as forward pre-hook of `column`, a layer by columns: return the first of its
        `inputs`, which is whole and the same on every rank, unchanged, but with a gradient that is
        summed over the ranks. If the pass is not yet among divided activations, swap torch's random
        state."""
        if not self.is_inside:
            self.swap()
        return enter_tensor_parallel(inputs[0], self.axis)

    def leave(self, row: Any, x: Tensor) -> Tensor:
        """Act as forward pass of the row-parallel layer `row`, from this rank's part `x` of the
        layer's input: return the sum of the ranks' products, whole on every rank, plus the bias
        once. If the pass is among divided activations, swap the random state back."""
        if self.is_inside:
            self.swap()
        product = x @ (row.weight.T if isinstance(row, nn.Linear) else row.weight)
        summed = leave_tensor_parallel(product, self.axis)
        return summed.clone() if row.bias is None else summed + row.bias


def _divide_heads(module: nn.Module, tp: int) -> None:
    """Divide in place, by `tp`, the attributes of an attention module that count heads or state the
    width of all heads, and the counts of heads in a copy of its configuration, which the module
    then has. Quotients are rounded down. Do nothing to a module without a count of heads."""
    if HEADS.isdisjoint(vars(module)):
        return
    # A copy: all modules of a model share one configuration, which would be divided repeatedly.
    settings: Any = copy.copy(getattr(module, "config", None))
    for holder, names in ((module, HEADS | WIDTHS), (settings, HEADS)):
        for name in names & vars(holder).keys() if holder is not None else ():
            if type(count := vars(holder)[name]) is int:
                setattr(holder, name, count // tp)
    if settings is not None:
        module.config = settings


def _look_up(
    forward: Callable[[Tensor], Tensor], start: int, stop: int, axis: Axis, ids: Tensor
) -> Tensor:
    """Return the embeddings of token ids `ids`, [..., h], whole on every rank. `forward` looks ids,
    which are counted from `start`, up in this rank's table, which has rows [start, stop) of the
    whole; ids outside give zeros. The results of all ranks of the axis are summed, so every rank of
    the axis calls this function."""
    inside = (ids >= start) & (ids < stop)
    rows = forward((ids - start).where(inside, 0)) * inside[..., None]
    return leave_tensor_parallel(rows, axis)


def _score(
    forward: Callable[[Tensor], Tensor], axis: Axis, start: int, whole: int, x: Tensor
) -> Tensor:
    """Return the scores [..., v] of states x [..., h] over the whole vocabulary, whose number of
    words v is `whole`, on every rank. `forward` is the function from the states to the scores of
    this rank's words, a part of the vocabulary from index `start` on. The scores of the other ranks
    are gathered, and the gradient of x is summed, so all ranks of `axis` call it."""
    return gather_features(forward(enter_tensor_parallel(x, axis)), axis, start, whole)
