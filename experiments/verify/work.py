"""The same training for two engines: its configuration, samples and first weights."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

from engine.config import RunConfig
from engine.data.dataset import DatasetFacts
from engine.launch.forked import RanksFailed, run_forked
from experiments.verify.engines import Engine, Work, initial_weights, write_random_tokens
from experiments.verify.parity import SERIAL, LayoutDiffers, ParityLayout, misfit, parse_layout
from lineage.errors import BadInput

ENGINES = {
    "ours": "experiments.verify.engines:Ours",
    "megatron-core": "experiments.verify.megatron_core:MegatronCore",
    "transformers": "experiments.verify.torch_peers:Transformers",
    "nanogpt": "experiments.verify.torch_peers:NanoGPT",
}
LONGEST_SECONDS = 24 * 3600


def engine_class(name: str) -> type[Engine]:
    """The engine of that name, with what it needs. Raises BadInput where there is none or a library is missing."""
    if name not in ENGINES:
        raise BadInput(f"there is no engine {name!r}; there are {', '.join(ENGINES)}")
    module, _, attribute = ENGINES[name].partition(":")
    kind: type[Engine] = getattr(import_module(module), attribute)
    kind.prepare()
    return kind


def described(name: str) -> str:
    """The engine with the version of its package."""
    package = engine_class(name).package
    return f"{name} {version(package)}" if package else name


@contextmanager
def shared_work(
    config: RunConfig, layout: str, iterations: int, dropout: float = 0.0, first_rate: int = 0, nudges: bool = False
) -> Iterator[tuple[Work, ParityLayout]]:
    """What both engines train, and on which layout. Raises BadInput where other engines cannot.

    Every row of the vocabulary is a word, as others take padding into the softmax. The schedule of 2019, which
    Megatron-Core has no longer, becomes today's cosine. Without data.dataset the tokens are random.
    """
    if config.model.family != "gpt2" or config.train.optimizer != "adam" or config.train.rampup_batch_size:
        raise BadInput("other engines are held against a GPT-2 with Adam and without a growing batch")
    if config.train.precision not in ("fp32", "bf16"):
        raise BadInput(f"precision {config.train.precision} is not compared: --set train.precision=fp32 or bf16")
    facts = DatasetFacts.read(config.data.dataset) if config.data.dataset else None
    model = facts.resize(config.model) if facts else config.model
    decay = "cosine" if config.train.decay == "clipped-cosine" else config.train.decay
    config = config.model_copy(update={
        "model": model.model_copy(update={"vocab_size": model.padded_vocab_size, "dropout": dropout}),
        "train": config.train.model_copy(update={"decay": decay}),
    })  # fmt: skip
    chosen = SERIAL if layout == "serial" else parse_layout(layout)
    if reason := misfit(chosen, config):
        raise BadInput(f"{chosen.name} does not fit: {reason}")
    weights = initial_weights(config.model, config.train.seed, nudges)
    with tempfile.TemporaryDirectory() as folder:
        if facts:
            tokens = tuple(zip(facts.prefixes("train"), facts.weights, strict=True))
        else:
            tokens = ((write_random_tokens(config, iterations, Path(folder) / "random"), 1.0),)
        yield Work(config, iterations, tokens, facts.tokenizer if facts else None, weights, first_rate), chosen


def on_ranks(function: Any, layout: ParityLayout, kind: type[Engine], *args: Any) -> list[Any]:
    """What the function gave on every rank. Raises LayoutDiffers where one fails, BadInput where it is the engine's."""
    try:
        return run_forked(function, layout.world_size, kind, *args, timeout_seconds=LONGEST_SECONDS)
    except RanksFailed as failure:
        if refused := failure.sentence.partition("failed: BadInput: ")[2]:
            raise BadInput(refused) from failure
        raise LayoutDiffers(f"{kind.__name__}: {failure.sentence}") from failure
