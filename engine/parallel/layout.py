"""Arithmetic of layouts: coordinates of each rank, and the layers that it holds. Imports no
torch."""

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from mlm_repro.lineage.errors import BadInput

if TYPE_CHECKING:
    from mlm_repro.engine.config import ModelConfig, RunConfig


@dataclass(frozen=True)
class Layout:
    """Layout of a run: its degrees of tensor, pipeline and data parallelism, the fields `tp`, `pp`
    and `dp`, each 1 by default.

    The order of the ranks is fixed, with TP, PP and DP for these degrees: global rank =
    tp + TP·(dp + DP·pp), so that tensor-parallel neighbours are adjacent, then data, then pipeline
    (Megatron-LM v2, `mpu/initialize.py`).
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1

    @property
    def world_size(self) -> int:
        """Number of all ranks of the layout, tp · pp · dp."""
        return self.tp * self.pp * self.dp

    def rank(self, tp: int, pp: int, dp: int) -> int:
        """Return the global rank whose indices along the tensor-, pipeline- and data-parallel axes
        are `tp`, `pp` and `dp`, each counted from 0."""
        # Tensor-parallel ranks exchange the most and are neighbours, so that they share a node.
        return tp + self.tp * (dp + self.dp * pp)

    def lines(self, rank: int) -> tuple[tuple[int, ...], ...]:
        """Return four tuples of global ranks in this layout: those along the tp, the pp and the dp
        axis through the global rank `rank`, each in the axis's order; then the first and the last
        rank of its pipeline, in this order, if it is one of them, else itself alone. With one stage
        the last tuple is itself alone too."""
        tp = rank % self.tp
        dp = rank // self.tp % self.dp
        pp = rank // (self.tp * self.dp)
        line = tuple(self.rank(tp, other, dp) for other in range(self.pp))
        return (
            tuple(self.rank(other, pp, dp) for other in range(self.tp)),
            line,
            tuple(self.rank(tp, pp, other) for other in range(self.dp)),
            tuple(sorted({line[0], line[-1]})) if rank in (line[0], line[-1]) else (rank,),
        )


@dataclass(frozen=True)
class PipelineStage:
    """One stage of the pipeline: the range of its layers' global numbers, and two marks that say if
    it is the first or the last, both True by default, as for a whole model."""

    layers: range
    """Range of the global numbers, counted from 0, of the stage's transformer layers."""
    is_first: bool = True
    """True if the stage is the first, which holds the embedding."""
    is_last: bool = True
    """True if the stage is the last, which also holds the output head and, except in a
    Transformer-XL, the final layer norm."""


def split_layers(num_layers: int, pp: int, chunks: int) -> list[PipelineStage]:
    """Return a list of the pipeline's stages as PipelineStages, pp · chunks in number, in order,
    each with the range of its layers and the marks for the first and the last stage; the stage of
    a rank's chunk has the index chunk · pp + rank.

    If the layers do not divide evenly, the earlier stages hold one layer more: the last stage also
    computes the output head. Raises BadInput when there are fewer layers than stages.
    """
    if num_layers < (stages := pp * chunks):
        raise BadInput(
            f"pp = {pp} × chunks = {chunks} makes {stages} pipeline stages, and the model has only"
            f" {num_layers} layers: make parallel.pp or parallel.chunks smaller"
        )
    least, extra = divmod(num_layers, stages)
    starts = [stage * least + min(stage, extra) for stage in range(stages + 1)]
    return [
        PipelineStage(range(start, end), start == 0, end == num_layers)
        for start, end in pairwise(starts)
    ]


def layout_of(config: "RunConfig", ranks: int) -> Layout:
    """Return the Layout of a run on `ranks` ranks in all: tp and pp as configured, all others
    data-parallel.

    Raises BadInput if tp, pp or the data-parallel ranks do not divide the heads, the vocabulary,
    the sequence, the ranks or the batch, mostly with the choices that would, for parallelism that
    the model's family or ZeRO stage 3 does not allow, and for a growing batch that the streams of a
    Transformer-XL or the interleaved schedule do not allow.
    """
    model = config.model
    parallel = config.parallel
    train = config.train
    tp = parallel.tp
    pp = parallel.pp
    batch_in_microbatches = train.batch_in_microbatches
    check_tensor_parallel(model, tp)
    if ranks % tp:
        raise BadInput(f"tp = {tp} does not divide the {ranks} ranks; tp can be {_divisors(ranks)}")
    if parallel.sequence_parallel and not model.section.divides_sequence:
        raise BadInput(
            f"a model of family = {model.family!r} does not divide its sequence: "
            "set parallel.sequence_parallel = false"
        )
    if model.transformer_xl.cutoffs and tp * pp > 1:
        raise BadInput(
            "a transformer-xl with cutoffs has an adaptive embedding, which is not divided: set"
            " parallel.tp = 1 and parallel.pp = 1"
        )
    if parallel.sequence_parallel and model.seq_length % tp:
        length = model.seq_length
        raise BadInput(
            f"parallel.sequence_parallel cannot divide seq_length = {length} by tp = {tp}; tp can"
            f" be {_divisors(length)}"
        )
    if ranks % (tp * pp):
        raise BadInput(
            f"tp × pp = {tp} × {pp} does not divide the {ranks} ranks: with tp = {tp}, pp can be"
            f" {_divisors(ranks // tp)}, or change the number of ranks"
        )
    dp = ranks // (tp * pp)
    if batch_in_microbatches % dp:
        batch = (
            "the largest common divisor of the growing batch's sizes"
            if train.rampup_batch_size
            else "the global batch"
        )
        raise BadInput(
            f"{batch}, {batch_in_microbatches} times microbatch_size ="
            f" {train.microbatch_size}, does not divide over {dp} data-parallel ranks: make"
            " microbatch_size smaller, or the number of ranks tp × pp times one of"
            f" {_divisors(batch_in_microbatches)}"
        )
    if train.rampup_batch_size and model.transformer_xl.memory_length and dp > 1:
        raise BadInput(
            "a growing batch would move a transformer-xl's streams of text to other data-parallel"
            f" ranks, without their memory: leave train.rampup_batch_size out, or take {tp * pp}"
            " ranks"
        )
    # Every size of a growing batch has to fit the schedule, not only the last.
    grows_interleaved = train.rampup_batch_size and parallel.schedule == "interleaved"
    if grows_interleaved and batch_in_microbatches // dp % pp:
        raise BadInput(
            f"parallel.schedule = 'interleaved' needs a multiple of pp = {pp} microbatches on each"
            " data-parallel rank, and not every batch size of train.rampup_batch_size gives one:"
            " change its numbers, or set schedule = '1f1b' and chunks = 1"
        )
    # A parameter is divided over one axis at most (`ShardedParameter`), here the data axis.
    if parallel.shard_parameters:
        if model.family != "gpt2" or tp * pp > 1 or parallel.shard_optimizer:
            raise BadInput(
                "parallel.shard_parameters (ZeRO stage 3) is only for a GPT-2 on data-parallel"
                " ranks: leave it out, or set parallel.tp = 1, parallel.pp = 1 and"
                " parallel.shard_optimizer = false"
            )
        # FSDP2 would pad what does not divide; checkpoints need equal shards.
        for name in ("hidden_size", "seq_length", "padded_vocab_size"):
            if (size := getattr(model, name)) % dp:
                raise BadInput(
                    f"parallel.shard_parameters cannot divide {name} = {size} over {dp} ranks:"
                    " choose a number of ranks that divides it"
                )
    return Layout(tp=tp, pp=pp, dp=dp)


def check_tensor_parallel(model: "ModelConfig", tp: int) -> None:
    """Raise BadInput, with the choices that would, unless the number `tp` of tensor-parallel ranks
    divides the model's attention heads and its padded vocabulary. Nothing is returned."""
    pad = ", or pad the vocabulary for it with `tokenizer.tp` of the dataset's recipe"
    for size, what, advice in (
        (model.num_heads, "attention heads", ""),
        (model.padded_vocab_size, "vocabulary rows", pad),
    ):
        if size % tp:
            raise BadInput(
                f"tp = {tp} does not divide the {size} {what}; tp can be {_divisors(size)}{advice}"
            )


def _divisors(number: int) -> str:
    # Up to 512: a sentence needs no divisors that no layout has.
    return ", ".join(str(n) for n in range(1, min(number, 512) + 1) if number % n == 0)
