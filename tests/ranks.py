"""Run a function on forked gloo ranks; a failure of any is the test's."""

from functools import cache
from typing import Any

import torch

from mlm_repro.engine.config import ModelConfig, ParallelConfig, TrainConfig
from mlm_repro.engine.launch.forked import run_forked
from mlm_repro.engine.model.microbatch import PipelineInput
from mlm_repro.engine.parallel.mesh import serial_mesh
from mlm_repro.engine.rng import Dropout
from mlm_repro.engine.step import build_step


def run_ranks(*arguments: Any, **options: Any) -> list[Any]:
    """As `run_forked`; what libraries prepare at first use is prepared once, in the parent."""
    take_a_step()
    return run_forked(*arguments, **options)


@cache
def take_a_step() -> None:
    """One iteration of training with dropout and recomputation."""
    model = ModelConfig(
        num_layers=1, hidden_size=8, num_heads=1, seq_length=4, vocab_size=8, padded_vocab_size=8
    )
    train = TrainConfig(iterations=1, global_batch_size=1, microbatch_size=1, warmup_iterations=0)
    _, step = build_step(model, train, ParallelConfig(recompute="full"), serial_mesh())
    tokens = torch.zeros(1, 4, dtype=torch.long)
    step.run([PipelineInput(tokens, tokens, Dropout(0.1, 0, 0, (0,)))], 1e-3)
