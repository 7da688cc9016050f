"""Programs that `mlm-verify layouts` holds against their own serial run."""

import ast
import difflib
import importlib.util
import inspect
import os
import sys
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from pydantic import ConfigDict, TypeAdapter, ValidationError

from engine.compare.recorder import NameMap, RankPlace, Recorder
from engine.config import ModelConfig, RunConfig, TrainConfig
from lineage.config import override_config, parse_config
from lineage.errors import BadInput
from verify import alone
from verify.alone import Shard
from verify.engines import Engine, Named, Ours, Weights, Work
from verify.megatron_core import MegatronCore, config_class, core
from verify.parity import ParityLayout
from verify.work import with_samples

MODEL = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4}
"""Sizes of the model, which `--with` may change."""
TRAIN = {
    "iterations": 100, "global_batch_size": 8, "microbatch_size": 2, "learning_rate": 1e-2, "warmup_iterations": 0,
    "weight_decay": 0.1, "clip_gradient": 0.1, "adam_epsilon": 1e-3, "precision": "fp32", "decay": "cosine",
}  # fmt: skip
"""One step that clips. Adam's epsilon is so large that the step depends on the size of a gradient."""
SEQUENCE, VOCABULARY = 16, 128
BY_LAYOUT = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size",
             "expert_model_parallel_size", "sequence_parallel", "use_distributed_optimizer")  # fmt: skip


@contextmanager
def subject(name: str, given: Sequence[str], seed: int) -> Iterator[tuple[type[Engine], Work]]:
    """The engine that `name` stands for and its work: megatron-core, here (this suite) or PATH.py:build.

    Raises BadInput for another name, or for fields that the program does not have.
    """
    if bare := next((text for text in given if "=" not in text), None):
        raise BadInput(f"--with {bare} has no value: write FIELD=VALUE")
    if name == "megatron-core":
        AnyGPT.prepare()
        yield AnyGPT, core_work(core_fields(given), seed)
    elif name == "here":
        work = small_work({}, seed, {})
        with with_samples(override_config(work.config, ["model.dropout=0.1", *given]), None, work.iterations) as work:
            yield Ours, replace(work, first_rate=0)
    elif ".py:" in name:
        if given:
            raise BadInput(f"--with is for megatron-core and here; {name} builds what it builds")
        yield AnyModule, small_work({}, seed, {"build": _builder(name)})
    else:
        raise BadInput(f"{name!r} is not megatron-core, here, or a function to build a program, PATH.py:build")


def core_work(given: Mapping[str, Any], seed: int) -> Work:
    """Two steps of a small GPTModel with the given fields."""
    fields = {"bias_activation_fusion": False, "bias_dropout_fusion": False, **given}
    return small_work(fields, seed, fields)


def _builder(name: str) -> Callable[[ParityLayout], "Program"]:
    """The function of a file. Raises BadInput if there is none."""
    path, _, function = name.rpartition(":")
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    if spec is None or spec.loader is None or not Path(path).is_file():
        raise BadInput(f"{path} does not exist")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        build: Callable[[ParityLayout], Program] = getattr(module, function)
    except Exception as error:
        raise BadInput(f"{name} cannot be imported: {type(error).__name__}: {error}") from error
    return build


def small_work(sizes: Mapping[str, Any], seed: int, fields: Mapping[str, Any]) -> Work:
    """Two steps of a small model on random tokens. Raises BadInput for sizes that do not fit each other."""
    shape = MODEL | {name: value for name, value in sizes.items() if name in MODEL}
    shape["num_heads"] = shape.pop("num_attention_heads")
    rest = {"seq_length": SEQUENCE, "vocab_size": VOCABULARY, "padded_vocab_size": VOCABULARY, "dropout": 0.0}
    model = parse_config(shape | rest, ModelConfig, "--with")
    train = parse_config(TRAIN | {"seed": seed}, TrainConfig, "--with")
    return Work(RunConfig(name="layouts", model=model, train=train), 2, (), first_rate=0, fields=fields)


def core_fields(given: Sequence[str]) -> dict[str, Any]:
    """Fields of Megatron-Core's configurations, given as `field=value`.

    They are those of TransformerConfig, GPTModel, OptimizerConfig and DistributedDataParallelConfig. Raises BadInput
    for an unknown field, with the nearest name, and for a value of another type.
    """
    texts = dict(text.partition("=")[::2] for text in given)
    kinds = [
        config_class({"multi_latent_attention": texts.get("multi_latent_attention") == "True"}),
        core("models.gpt").GPTModel.__init__, core("optimizer").OptimizerConfig,
        core("distributed").DistributedDataParallelConfig,
    ]  # fmt: skip
    hints = {name: (kind, hint) for kind in reversed(kinds) for name, hint in typing.get_type_hints(kind).items()}
    fields = {}
    for name, text in texts.items():
        if name in BY_LAYOUT:
            raise BadInput(f"{name} is set by --layouts")
        if name not in hints:
            close = difflib.get_close_matches(name, hints, 1)
            raise BadInput(f"Megatron-Core has no field {name!r}" + (f"; the nearest is {close[0]}" if close else ""))
        fields[name] = _typed(name, text, hints[name][1])
    return fields


def _typed(name: str, text: str, hint: Any) -> Any:
    """A value of the field's type."""
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
        raise BadInput(f"{name}={text}: the field is a {wanted}, not {value!r}") from error


class Sharded(Engine):
    """An engine whose shards say where they lie."""

    def shards(self, named: Mapping[str, torch.Tensor]) -> list[Shard]:
        """Shards of tensors that are like the parameters of these names."""
        raise NotImplementedError

    def show(self, recorder: Recorder, kind: str, named: Named) -> None:
        """Record the shards of tensors that are like parameters."""
        for shard in self.shards(dict(named)):
            recorder.show(kind + shard.key, shard.value, shard.start)

    @torch.no_grad()
    def load(self, whole: Weights) -> None:
        """Copy whole weights into this rank's parameters."""
        named = dict(self.parameters())
        new = {name: parameter.detach().clone() for name, parameter in named.items()}
        for shard in self.shards(new):
            ends = (start + size for start, size in zip(shard.start, shard.value.shape, strict=True))
            shard.value.copy_(whole[shard.key][tuple(map(slice, shard.start, ends))])
        for name, parameter in named.items():
            parameter.copy_(new[name])

    def gradient_of(self, parameter: torch.Tensor) -> torch.Tensor:
        """The tensor in which the optimizer finds the gradient of a parameter."""
        raise NotImplementedError

    @torch.no_grad()
    def planted(self, tensor: str) -> float:
        """Norm of a planted gradient, as the program's own step returns it."""
        named = dict(self.parameters())
        holders = {shard.parameter for shard in self.shards(named) if shard.key == tensor}
        for name, parameter in named.items():
            self.gradient_of(parameter).fill_(name in holders)
        return self.update(0)[0]


class AnyGPT(Sharded, MegatronCore):
    """A GPTModel of any configuration. Names and places of its shards are those of its own checkpoints."""

    names = NameMap(outputs={}, parameters={})
    imports = (*MegatronCore.imports, "dist_checkpointing.mapping", "dist_checkpointing.dict_utils")

    def _samples(self) -> list[dict[str, torch.Tensor]]:
        generator = torch.Generator().manual_seed(self.train.seed)
        count = self.work.iterations * self.train.global_batch_size
        tokens = torch.randint(VOCABULARY, (count, SEQUENCE + 1), generator=generator)
        return [{"tokens": row[:-1], "labels": row[1:]} for row in tokens]

    def shards(self, named: Mapping[str, torch.Tensor]) -> list[Shard]:
        """Shards of the given tensors, where the package's checkpoints put them."""
        return alone.shards_of(self.gpt, named)

    def load(self, whole: Weights) -> None:
        """Copy whole weights into this rank's parameters and the optimizer's own copy."""
        super().load(whole)
        self.optimizer.reload_model_params()

    def save(self, directory: Path) -> None:
        """Write the package's own distributed checkpoint."""
        if int(os.environ["RANK"]) == 0:
            directory.mkdir(parents=True)
        if torch.distributed.get_world_size() > 1:
            torch.distributed.barrier()
        content = alone.checkpoint_of(self.gpt, self.optimizer, self.scheduler, False)
        core("dist_checkpointing").save(content, str(directory))

    def restore(self, directory: Path) -> None:
        """Load the package's own distributed checkpoint."""
        alone.restore(directory, self.gpt, self.optimizer, self.scheduler)

    def gradient_of(self, parameter: torch.Tensor) -> torch.Tensor:
        """The buffer of its data-parallel wrapper."""
        gradient: torch.Tensor = parameter.main_grad  # type: ignore[attr-defined]
        return gradient


@dataclass(frozen=True)
class Program:
    """A program on one rank of a layout, as the function of PATH.py:build returns it."""

    model: torch.nn.Module
    gradient: Callable[[], float]
    """Runs the same batch at every layout, forward and backward, and reduces the gradients; returns the mean loss."""
    step: Callable[[], float]
    """Clips and updates; returns the norm of the whole gradient."""
    starts: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Begins of this rank's parts of parameters in the whole; DTensors say it themselves, others are whole."""
    optimizer: torch.optim.Optimizer | None = None
    """The optimizer, whose moments are compared."""
    save: Callable[[Path], None] | None = None
    """Writes a checkpoint into a new directory; every rank calls it."""
    restore: Callable[[Path], None] | None = None
    """Loads a checkpoint that `save` wrote at any layout."""


class AnyModule(Sharded):
    """A program of the user's."""

    names, place = NameMap(outputs={}, parameters={}), RankPlace()

    def __init__(self, work: Work, layout: ParityLayout) -> None:
        self.work = work
        self.program: Program = work.fields["build"](layout)
        self.own = dict(self.program.model.named_parameters())

    def parameters(self) -> Named:
        """Parameters of the module; of a DTensor, what is on this rank."""
        return ((name, _local(parameter.detach())) for name, parameter in self.own.items())

    def shards(self, named: Mapping[str, torch.Tensor]) -> list[Shard]:
        """Each tensor where `starts`, or its DTensor, says."""
        starts = {name: _start(parameter, self.program.starts.get(name)) for name, parameter in self.own.items()}
        return [Shard(name, name, starts[name], value) for name, value in named.items()]

    def modules(self) -> Iterable[tuple[str, torch.nn.Module]]:
        return self.program.model.named_modules()

    def save(self, directory: Path) -> None:
        if not self.program.save:
            raise NotImplementedError("the program has no `save`")
        self.program.save(directory)

    def restore(self, directory: Path) -> None:
        if not self.program.restore:
            raise NotImplementedError("the program has no `restore`")
        self.program.restore(directory)

    def backward(self, iteration: int, recorder: Recorder | None) -> float:
        """Run the program's forward and backward."""
        return float(self.program.gradient())

    def gradients(self) -> Named:
        """Gradients of the parameters that have one."""
        return ((name, _local(parameter.grad)) for name, parameter in self.own.items() if parameter.grad is not None)

    def gradient_of(self, parameter: torch.Tensor) -> torch.Tensor:
        """The parameter's `grad`."""
        own = next(each for each in self.own.values() if _local(each.detach()).data_ptr() == parameter.data_ptr())
        own.grad = torch.zeros_like(own) if own.grad is None else own.grad
        return _local(own.grad)

    def update(self, iteration: int) -> tuple[float, float]:
        """Run the program's step."""
        return float(self.program.step()), 0.0

    def state(self) -> Iterable[tuple[str, str, torch.Tensor]]:
        """Moments that the optimizer has."""
        states = self.program.optimizer.state if self.program.optimizer else {}
        return ((name, what, _local(states[parameter][what])) for name, parameter in self.own.items()
                for what in ("exp_avg", "exp_avg_sq") if what in states.get(parameter, {}))  # fmt: skip


def _local(value: torch.Tensor) -> torch.Tensor:
    """A tensor, or the part of a DTensor that is on this rank."""
    return value.to_local() if hasattr(value, "to_local") else value


def _start(parameter: torch.Tensor, given: tuple[int, ...] | None) -> tuple[int, ...]:
    """Begin of this rank's part of a parameter in the whole."""
    if hasattr(parameter, "device_mesh"):
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset as place

        return tuple(place(parameter.shape, parameter.device_mesh, parameter.placements)[1])  # type: ignore[attr-defined]
    return given or (0,) * parameter.dim()
