"""Engines that train one configuration from the same weights on the same samples: ours and the base
class of others."""

import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from mlm_repro.data_pipeline.tokens.token_file import TokenFile, TokenFileWriter, token_dtype
from mlm_repro.engine.compare.recorder import (
    NameMap,
    RankPlace,
    Recorder,
    moved,
    read_names,
    whole_gradients,
    whole_state,
)
from mlm_repro.engine.compare.tensors import Array, TensorPart
from mlm_repro.engine.config import RunConfig
from mlm_repro.engine.data.dataset import DatasetFacts
from mlm_repro.engine.inputs import TrainingInputs
from mlm_repro.engine.launch.mesh import build_mesh
from mlm_repro.engine.optim.schedule import learning_rate
from mlm_repro.engine.parallel.layout import layout_of
from mlm_repro.engine.parallel.mesh import ParallelMesh
from mlm_repro.engine.step import build_step
from mlm_repro.lineage.errors import BadInput
from mlm_repro.verify.parity import ParityLayout

Weights = dict[str, Tensor]
"""Whole weights by their names in this suite's engine."""


@dataclass(frozen=True)
class Work:
    """The training that every engine is given: its `config`, its number of `iterations`, the token
    files with their weights in the blend, `tokens`, from which the method `inputs` makes a rank's
    microbatches, and the initial weights, `initial`; if `initial` is None, the engine draws them
    from the seed. `fields` has values of the other program's settings, by that program's own names.
    """

    config: RunConfig
    iterations: int
    tokens: tuple[tuple[Path, float], ...]
    """Pairs of a token file's prefix, its path without an ending, and its blend weight."""
    tokenizer: Path | None = None
    """Directory of the tokenizer; None for random tokens."""
    scratch: Path = Path()
    """Directory for files that an engine derives from the tokens; the dataset's own directory is
    sealed."""
    initial: Weights | None = None
    """Initial weights; by default the engine draws them from the seed."""
    first_rate: int = 1
    """Step of the learning rate's schedule at the first update; 0 in Megatron-Core."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Values of fields of the other program's configurations, by the program's own names."""
    spec: Callable[[Any], Any] | None = None
    """Function from Megatron-Core's configuration to its description of the layers; by default the
    configuration decides."""

    def inputs(self, config: RunConfig, mesh: ParallelMesh) -> TrainingInputs:
        """Return the TrainingInputs that give this rank of `mesh` its microbatches of every
        iteration, made of the work's token files by `config`, which is the layout's
        configuration."""
        tokens = [(TokenFile(prefix), weight) for prefix, weight in self.tokens]
        return TrainingInputs(config, self.iterations, tokens, self.tokenizer, mesh)

    def rate(self, iteration: int) -> float:
        """Return the learning rate of the update in iteration `iteration`, counted from 0, by the
        schedule in this training's configuration. The schedule's step is `iteration` plus the
        attribute `first_rate`, its step at the first update."""
        return learning_rate(self.config.train, iteration + self.first_rate)


class Shard(NamedTuple):
    """A rank's part of a tensor with a parameter's shape: the tensor's name on this rank and in the
    whole model, where the part begins in the whole tensor, and the part's values."""

    parameter: str
    """Name of the parameter on this rank."""
    key: str
    """Name of the whole tensor."""
    start: tuple[int, ...]
    value: Tensor
    """The part, with as many dims as the whole; a view of the given tensor, or of a copy of it."""


class StepResult(NamedTuple):
    """Numbers that an engine reports for an iteration: the mean loss before the update, the
    gradient's norm before clipping, and the learning rate."""

    loss: float
    """Mean loss over the global batch, before the update."""
    norm: float
    """Norm of the whole gradient, before clipping."""
    rate: float


Named = Iterable[tuple[str, Tensor]]
"""Pairs of name and tensor on one rank; the names are the engine's own."""


def saved_buffers(module: torch.nn.Module) -> Named:
    """Return an iterator, to be used once, over pairs (name, tensor) of a module's buffers that
    hold floating-point numbers and are in its state_dict, such as the biases of experts. A name is
    the one in the state_dict, a tensor the buffer itself."""
    saved = module.state_dict()
    return (
        (name, value)
        for name, value in module.named_buffers()
        if name in saved and value.is_floating_point()
    )


Kind = Callable[[Work, ParityLayout], "Engine"]
"""Function (work, layout) → engine, built on the rank that calls it. Raises BadInput for an
unsupported layout."""


class Engine:
    """Base class of the programs that are compared: one rank of a training. A subclass sets `work`
    and builds its model, as `module`, in `__init__`; it implements `shards`, `backward` and
    `update`, and either `gradient_of` or `counts_norm` = False. Gradients, moments and checkpoints
    are compared if it also implements `gradients`, `state`, `save` and `restore`."""

    names, place = NameMap(outputs={}, parameters={}), RankPlace()
    """Map of the names of modules whose outputs are recorded, by default none, and this rank's
    place: its tensor-parallel number and first layer."""
    patches: tuple[str, ...] = ()
    """Descriptions of the changes to the program that let it run on CPUs."""
    where: str = ""
    """This rank's coordinates as a phrase for messages; empty to name the rank's number."""
    work: Work
    shares: Mapping[str, list[Array]] = MappingProxyType({})
    """Gradient of each parameter as accumulated after each microbatch of the first iteration; of a
    serial Program alone."""
    module = torch.nn.Module()
    """Model of this rank. A call of torch's dropout is recorded under the module of it that makes
    the call."""
    counts_norm = True
    """True, the default, if the engine's step returns the norm of the gradient, so that planted
    gradients are counted: `gradient_of` must be implemented then."""
    drops_at_zero = True
    """True if dropout masks are compared even where the dropout rate is 0."""

    def __init__(self, work: Work, layout: ParityLayout) -> None:
        """Build the engine for the training `work` on this rank of the layout; a subclass does it,
        the base does nothing. Raises BadInput for an unsupported layout."""

    @classmethod
    def prepare(cls) -> None:
        """Import the engine's packages before ranks are forked. By default it does nothing."""

    @classmethod
    def release(cls) -> str:
        """Return the version that the engine's package states of itself. A subclass must implement
        it if it is compared by name: by default it raises NotImplementedError."""
        raise NotImplementedError

    def parameters(self) -> Named:
        """Return an iterable of pairs of name and tensor for every parameter of this rank's model,
        in the order of the forward pass. By default these are the pairs that torch gives for the
        model in the attribute `module`; a subclass may override this."""
        return self.module.named_parameters()

    def buffers(self) -> Named:
        """Return pairs of name and buffer of floating-point numbers of this rank's model: by
        default the buffers of the attribute `module` that are in its state_dict. They are compared
        with the serial run's as weights are: a rank may hold a part of one, but the values of the
        whole must not depend on the layout."""
        return saved_buffers(self.module)

    def shards(self, named: Mapping[str, Tensor]) -> list[Shard]:
        """Return a list of a Shard for each part that this rank holds of the tensors in `named`, a
        mapping name → tensor, with the names and shapes of this rank's parameters or buffers. A
        Shard has the part's name and place in the whole model, and as `value` a view, into which
        the method `assign` writes. Every rank calls it. A subclass must implement it."""
        raise NotImplementedError

    def backward(self, iteration: int, recorder: Recorder | None) -> float:
        """Run an iteration, counted from 0, forward and backward, and record outputs and losses if
        a recorder is given. Return the mean loss of the global batch, and leave the gradient for
        the methods `gradients` and `update`. Every rank calls it. A subclass must implement it."""
        raise NotImplementedError

    def gradients(self) -> Named:
        """Return pairs of name and gradient of this rank's parameters, after `backward`: reduced
        over the ranks, not yet clipped, and in the parameter's own shape, so that a divided
        optimizer must gather its parts. Every rank calls it. By default the result is empty, and
        gradients are not compared."""
        return ()

    def update(self, iteration: int) -> tuple[float, float]:
        """Clip the gradient that the method `backward` left and update the weights, in the
        iteration of this number, from 0. Return the gradient norm before clipping and the learning
        rate. Every rank calls it. A subclass must implement it."""
        raise NotImplementedError

    def state(self) -> Iterable[tuple[str, str, Tensor]]:
        """Return the optimizer's moments as triples: the parameter's name, `exp_avg` or
        `exp_avg_sq`, and the tensor in the parameter's own shape, so that a divided optimizer must
        gather its parts. Every rank calls it, after the method `update`. By default the result is
        empty, and moments are not compared."""
        return ()

    def save(self, directory: Path) -> None:
        """Write a checkpoint of the current state into `directory`, as the program itself does. It
        is called after the first iteration, by every rank. By default it raises
        BadInput."""
        raise BadInput(
            "the program gives no functions `save` and `restore`: give it both to have its"
            " checkpoints compared"
        )

    def restore(self, directory: Path) -> None:
        """Load a checkpoint that the method `save` wrote, on any layout, into an engine that has
        not trained; every rank calls it. By default it raises NotImplementedError."""
        raise NotImplementedError

    def norm(self) -> float:
        """Return the norm, before clipping, of the whole gradient that the ranks hold now, as the
        program's own step computes it. Every rank calls it. By default an update is made for it,
        which changes the weights, so the training cannot continue afterwards."""
        return self.update(0)[0]

    def gradient_of(self, parameter: str) -> Tensor:
        """Return the tensor on this rank from which the optimizer reads the gradient of
        `parameter`, a name that this rank's `parameters` gives; the caller writes another gradient
        into it. An engine whose `counts_norm` is True must implement it: by default it raises
        NotImplementedError."""
        raise NotImplementedError

    @torch.no_grad()
    def planted(self, tensors: Iterable[str]) -> dict[str, float]:
        """Set the gradient to 1 in one parameter and to 0 elsewhere, for each of `tensors` in turn,
        and return a dict parameter name → the gradient norm that the engine's own step finds.

        Every rank calls it, with the names of whole parameters, and only if `counts_norm` is True.
        By default each norm comes from an update, which changes the weights.
        """
        shards = self.shards(dict(self.parameters()))
        norms = {}
        for tensor in tensors:
            holders = {shard.parameter for shard in shards if shard.key == tensor}
            for name, _ in self.parameters():
                self.gradient_of(name).fill_(name in holders)
            norms[tensor] = self.norm()
        return norms

    def step(self, iteration: int, recorder: Recorder | None = None) -> StepResult:
        """Train one iteration, counted from 0, and return its loss, gradient norm and learning
        rate. With a recorder, these three, outputs, gradients, moments and updated weights are
        recorded, as far as the engine gives them. Every rank calls it."""
        if recorder:
            recorder.iteration = iteration
        loss = self.backward(iteration, recorder)
        if recorder:
            self.show(recorder, "gradient of ", self.gradients())
        norm, rate = self.update(iteration)
        if recorder:
            for tensor, number in (
                ("mean loss", loss),
                ("gradient norm", norm),
                ("learning rate", rate),
            ):
                recorder.show(tensor, number)
            state = list(self.state())
            for what in dict.fromkeys(what for _, what, _ in state):
                self.show(
                    recorder,
                    f"{what} of ",
                    ((name, value) for name, kind, value in state if kind == what),
                )
            self.show(recorder, "updated ", [*self.parameters(), *self.buffers()])
        return StepResult(loss, norm, rate)

    def run(
        self, recorder: Recorder | None = None, draw: int = 0, begun: int = 0
    ) -> list[StepResult]:
        """Train the iterations from number `begun`, counted from 0, to the work's last, and return
        a StepResult for each; with a recorder, record their tensors. If `draw` is not 0, weights
        are moved by up to a rounding before each iteration, another way for each draw. Every rank
        calls it."""
        steps = []
        for iteration in range(begun, self.work.iterations):
            if draw:
                number = draw * self.work.iterations + iteration
                self.assign(lambda shard, number=number: moved(shard.value, shard.key, number))  # type: ignore[misc]
            steps.append(self.step(iteration, recorder))
        return steps

    def recorder(self, take: Callable[[TensorPart], None]) -> Recorder:
        """Return a new Recorder for this rank, to be given to the methods `run`, `step`, `backward`
        and `show`. It passes each number, and each part of a tensor that this rank holds, to the
        function `take` as a TensorPart when it is recorded."""
        return Recorder(self.names, take, self.place, self.work.config.model.num_heads)

    def show(self, recorder: Recorder, kind: str, named: Named) -> None:
        """Give `recorder` this rank's shards of the tensors in `named`, pairs of name and tensor,
        which have the names and shapes of this rank's parameters or buffers. The name of a shard in
        the record is `kind`, a prefix such as "gradient of ", then the parameter's or buffer's name
        in the whole model. Empty shards are left out."""
        for shard in self.shards(dict(named)):
            if shard.value.numel():
                recorder.show(kind + shard.key, shard.value, shard.start)

    def load(self, whole: Weights) -> None:
        """Copy this rank's part of the weights `whole`, given by their names in the whole model,
        into this rank's parameters. Raises KeyError if `whole` lacks a weight of this rank."""
        self.assign(
            lambda shard: whole[shard.key][
                tuple(slice(a, a + n) for a, n in zip(shard.start, shard.value.shape, strict=True))
            ]
        )

    @torch.no_grad()
    def assign(self, value_of: Callable[[Shard], Tensor]) -> None:
        """Call `value_of` with each shard of this rank's parameters, whose field `value` has the
        present values, and copy the tensor of the same shape that `value_of` returns into the
        parameter. Every rank calls it."""
        named = dict(self.parameters())
        # Into copies first: an engine's shards may be views of a transformed tensor, not of the
        # parameter itself.
        new = {name: parameter.detach().clone() for name, parameter in named.items()}
        for shard in self.shards(new):
            shard.value.copy_(value_of(shard))
        for name, parameter in named.items():
            parameter.copy_(new[name])


class Ours(Engine):
    """This suite's own engine, its part on one rank: it trains the Work `work` in the layout
    `layout`, which has one rank or several. `mlm-verify` compares such a training with this
    engine's serial one, or with another engine's."""

    names = read_names("ours")

    def __init__(self, work: Work, layout: ParityLayout) -> None:
        config = layout.configure(work.config)
        sizes = layout_of(config, layout.world_size)
        self.work = work
        self.config = config
        mesh = build_mesh(sizes, layout.sequence_parallel)
        self.mesh = mesh
        self.where = f"tp {mesh.tp.rank}, pp {mesh.pp.rank}, dp {mesh.dp.rank}"
        self.at_once = config.train.microbatch_size
        self.place = RankPlace(layout.tp, mesh.tp.rank, mesh.sequence_parallel)
        self.model, self.training = build_step(config.model, config.train, config.parallel, mesh)
        self.inputs = work.inputs(config, mesh)

    def parameters(self) -> Named:
        return ((parameter.name, parameter.local.data) for parameter in self.model.parameters)

    def shards(self, named: Mapping[str, Tensor]) -> list[Shard]:
        of = {parameter.name: parameter for parameter in self.model.parameters}
        return [
            Shard(
                name,
                name,
                tuple(
                    of[name].axis.rank * n * (dim == of[name].dim) for dim, n in enumerate(x.shape)
                ),
                x,
            )
            for name, x in named.items()
        ]

    def load(self, whole: Weights) -> None:
        super().load(whole)
        for group in self.training.optimizer.groups:
            # The optimizer has a copy of its own, which would overwrite the weights in the first
            # update.
            group.master.copy_(group.flat[group.own])

    def backward(self, iteration: int, recorder: Recorder | None) -> float:
        """Run an iteration, counted from 0, forward and backward, and return the mean loss of its
        global batch, the same on every rank. Every rank calls it. The reduced gradient is kept for
        the methods `gradients` and `update`. With a recorder, this rank's outputs and losses are
        recorded, which relies on every schedule taking a chunk through its microbatches in
        order."""
        microbatches = self.inputs.of(iteration)
        firsts = list(
            chain.from_iterable(microbatch.places[:: self.at_once] for microbatch in microbatches)
        )
        with ExitStack() as watches:
            for chunk in self.model.chunks if recorder else ():
                watches.callback(self._watch(chunk, firsts, recorder))
            self.gradient = self.training.gradient(microbatches)
        self.inputs.streams.commit()
        return self.gradient.loss

    def gradients(self) -> Named:
        return (
            (parameter.name, value) for parameter, value in whole_gradients(self.training.optimizer)
        )

    def update(self, iteration: int) -> tuple[float, float]:
        rate = self.work.rate(iteration)
        self.training.update(self.gradient, rate)
        return self.gradient.norm, rate

    def state(self) -> Iterable[tuple[str, str, Tensor]]:
        return (
            (parameter.name, what, value)
            for parameter, what, value in whole_state(self.training.optimizer)
            if what != "master"
        )

    def _watch(self, chunk: Any, firsts: list[int], recorder: Any) -> Callable[[], None]:
        """Let `recorder` record from now on the outputs of the modules of `chunk` and their
        gradients, as `Recorder.watch` does, and each loss that the method `batch_loss` of `chunk`
        returns. Call n of a module or of `batch_loss`, counted from 0, belongs to the microbatch
        that begins at sequence `firsts[n]` of the global batch; there must be no more calls than
        `firsts` has entries. Return a function that ends the recording."""
        end_hooks = recorder.watch(chunk, firsts)
        batch_loss = chunk.batch_loss
        waiting = iter(firsts)

        def watched_loss(*args: Any) -> Tensor:
            value: Tensor = batch_loss(*args)
            recorder.loss(value, next(waiting), self.at_once)
            return value

        def end() -> None:
            del vars(chunk)["batch_loss"]
            end_hooks()

        vars(chunk)["batch_loss"] = watched_loss
        return end


def with_vocabulary(config: RunConfig) -> RunConfig:
    """Return the configuration with the vocabulary sizes of its dataset in its model, or as it is
    if it has no dataset. Raises DataMissing or IntegrityFailure for a dataset that is missing or
    incomplete, BadInput for several that differ in vocabulary."""
    if not config.data.dataset:
        return config
    return config.model_copy(
        update={"model": DatasetFacts.read(config.data.dataset).resize(config.model)}
    )


@contextmanager
def with_samples(config: RunConfig, iterations: int) -> Iterator[Work]:
    """Context manager: yield the Work that trains the configuration for `iterations` on its
    dataset's training files, or else on random tokens. The random tokens and the Work's scratch
    folder are removed at the end. Raises DataMissing or IntegrityFailure for a dataset that is
    missing or incomplete, BadInput for several that differ in vocabulary."""
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        facts = DatasetFacts.read(config.data.dataset) if config.data.dataset else None
        if facts:
            tokens = tuple(facts.prefixes("train"))
        else:
            tokens = ((write_random_tokens(config, iterations, scratch / "random"), 1.0),)
        yield Work(config, iterations, tokens, facts.tokenizer if facts else None, scratch)


def write_random_tokens(config: RunConfig, iterations: int, prefix: Path) -> Path:
    """Write a token file with documents of random tokens, drawn by the recipe's seed and enough to
    train the recipe for `iterations` iterations; a few tokens are frequent as in text. `prefix` is
    the file's path without its ending, and is returned."""
    random = np.random.RandomState(config.train.seed)
    vocab_size = config.model.text_vocab_size
    length = max(config.model.seq_length * 2 // 3, 1)
    documents = iterations * config.train.global_batch_size * 2 + 2
    with TokenFileWriter(prefix, token_dtype(vocab_size)) as writer:
        for _ in range(documents):
            # Exponents drawn evenly make small ids frequent, as words of a text are.
            writer.add_document((vocab_size ** random.random_sample(length) - 1).astype(np.int64))
    return prefix
