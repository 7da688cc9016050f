"""Twins: published recipes at laptop size. Imports no torch."""

import math

from mlm_repro.engine.config import ParallelConfig, RunConfig, TwinScale
from mlm_repro.lineage.errors import BadInput

TWIN_FLOPS = 30e9
"""Floating-point operations per second and core in a twin's training, only for estimates of its
time."""

DIVIDED = ("hidden_size", "num_heads", "seq_length", "vocab_size")
"""Names of the sizes of a ModelConfig that its twin has divided by the factors of the same names.
The number of layers is divided too, and stays above 0."""


def shrink(config: RunConfig, scale: TwinScale | None = None) -> RunConfig:
    """Return the RunConfig of the twin, a small copy, of a published recipe, `config`: the model's
    sizes, batch, iterations, warm-up and decay divided, and the learning rates multiplied, by the
    factors in `scale`, by default `TwinScale()`. The twin's name ends in `-twin`. The twin has at
    least one layer, one sequence in a batch and two iterations, and a microbatch that fits its
    batch. Another size that is below its factor becomes 0, which is not refused here. Raises
    BadInput for a growing batch.

    The twin is in fp32 and undivided, with default records and with intervals and validation
    samples of its own, whatever `config` says.
    """
    if config.train.rampup_batch_size:
        raise BadInput(
            "a growing batch has no twin: take train.rampup_batch_size out of the recipe's file;"
            " with --twin, --set train.rampup_batch_size=… then gives the twin one"
        )
    scale = scale or TwinScale()
    model = config.model
    train = config.train
    batch = max(train.global_batch_size // scale.global_batch_size, 1)
    iterations = max(train.iterations // scale.iterations, 2)
    return RunConfig(
        name=f"{config.name}-twin",
        model=model.model_copy(
            update={
                **{name: getattr(model, name) // getattr(scale, name) for name in DIVIDED},
                "num_layers": max(model.num_layers // scale.num_layers, 1),
                "padded_vocab_size": model.padded_vocab_size // scale.vocab_size,
                "transformer_xl": model.transformer_xl.shrink(scale),
            }
        ),
        train=train.model_copy(
            update={
                "global_batch_size": batch,
                "microbatch_size": math.gcd(batch, min(train.microbatch_size, max(batch // 2, 1))),
                "iterations": iterations,
                "decay_iterations": (
                    train.decay_iterations
                    and max(int(train.decay_iterations // scale.iterations), 2)
                ),
                "wsd_iterations": (
                    train.wsd_iterations and max(int(train.wsd_iterations // scale.iterations), 1)
                ),
                "warmup_iterations": -int(-train.warmup_iterations // scale.warmup_iterations),
                "learning_rate": train.learning_rate * scale.learning_rate,
                "min_learning_rate": train.min_learning_rate * scale.learning_rate,
                "validation_interval": max(iterations // 30, 1),
                "validation_samples": 256,
                "checkpoint_interval": max(iterations // 3, 1),
                "precision": "fp32",
            }
        ),
        parallel=ParallelConfig(),
        data=config.data,
        twin=scale,
    )


def describe_scale(scale: TwinScale, rates: str = "", kept: str = "initialisation, ") -> str:
    """Return a sentence that states by which factors a twin is smaller than its published recipe.
    `rates`, if given, replaces the phrase about learning rates; `kept`, by default "initialisation,
    ", begins the list of what stays the same."""
    return (
        f"A twin is the published recipe with hidden size and vocabulary ÷ {scale.hidden_size} and"
        f" ÷ {scale.vocab_size}, heads ÷ {scale.num_heads}, layers ÷ {scale.num_layers} (rounded"
        f" down), context ÷ {scale.seq_length}, batch ÷ {scale.global_batch_size}, iterations ÷"
        f" {scale.iterations}, warm-up ÷ {scale.warmup_iterations} and"
        f" {rates or f'learning rates × {scale.learning_rate}'}; {kept}schedule, dropout, weight"
        " decay, clipping and every line of code stay the same."
    )


def initial_deviation(width: int) -> float:
    """Return the initial standard deviation of the weights of a small model of this width, its
    hidden size: 0.02 · √(1024/width), the 355M model's 0.02 at its width of 1024."""
    return 0.02 * math.sqrt(1024 / width)


def twin_seconds(flops: float, ranks: int) -> float:
    """Return an estimate of the seconds that a twin trains for `flops` floating-point operations on
    `ranks` ranks, at 30 billion a second on each."""
    return flops / (TWIN_FLOPS * ranks)
