"""Model shapes, batches and the optimizer's settings that every contender of a benchmark shares."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.cli import read_run_config
from engine.config import ModelConfig, Precision, TrainConfig
from lineage.shipped import model_file


@dataclass(frozen=True)
class BenchSize:
    """What is trained. Every vocabulary row is a real word, so that no contender masks padding."""

    name: str
    model: ModelConfig
    train: TrainConfig
    warm_up: int
    """Iterations of a round that are not timed."""

    @property
    def tokens(self) -> int:
        """Tokens of one iteration over all ranks."""
        return self.train.global_batch_size * self.model.seq_length

    def batch(self, iteration: int) -> NDArray[np.int64]:
        """Token ids of an iteration's global batch, [B, s + 1]: few words are frequent, as in text."""
        generator = np.random.default_rng([self.train.seed, iteration])
        uniform = generator.random((self.train.global_batch_size, self.model.seq_length + 1))
        return (self.model.vocab_size**uniform - 1).astype(np.int64)

    def describe(self) -> dict[str, Any]:
        """The shape and the recipe, as plain JSON values."""
        train = self.train
        shape = self.model.model_dump(include={"num_layers", "hidden_size", "num_heads", "seq_length", "vocab_size"})
        return shape | {
            "global_batch_size": train.global_batch_size,
            "precision": train.precision,
            "optimizer": f"AdamW, learning rate {train.learning_rate:g}, gradient norm clipped at "
            f"{train.clip_gradient:g}, weight decay {train.weight_decay:g} except biases and layer norms",
            "warm_up_iterations": self.warm_up,
            "timed_iterations": train.iterations - self.warm_up,
        }

    def in_precision(self, precision: Precision) -> "BenchSize":
        """The same in another number format."""
        return replace(self, train=self.train.model_copy(update={"precision": precision}))


def read_size(name: str) -> BenchSize:
    """The size of that name: `tiny`, `small` (GPT-2 124M), or `twin`, the twin of the 8.3b recipe. Raises KeyError for
    another.
    """
    if name == "twin":
        twin = read_run_config(model_file("8.3b"), twin=True)
        return bench_size(name, twin.model, twin.train.global_batch_size, iterations=5, warm_up=2)
    layers, h, heads, s, batch = {"tiny": (4, 256, 4, 256, 4), "small": (12, 768, 12, 1024, 1)}[name]
    model = ModelConfig(
        num_layers=layers, hidden_size=h, num_heads=heads, seq_length=s, vocab_size=50304, padded_vocab_size=50304
    )
    return bench_size(name, model, batch, *((7, 4) if name == "tiny" else (3, 2)))


def bench_size(name: str, model: ModelConfig, batch: int, iterations: int, warm_up: int) -> BenchSize:
    """The model trained on one microbatch of `batch` sequences an iteration, in fp32.

    In the first iterations, `warm_up`, the heap grows until it holds what an iteration needs.
    """
    train = TrainConfig(
        iterations=iterations, global_batch_size=batch, microbatch_size=batch, learning_rate=1e-3, warmup_iterations=0,
        precision="fp32",
    )  # fmt: skip
    return BenchSize(name, model.model_copy(update={"vocab_size": model.padded_vocab_size}), train, warm_up)
