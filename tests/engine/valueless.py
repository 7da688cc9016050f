"""Run a process: two training steps on tensors without values, kernels launched into nothing.
Reading a value fails.

Prints how often the host asked for numbers by `tolist`, which alone is answered, and how many
kernels were launched. Then takes a step whose update reads a number otherwise.
"""

import os
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)

import torch
from triton.runtime.jit import JITFunction

from mlm_repro.engine import step
from mlm_repro.engine.config import ModelConfig, ParallelConfig, TrainConfig
from mlm_repro.engine.kernels.registry import DTYPES, KERNELS
from mlm_repro.engine.model.microbatch import PipelineInput
from mlm_repro.engine.parallel.mesh import serial_mesh
from mlm_repro.engine.rng import Dropout

MODEL = ModelConfig(
    num_layers=2, hidden_size=64, num_heads=2, seq_length=32, vocab_size=256, padded_vocab_size=256
)
TRAIN = TrainConfig(
    iterations=2,
    global_batch_size=2,
    microbatch_size=1,
    learning_rate=1e-3,
    warmup_iterations=0,
    precision="bf16",
)
launched: set[str] = set()
asked: list[int] = []


def launch(self: Any, *arguments: Any, **options: Any) -> None:
    launched.add(self.__name__)


def as_list(numbers: torch.Tensor) -> list[float]:
    asked.append(len(numbers))
    return [1.0] * len(numbers)


setattr(torch.Tensor, "tolist", as_list)  # noqa: B010
setattr(JITFunction, "run", launch)  # noqa: B010
DTYPES["meta"] = DTYPES["cuda"]
for places in KERNELS.values():
    if "cuda" in places:
        places["meta"] = places["cuda"]
_, training = step.build_step(MODEL, TRAIN, ParallelConfig(), serial_mesh("meta"))
update = training.optimizer.update


def reading(learning_rate: float, clipping: float) -> None:
    training.optimizer.groups[0].master.sum().item()
    update(learning_rate, clipping)


tokens = torch.zeros(1, MODEL.seq_length, dtype=torch.int64, device="meta")
for iteration in range(3):
    if iteration == 2:
        print(len(asked), len(launched), flush=True)
        vars(training.optimizer)["update"] = reading
    training.run(
        [PipelineInput(tokens, tokens, Dropout(0.1, 1, iteration, (place,))) for place in range(2)],
        1e-3,
    )
