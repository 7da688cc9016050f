"""Programs that `mlm-verify layouts` holds against their own serial run."""

import ast
import difflib
import importlib.util
import inspect
import re
import sys
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from pydantic import ConfigDict, TypeAdapter, ValidationError

from mlm_repro.engine.compare.recorder import Recorder
from mlm_repro.engine.config import ModelConfig, RunConfig, TrainConfig
from mlm_repro.lineage.config import override_config, parse_config
from mlm_repro.lineage.errors import BadInput
from mlm_repro.verify.alone import Shard, core
from mlm_repro.verify.engines import Engine, Named, Ours, Work, with_samples
from mlm_repro.verify.megatron_core import MegatronCore, config_class
from mlm_repro.verify.parity import ParityLayout

MODEL = {
    "num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "seq_length": 16, "vocab_size": 128,
    "dropout": 0.0,
}  # fmt: skip
"""Sizes of the model, which `--with` may change."""
TRAIN = {
    "iterations": 100, "global_batch_size": 8, "microbatch_size": 2, "learning_rate": 1e-2, "warmup_iterations": 0,
    "weight_decay": 0.1, "clip_gradient": 0.1, "adam_epsilon": 1e-3, "precision": "fp32", "decay": "cosine",
}  # fmt: skip
"""One step that clips. Adam's epsilon is so large that the step depends on the size of a gradient."""
LAYOUTS = "(tensor_model|pipeline_model|context|expert_model)_parallel_size|sequence_parallel|use_distributed_optimizer"


@contextmanager
def subject(name: str, given: Sequence[str], seed: int) -> Iterator[tuple[type[Engine], Work]]:
    """The engine that `name` stands for and its work: megatron-core, here (this suite) or PATH.py:build.

    Raises BadInput for fields that the program does not have.
    """
    if bare := next((text for text in given if "=" not in text), None):
        raise BadInput(f"--with {bare} has no value: write FIELD=VALUE")
    if name == "megatron-core":
        MegatronCore.prepare()
        yield MegatronCore, small_work(seed, core_fields(given))
    elif name == "here":
        work = small_work(seed)
        with with_samples(override_config(work.config, ["model.dropout=0.1", *given]), work.iterations) as work:
            yield Ours, replace(work, first_rate=0)
    else:
        if given:
            raise BadInput(f"--with is for megatron-core and here; {name} builds what it builds")
        yield _builder(name), small_work(seed)


def _builder(name: str) -> type[Engine]:
    """A class whose instances the function of a file builds. Raises BadInput if there is none."""
    path, _, function = name.rpartition(":")
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    if spec is None or spec.loader is None:
        raise BadInput(f"{path} is not a Python file")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        build: Callable[[ParityLayout], Program] = getattr(module, function)
    except Exception as error:
        raise BadInput(f"{name} cannot be imported: {type(error).__name__}: {error}") from error

    class Built(Program):
        def __new__(cls, work: Work, layout: ParityLayout) -> Program:  # type: ignore[misc]
            program = build(layout)
            program.work = work
            return program

    return Built


def small_work(seed: int, fields: Mapping[str, Any] = MappingProxyType({})) -> Work:
    """Two steps of a small model on random tokens. Raises BadInput for sizes that do not fit each other."""
    shape = MODEL | {name: value for name, value in fields.items() if name in MODEL}
    shape |= {"num_heads": shape.pop("num_attention_heads"), "padded_vocab_size": shape["vocab_size"]}
    model = parse_config(shape, ModelConfig, "--with")
    train = parse_config(TRAIN | {"seed": seed}, TrainConfig, "--with")
    return Work(RunConfig(name="layouts", model=model, train=train), 2, (), first_rate=0, fields=fields)


def core_fields(given: Sequence[str]) -> dict[str, Any]:
    """Fields of Megatron-Core's configurations, given as `field=value`.

    Raises BadInput for an unknown field, with the nearest name, and for a value of another type.
    """
    texts = dict(text.partition("=")[::2] for text in given)
    kinds = [
        config_class({"multi_latent_attention": texts.get("multi_latent_attention") == "True"}),
        core("models.gpt").GPTModel.__init__, core("optimizer").OptimizerConfig,
        core("distributed").DistributedDataParallelConfig,
    ]  # fmt: skip
    hints = {name: (kind, hint) for kind in reversed(kinds) for name, hint in typing.get_type_hints(kind).items()}
    fields: dict[str, Any] = {"bias_activation_fusion": False, "bias_dropout_fusion": False}
    for name, text in texts.items():
        if re.fullmatch(LAYOUTS, name):
            raise BadInput(f"{name} is set by --layouts")
        if name not in hints:
            close = difflib.get_close_matches(name, hints, 1)
            raise BadInput(f"Megatron-Core has no field {name!r}" + (f"; the nearest is {close[0]}" if close else ""))
        fields[name] = _typed(name, text, hints[name][1])
    return fields


def _typed(name: str, text: str, hint: Any) -> Any:
    if "Callable" in str(hint):
        function = vars(torch.nn.functional).get(text.removeprefix("F."))
        if callable(function):
            return function
        raise BadInput(f"{name}={text}: torch.nn.functional has no such function")
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        value = text
    try:
        return TypeAdapter(hint, config=ConfigDict(arbitrary_types_allowed=True)).validate_python(value)
    except ValidationError as error:
        wanted = inspect.formatannotation(hint).replace("typing.", "")
        raise BadInput(f"{name}={text}: the field must be {wanted}, not {value!r}") from error


class Program(Engine):
    """A program of the user's on one rank of a layout, as the function of PATH.py:build returns it."""

    def __init__(
        self, model: torch.nn.Module, gradient: Callable[[], float], step: Callable[[], float],
        starts: Mapping[str, tuple[int, ...]] | None = None, optimizer: torch.optim.Optimizer | None = None,
        save: Callable[[Path], None] | None = None, restore: Callable[[Path], None] | None = None,
    ) -> None:  # fmt: skip
        """Describe the program.

        `gradient` runs the same batch at every layout, forward and backward, reduces the gradients and returns the mean
        loss. `step` clips and updates, and returns the norm of the whole gradient. `starts` has the begins of this
        rank's parts of parameters in the whole; DTensors say it themselves, others are whole. Moments of the
        `optimizer` are compared. `save` writes a checkpoint into a new directory, `restore` loads one of any layout;
        every rank calls them.
        """
        self.module, self.gradient, self.clip_and_update, self.starts = model, gradient, step, starts or {}
        self.states = optimizer.state if optimizer else {}
        self.own = dict(model.named_parameters())
        if save and restore:
            vars(self).update(save=save, restore=restore)

    def parameters(self) -> Named:
        return ((name, _local(parameter.detach())) for name, parameter in self.own.items())

    def shards(self, named: Mapping[str, torch.Tensor]) -> list[Shard]:
        return [Shard(name, name, _start(self.own[name], self.starts.get(name)), part) for name, part in named.items()]

    def backward(self, iteration: int, recorder: Recorder | None) -> float:
        return float(self.gradient())

    def gradients(self) -> Named:
        return ((name, _local(parameter.grad)) for name, parameter in self.own.items() if parameter.grad is not None)

    def gradient_of(self, parameter: str) -> torch.Tensor:
        own = self.own[parameter]
        own.grad = torch.zeros_like(own) if own.grad is None else own.grad
        return _local(own.grad)

    def update(self, iteration: int) -> tuple[float, float]:
        return float(self.clip_and_update()), 0.0

    def state(self) -> Iterable[tuple[str, str, torch.Tensor]]:
        return ((name, what, _local(self.states[parameter][what])) for name, parameter in self.own.items()
                for what in ("exp_avg", "exp_avg_sq") if what in self.states.get(parameter, {}))  # fmt: skip


def _local(value: torch.Tensor) -> torch.Tensor:
    """A tensor, or the part of a DTensor that is on this rank."""
    return value.to_local() if hasattr(value, "to_local") else value


def _start(parameter: torch.Tensor, given: tuple[int, ...] | None) -> tuple[int, ...]:
    """Begin of this rank's part of a parameter in the whole."""
    if hasattr(parameter, "device_mesh"):
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset as place

        return tuple(place(parameter.shape, parameter.device_mesh, parameter.placements)[1])  # type: ignore[attr-defined]
    return given or (0,) * parameter.dim()
