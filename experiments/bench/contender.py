"""Who is measured, in which layout, and what it trains: shapes, batches and settings that all contenders share."""

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from engine.config import ModelConfig, ParallelConfig, Precision, TrainConfig
from engine.run.resolved import read_run_config
from lineage.extras import install_command
from lineage.shipped import model_file

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

TOLERANCE = 1e-3
"""By how much the losses of two contenders may differ."""

Step = Callable[..., float]
"""(iteration, dropout probability) → mean loss of the global batch before the update, on every rank. Ours also takes a
list of intervals, `timeline`, to which this rank's computations are added as they end."""


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

    def batch(self, iteration: int) -> "NDArray[np.int64]":
        """Token ids of an iteration's global batch, [B, s + 1]: few words are frequent, as in text."""
        import numpy as np

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


@dataclass(frozen=True)
class Contender:
    """One program in one layout."""

    name: str
    ranks: int
    build: Callable[["Contender", BenchSize], Step]
    """Called on every rank, within its process group."""
    is_ours: bool = False
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    microbatches: int = 1
    """Microbatches of each rank in an iteration."""
    needs: str = ""
    """Module without which it does not run."""
    is_tuned: bool = True
    """Whether it has this engine's allocator setting and the fused AdamW, or what its authors ship."""
    is_compiled: bool = False
    """Whether a peer's model is compiled by torch.compile."""

    @property
    def is_installed(self) -> bool:
        """Whether what it needs can be imported."""
        return not self.needs or importlib.util.find_spec(self.needs) is not None

    def describe(self) -> dict[str, Any]:
        """Name, ranks and layout, as plain JSON values."""
        layout: dict[str, Any] = {"name": self.name, "ranks": self.ranks, "microbatches": self.microbatches}
        return layout | ({"schedule": self.parallel.schedule} if self.parallel.pp > 1 else {})


def left_out(every: Sequence[Contender]) -> dict[str, str]:
    """Those that are not installed, and what installs them."""
    why = f"not installed: {install_command('bench')}"
    return {contender.name: why for contender in every if not contender.is_installed}
