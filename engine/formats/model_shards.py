"""Any model of Hugging Face as one file for each tensor-parallel rank (`shard-hf`), run, and merged (`export`).

The directory has `plan.json`, a file of tensors for each rank, and in `huggingface/` the rest of the original one.
"""

import os
import re
import shutil
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from engine.formats import check_output, digests, new_output
from engine.formats.divided import divide
from engine.formats.huggingface import FOLDER, WEIGHT_FILE, companions, current_name, read_weights
from engine.formats.tensor_plan import Division, TensorPlan, describe_plan, make_plan, some_tokens
from engine.launch.mesh import build_mesh
from engine.launch.threads import run_threads
from engine.parallel.layout import Layout
from engine.parallel.mesh import Axis
from engine.published import CONFIG, INDEX, PLAN
from lineage.atomic import write_json
from lineage.digest import check_seal, seal
from lineage.errors import BadInput, IntegrityFailure
from lineage.extras import import_extra
from lineage.files import FileSchema, one_line, parse_document, read_object
from lineage.lock import check_is_there

WRITTEN = "written.json"
TOLERANCE = 1e-10
"""Largest difference of a divided model's outputs in float64, in parts of the largest output."""
NO_BUFFER = re.compile("(?!)")
Names = Mapping[str, list[str]]
"""Tensor of the files → the model's parameters and buffers that are this tensor."""


class WeightFile(FileSchema):
    """Content of an original weight file, by its name in `WRITTEN`."""

    tensors: list[str]
    metadata: dict[str, str] | None = None


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
            shutil.copyfile(path, temporary / FOLDER / name)
        written = {path.name: _describe(path) for path in files if path.name != INDEX}
        write_json(temporary / FOLDER / WRITTEN, written)
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
            model: nn.Module = kind(config).eval()
            return model
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise BadInput(f"{directory / CONFIG}: transformers builds no model of it ({one_line(error)})") from error


def load_rank(directory: Path, axis: Axis, seed: int = 0, dtype: torch.dtype | None = None) -> nn.Module:
    """This rank's part of a model that `shard_model` wrote: a transformers model, used as the whole one is. `dtype`
    None is the number format of the files. `seed` is that of dropout in divided layers. Raises BadInput if the axis has
    another number of ranks than there are files."""
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
    """Write what `shard_model` divided as the Hugging Face directory `out`, and return `out`. The files are the
    original ones, byte for byte. Raises BadInput if `out` exists or cannot be written, IntegrityFailure if the
    checkpoint is incomplete or changed."""
    check_output(out)
    check_seal(checkpoint)
    plan = read_plan(checkpoint)
    ranks = [load_file(checkpoint / _file(rank)) for rank in range(plan.tp)]
    names = _names_of(build_model(checkpoint / FOLDER), ranks[0], checkpoint)
    whole = {name: split.merge([tensors[name] for tensors in ranks]) if (split := _split(plan, names[name])) else tensor
             for name, tensor in ranks[0].items()}  # fmt: skip
    with new_output(out) as temporary:
        for file, content in read_object(checkpoint / FOLDER / WRITTEN).items():
            described = parse_document(content, WeightFile, f"{checkpoint / FOLDER / WRITTEN}, {file}")
            if not WEIGHT_FILE.fullmatch(file) or not whole.keys() >= {*described.tensors}:
                raise IntegrityFailure(f"{checkpoint / FOLDER / WRITTEN}: {file} is no file of these tensors")
            chosen = {name: whole[name] for name in described.tensors}
            save_file(chosen, temporary / file, metadata=described.metadata)
        for path in (checkpoint / FOLDER).iterdir():
            if path.name != WRITTEN:
                shutil.copyfile(path, temporary / path.name)
    return out


def _describe(path: Path) -> dict[str, Any]:
    with safe_open(path, framework="pt") as file:
        return {"tensors": sorted(file.keys()), "metadata": file.metadata()}


def read_plan(directory: Path) -> TensorPlan:
    """The plan that a directory was divided by. Raises IntegrityFailure if it is none."""
    try:
        return TypeAdapter(TensorPlan).validate_python(read_object(directory / PLAN))
    except ValidationError as error:
        raise IntegrityFailure(f"{directory / PLAN} is not a plan of this program") from error


def _file(rank: int) -> str:
    return f"model-tp{rank:02d}.safetensors"


def _names_of(model: nn.Module, tensors: Mapping[str, torch.Tensor], where: Path) -> Names:
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


def _fill(model: nn.Module, names: Names, tensors: Mapping[str, torch.Tensor]) -> None:
    """Copy the files' tensors into the model. Raises IntegrityFailure naming one of another shape."""
    own = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
    for name, tensor in tensors.items():
        for target in names[name][:1]:
            if own[target].shape != tensor.shape:
                shapes = f"{list(tensor.shape)}, the model's is {list(own[target].shape)}"
                raise IntegrityFailure(f"tensor {name!r} has shape {shapes}")
            own[target].data.copy_(tensor)


def _check(directory: Path, model: nn.Module, names: Names, tensors: Mapping[str, torch.Tensor], tp: int) -> str:
    """Hold the ranks' outputs against the whole model's; returns a sentence."""
    needed = 24 * sum(parameter.numel() for parameter in model.parameters())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    if needed > memory:
        return f"not compared with the whole model: this needs {needed / 1e9:.0f} GB, {memory / 1e9:.0f} GB are free"
    _fill(model, names, tensors)

    def answer() -> torch.Tensor:
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


def outputs(model: nn.Module) -> torch.Tensor:
    """The model's logits of some tokens, or its last hidden states."""
    with torch.no_grad():
        said = model(**some_tokens(model))
    first: torch.Tensor = said.logits if "logits" in said else said[0]
    return first
