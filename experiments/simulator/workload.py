"""A workload to simulate: a model, a batch and a layout, checked by the engine's own rules. Imports
no torch."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from mlm_repro.engine.config import Precision, RunConfig
from mlm_repro.engine.costs import flops_per_iteration
from mlm_repro.engine.parallel.layout import layout_of, split_layers
from mlm_repro.engine.pipeline.schedule import check_schedule
from mlm_repro.lineage.atomic import JSON
from mlm_repro.lineage.config import parse_config
from mlm_repro.lineage.errors import BadInput

Floats = NDArray[np.float64]
NOT_COSTED = (
    "the simulator costs gpt2 with ffn_hidden = 4 · hidden, which stands for a bert too, and"
    " transformer-xl; a llama is not costed"
)
MOST_COMPUTATIONS = 10_000_000
"""Limit on the forward and backward passes of all stages in one iteration; published runs have
fewer than 100,000."""


class NotCosted(BadInput):
    """Raised for a model that the simulator does not cost: one of another family than gpt2, which
    stands for a BERT too, and transformer-xl; a gpt2 whose MLP is not 4h wide; or one that another
    program's configuration describes. It is a BadInput, so that its exit code is the same."""


class Workload(NamedTuple):
    """One training iteration to be timed: its batch, the model's shape, and the layout over GPUs.
    Batches count sequences, `seq` the tokens of a sequence; `vocab` is the size of the vocabulary,
    padded or not, and `recompute` is `none`, `selective` or `full`."""

    gpus: int
    global_batch: int
    micro_batch: int
    hidden: int
    heads: int
    layers: int
    seq: int
    tp: int
    dp: int
    pp: int
    vocab: int = 51200
    chunks: int = 1
    recompute: str = "full"
    scatter_gather: bool = True
    """True if messages between stages are divided over the tensor-parallel ranks (2021 paper,
    Section 4.1)."""
    family: str = "gpt2"
    """Model family that is timed: `gpt2` or `transformer-xl`."""
    ffn_hidden: int = 0
    """Width between the products of the MLP; 0 for 4h."""
    zero: int = 0
    """Stage of ZeRO: 1 divides the optimizer's state over the data-parallel ranks, 3 gradients and
    parameters too."""
    sequence_parallel: int = 0
    """1 where activations outside tensor-parallel regions are divided over the sequence."""
    memory: int = 0
    """Number of positions of a Transformer-XL's memory; 0 for other families."""
    head_dim: int = 0
    """Width of a Transformer-XL's heads; 0 for hidden over heads."""

    @classmethod
    def of_run(cls, config: RunConfig, gpus: int) -> "Workload":
        """Return the Workload of one iteration of the run `config` on this many GPUs, with dp =
        gpus // (tp · pp). Nothing is checked here; `checked_config` refuses the Workload if tp · pp
        does not divide `gpus`. Every family but Transformer-XL is taken for a GPT-2."""
        model = config.model
        train = config.train
        parallel = config.parallel
        row = cls(
            gpus,
            train.global_batch_size,
            train.microbatch_size,
            model.hidden_size,
            model.num_heads,
            model.num_layers,
            model.seq_length,
            parallel.tp,
            gpus // (parallel.tp * parallel.pp),
            parallel.pp,
            model.padded_vocab_size,
            parallel.chunks,
            parallel.recompute,
            parallel.scatter_gather,
            zero=3 if parallel.shard_parameters else int(parallel.shard_optimizer),
            sequence_parallel=int(parallel.sequence_parallel),
        )
        if model.family != "transformer-xl":
            return row
        memory = model.transformer_xl.memory_length
        return row._replace(
            family=model.family, ffn_hidden=model.inner_size, memory=memory, head_dim=model.head_dim
        )

    @property
    def microbatches(self) -> int:
        """Number of microbatches that one data-parallel rank runs in an iteration."""
        return self.global_batch // (self.micro_batch * self.dp)

    @property
    def inner(self) -> int:
        """Width of the MLP's inner layer: `ffn_hidden`, or 4 · hidden if that is 0."""
        return self.ffn_hidden or 4 * self.hidden

    @property
    def padded_vocab(self) -> int:
        """Size of the vocabulary, rounded up to a multiple of 128 · tp, as Megatron-LM pads it."""
        unit = 128 * self.tp
        return -(-self.vocab // unit) * unit


def checked_config(
    workload: Workload, precision: Precision = "fp16", run: RunConfig | None = None
) -> RunConfig:
    """Return the RunConfig that the workload describes: `run` with the workload's sizes and layout,
    or default settings if `run` is None. The family with its options, such as memory and head
    width, and the vocabulary are `run`'s, and the workload's only without `run`; ZeRO stage 3 is
    set in the configuration only with `run`. `precision` replaces the run's.

    Raises BadInput with the engine's own reason if it would refuse the run, such as sizes that do
    not divide; also for a size below 1, `gpus` other than tp × pp × dp, more passes than are
    simulated (MOST_COMPUTATIONS), ZeRO stage 2, stage 3 with tp or pp, `ffn_hidden` that tp does
    not divide, and memory or head width for another family than Transformer-XL. Raises NotCosted
    for a family that is not costed, and for a GPT-2 with `ffn_hidden` other than 4 · hidden.
    """
    w = workload
    for name in ("gpus", "dp", "tp", "vocab"):  # the engine's configuration checks the others
        if getattr(w, name) < 1:
            raise BadInput(f"{name} = {getattr(w, name)} must be at least 1")
    config = parse_config(_values(w, precision, run), RunConfig, "this row")
    computations = 2 * w.pp * w.chunks * w.microbatches
    if computations > MOST_COMPUTATIONS:
        raise BadInput(
            f"{computations:,} passes in one iteration are more than the {MOST_COMPUTATIONS:,} that"
            " are simulated: take a larger micro_batch, or smaller pp or chunks"
        )
    if w.tp * w.pp * w.dp != w.gpus:
        raise BadInput(
            f"tp × pp × dp = {w.tp} × {w.pp} × {w.dp} = {w.tp * w.pp * w.dp} is not gpus = {w.gpus}"
        )
    layout_of(config, w.gpus)
    split_layers(w.layers, w.pp, w.chunks)
    check_schedule(config.parallel.schedule, w.pp, w.chunks, w.microbatches)
    _check_family(w)
    return config


def _check_family(w: Workload) -> None:
    if w.family not in ("gpt2", "transformer-xl") or (
        w.family == "gpt2" and w.inner != 4 * w.hidden
    ):
        raise NotCosted(f"family = {w.family} with ffn_hidden = {w.inner}: {NOT_COSTED}")
    if w.zero not in (0, 1, 3):
        raise BadInput(f"zero = {w.zero} must be 0, 1 or 3, which this engine has")
    if w.zero == 3 and w.tp * w.pp > 1:
        raise BadInput(f"zero = 3 is costed with tp = pp = 1 alone, not pp = {w.pp}, tp = {w.tp}")
    if w.inner < 1 or w.inner % w.tp:
        raise BadInput(
            f"ffn_hidden = {w.inner} (by default 4 · hidden) must be a positive multiple of tp ="
            f" {w.tp}"
        )
    if w.family != "transformer-xl" and (w.memory or w.head_dim):
        raise BadInput(
            f"memory = {w.memory} and head_dim = {w.head_dim} are for family = transformer-xl:"
            f" leave them out with {w.family}"
        )


@lru_cache(maxsize=4096)  # a fit asks for the same rows thousands of times
def flops_of(workload: Workload) -> float:
    """Return the floating-point operations, a float, of the matrix products of a workload's
    iteration, on all GPUs together; layers that are computed again count only if the workload has
    full recomputation.

    Raises BadInput for a workload that the engine would refuse or that is not simulated, and
    NotCosted for a model that is not costed, such as a GPT-2 whose MLP is not 4h wide.
    """
    config = checked_config(workload)
    return flops_per_iteration(config.model, config.train, recompute=workload.recompute == "full")


def _values(w: Workload, precision: Precision, run: RunConfig | None) -> JSON:
    values: JSON = run.model_dump() if run else {"name": "simulated"}
    model: JSON = {
        "num_layers": w.layers,
        "hidden_size": w.hidden,
        "num_heads": w.heads,
        "seq_length": w.seq,
    }
    if not run:
        model |= {"vocab_size": w.vocab, "padded_vocab_size": w.padded_vocab}
        if w.family == "transformer-xl":
            own = {
                "memory_length": w.memory,
                "head_dim": w.head_dim or None,
                "inner_size": w.inner,
            }
            model |= {"family": w.family, "transformer_xl": own}
    batch = {
        "global_batch_size": w.global_batch,
        "microbatch_size": w.micro_batch,
        "precision": precision,
    }
    plain = "gpipe" if run and run.parallel.schedule == "gpipe" else "1f1b"
    layout = {
        "tp": w.tp,
        "pp": w.pp,
        "chunks": w.chunks,
        "schedule": "interleaved" if w.chunks > 1 else plain,
        "recompute": w.recompute,
        "scatter_gather": w.scatter_gather,
        "shard_optimizer": w.zero == 1,
        "sequence_parallel": w.sequence_parallel == 1,
        "shard_parameters": w.zero == 3 and run is not None,
    }
    changed = {"model": model, "train": batch, "parallel": layout}
    return values | {section: values.get(section, {}) | new for section, new in changed.items()}


@dataclass(frozen=True)
class Workloads:
    """Workloads as columns of numbers, so that the cost model is arithmetic on arrays. Names of one
    letter are the papers'."""

    gpus: Floats
    b: Floats
    """Number of sequences of a microbatch."""
    s: Floats
    h: Floats
    heads: Floats
    layers: Floats
    v: Floats
    """Size of the padded vocabulary."""
    t: Floats
    p: Floats
    d: Floats
    m: Floats
    """Number of microbatches of a rank in an iteration."""
    full: Floats
    """1 where whole layers are computed again, otherwise 0."""
    selective: Floats
    """1 where attention is computed again, otherwise 0."""
    message_share: Floats
    """Share of an activation that a rank sends to the next stage."""
    f: Floats
    """Width between the products of the MLP."""
    xl: Floats
    """1 for a Transformer-XL, otherwise 0."""
    keys_length: Floats
    """Positions that a position attends to: the segment's and the memory's."""
    width: Floats
    """Width of a head."""
    zero: Floats
    outside: Floats
    """Number of ranks over which activations outside tensor-parallel regions are divided."""

    @classmethod
    def of(cls, rows: Sequence[Workload]) -> Self:
        """Return the workloads `rows`, which `checked_config` must have accepted, as columns: a
        Workloads whose fields are arrays of float64 with one element for each workload."""
        columns = [
            [
                w.gpus,
                w.micro_batch,
                w.seq,
                w.hidden,
                w.heads,
                w.layers,
                w.padded_vocab,
                w.tp,
                w.pp,
                w.dp,
                w.microbatches,
                w.recompute == "full",
                w.recompute == "selective",
                1 / w.tp if w.scatter_gather else 1.0,
                w.inner,
                w.family == "transformer-xl",
                w.memory + w.seq,
                w.head_dim or w.hidden / w.heads,
                w.zero,
                w.tp if w.sequence_parallel else 1,
            ]
            for w in rows
        ]
        table = np.array(columns, np.float64).reshape(len(rows), len(fields(cls)))
        return cls(*table.T)
