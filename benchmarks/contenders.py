"""Programs that train a model on made-up tokens, each in processes of its own: this engine in a
layout, and nanoGPT.

nanoGPT has fused attention, one loss over all logits, a tied head; biases everywhere, as GPT-2 has.
Shapes: b batch, s sequence, h hidden, n heads, d head dim, v vocabulary; activations are [b, s, h].
"""

import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from mlm_repro.engine.config import ModelConfig, ParallelConfig, TrainConfig
from mlm_repro.engine.formats.huggingface import FORMATS, named_as_theirs
from mlm_repro.engine.guard.memory import PeakMemory
from mlm_repro.engine.launch.forked import run_forked
from mlm_repro.engine.launch.local import keep_large_buffers
from mlm_repro.engine.launch.mesh import build_mesh, local_device
from mlm_repro.engine.launch.threads import RanksFailed
from mlm_repro.engine.model.gpt2 import GPT2
from mlm_repro.engine.model.microbatch import PipelineInput
from mlm_repro.engine.parallel.layout import Layout
from mlm_repro.engine.parallel.mesh import serial_mesh
from mlm_repro.engine.rng import Dropout
from mlm_repro.engine.step import TrainingStep, build_step
from mlm_repro.lineage.atomic import JSON
from mlm_repro.lineage.errors import UserError
from mlm_repro.lineage.extras import import_extra
from mlm_repro.lineage.progress import Progress

K = TypeVar("K")
T = TypeVar("T")
Step = Callable[[int, float], float]
"""(iteration, dropout probability) → mean loss of the global batch before the update, on every
rank. The call trains that iteration."""


def huggingface(config: ModelConfig) -> nn.Module:
    """Return a new GPT2LMHeadModel of transformers with the sizes of `config` and transformers' own
    initial values. Raises BadInput without transformers, which the extra `bench` installs."""
    transformers = import_extra("transformers", "bench")
    settings = transformers.GPT2Config(
        **FORMATS["gpt2"].their_config(config), bos_token_id=0, eos_token_id=0
    )
    model: nn.Module = transformers.GPT2LMHeadModel(settings)
    return model


def adamw(model: nn.Module, train: TrainConfig, fused: bool = False) -> torch.optim.AdamW:
    """Return a new torch AdamW over a model's parameters with the settings of the recipe `train`,
    as nanoGPT sets it: parameters of one dim are not decayed. `fused` selects torch's fused
    kernel."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": train.weight_decay},
        {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        groups,
        lr=train.learning_rate,
        betas=(train.adam_beta1, train.adam_beta2),
        eps=train.adam_epsilon,
        fused=fused,
    )


@dataclass(frozen=True)
class TrainingSize:
    """Settings of a timed training: the model's configuration `model`, the recipe `train` with
    batch, precision and iterations, and the number of iterations at the beginning of a round,
    `warm_up`, that are not timed. The method `batch` invents the tokens of an iteration."""

    model: ModelConfig
    train: TrainConfig
    warm_up: int = 0
    """Number of iterations at the beginning of a round that are not timed."""

    @property
    def tokens(self) -> int:
        """Number of tokens that one iteration trains on: the global batch size times the sequence
        length."""
        return self.train.global_batch_size * self.model.seq_length

    @property
    def setting(self) -> JSON:
        """Dict of this size's settings for a benchmark's record, new at each access: `model` and
        `train`, dicts of the values of these two configurations that differ from the defaults, and
        `warm_up`, the number of iterations that are not timed."""
        return {
            "model": self.model.model_dump(exclude_defaults=True),
            "train": self.train.model_dump(exclude_defaults=True),
            "warm_up": self.warm_up,
        }

    def batch(self, iteration: int) -> NDArray[np.int64]:
        """Return invented token ids of the global batch of an iteration, an int64 array [B, s + 1]
        whose row is a sample's inputs and its last target; a few words are frequent, as in text.
        The recipe's seed and the iteration fix them."""
        generator = np.random.default_rng([self.train.seed, iteration])
        uniform = generator.random((self.train.global_batch_size, self.model.seq_length + 1))
        return (self.model.vocab_size**uniform - 1).astype(np.int64)


@dataclass(frozen=True)
class Timed:
    """One contender's round of a training: seconds of each iteration after the warm-up, losses of
    all iterations, and the first rank's peak memory in bytes."""

    seconds: list[float]
    """Seconds of each iteration after the warm-up, by the clock that was given."""
    losses: list[float]
    """Loss of every iteration in nats per token, also of the warm-up's."""
    peak_bytes: int = 0
    """Peak memory of the first rank during the round, in bytes: on a GPU what torch allocated, on a
    CPU the growth of the process's resident set."""


@dataclass(frozen=True)
class OurLayout:
    """This suite's engine, as a contender in a timed training, on `ranks` ranks in the layout
    `parallel`. Every rank calls the method `build` with a TrainingSize, for a function that is
    given an iteration's number and a dropout probability, trains that iteration and returns its
    loss, a float; `training` and `steps` are the two methods that `build` calls."""

    name: str
    microbatches: int = 1
    """Number of microbatches that a data-parallel rank's share of the batch is divided into."""
    is_captured: bool = False
    """True if the first step captures its microbatches as CUDA graphs."""
    is_tuned: bool = True
    """True if this process's allocator is set to keep large buffers before the training."""
    ranks: int = 1
    """Number of processes that train; ranks that neither pipeline nor tensor parallelism needs are
    data parallel."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    is_separate: bool = False
    """True if every process trains the whole model by itself at the same time as the others."""

    def build(self, size: TrainingSize) -> Step:
        """Build this rank's part of a new model of `size`, or the whole model if `is_separate`,
        with its optimizer on this rank's device. Return a function that is given an iteration's
        number and a dropout probability, trains that iteration and returns the mean loss of its
        global batch, a float. Every rank calls this method and that function."""
        return self.steps(self.training(size), size)

    def training(self, size: TrainingSize) -> TrainingStep:
        """Return the TrainingStep of a new model of `size` with its optimizer, on this rank's
        device: of this rank's part of it in the layout of the attributes `ranks` and `parallel` or,
        if the attribute `is_separate` is true, of a whole model that this rank trains by itself.
        Every rank calls it, in torch's process group if there are several."""
        tp, pp = self.parallel.tp, self.parallel.pp
        mesh = (
            serial_mesh(local_device())
            if self.is_separate
            else build_mesh(Layout(tp, pp, self.ranks // (tp * pp)))
        )
        return build_step(size.model, size.train, self.parallel, mesh)[1]

    def steps(self, training: TrainingStep, size: TrainingSize) -> Step:
        """Return a function that is given an iteration's number, from 0, and a dropout probability,
        trains the already built model of `training` for that one iteration, with its update of the
        weights, and returns the iteration's mean loss, a float. `size` gives the iteration's
        invented tokens, learning rate and seed; the iteration's batch may be another than the model
        was built for, and this rank takes its share of that batch. If the layout is captured,
        iteration 0 first captures the model's CUDA graphs, or goes on without them,
        `training.model.graphs` being None, if they cannot be captured or give other numbers."""
        train = size.train
        mesh = training.mesh
        share = train.global_batch_size // mesh.dp.size
        first = mesh.dp.rank * share
        microbatch = share // self.microbatches

        def step(iteration: int, dropout: float) -> float:
            batch = torch.from_numpy(size.batch(iteration)).to(mesh.device)
            inputs = []
            for start in range(first, first + share, microbatch):
                masks = (
                    Dropout(dropout, train.seed, iteration, tuple(range(start, start + microbatch)))
                    if dropout
                    else None
                )
                tokens = batch[start : start + microbatch]
                inputs.append(PipelineInput(tokens[:, :-1], tokens[:, 1:], masks))
            if self.is_captured and iteration == 0:
                training.capture(inputs)
            return training.run(inputs, train.learning_rate).loss

        return step


class _Block(nn.Module):
    def __init__(self, h: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = nn.Dropout(0.0)
        self.ln_1 = nn.LayerNorm(h)
        self.ln_2 = nn.LayerNorm(h)
        self.attn = nn.ModuleDict({"c_attn": nn.Linear(h, 3 * h), "c_proj": nn.Linear(h, h)})
        self.mlp = nn.ModuleDict({"c_fc": nn.Linear(h, 4 * h), "c_proj": nn.Linear(4 * h, h)})

    def forward(self, x: Tensor) -> Tensor:
        rows = self.attn["c_attn"](self.ln_1(x)).chunk(3, dim=2)
        q, k, v = (chunk.unflatten(2, (self.heads, -1)).transpose(1, 2) for chunk in rows)
        mixed = F.scaled_dot_product_attention(
            q, k, v, dropout_p=self.dropout.p, is_causal=True
        )  # [b, n, s, d]
        x = x + self.dropout(self.attn["c_proj"](mixed.transpose(1, 2).flatten(2)))
        wide = F.gelu(self.mlp["c_fc"](self.ln_2(x)), approximate="tanh")
        return x + self.dropout(self.mlp["c_proj"](wide))


class NanoGPTModel(nn.Module):
    """nanoGPT's GPT-2 in plain torch, called with token ids and targets, both [b, s]; returns their
    mean loss in nats, a scalar tensor. There is no dropout until the caller sets `p` of its
    `nn.Dropout` modules."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        h = config.hidden_size
        self.wte = nn.Embedding(config.vocab_size, h)
        self.wpe = nn.Embedding(config.seq_length, h)
        self.dropout = nn.Dropout(0.0)
        self.h = nn.ModuleList(_Block(h, config.num_heads) for _ in range(config.num_layers))
        self.ln_f = nn.LayerNorm(h)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.dropout(
            self.wte(tokens) + self.wpe(torch.arange(tokens.size(1), device=tokens.device))
        )
        for block in self.h:
            x = block(x)
        logits = F.linear(self.ln_f(x), self.wte.weight)  # [b, s, v]
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


@dataclass(frozen=True)
class Peer:
    """A contender, called `name`, in a timed training: a NanoGPTModel, nanoGPT's model in plain
    torch, on one rank, with the initial weights of this suite's engine, and compiled by torch if
    `is_compiled`. The method `build` returns the function that trains one iteration: forward,
    backward, clipping and AdamW."""

    name: str
    is_tuned: bool = True
    """True if it has this engine's allocator setting, and the fused AdamW."""
    is_compiled: bool = False

    def build(self, size: TrainingSize) -> Step:
        """Build the model of `size`, with the initial weights that this suite's engine draws, on
        this process's device. Return a function that is given an iteration and a dropout
        probability, trains that iteration, under autocast if the recipe's precision is bf16, else
        in fp32, and returns its mean loss. Seeds torch's generator."""
        network = GPT2(size.model, serial_mesh())
        network.initialize(size.train.seed)
        train = size.train
        device = local_device()
        with device:  # a GPU draws the values that are replaced in less time
            model = NanoGPTModel(size.model).train()
        weights = named_as_theirs(dict(network.named_parameters()), network.config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                weight = weights[f"transformer.{name}"]
                parameter.copy_(weight.T if ".c_" in name and weight.dim() == 2 else weight)
        optimizer = adamw(model, train, fused=self.is_tuned)
        dropouts = [module for module in model.modules() if isinstance(module, nn.Dropout)]
        if self.is_compiled:
            model.compile()
        torch.manual_seed(train.seed)

        def step(iteration: int, dropout: float) -> float:
            for module in dropouts:
                module.p = dropout
            rows = torch.from_numpy(size.batch(iteration)).to(device)
            with torch.autocast(device.type, torch.bfloat16, enabled=train.precision == "bf16"):
                value = model(rows[:, :-1], rows[:, 1:])
            value.backward()
            nn.utils.clip_grad_norm_(model.parameters(), train.clip_gradient)
            optimizer.step()
            optimizer.zero_grad()
            return float(value.item())

        return step


Contender = OurLayout | Peer


def time_contender(
    contender: Contender,
    size: TrainingSize,
    dropout: float = 0.0,
    clock: Callable[[], float] = time.perf_counter,
    training: TrainingStep | None = None,
) -> Timed:
    """Train a contender for the iterations of `size`, one round, the warm-up first; `dropout` is
    the dropout probability. Every rank of the contender calls it, and all begin and end an
    iteration together. Return a Timed: the seconds by `clock` of each iteration after the
    warm-up, all losses and the peak memory. An OurLayout goes on with the already built `training`,
    if given; without it, and for a Peer, a new model is built before the clock runs. A tuned
    contender changes this process's allocator."""
    if contender.is_tuned:
        keep_large_buffers()
    memory = PeakMemory(local_device())
    step = (
        contender.steps(training, size)
        if training and isinstance(contender, OurLayout)
        else contender.build(size)
    )
    together: Callable[[], object] = dist.barrier if dist.is_initialized() else lambda: None
    seconds = []
    losses = []
    for iteration in range(size.train.iterations):
        together()
        start = clock()
        losses.append(step(iteration, dropout))
        together()
        seconds.append(clock() - start)
    return Timed(seconds[size.warm_up :], losses, memory.bytes())


def in_turn(
    name: str, rounds: int, measurements: Mapping[K, Callable[[], Any]]
) -> dict[K, list[Any]]:
    """Call every function in `measurements` once in each of `rounds` rounds, so that other work on
    the machine falls on all alike. Return a dict with the same keys, whose values are lists of what
    the key's function returned in each round. Shows progress under `name`."""
    taken = defaultdict[K, list[Any]](list)
    with Progress(name, rounds * len(measurements), "measurements") as progress:
        for _ in range(rounds):
            for key, measure in measurements.items():
                taken[key].append(measure())
                shown = ", ".join(map(str, key)) if isinstance(key, tuple) else str(key)
                progress.advance(1, shown)
    return taken


def apart(name: str, function: Callable[..., T], *arguments: Any, ranks: int = 1) -> T:
    """Call `function` with the arguments in each of `ranks` new processes, by default one, that are
    forked from this one and see no GPU, and return the first one's result; results must be
    picklable. The function may take ten minutes. Raises UserError if the function fails or takes
    longer; `name` begins the message."""
    try:
        results: list[T] = run_forked(function, ranks, *arguments, timeout_seconds=600.0)
    except RanksFailed as error:
        raise UserError(
            f"{name} could not be measured: {error.sentence}; mend the cause, and measure again"
        ) from error
    return results[0]
