"""Run a process: what a GPU is given in one layer of a microbatch, and in an update, on tensors
without values.

Prints JSON: by name of what is launched, how often and with how many bytes that are read and
written; copies from the host have a name of their own. A layer is what a microbatch has more with
one layer more. The update is what follows the last backward pass.
"""

import json
import os
import re
from collections import Counter
from collections.abc import Callable
from inspect import getsource
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime.jit import JITFunction

from mlm_repro.engine import step
from mlm_repro.engine.config import ModelConfig, ParallelConfig, TrainConfig
from mlm_repro.engine.kernels.registry import DTYPES, KERNELS
from mlm_repro.engine.model.microbatch import PipelineInput
from mlm_repro.engine.parallel.mesh import serial_mesh
from mlm_repro.engine.rng import Dropout

S, B, H, HEADS = 1024, 8, 1920, 20
NOTHING = {
    "empty",
    "new_empty",
    "empty_like",
    "empty_strided",
    "new_empty_strided",
    "_unsafe_view",
    "set_",
}
"""Operations that launch nothing, besides views."""
Counts = dict[str, tuple[int, int]]

counts: Counter[str] = Counter()
moved: Counter[str] = Counter()


def count(name: str, read: Any, written: Any) -> None:
    counts[name] += 1
    for values in (read, written):
        tensors = {id(each): each for each in tree_leaves(values) if isinstance(each, torch.Tensor)}
        moved[name] += sum(each.numel() * each.element_size() for each in tensors.values())


class Counting(TorchDispatchMode):
    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), options: Any = None
    ) -> Any:
        result = function(*arguments, **(options or {}))
        name = function.overloadpacket.__name__
        devices = {
            each.device.type for each in tree_leaves(arguments) if isinstance(each, torch.Tensor)
        }
        made = {each.device.type for each in tree_leaves(result) if isinstance(each, torch.Tensor)}
        if "meta" in devices | made and not function.is_view and name not in NOTHING:
            from_host = "cpu" in devices and name in ("_to_copy", "copy_")
            count(
                "copy from the host" if from_host else name,
                *passed(function, arguments, options or {}, result),
            )
        return result


def passed(function: Any, arguments: Any, options: Any, result: Any) -> tuple[Any, Any]:
    """What an operation reads, and what it writes: its result, and what it changes in place without
    returning it."""
    given = [
        (each, *arguments[i : i + 1], options.get(each.name))
        for i, each in enumerate(function._schema.arguments)
    ]
    changed = [each[1] for each in given if each[0].alias_info and each[0].alias_info.is_write]
    overwrites = function.overloadpacket.__name__ in ("copy_", "fill_", "zero_")
    return [each[1] for each in given if not overwrites or each[1] is not changed[0]], (
        changed,
        result,
    )


def launch(self: Any, *arguments: Any, **options: Any) -> None:
    """Of an element-wise kernel, its source says which tensors it loads and which it stores."""
    room, source = self.__module__.rpartition(".")[2], getsource(self.fn)
    given = dict(zip(self.arg_names, arguments, strict=False))
    read, written = (
        [given[name] for name in set(re.findall(rf"tl\.{verb}\(\s*(\w+)", source)) & given.keys()]
        for verb in ("load", "store")
    )
    # Which alone works in place: others are given a tensor twice where they store nothing.
    if room != "adamw":
        written = [each for each in written if not any(each is other for other in read)]
    knows = room == "adamw" or room.startswith("bias")
    count(f"{room}.{self.__name__.strip('_')}", *((read, written) if knows else (arguments, ())))


setattr(torch.Tensor, "tolist", lambda self: [1.0] * len(self))  # noqa: B010
setattr(JITFunction, "run", launch)  # noqa: B010
DTYPES["meta"] = DTYPES["cuda"]
for places in KERNELS.values():
    if "cuda" in places:
        places["meta"] = places["cuda"]


def launched(layers: int, microbatches: int, is_update: bool = False) -> tuple[Counter[str], ...]:
    """Of the second iteration of a model, or of its update alone."""
    model = ModelConfig(
        num_layers=layers,
        hidden_size=H,
        num_heads=HEADS,
        seq_length=S,
        vocab_size=512,
        padded_vocab_size=512,
    )
    train = TrainConfig(
        iterations=2,
        global_batch_size=B * microbatches,
        microbatch_size=B,
        learning_rate=1e-3,
        warmup_iterations=0,
        precision="bf16",
    )
    _, training = step.build_step(model, train, ParallelConfig(), serial_mesh("meta"))
    tokens = torch.zeros(B, S, dtype=torch.int64, device="meta")
    for iteration in range(2):
        inputs = [
            PipelineInput(tokens, tokens, Dropout(0.1, 1, iteration, tuple(range(B))))
            for _ in range(microbatches)
        ]
        with Counting():
            counts.clear()
            moved.clear()
            if is_update:
                training.reducer.finish = after_clearing(training.reducer.finish)  # type: ignore[method-assign]
            training.run(inputs, 1e-3)
    return Counter(counts), Counter(moved)


def after_clearing(finish: Callable[[float], None]) -> Callable[[float], None]:
    def finish_alone(divisor: float) -> None:
        counts.clear()
        moved.clear()
        finish(divisor)

    return finish_alone


def more(
    larger: tuple[Counter[str], ...], smaller: tuple[Counter[str], ...]
) -> tuple[Counter[str], ...]:
    return tuple(
        Counter({name: a[name] - b[name] for name in a | b if a[name] != b[name]})
        for a, b in zip(larger, smaller, strict=True)
    )


def shown(both: tuple[Counter[str], ...]) -> Counts:
    return {name: (both[0][name], both[1][name]) for name in sorted(both[0])}


def of_a_layer() -> Counts:
    """Of one layer in a microbatch that is not the first."""
    return shown(more(*(more(launched(layers, 2), launched(layers, 1)) for layers in (2, 1))))


print(json.dumps({"layer": of_a_layer(), "update": shown(launched(1, 8, is_update=True))}))
