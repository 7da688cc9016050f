"""Programs that `mlm-verify layouts` compares with their own serial run."""

import importlib
import importlib.util
import inspect
import re
import sys
import typing
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from pydantic import ConfigDict, TypeAdapter, ValidationError

from mlm_repro.engine.config import ModelConfig, RunConfig, TrainConfig
from mlm_repro.lineage.atomic import JSON
from mlm_repro.lineage.config import parse_config
from mlm_repro.lineage.errors import BadInput, did_you_mean
from mlm_repro.verify.engines import Kind, Work
from mlm_repro.verify.megatron_core import MegatronCore, config_class, core
from mlm_repro.verify.programs import HeldTraining, own_loss
from mlm_repro.verify.transformers_models import TABLES, literal

MODEL = TABLES["model"]
"""Sizes of the small model that is trained; `--with` may change them."""
TRAIN = TABLES["train"]
"""Training recipe in whose steps the gradient is clipped."""
LAYOUTS = (
    "(tensor_model|pipeline_model|context|expert_model)_parallel_size"
    "|sequence_parallel|use_distributed_optimizer"
)


LARGEST_BATCH = 8


class Asked(NamedTuple):
    """A program to compare on layouts, as the command line gives it, unchecked: `program`, its name
    or PATH.py:build; its settings in `fields`, texts FIELD=VALUE; and the number of microbatches, 0
    for the default. `spec` names the function of Megatron-Core's layers, empty for its own, and
    `imports` the Python files or modules to import first."""

    program: str
    """Name of the program: megatron-core, transformers, torch or PATH.py:build."""
    fields: Sequence[str] = ()
    """Values of fields of the program's configurations, each as FIELD=VALUE."""
    microbatches: int = 0
    """Number of microbatches of the serial batch in Megatron-Core, and of every rank elsewhere; 0
    for the default."""
    spec: str = ""
    """Function that returns Megatron-Core's layers: MODULE:FUNCTION or PATH.py:FUNCTION."""
    imports: Sequence[str] = ()
    """Python files to run before the program is built."""


@contextmanager
def subject(asked: Asked, seed: int) -> Iterator[tuple[Kind, Work, str, str]]:
    """Context manager: yield a tuple of four values for the program that `asked` names:

    - the function that builds its engine from a Work and a layout;
    - its Work, which describes the training;
    - its name, with the release if it is a package;
    - the names of the layouts that `all` stands for, as one string with commas between them.

    `seed` determines the training's random numbers and, for transformers and torch, the weights.
    The caller builds engines within the block only, because files that they load may be removed
    after it.

    Imports the files and modules in `asked.imports` before the program. Raises BadInput if one of
    them, or the program's package, module or function, is missing or cannot be imported, and for an
    architecture that transformers does not have as a causal model or cannot build. Also raises
    BadInput for a field that is given twice, that the program does not have, or that has no value
    or an unfit one, and for a number of microbatches that does not divide 8.
    """
    name = asked.program
    given = asked.fields
    count = asked.microbatches
    if bare := next((text for text in given if "=" not in text), None):
        raise BadInput(f"--with {bare} has no value: write FIELD=VALUE")
    for number, file in enumerate(asked.imports):
        _module(file, f"imported_{number}")
    train = {"microbatch_size": LARGEST_BATCH // count} if count else {}
    if count and LARGEST_BATCH % count:
        raise BadInput(
            f"--microbatches {count} does not divide the batch of {LARGEST_BATCH} sequences: give"
            " 1, 2, 4 or 8"
        )
    texts = dict(text.partition("=")[::2] for text in given)
    if len(texts) < len(given):
        raise BadInput("--with names a field twice: give each field once")
    if name == "megatron-core":
        MegatronCore.prepare()
        work = replace(
            small_work(seed, 2, core_fields(texts), train),
            spec=function_of(asked.spec) if asked.spec else None,
        )
        yield (
            MegatronCore,
            work,
            f"{name} {MegatronCore.release()}",
            "tp2,tp2-sp,pp2,dp2,dp2-zero1",
        )
    elif name == "transformers":
        from mlm_repro.verify import transformers_models

        with transformers_models.training(texts, seed, count or 1) as kind:
            yield (
                kind,
                small_work(seed, 3),
                f"{name} {sys.modules[name].__version__}",
                "tp2,fsdp2",
            )
    elif name == "torch":
        from mlm_repro.verify import torch_blocks

        kind = torch_blocks.training(texts, seed, count or 1)
        yield (
            kind,
            small_work(seed, 3),
            f"{name} {torch.__version__}",
            "tp2,tp2-sp,fsdp2,dp2,dp2-fsdp2,fsdp2-tp2,pp2",
        )
    else:
        if given:
            raise BadInput(
                f"--with is for megatron-core, transformers and torch: leave it out with {name},"
                " which has no fields to set"
            )
        build = function_of(name)
        beside = vars(sys.modules[build.__module__])
        kind = HeldTraining(build, beside.get("batch"), beside.get("loss", own_loss), count or 1)
        yield kind, small_work(seed, 3 if "batch" in beside else 2), name, "tp2"


def _module(path: str, name: str) -> Any:
    """Import and return the module in the file `path` under the name `name` or, if `path` does not
    end in .py, the module that `path` names. Raises BadInput if the module cannot be imported."""
    try:
        if not path.endswith(".py"):
            return importlib.import_module(path)
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec
        assert spec.loader
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except Exception as error:
        raise BadInput(
            f"{path!r} cannot be imported as a Python module: {type(error).__name__}: {error}"
        ) from error
    return module


def function_of(name: str) -> Any:
    """Import the module and return the function that MODULE:FUNCTION or PATH.py:FUNCTION names.
    Raises BadInput if the module cannot be imported or has no such function."""
    path, _, function = name.rpartition(":")
    module = _module(path, Path(path).stem)
    if not callable(member := getattr(module, function, None)):
        raise BadInput(f"{path} has no function {function!r}")
    return member


def small_work(
    seed: int,
    iterations: int,
    fields: Mapping[str, Any] = MappingProxyType({}),
    train: Mapping[str, int] = MappingProxyType({}),
) -> Work:
    """Return the Work of training a small model for `iterations`, without token files: the engine
    has tokens of its own. `fields` are values of the other program's fields by its names, and all
    are in the Work; the ones that MODEL has, such as `num_attention_heads`, change the model's size
    too. `train` may change the recipe, by the names of TrainConfig; the recipe's seed is `seed`.
    Raises BadInput for sizes that do not fit each other."""
    shape = MODEL | {name: value for name, value in fields.items() if name in MODEL}
    shape |= {
        "num_heads": shape.pop("num_attention_heads"),
        "padded_vocab_size": shape["vocab_size"],
    }
    model = parse_config(shape, ModelConfig, "--with")
    trained = parse_config({**TRAIN, "seed": seed, **train}, TrainConfig, "--with")
    return Work(
        RunConfig(name="layouts", model=model, train=trained),
        iterations,
        (),
        first_rate=0,
        fields=fields,
    )


def core_fields(texts: Mapping[str, str]) -> JSON:
    """Return a dict name → value of fields of Megatron-Core's configurations and arguments of its
    GPTModel, read from `texts`, a dict name → text such as `True`. Megatron-Core's fusions of bias
    with activation and with dropout are in the dict too, off unless `texts` sets them.

    Raises BadInput for an unknown field, with the nearest name, for a field that the layout sets,
    and for a text whose value is not of the field's type.
    """
    kinds = [
        config_class({"multi_latent_attention": texts.get("multi_latent_attention") == "True"}),
        core("models.gpt").GPTModel.__init__,
        core("optimizer").OptimizerConfig,
        core("distributed").DistributedDataParallelConfig,
    ]
    hints: JSON = {}
    for kind in reversed(kinds):
        hints |= typing.get_type_hints(kind)
    fields: JSON = {"bias_activation_fusion": False, "bias_dropout_fusion": False}
    for name, text in texts.items():
        if re.fullmatch(LAYOUTS, name):
            raise BadInput(f"{name} is set by the names of --layouts: leave it out of --with")
        if name not in hints:
            raise BadInput(
                f"Megatron-Core has no field {name!r}:"
                f" {did_you_mean(name, hints, 'none is like it')}"
            )
        fields[name] = _typed(name, text, hints[name])
    return fields


def _typed(name: str, text: str, hint: Any) -> Any:
    if "Callable" in str(hint):
        function = vars(torch.nn.functional).get(text.removeprefix("F."))
        if callable(function):
            return function
        raise BadInput(
            f"{name}={text} in --with: torch.nn.functional has no such function; name one that it"
            " has, such as F.gelu"
        )
    value = literal(text)
    try:
        return TypeAdapter(hint, config=ConfigDict(arbitrary_types_allowed=True)).validate_python(
            value
        )
    except ValidationError as error:
        wanted = inspect.formatannotation(hint).replace("typing.", "")
        raise BadInput(
            f"{name}={text} in --with: the field must be {wanted}, not {value!r}"
        ) from error
