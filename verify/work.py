"""The engines by name, the training that two of them share, and what one makes of it as a trace."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from data_pipeline.tokens.token_file import TokenFileWriter, token_dtype
from engine.compare.tensors import TensorPart
from engine.config import ModelConfig, RunConfig
from engine.data.dataset import DatasetFacts
from engine.launch.forked import run_forked
from engine.launch.threads import RanksFailed
from engine.model.gpt2 import GPT2
from engine.parallel.mesh import serial_mesh
from lineage.atomic import new_directory
from lineage.errors import BadInput
from lineage.progress import announce
from verify.engines import Engine, Weights, Work
from verify.parity import LayoutDiffers, ParityLayout, misfit, parse_layout
from verify.traces import Trace, finish_trace, write_rank

ENGINES = {
    "ours": "verify.engines:Ours",
    "megatron-core": "verify.megatron_core:MegatronCore",
    "transformers": "verify.torch_peers:Transformers",
    "nanogpt": "verify.torch_peers:NanoGPT",
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


def on_ranks(function: Any, layout: ParityLayout, kind: type[Engine], *args: Any) -> list[Any]:
    """What the function gave on every rank. Raises LayoutDiffers where one fails, BadInput where it is the engine's."""
    try:
        return run_forked(function, layout.world_size, kind, *args, timeout_seconds=LONGEST_SECONDS)
    except RanksFailed as failure:
        if refused := failure.sentence.partition("failed: BadInput: ")[2]:
            raise BadInput(refused) from failure
        raise LayoutDiffers(f"{kind.__name__}: {failure.sentence}") from failure


def with_vocabulary(config: RunConfig) -> tuple[RunConfig, DatasetFacts | None]:
    """The configuration with the vocabulary of its dataset, and what the dataset is; None without data.dataset."""
    if not config.data.dataset:
        return config, None
    facts = DatasetFacts.read(config.data.dataset)
    return config.model_copy(update={"model": facts.resize(config.model)}), facts


@contextmanager
def with_samples(config: RunConfig, facts: DatasetFacts | None, iterations: int) -> Iterator[Work]:
    """The training on the dataset's files; without one on random tokens."""
    if facts:
        yield Work(config, iterations, tuple(zip(facts.prefixes("train"), facts.weights, strict=True)), facts.tokenizer)
        return
    with tempfile.TemporaryDirectory() as folder:
        yield Work(config, iterations, ((write_random_tokens(config, iterations, Path(folder) / "random"), 1.0),))


@contextmanager
def shared_work(
    config: RunConfig, layout: str, iterations: int, dropout: float = 0.0, first_rate: int = 0, nudges: bool = False
) -> Iterator[tuple[Work, ParityLayout]]:
    """What both engines train, and on which layout. Raises BadInput where other engines cannot.

    Every row of the vocabulary is a word, as others take padding into the softmax. The schedule of 2019, which
    Megatron-Core has no longer, becomes today's cosine.
    """
    if config.model.family != "gpt2" or config.train.optimizer != "adam" or config.train.rampup_batch_size:
        raise BadInput("other engines are held against a GPT-2 with Adam and without a growing batch")
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
    """This engine's initial values; with `nudges` biases and layer norms are moved too, so that none is 0 or 1."""
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
    """Random tokens, few of them frequent as in text: a file of documents that samples run across."""
    random = np.random.RandomState(config.train.seed)
    vocab_size, length = config.model.text_vocab_size, max(config.model.seq_length * 2 // 3, 1)
    documents = iterations * config.train.global_batch_size * 2 + 2
    with TokenFileWriter(prefix, token_dtype(vocab_size)) as writer:
        for _ in range(documents):
            writer.add_document((vocab_size ** random.random_sample(length) - 1).astype(np.int64))
    return prefix


def record_trace(
    config: RunConfig, engine: str, layout: str, iterations: int, draws: int, out: Path, dropout: float = 0.0
) -> Trace:
    """Write the trace `out`, with as many further draws. Biases and layer norms are moved from 0 and 1 first.

    Rates are Megatron-Core's, in whichever engine; dropout masks are each engine's own. Raises BadInput where the
    engine cannot run it or `out` is there.
    """
    if os.path.lexists(out):
        raise BadInput(f"{out} exists already: name a new directory")
    kind = engine_class(engine)
    torch.set_num_threads(1)
    with shared_work(config, layout, iterations, dropout, nudges=True) as (work, chosen):
        if engine == "megatron-core" and chosen.shard_optimizer:
            raise BadInput("megatron-core's distributed optimizer reduces parts of gradients alone: leave zero1 out")
        announce(f"{1 + draws} trainings of {iterations} iterations, each on {chosen.world_size} processes")
        with new_directory(out) as directory:
            for draw in range(draws + 1):
                ranks = on_ranks(_record_rank, chosen, kind, work, chosen, draw, directory)
            unnamed = sorted({name for rank in ranks for name in rank})
            setting = f"{config.name}, {chosen.name}, {iterations} iterations"
            trace = Trace(engine=described(engine), precision=config.train.precision, setting=setting, unnamed=unnamed)
            finish_trace(directory, trace)
    return trace


def _record_rank(kind: type[Engine], work: Work, layout: ParityLayout, draw: int, directory: Path) -> list[str]:
    """On a rank: write its part; the parameters without a name."""
    engine = kind(work, layout)
    pieces: list[TensorPart] = []
    recorder = engine.recorder(pieces.append)
    engine.run(recorder, draw)
    write_rank(directory, draw, int(os.environ["RANK"]), pieces)
    return [name for name, _ in engine.parameters() if recorder.ours(name) is None]
