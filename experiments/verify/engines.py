"""Engines that train one configuration from the same weights on the same samples: ours, and those it is held against.

Each is built on every rank of its layout. What it computes in an iteration goes to a recorder, where there is one.
"""

import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from data_pipeline.tokens.token_file import TokenFile, TokenFileWriter, token_dtype
from engine.config import ModelConfig, RunConfig
from engine.inputs import TrainingInputs
from engine.launch.mesh import build_mesh
from engine.model.gpt2 import GPT2
from engine.optim.schedule import learning_rate
from engine.parallel.layout import layout_of
from engine.parallel.mesh import serial_mesh
from engine.step import build_step
from experiments.verify.parity import ParityLayout
from experiments.verify.recorder import NameMap, RankPlace, Recorder, read_names
from experiments.verify.tensors import Piece

Weights = dict[str, torch.Tensor]
"""Whole tensors by our names."""


@dataclass(frozen=True)
class Work:
    """What every engine trains."""

    config: RunConfig
    iterations: int
    tokens: tuple[tuple[Path, float], ...]
    """Prefixes of the token files, with their weights."""
    tokenizer: Path | None = None
    """Directory of their tokenizer; random tokens have none."""
    initial: Weights | None = None
    """Weights to begin with; without them those of the seed."""
    first_rate: int = 1
    """Step of the schedule whose rate the first update takes."""

    def rate(self, iteration: int) -> float:
        """Learning rate of the update of `iteration`, from 0."""
        step = iteration + self.first_rate
        return learning_rate(self.config.train, step) if step else self.config.train.learning_rate * (
            not self.config.train.warmup_iterations
        )


class StepResult(NamedTuple):
    """What an engine says of an iteration."""

    loss: float
    """Mean over the global batch, before the update."""
    norm: float
    """Norm of the whole gradient, before clipping."""
    rate: float


class Engine(ABC):
    """One rank of an engine."""

    names: NameMap
    place: RankPlace

    @abstractmethod
    def parameters(self) -> Iterable[tuple[str, torch.Tensor]]:
        """This rank's parameters by the engine's own names, in the order of the forward pass."""

    @abstractmethod
    def step(self, iteration: int, recorder: Recorder | None = None) -> StepResult:
        """Train one iteration, from 0."""

    @abstractmethod
    def take_weights(self) -> None:
        """Make what the optimizer keeps of the weights follow the parameters."""

    def recorder(self, work: Work, take: Callable[[Piece], None]) -> Recorder:
        """What records this engine."""
        return Recorder(self.names, take, self.place, work.config.model.num_heads)

    @torch.no_grad()
    def load(self, whole: Weights, work: Work) -> None:
        """Take over weights."""
        recorder = self.recorder(work, lambda piece: None)
        for name, parameter in self.parameters():
            ours = self.names.ours(name, self.names.parameters, self.place.first_layer)
            if ours is not None:
                lies = recorder.in_our_order(ours, parameter)
                box = zip(recorder.start(ours, lies), lies.shape, strict=True)
                part = whole[ours][tuple(slice(start, start + size) for start, size in box)]
                parameter.copy_(recorder.in_their_order(ours, part))
        self.take_weights()

    @torch.no_grad()
    def move_weights(self, draw: int) -> None:
        """Move every weight w to w(1 + δ), δ drawn evenly from ± the unit round-off of its number format."""
        for name, parameter in self.parameters():
            ours = self.names.ours(name, self.names.parameters, self.place.first_layer) or name
            generator = torch.Generator().manual_seed(zlib.crc32(f"{ours} {draw}".encode()))
            moves = torch.rand(parameter.shape, generator=generator, dtype=torch.float64).mul_(2).sub_(1)
            parameter.copy_(parameter.double() * (1 + torch.finfo(parameter.dtype).eps / 2 * moves))


class Ours(Engine):
    """This engine."""

    def __init__(self, work: Work, layout: ParityLayout) -> None:
        config = layout.configure(work.config)
        self.work, self.train = work, config.train
        self.mesh = build_mesh(layout_of(config, layout.world_size), config.parallel.sequence_parallel)
        self.place = RankPlace(layout.tp, self.mesh.tp.rank, self.mesh.sequence_parallel)
        self.model, self._step = build_step(config.model, config.train, config.parallel, self.mesh)
        divided = {parameter.name: parameter.dim for parameter in self.model.parameters if parameter.dim is not None}
        self.names = read_names("ours").model_copy(update={"divided": divided})
        tokens = [(TokenFile(prefix), weight) for prefix, weight in work.tokens]
        self.inputs = TrainingInputs(config, work.iterations, tokens, work.tokenizer, self.mesh)
        if work.initial:
            self.load(work.initial, work)

    def parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """By the whole model's names."""
        return ((parameter.name, parameter.local.data) for parameter in self.model.parameters)

    def take_weights(self) -> None:
        """fp32 copies follow the model."""
        for group in self._step.optimizer.groups:
            group.master.copy_(group.flat[group.own])

    def step(self, iteration: int, recorder: Recorder | None = None) -> StepResult:
        """One iteration of the trainer, without files."""
        microbatches = self.inputs.of(iteration)
        firsts = [microbatch.places[0] for microbatch in microbatches]
        ends = [self._watch(chunk, firsts, recorder) for chunk in self.model.chunks] if recorder else []
        gradient = self._step.gradient(microbatches)
        for end in ends:
            end()
        self.inputs.streams.commit()
        rate = self.work.rate(iteration)
        if recorder:
            for group in self._step.optimizer.groups:
                for parameter, value in zip(group.parameters, group.gradients, strict=True):
                    recorder.parameter("gradient of ", parameter.name, value)
            for tensor, number in (("mean loss", gradient.loss), ("gradient norm", gradient.norm),
                                   ("learning rate", rate)):  # fmt: skip
                recorder.show(tensor, number)
        self._step.update(gradient, rate)
        if recorder:
            for parameter, what, value in self._step.optimizer.state():
                if what != "master":
                    recorder.parameter(f"{what} of ", parameter.name, value)
            for parameter in self.model.parameters:
                recorder.parameter("updated ", parameter.name, parameter.local)
        return StepResult(gradient.loss, gradient.norm, rate)

    def _watch(self, chunk: Any, firsts: list[int], recorder: Recorder) -> Callable[[], None]:
        """Every schedule takes a chunk through its microbatches in order; the loss is not a module's output."""
        end_hooks, batch_loss, waiting = recorder.watch(chunk, firsts), chunk.batch_loss, iter(firsts)

        def watched_loss(*args: Any) -> torch.Tensor:
            value: torch.Tensor = batch_loss(*args)
            recorder.show("loss", value.view(1), (next(waiting) // self.train.microbatch_size,))
            return value

        vars(chunk)["batch_loss"] = watched_loss

        def end() -> None:
            del vars(chunk)["batch_loss"]
            end_hooks()

        return end


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
    """Random tokens, keyed by the seed, as a token file of documents that samples run across."""
    random = np.random.RandomState(config.train.seed)
    vocab_size, length = config.model.text_vocab_size, max(config.model.seq_length * 2 // 3, 1)
    documents = iterations * config.train.global_batch_size * 2 + 2
    with TokenFileWriter(prefix, token_dtype(vocab_size)) as writer:
        for _ in range(documents):
            writer.add_document(random.randint(0, vocab_size, length))
    return prefix
