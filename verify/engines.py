"""Engines that train one configuration from the same weights on the same samples: ours and the base class of others.

Each is built on every rank of its layout. What it computes in an iteration goes to a recorder, where there is one.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from data_pipeline.tokens.token_file import TokenFile
from engine.checkpoint.checkpoint import TrainingState, load_checkpoint, save_checkpoint
from engine.compare.recorder import NameMap, RankPlace, Recorder, moved, read_names
from engine.compare.tensors import TensorPart
from engine.config import RunConfig
from engine.inputs import TrainingInputs
from engine.launch.mesh import build_mesh
from engine.optim.flat import FlatOptimizer
from engine.optim.schedule import learning_rate
from engine.parallel.layout import layout_of
from engine.parallel.sharding import ShardedParameter
from engine.step import build_step
from lineage.chain import checkpoint_path
from verify.parity import ParityLayout

Weights = dict[str, torch.Tensor]
"""Whole tensors by their names in this engine."""


@dataclass(frozen=True)
class Work:
    """The training that every engine is given."""

    config: RunConfig
    iterations: int
    tokens: tuple[tuple[Path, float], ...]
    """Prefixes of the token files and their blend weights."""
    tokenizer: Path | None = None
    """Directory of the tokenizer; None for random tokens."""
    initial: Weights | None = None
    """Initial weights; by default the engine draws them from the seed."""
    first_rate: int = 1
    """Schedule step of the first update; 0 in Megatron-Core."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the other program's configurations that are set by their own names."""

    def rate(self, iteration: int) -> float:
        """Learning rate of the update of `iteration`, from 0."""
        train, step = self.config.train, iteration + self.first_rate
        return learning_rate(train, step) if step else 0.0 if train.warmup_iterations else train.learning_rate


class StepResult(NamedTuple):
    """Numbers that an engine reports for an iteration."""

    loss: float
    """Mean over the global batch, before the update."""
    norm: float
    """Norm of the whole gradient, before clipping."""
    rate: float


Named = Iterable[tuple[str, torch.Tensor]]
"""Tensors of a rank by the engine's own names."""


class Engine(Protocol):
    """One rank of an engine."""

    names: NameMap
    place: RankPlace
    work: Work
    package: str = ""
    """Name of the package to install."""
    patches: tuple[str, ...] = ()
    """Descriptions of the changes that let it run on CPUs."""
    where: str = ""
    """Place of this rank, in a sentence; by default its number."""

    def __init__(self, work: Work, layout: ParityLayout) -> None:
        """Build this rank with the initial weights. Raises BadInput for an unsupported layout."""

    @classmethod
    def prepare(cls) -> None:
        """Import the engine's packages before ranks are forked."""
        return

    def parameters(self) -> Named:
        """Parameters in the order of the forward pass."""

    def backward(self, iteration: int, recorder: Recorder | None) -> float:
        """Run an iteration, counted from 0, forward and backward; return the mean loss of the global batch."""

    def gradients(self) -> Named:
        """Reduced gradients, not yet clipped."""

    def update(self, iteration: int) -> tuple[float, float]:
        """Clip and update; return the gradient norm and the learning rate."""

    def state(self) -> Iterable[tuple[str, str, torch.Tensor]]:
        """Optimizer state as (parameter, `exp_avg` or `exp_avg_sq`, tensor)."""

    def step(self, iteration: int, recorder: Recorder | None = None) -> StepResult:
        """Train one iteration."""
        if recorder:
            recorder.iteration = iteration
        loss = self.backward(iteration, recorder)
        if recorder:
            self.show(recorder, "gradient of ", self.gradients())
        norm, rate = self.update(iteration)
        if recorder:
            for tensor, number in (("mean loss", loss), ("gradient norm", norm), ("learning rate", rate)):
                recorder.show(tensor, number)
            state = list(self.state())
            for what in dict.fromkeys(what for _, what, _ in state):
                self.show(recorder, f"{what} of ", ((name, value) for name, kind, value in state if kind == what))
            self.show(recorder, "updated ", self.parameters())
        return StepResult(loss, norm, rate)

    def run(self, recorder: Recorder | None = None, draw: int = 0, begun: int = 0) -> list[StepResult]:
        """Train the iterations from `begun` on; in draws other than 0, weights are perturbed before each."""
        steps = []
        for iteration in range(begun, self.work.iterations):
            if draw:
                self.move_weights(draw * self.work.iterations + iteration)
            steps.append(self.step(iteration, recorder))
        return steps

    def modules(self) -> Iterable[tuple[str, torch.nn.Module]]:
        """Modules by name, which say where torch's dropout is called."""
        return ()

    def show(self, recorder: Recorder, kind: str, named: Named) -> None:
        """Record tensors that are like parameters, under `kind` and the names of the whole tensors."""
        for name, value in named:
            recorder.parameter(kind, name, value)

    def save(self, directory: Path) -> None:
        """Write a checkpoint after the first iteration, as the program itself does; every rank calls it.

        Raises NotImplementedError if the program has none.
        """
        raise NotImplementedError

    def restore(self, directory: Path) -> None:
        """Load a checkpoint, of any layout, into an engine that has not trained."""
        raise NotImplementedError

    def planted(self, tensor: str) -> float:
        """Norm that the optimizer computes of a gradient that is 1 in one parameter and 0 elsewhere.

        Every rank calls it. The training cannot go on afterwards.
        """
        raise NotImplementedError

    def recorder(self, take: Callable[[TensorPart], None]) -> Recorder:
        """Build a recorder of this engine."""
        return Recorder(self.names, take, self.place, self.work.config.model.num_heads)

    @torch.no_grad()
    def load(self, whole: Weights) -> None:
        """Copy whole weights into this rank's parameters."""
        recorder = self.recorder(lambda piece: None)
        for name, parameter in self.parameters():
            if (ours := recorder.ours(name)) is not None:
                lies = self.names.in_our_order(ours, parameter, recorder.heads)
                box = zip(recorder.start(ours, lies), lies.shape, strict=True)
                part = whole[ours][tuple(slice(start, start + size) for start, size in box)]
                parameter.copy_(self.names.in_their_order(ours, part, recorder.heads))

    @torch.no_grad()
    def move_weights(self, draw: int) -> None:
        """Perturb every weight by up to one unit round-off."""
        recorder = self.recorder(lambda piece: None)
        for name, parameter in self.parameters():
            parameter.copy_(moved(parameter, recorder.ours(name) or name, draw))


class Ours(Engine):
    """This suite's own engine."""

    def __init__(self, work: Work, layout: ParityLayout) -> None:
        config = layout.configure(work.config)
        sizes = layout_of(config, layout.world_size)
        self.work, self.config, self.mesh = work, config, build_mesh(sizes, layout.sequence_parallel)
        self.where = f"tp {self.mesh.tp.rank}, pp {self.mesh.pp.rank}, dp {self.mesh.dp.rank}"
        self.at_once = config.train.microbatch_size
        self.place = RankPlace(layout.tp, self.mesh.tp.rank, self.mesh.sequence_parallel)
        self.model, self.training = build_step(config.model, config.train, config.parallel, self.mesh)
        divided = {parameter.name: parameter.dim for parameter in self.model.parameters if parameter.dim is not None}
        self.names = read_names("ours").model_copy(update={"divided": divided})
        tokens = [(TokenFile(prefix), weight) for prefix, weight in work.tokens]
        self.inputs = TrainingInputs(config, work.iterations, tokens, work.tokenizer, self.mesh)
        if work.initial:
            self.load(work.initial)
            for group in self.training.optimizer.groups:
                group.master.copy_(group.flat[group.own])

    def parameters(self) -> Named:
        return ((parameter.name, parameter.local.data) for parameter in self.model.parameters)

    def backward(self, iteration: int, recorder: Recorder | None) -> float:
        """Run an iteration. Recording relies on every schedule taking a chunk through its microbatches in order."""
        microbatches = self.inputs.of(iteration)
        firsts = [first for microbatch in microbatches for first in microbatch.places[:: self.at_once]]
        with ExitStack() as watches:
            for chunk in self.model.chunks if recorder else ():
                watches.callback(self._watch(chunk, firsts, recorder))
            self.gradient = self.training.gradient(microbatches)
        self.inputs.streams.commit()
        return self.gradient.loss

    def gradients(self) -> Named:
        return ((parameter.name, value) for parameter, value in whole_gradients(self.training.optimizer))

    def update(self, iteration: int) -> tuple[float, float]:
        rate = self.work.rate(iteration)
        self.training.update(self.gradient, rate)
        return self.gradient.norm, rate

    def save(self, directory: Path) -> None:
        (tokenizer := directory / "tokenizer").mkdir(parents=True, exist_ok=True)
        state = TrainingState(1, self.training.optimizer.steps)
        optimizer = self.training.optimizer
        save_checkpoint(directory, self.config, state, self.model.parameters, optimizer, self.mesh, tokenizer)

    def restore(self, directory: Path) -> None:
        load_checkpoint(checkpoint_path(directory, 1), self.model.parameters, self.training.optimizer)

    def planted(self, tensor: str) -> float:
        optimizer = self.training.optimizer
        for group in optimizer.groups:
            for parameter, gradient in zip(group.parameters, group.pieces(group.own_gradient), strict=True):
                gradient.fill_(parameter.name == tensor)
        return optimizer.gradient_norm().item()

    def state(self) -> Iterable[tuple[str, str, torch.Tensor]]:
        return ((parameter.name, what, value) for parameter, what, value in whole_state(self.training.optimizer)
                if what != "master")  # fmt: skip

    def _watch(self, chunk: Any, firsts: list[int], recorder: Any) -> Callable[[], None]:
        """Record a chunk's modules and its loss, which is not the output of a module."""
        end_hooks, batch_loss, waiting = recorder.watch(chunk, firsts), chunk.batch_loss, iter(firsts)

        def watched_loss(*args: Any) -> torch.Tensor:
            value: torch.Tensor = batch_loss(*args)
            recorder.loss(value, next(waiting), self.at_once)
            return value

        def end() -> None:
            del vars(chunk)["batch_loss"]
            end_hooks()

        vars(chunk)["batch_loss"] = watched_loss
        return end


def whole_gradients(optimizer: FlatOptimizer) -> Iterator[tuple[ShardedParameter, torch.Tensor]]:
    """Each parameter's whole reduced gradient; a collective."""
    for group in optimizer.groups:
        yield from group.views(group.owners.all_gather(group.own_gradient, dim=0))


def whole_state(optimizer: FlatOptimizer) -> Iterator[tuple[ShardedParameter, str, torch.Tensor]]:
    """(parameter, name, tensor) for both moments and, in mixed precision, the master weights; a collective."""
    for group in optimizer.groups:
        for name, part in group.state.items():
            for parameter, view in group.views(group.owners.all_gather(part, dim=0)):
                yield parameter, name, view
