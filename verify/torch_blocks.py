"""Engine of torch's own parallel building blocks on a small model, for `mlm-verify layouts
torch`."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F

from mlm_repro.lineage.config import Config, parse_config
from mlm_repro.lineage.errors import BadInput
from mlm_repro.verify.parity import SERIAL, ParityLayout
from mlm_repro.verify.programs import EXACT, HeldTraining, Program, whole_of

HIDDEN = 32
HEAD = 8
WORDS = 64
LENGTH = 12
ROWS = 8
LAYERS = 4
CLIP = 0.1
"""Norm above which the gradient is clipped."""
ROUNDINGS = 8
"""Units of rounding by which a gradient may be off if it is reduced in a shorter type."""
KINDS = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float64": torch.float64,
}
"""Number formats in which gradients can be reduced, by name."""


class Fields(Config):
    """Fields that `--with` may set for the small model of torch's blocks: whether its
    embeddings are tied, how FSDP2 reduces gradients, and the schedule of its pipeline."""

    tied: bool = False
    """True if the word embedding is the output head too."""
    reduce_dtype: Literal["", "float16", "bfloat16", "float32", "float64"] = ""
    """Number format in which FSDP2 reduces gradients, such as float16; by default the gradients'
    own."""
    gradient_divide_factor: float = 0.0
    """Number that FSDP2 divides gradients by; 0 for its own mean."""
    schedule: str = "1F1B"
    """A schedule of torch.distributed.pipelining, by its name there."""


class Attention(nn.Module):
    """Causal attention with a norm of each head's query and key; maps [b, s, h] to the same shape.
    It is built whole and exchanges nothing itself: `Builder.divide` leaves this rank's heads."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(4))
        self.q_norm = nn.RMSNorm(HEAD, eps=1e-6)
        self.k_norm = nn.RMSNorm(HEAD, eps=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.view(*part.shape[:2], -1, HEAD) for part in (self.q(x), self.k(x), self.v(x))
        )
        q, k, v = (part.transpose(1, 2) for part in (self.q_norm(q), self.k_norm(k), v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        output: Tensor = self.o(mixed.transpose(1, 2).flatten(2))
        return output


class DecoderBlock(nn.Module):
    """Decoder block, [b, s, h] to the same shape: causal attention and an MLP, each after an
    RMSNorm and added to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(HIDDEN)
        self.mlp_norm = nn.RMSNorm(HIDDEN)
        self.attention = Attention()
        self.up = nn.Linear(HIDDEN, 4 * HIDDEN)
        self.down = nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class Decoder(nn.Module):
    """Causal language model of embedding, blocks, norm and head, in this module's fixed sizes:
    token ids [b, s] to logits [b, s, v]. If `tied` is True, the head has the embedding's weight. A
    pipeline stage lacks some of these parts, which its maker has replaced by None or left out of
    `layers`; its input or output are then hidden states [b, s, h]."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embed: nn.Module | None = nn.Embedding(WORDS, HIDDEN)
        self.layers = nn.ModuleDict({str(number): DecoderBlock() for number in range(LAYERS)})
        self.norm: nn.Module | None = nn.RMSNorm(HIDDEN)
        self.head: nn.Module | None = nn.Linear(HIDDEN, WORDS, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x) if self.embed else x
        for layer in self.layers.values():
            x = layer(x)
        return self.head(self.norm(x)) if self.norm and self.head else x


def training(texts: Mapping[str, str], seed: int, microbatches: int) -> HeldTraining:
    """Return the HeldTraining of the small model of torch's blocks on a batch of random tokens,
    divided into `microbatches` on every rank; `seed` decides weights and tokens. `texts` maps
    fields of the class `Fields` by name to their values as text. Raises BadInput for an unknown
    field or an unfit value."""
    fields = parse_config(dict(texts), Fields, "--with")
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(WORDS, (ROWS, LENGTH + 1), generator=generator)
    batch = {"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}
    kind = KINDS[fields.reduce_dtype or "float64"]
    build = Builder(fields, seed, microbatches, batch)
    rounding = max(EXACT, ROUNDINGS * torch.finfo(kind).eps)
    return HeldTraining(build, batch, token_loss, microbatches, in_double=False, tolerance=rounding)


def token_loss(model: nn.Module, rows: Mapping[str, Tensor]) -> Tensor:
    """Return the model's mean cross-entropy, in nats, for a microbatch `rows`, a mapping with the
    model's inputs under `tokens` and the ids to predict under `labels`, both [b, s]."""
    return cross_entropy(model(rows["tokens"]), rows["labels"])


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross-entropy, in nats, of labels [b, s] from logits [b, s, v]."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def clip(own: Mapping[str, nn.Parameter], stages: bool = False) -> Tensor:
    """Clip in place the gradients of the parameters `own`, a dict by name, to the norm `CLIP`, by
    torch's functions, which take no parameters of several meshes at once; a parameter without a
    gradient is passed over. Return the norm of the whole gradient before clipping, a tensor without
    dims. `stages` is True where each rank has the parameters of other pipeline stages: the norm is
    then over all ranks' parameters. Every rank calls it."""
    groups: dict[Any, list[nn.Parameter]] = {}
    for parameter in own.values():
        if parameter.grad is not None:
            groups.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    squares = torch.zeros(())
    for parameters in groups.values():
        norm = nn.utils.get_total_norm([each.grad for each in parameters], foreach=False)  # type: ignore[misc]
        squares += whole_of(norm).square()
    if stages:
        dist.all_reduce(squares)
    for parameters in groups.values():
        nn.utils.clip_grads_with_norm_(parameters, CLIP, squares.sqrt(), foreach=False)
    return squares.sqrt()


@dataclass(frozen=True)
class Builder:
    """Function that is called on every rank with a layout alone, a ParityLayout, and returns a
    Program: this rank's part of the small model with its training step. The attributes `fields` and
    `seed` decide the model and its weights. The step of a pipeline runs the attribute `batch`, a
    mapping with all `tokens` and `labels`, both [b, s], in `microbatches` microbatches or, if that
    is more, 2 · pp; other layouts use neither attribute. The call raises BadInput for a layout that
    the model cannot run."""

    fields: Fields
    seed: int
    microbatches: int
    batch: Mapping[str, Tensor]

    def __call__(self, layout: ParityLayout) -> Program:
        """Return this rank's part of the small model, divided by `layout`, with weights that the
        seed decides, and its training step, as a Program. Raises BadInput for a layout that has
        other parts than tp, sp, fsdp and dp, or pp alone, and for one with tp or pp if the
        embedding is the output head too. Every rank calls it with the same layout."""
        if (
            layout.cp * layout.ep > 1
            or layout.shard_optimizer
            or not layout.is_of_ranks
            or layout.pp > 1 != layout.world_size // layout.pp > 1
        ):
            raise BadInput(
                "torch's blocks are run with tp, sp, fsdp and dp, or with pp alone: leave the other"
                " parts out of the layout's name"
            )
        torch.manual_seed(self.seed)
        model = Decoder(self.fields.tied)
        if self.fields.tied and layout.tp * layout.pp > 1:
            raise BadInput(
                "torch's blocks with tp or pp cannot have the embedding as output head: leave"
                " --with tied=True out, or layouts with tp and pp"
            )
        if layout.pp > 1:
            return self.pipelined(model, layout)
        if layout != SERIAL:
            sizes = (layout.dp, layout.fsdp, layout.tp)
            mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "fsdp", "tp"))
            if layout.tp > 1:
                self.divide(model, mesh["tp"], layout.sequence_parallel)
            if layout.dp * layout.fsdp > 1:
                self.shard(model, mesh["dp", "fsdp"] if layout.dp > 1 else mesh["fsdp"])

        return Program(model, clip=partial(clip, dict(model.named_parameters())))

    def divide(self, model: Decoder, mesh: Any, sequence_parallel: bool) -> None:
        """Divide the embedding, layers and output head of `model` in place over the tensor-parallel
        ranks of `mesh` as torchtitan does; on every rank the model still takes whole tokens and
        returns whole logits. With `sequence_parallel` the hidden state outside attention and MLP is
        divided by position. Every parameter becomes a DTensor, except the norms of the hidden state
        without sequence parallelism. The output head must not be the embedding. Every rank calls
        it."""
        stream = Shard(1) if sequence_parallel else Replicate()
        plan: dict[str, Any] = {
            "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=stream),
            "head": ColwiseParallel(input_layouts=stream, output_layouts=Replicate()),
        }
        if sequence_parallel:
            plan["norm"] = SequenceParallel()
        for name in model.layers:
            heads = SequenceParallel(sequence_dim=2, use_local_output=True)
            layer = {
                "attention.q": ColwiseParallel(),
                "attention.k": ColwiseParallel(),
                "attention.v": ColwiseParallel(),
                "attention.q_norm": heads,
                "attention.k_norm": heads,
                "up": ColwiseParallel(),
                "attention.o": RowwiseParallel(output_layouts=stream),
                "down": RowwiseParallel(output_layouts=stream),
            }
            if sequence_parallel:
                layer |= {
                    "attention_norm": SequenceParallel(),
                    "mlp_norm": SequenceParallel(),
                    "attention": PrepareModuleInput(
                        input_layouts=(stream,), desired_input_layouts=(Replicate(),)
                    ),
                    "up": ColwiseParallel(input_layouts=stream),
                }
            plan |= {f"layers.{name}.{part}": style for part, style in layer.items()}
        parallelize_module(model, mesh, plan)

    def shard(self, model: Decoder, mesh: Any) -> None:
        """Wrap each layer of a model, then the model, with FSDP2 in place, so that the parameters
        are divided over the ranks of an axis of `mesh`. On a mesh of `dp` and `fsdp` they are
        divided over the ranks of `fsdp`, and each rank of `dp` has a copy. The fields
        `reduce_dtype` and `gradient_divide_factor` apply."""
        more = {
            "mp_policy": MixedPrecisionPolicy(reduce_dtype=KINDS.get(self.fields.reduce_dtype)),
            "mesh": mesh,
        }
        for layer in (*model.layers.values(), model):
            fully_shard(layer, **more)
        for module in model.modules():
            if self.fields.gradient_divide_factor and isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(self.fields.gradient_divide_factor)

    def pipelined(self, model: Decoder, layout: ParityLayout) -> Program:
        """Return a Program of this rank's stages, cut from the whole `model`, of which each rank of
        `layout` has a copy. Its `gradient` runs the field `schedule`, a schedule of
        torch.distributed.pipelining, on the whole batch, in `microbatches` microbatches or, if that
        is more, in 2 · pp, and returns the mean loss on every rank. Every rank calls it. Raises
        ValueError for a schedule that torch does not have."""
        rank = dist.get_rank()
        count = max(self.microbatches, 2 * layout.pp)
        schedule: Any = get_schedule_class(self.fields.schedule)
        each = 1 if issubclass(schedule, PipelineScheduleSingle) else 2
        numbers = [rank + layout.pp * turn for turn in range(each)]
        # These run from the first rank to the last and back, so a rank has two stages that mirror.
        # By the class: torch takes a schedule's name in any case.
        if schedule.__name__ in ("ScheduleZBVZeroBubble", "ScheduleDualPipeV"):
            numbers = [rank, 2 * layout.pp - 1 - rank]
        of = layout.pp * each
        device = torch.device("cpu")
        stages = [
            PipelineStage(self.stage(model, number, of), number, of, device) for number in numbers
        ]
        held = nn.Module()
        held.own = nn.ModuleList([stage.submod for stage in stages])
        run = schedule(
            stages[0] if each == 1 else stages,
            count,
            cross_entropy,
        )
        last = any(stage.is_last for stage in stages)
        first = any(stage.is_first for stage in stages)

        def gradient() -> float:
            losses: list[Tensor] = []
            held.zero_grad()
            inputs = (self.batch["tokens"],) if first else ()
            run.step(
                *inputs, **({"target": self.batch["labels"], "losses": losses} if last else {})
            )
            total = torch.stack(losses).mean() if last else torch.zeros(())
            dist.all_reduce(total)
            return total.item()

        own = {
            name.partition(".")[2].partition(".")[2]: each for name, each in held.named_parameters()
        }
        return Program(held, gradient, named=own, clip=partial(clip, own, stages=True))

    def stage(self, model: Decoder, number: int, of: int) -> Decoder:
        """Return a Decoder, the part of the whole model `model` that is stage `number`, from 0, of
        `of` stages. It has its share of the layers, in order, the first stage also the embedding,
        and the last one the norm and the head. These modules are shared with `model`, not copied.
        Stages may differ by one layer."""
        # Its own modules are replaced by the whole model's, which every rank drew from one seed.
        part = Decoder(False)
        part.embed = model.embed if number == 0 else None
        is_last = number == of - 1
        part.norm = model.norm if is_last else None
        part.head = model.head if is_last else None
        own = list(model.layers.items())[number * LAYERS // of : (number + 1) * LAYERS // of]
        part.layers = nn.ModuleDict(dict(own))
        return part
