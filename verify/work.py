"""Engines by name, and the training that two of them share."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch

from data_pipeline.tokens.token_file import TokenFileWriter, token_dtype
from engine.config import ModelConfig, RunConfig
from engine.data.dataset import DatasetFacts
from engine.model.gpt2 import GPT2
from engine.parallel.mesh import serial_mesh
from lineage.errors import BadInput
from verify.engines import Engine, Weights, Work
from verify.parity import ParityLayout, misfit, parse_layout

ENGINES = {
    "ours": "verify.engines:Ours",
    "megatron-core": "verify.megatron_core:MegatronCore",
    "transformers": "verify.peers:Transformers",
    "nanogpt": "verify.peers:NanoGPTEngine",
}


def engine_class(name: str) -> type[Engine]:
    """Import an engine by name. Raises BadInput for an unknown name or a missing package."""
    if name not in ENGINES:
        raise BadInput(f"there is no engine {name!r}; there are {', '.join(ENGINES)}")
    module, _, attribute = ENGINES[name].partition(":")
    kind: type[Engine] = getattr(import_module(module), attribute)
    kind.prepare()
    return kind


def described(name: str) -> str:
    """Name of an engine with the version of its package."""
    package = engine_class(name).package
    return f"{name} {version(package)}" if package else name


def with_vocabulary(config: RunConfig) -> tuple[RunConfig, DatasetFacts | None]:
    """Set the vocabulary of the dataset in a configuration; also return the dataset, None without data.dataset."""
    if not config.data.dataset:
        return config, None
    facts = DatasetFacts.read(config.data.dataset)
    return config.model_copy(update={"model": facts.resize(config.model)}), facts


@contextmanager
def with_samples(config: RunConfig, facts: DatasetFacts | None, iterations: int) -> Iterator[Work]:
    """Describe the training, on the dataset's files or else on random tokens."""
    if facts:
        yield Work(config, iterations, tuple(zip(facts.prefixes("train"), facts.weights, strict=True)), facts.tokenizer)
        return
    with tempfile.TemporaryDirectory() as folder:
        yield Work(config, iterations, ((write_random_tokens(config, iterations, Path(folder) / "random"), 1.0),))


@contextmanager
def shared_work(
    config: RunConfig, layout: str, iterations: int, dropout: float = 0.0, first_rate: int = 0, nudges: bool = False
) -> Iterator[tuple[Work, ParityLayout]]:
    """Prepare a training for two engines, and its layout. Raises BadInput if other engines cannot run it.

    The vocabulary has no padding rows, because other engines include them in the softmax. The schedule of 2019, which
    Megatron-Core no longer has, becomes a cosine.
    """
    if config.model.family != "gpt2" or config.train.optimizer != "adam" or config.train.rampup_batch_size:
        raise BadInput("only a GPT-2 trained by Adam without a growing batch can be compared with other engines")
    if config.train.precision not in ("fp32", "bf16"):
        raise BadInput(f"precision {config.train.precision} is not compared: --set train.precision=fp32 or bf16")
    decay = "cosine" if config.train.decay == "clipped-cosine" else config.train.decay
    config, facts = with_vocabulary(config)
    model = config.model.model_copy(update={"vocab_size": config.model.padded_vocab_size, "dropout": dropout})
    train = config.train.model_copy(update={"decay": decay})
    config = config.model_copy(update={"model": model, "train": train})
    chosen = parse_layout(layout)
    if reason := misfit(chosen, config):
        raise BadInput(f"{chosen.name} does not fit: {reason}")
    weights = initial_weights(model, train.seed, nudges)
    with with_samples(config, facts, iterations) as work:
        yield replace(work, initial=weights, first_rate=first_rate), chosen


def initial_weights(model: ModelConfig, seed: int, nudges: bool = False) -> Weights:
    """Initial weights of this engine; with `nudges`, biases and layer norms are moved away from 0 and 1."""
    built = GPT2(model, serial_mesh())
    built.initialize(seed)
    weights = {name: parameter.detach() for name, parameter in built.named_parameters()}
    if nudges:
        generator = torch.Generator().manual_seed(seed)
        for weight in weights.values():
            if weight.dim() == 1:
                weight.add_(model.init_std * torch.randn(weight.shape, generator=generator))
    return weights


def write_random_tokens(config: RunConfig, iterations: int, prefix: Path) -> Path:
    """Write documents of random tokens, a few of them frequent as in text; return the file's prefix."""
    random = np.random.RandomState(config.train.seed)
    vocab_size, length = config.model.text_vocab_size, max(config.model.seq_length * 2 // 3, 1)
    documents = iterations * config.train.global_batch_size * 2 + 2
    with TokenFileWriter(prefix, token_dtype(vocab_size)) as writer:
        for _ in range(documents):
            writer.add_document((vocab_size ** random.random_sample(length) - 1).astype(np.int64))
    return prefix
