"""Any model of Hugging Face divided over tensor-parallel ranks by its plan (`shard-hf`), run, and merged (`export`).

The directory has `plan.json`, a file of tensors for each rank, and in `huggingface/` the rest of the original one.
"""

import copy
import os
import re
import shutil
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from mlm_repro.engine.checkpoint.shards import reading
from mlm_repro.engine.formats import digests
from mlm_repro.engine.formats.huggingface import FOLDER, companions, current_name, read_weights
from mlm_repro.engine.formats.tensor_plan import (
    DividedBlock,
    Division,
    TensorPlan,
    describe_plan,
    make_plan,
    some_tokens,
)
from mlm_repro.engine.launch.mesh import build_mesh
from mlm_repro.engine.launch.threads import run_threads
from mlm_repro.engine.parallel.collectives import enter_tensor_parallel, gather_features, leave_tensor_parallel
from mlm_repro.engine.parallel.layout import Layout
from mlm_repro.engine.parallel.mesh import Axis
from mlm_repro.engine.published import CONFIG, INDEX, PLAN, WEIGHTS
from mlm_repro.lineage.atomic import write_json
from mlm_repro.lineage.digest import check_seal, seal
from mlm_repro.lineage.errors import BadInput, IntegrityFailure
from mlm_repro.lineage.extras import import_extra
from mlm_repro.lineage.files import one_line, read_object
from mlm_repro.lineage.lock import check_is_there, check_output, new_output

HEADS = frozenset({
    "num_heads", "num_attention_heads", "num_key_value_heads", "num_kv_heads", "n_heads", "n_head",
    "encoder_attention_heads", "decoder_attention_heads",
})  # fmt: skip
"""Names by which models count attention's heads."""
WIDTHS = frozenset({"inner_dim", "all_head_size", "split_size", "embed_dim", "hidden_size"})
"""Names by which an attention module knows the width of its heads together."""
TOLERANCE = 1e-10
"""Largest difference of a divided model's outputs in float64, in parts of the largest output."""
NO_BUFFER = re.compile("(?!)")
Names = Mapping[str, list[str]]
"""Tensor of the files → the model's parameters and buffers that are this tensor."""


def shard_model(directory: Path, out: Path, tp: int) -> list[str]:
    """Write a Hugging Face model as `out`, one file for each of `tp` ranks; returns the plan and the check as lines.

    Every weight keeps its value and number format. The ranks, run as threads in float64, must answer as the whole model
    does; a last line says so, or that memory is too small for it. Raises BadInput for a model that cannot be divided.
    """
    check_output(out)
    check_is_there(directory, "directory")
    model = build_model(directory)
    plan = make_plan(model, tp)
    if not plan.blocks:
        reason = next(iter(plan.copied.values()), "it has none")
        raise BadInput(f"{directory}: {tp} ranks can divide no layer: {reason}")
    tensors, files = read_weights(directory, "", NO_BUFFER)
    names = _names_of(model, tensors, directory)
    with new_output(out) as temporary:
        for rank in range(tp):
            parts = {name: split.of(tensor, rank) if (split := _split(plan, names[name])) else tensor
                     for name, tensor in tensors.items()}  # fmt: skip
            save_file(parts, temporary / _file(rank))
        write_json(temporary / PLAN, asdict(plan) | {"summed": sorted(plan.summed)})
        write_json(temporary / "origin.json", {"files": digests([directory / CONFIG, *files], directory)})
        (temporary / FOLDER).mkdir()
        for name, path in companions(directory).items():
            if name != INDEX:
                shutil.copyfile(path, temporary / FOLDER / name)
        checked = _check(temporary, model, names, tensors, tp)
        seal(temporary)
    return [*describe_plan(plan, model), checked]


def build_model(directory: Path) -> nn.Module:
    """The model that a directory's config.json describes, with random weights of one seed. Runs no code of it."""
    transformers: Any = import_extra("transformers", "bench")
    try:
        config = transformers.AutoConfig.from_pretrained(directory, local_files_only=True)
        kind = getattr(transformers, (config.architectures or ["none"])[0])
        if not issubclass(kind, transformers.PreTrainedModel):
            raise TypeError(f"{kind.__name__} is no model")
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return kind(config).eval()
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise BadInput(f"{directory / CONFIG}: transformers builds no model of it ({one_line(error)})") from error


def load_rank(directory: Path, axis: Axis, seed: int = 0, dtype: torch.dtype | None = None) -> nn.Module:
    """This rank's part of a model that `shard_model` wrote: a transformers model, used as the whole one is.

    `dtype` None is the number format of the files. `seed` is that of dropout in divided layers. Raises BadInput if the
    axis has another number of ranks than there are files.
    """
    plan = read_plan(directory)
    if axis.size != plan.tp:
        raise BadInput(f"{directory} is divided over {plan.tp} ranks, not {axis.size}")
    tensors = load_file(directory / _file(axis.rank))
    whole = build_model(directory / FOLDER)
    names = _names_of(whole, tensors, directory)
    formats = {tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()}
    model = divide(whole.to(dtype or (formats.pop() if len(formats) == 1 else torch.float32)), plan, axis, seed)
    _fill(model, names, tensors)
    return model


def merge_model(checkpoint: Path, out: Path) -> Path:
    """Write what `shard_model` divided as the Hugging Face directory `out`, and return `out`.

    Every tensor has the original bits; all are in one file. Raises BadInput if `out` exists or cannot be written,
    IntegrityFailure if the checkpoint is incomplete or changed.
    """
    check_output(out)
    check_seal(checkpoint)
    plan = read_plan(checkpoint)
    with reading(checkpoint):
        ranks = [load_file(checkpoint / _file(rank)) for rank in range(plan.tp)]
        names = _names_of(build_model(checkpoint / FOLDER), ranks[0], checkpoint)
        whole = {}
        for name in ranks[0]:
            split, parts = _split(plan, names[name]), [tensors[name] for tensors in ranks]
            whole[name] = split.merge(parts) if split else parts[0]
    with new_output(out) as temporary:
        save_file(whole, temporary / WEIGHTS, metadata={"format": "pt"})
        for path in (checkpoint / FOLDER).iterdir():
            shutil.copyfile(path, temporary / path.name)
    return out


def read_plan(directory: Path) -> TensorPlan:
    """The plan that a directory was divided by. Raises IntegrityFailure if it is none."""
    try:
        return TypeAdapter(TensorPlan).validate_python(read_object(directory / PLAN))
    except ValidationError as error:
        raise IntegrityFailure(f"{directory / PLAN} is not a plan of this program") from error


def _file(rank: int) -> str:
    return f"model-tp{rank:02d}.safetensors"


def _names_of(model: nn.Module, tensors: Mapping[str, Tensor], where: Path) -> Names:
    """Names in the model of each tensor of the files. Raises BadInput if a parameter has no tensor."""
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    same: dict[int, list[str]] = defaultdict(list)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name, parameter in parameters.items():
        same[id(parameter)].append(name)
    own = {name: [name] for name, _ in model.named_buffers()}
    own |= {name: same[id(parameter)] for name, parameter in parameters.items()}
    names = {}
    for name in tensors:
        now = current_name(name)
        names[name] = next((own[each] for each in (now, prefix + now, now.removeprefix(prefix)) if each in own), [])
    covered = {each for held in names.values() for each in held}
    if missing := [name for name, _ in model.named_parameters() if name not in covered]:
        raise BadInput(f"{where}: the weights have no tensor for {missing[0]} ({len(missing)} such parameters)")
    return names


def _split(plan: TensorPlan, names: list[str]) -> Division | None:
    return next((plan.splits[name] for name in names if name in plan.splits), None)


def _fill(model: nn.Module, names: Names, tensors: Mapping[str, Tensor]) -> None:
    """Copy the files' tensors into the model. Raises IntegrityFailure naming one of another shape."""
    own = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
    for name, tensor in tensors.items():
        for target in names[name][:1]:
            if own[target].shape != tensor.shape:
                shapes = f"{list(tensor.shape)}, the model's is {list(own[target].shape)}"
                raise IntegrityFailure(f"tensor {name!r} has shape {shapes}")
            own[target].data.copy_(tensor)


def _check(directory: Path, model: nn.Module, names: Names, tensors: Mapping[str, Tensor], tp: int) -> str:
    """Hold the ranks' outputs against the whole model's; returns a sentence."""
    needed = 24 * sum(parameter.numel() for parameter in model.parameters())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    if needed > memory:
        return f"not compared with the whole model: this needs {needed / 1e9:.0f} GB, {memory / 1e9:.0f} GB are free"
    _fill(model, names, tensors)

    def answer() -> Tensor:
        part = load_rank(directory, build_mesh(Layout(tp=tp)).tp, dtype=torch.float64)
        return outputs(part)

    whole = outputs(model.double())
    try:
        difference = max(float((each - whole).abs().max()) for each in run_threads(answer, tp))
    except RuntimeError as error:
        raise BadInput(f"a {type(model).__name__} cannot be divided: its parts do not run ({error})") from error
    if not difference <= TOLERANCE * max(1.0, float(whole.abs().max())):
        raise BadInput(f"a {type(model).__name__} cannot be divided: its parts answer otherwise, by {difference:.3g}")
    return f"{tp} ranks answer as the whole model does in float64: largest difference {difference:.1e}"


def outputs(model: nn.Module) -> Tensor:
    """The model's logits of some tokens, or its last hidden states."""
    with torch.no_grad():
        said = model(**some_tokens(model))
    return said.logits if "logits" in said else said[0]


def divide(model: nn.Module, plan: TensorPlan, axis: Axis, seed: int = 0) -> nn.Module:
    """Turn a whole model into this rank's part of it, in place, and return it.

    Inputs, outputs and gradients of copied parameters are whole on every rank. Dropout between a block's first and last
    layers differs on each rank (by `seed`); elsewhere ranks with one random state draw the same.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    parts: dict[int, nn.Parameter] = {}
    for name, split in plan.splits.items():
        whole = parameters[name]
        if id(whole) not in parts:
            parts[id(whole)] = nn.Parameter(split.of(whole.data, axis.rank), whole.requires_grad)
        place, _, own = name.rpartition(".")
        setattr(model.get_submodule(place), own, parts[id(whole)])
    for name in plan.summed:
        parameters[name].register_hook(axis.all_reduce)
    random = _RankRandom(seed, axis.rank)
    for block in plan.blocks:
        _Region(model, block, plan.tp, axis, random)
    for name in plan.embeddings:
        words: Any = model.get_submodule(name)
        start, stop = _rows(plan.splits[f"{name}.weight"], axis.rank)
        words.forward = partial(_look_up, words.forward, start, stop, axis)
        padding = words.padding_idx
        words.padding_idx = padding - start if padding is not None and start <= padding < stop else None
    if plan.head is not None:
        head: Any = model.get_submodule(plan.head)
        split = plan.splits[f"{plan.head}.weight"]
        head.forward = partial(_score, head.forward, axis, _rows(split, axis.rank)[0], split.parts[-1][-1][1])
    return model


class _RankRandom:
    """The random state of divided activations, different on each rank; within a block, that of the others."""

    def __init__(self, seed: int, rank: int) -> None:
        self.other = torch.Generator().manual_seed(seed + 1 + rank).get_state()

    def swap(self) -> None:
        current = torch.get_rng_state()
        torch.set_rng_state(self.other)
        self.other = current


class _Region:
    """A block's layers on this rank: its inputs enter once, its sum leaves, heads between them are counted anew."""

    def __init__(self, model: nn.Module, block: DividedBlock, tp: int, axis: Axis, random: _RankRandom) -> None:
        self.axis, self.random = axis, random
        self.entered: list[tuple[Tensor, Tensor]] = []
        for name in block.columns:
            column: Any = model.get_submodule(name)
            if hasattr(column, "nf"):
                column.nf = column.weight.shape[1]
            column.register_forward_pre_hook(self.enter)
        row: Any = model.get_submodule(block.row)
        row.forward = partial(self.leave, row)
        for name in {name.rpartition(".")[0] for name in (*block.columns, block.row)}:
            _divide_heads(model.get_submodule(name), tp)

    def enter(self, column: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        if not self.entered:
            self.random.swap()
        for whole, entered in self.entered:
            if whole is inputs[0]:
                return (entered,)
        entered = enter_tensor_parallel(inputs[0], self.axis)
        self.entered.append((inputs[0], entered))
        return (entered,)

    def leave(self, row: Any, x: Tensor) -> Tensor:
        if self.entered:
            self.random.swap()
        self.entered.clear()
        product = x @ (row.weight.T if isinstance(row, nn.Linear) else row.weight)
        summed = leave_tensor_parallel(product, self.axis)
        return summed.clone() if row.bias is None else summed + row.bias


def _divide_heads(module: nn.Module, tp: int) -> None:
    if HEADS.isdisjoint(vars(module)):
        return
    settings: Any = copy.copy(getattr(module, "config", None))
    for place, names in ((module, HEADS | WIDTHS), (settings, HEADS)):
        for name in names & vars(place).keys() if place is not None else ():
            if type(count := vars(place)[name]) is int:
                setattr(place, name, count // tp)
    if settings is not None:
        module.config = settings


def _rows(split: Division, rank: int) -> tuple[int, int]:
    (rows,) = split.parts[rank]
    return rows


def _look_up(forward: Callable[[Tensor], Tensor], start: int, stop: int, axis: Axis, ids: Tensor) -> Tensor:
    """Rows of a vocabulary of which this rank has [start, stop)."""
    inside = (ids >= start) & (ids < stop)
    rows = forward((ids - start).where(inside, 0)) * inside[..., None]
    return leave_tensor_parallel(rows, axis)


def _score(forward: Callable[[Tensor], Tensor], axis: Axis, start: int, whole: int, x: Tensor) -> Tensor:
    return gather_features(forward(enter_tensor_parallel(x, axis)), axis, start, whole)
