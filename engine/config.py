"""Configuration of a training run: model, recipe, layout and data, as frozen data. Imports no
torch."""

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    AfterValidator,
    Field,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    field_validator,
    model_serializer,
    model_validator,
)

from mlm_repro.data_pipeline.tokens.special_tokens import SPECIAL_TOKENS
from mlm_repro.engine.batch_schedule import BatchSchedule
from mlm_repro.lineage.atomic import JSON
from mlm_repro.lineage.config import Config
from mlm_repro.lineage.environment import list_gpus
from mlm_repro.lineage.files import Positive

Precision = Literal["fp64", "fp32", "bf16", "fp16", "fp16-pure"]
ScheduleName = Literal["gpipe", "1f1b", "interleaved"]
# Names and not classes, because the configuration imports no torch.
OPTIMIZERS = {
    "adam": "mlm_repro.engine.optim.adam:FlatAdamW",
    "lamb": "mlm_repro.engine.optim.adam:FlatLamb",
    "lamb-clamped": "mlm_repro.engine.optim.adam:ClampedLamb",
    "lamb-2019-05": "mlm_repro.engine.optim.adam:LambOfThePost",
}
"""Dict name of an optimizer in `train.optimizer` → `module:class` of its implementation."""
LARGEST_SIZE = 1 << 28
"""Largest value of one size of a model, such as a width or a number of rows: 2²⁸. The bytes of a
matrix with two such sides are counted in 64 bits."""
Size = Annotated[int, Field(ge=1, le=LARGEST_SIZE)]
Share = Annotated[float, Field(ge=0, lt=1)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Batches = Annotated[
    int | float,
    Field(ge=0, allow_inf_nan=False),
    # 3.0 and 3 are one setting, and must not make two runs.
    AfterValidator(lambda n: int(n) if n % 1 == 0 else n),
]
"""A number of batches, at least 0; an int if it is whole."""


class FamilySection(Config):
    """Base class of a family's section of the configuration. A subclass has the family's own
    options as fields, sets the class's `special_tokens` and `divides_sequence` where it differs,
    and overrides `check`, to raise ValueError, if the sizes of such a model have limits."""

    special_tokens: ClassVar[int] = 0
    """Number of this family's special tokens. They get ids after those of a dataset's tokenizer,
    unless it has them itself."""
    divides_sequence: ClassVar[bool] = True
    """True if sequence parallelism can divide the activations."""

    def check(self, model: "ModelConfig") -> None:
        """Raise ValueError if a model with the options of this section, a family's, cannot have the
        sizes of `model`, the section that contains it. A family with limits overrides this; the
        base class accepts all sizes."""


# A section although it is empty: an option that stood in the base class would apply to every
# family, in silence.
class GPT2Config(FamilySection):
    """Options of a GPT-2. It has no options: the keys of `[model]` describe it."""


class BertConfig(FamilySection):
    """Options of a BERT: order and epsilon of its layer norms (2019 paper, Section 5.3)."""

    special_tokens: ClassVar[int] = len(SPECIAL_TOKENS)

    layer_norm_order: Literal["rearranged", "original"] = "rearranged"
    """`rearranged`: x + f(LN(x)), the 2019 paper's Figure 7 (b); `original`: LN(x + f(x)), its
    Figure 7 (a)."""
    layer_norm_epsilon: Annotated[float, Field(gt=0, lt=1)] = 1e-5
    """Number that layer norms add to the variance; the published BERT has 1e-12."""

    def check(self, model: "ModelConfig") -> None:
        """Raise ValueError if the `seq_length` of `model`, the section `model` of a BERT, is less
        than 5 tokens: a pair of texts needs [CLS], two [SEP] and a token of each text."""
        if model.seq_length < 5:
            raise ValueError(
                f"seq_length = {model.seq_length} is too short for a BERT: [CLS], two [SEP] and a"
                " token of each of two texts need 5"
            )


class TransformerXLConfig(FamilySection):
    """Options of a Transformer-XL (Dai et al. 2019): length of its memory, widths, and clusters of
    words."""

    divides_sequence: ClassVar[bool] = False

    memory_length: Annotated[int, Field(ge=0, le=LARGEST_SIZE)] = 0
    """Number of states of earlier segments, one a token, that every layer sees, `m`; 0 for a model
    without recurrence."""
    head_dim: Size | None = None
    """Width of one attention head; hidden_size / num_heads unless given."""
    inner_size: Size | None = None
    """Width between the two products of the MLP; 4 × hidden_size unless given."""
    cutoffs: tuple[int, ...] = ()
    """Id of the first word of each cluster after the head, rising, for adaptive embedding and
    softmax; empty for neither. Word ids are sorted by falling frequency."""
    div_value: PositiveInt = 1
    """Factor by which the embeddings grow narrower from each cluster to the next."""

    def check(self, model: "ModelConfig") -> None:
        """Raise ValueError if these options do not fit `model`, the ModelConfig that they belong
        to: for heads that are together wider than LARGEST_SIZE, for `cutoffs` that do not rise or
        lie outside the vocabulary, and for a hidden size that is odd or that cannot be divided by
        `div_value` once for each cutoff. Nothing is changed or returned."""
        if (self.head_dim or 1) * model.num_heads > LARGEST_SIZE:
            raise ValueError(
                f"num_heads × transformer_xl.head_dim is above {LARGEST_SIZE:,}, the largest width"
                " that a model can have: make one of them smaller"
            )
        cutoffs = list(self.cutoffs)
        if cutoffs != sorted({*cutoffs}) or not all(
            0 < cutoff < model.vocab_size for cutoff in cutoffs
        ):
            raise ValueError(
                f"transformer_xl.cutoffs = {cutoffs} must rise, and each must be above 0 and below"
                f" vocab_size = {model.vocab_size}"
            )
        if model.hidden_size % self.div_value ** len(cutoffs):
            raise ValueError(
                f"hidden_size = {model.hidden_size} cannot be divided by transformer_xl.div_value"
                f" once for each of the {len(cutoffs)} cutoffs: make it a multiple of div_value to"
                " that power"
            )
        if model.hidden_size % 2:
            raise ValueError(
                f"hidden_size = {model.hidden_size} must be even in a transformer-xl, whose"
                " positions have as many sines as cosines"
            )

    def shrink(self, scale: "TwinScale") -> Self:
        """Return a TransformerXLConfig for a twin, a small copy of a published model: a copy of
        these options, divided by factors of the TwinScale `scale` and rounded down: by the scale's
        `seq_length` for the memory length, `vocab_size` for the cutoffs, `hidden_size` for
        `inner_size`, and, for `head_dim`, `hidden_size` divided by `num_heads`. `div_value` stays,
        and so does an option that is None."""
        sizes = {
            "memory_length": self.memory_length // scale.seq_length,
            "head_dim": self.head_dim and self.head_dim * scale.num_heads // scale.hidden_size,
            "inner_size": self.inner_size and self.inner_size // scale.hidden_size,
            "cutoffs": tuple(cutoff // scale.vocab_size for cutoff in self.cutoffs),
        }
        return self.model_copy(update=sizes)


class ModelConfig(Config):
    """Family and shape of a model. Numbers of layers and heads and the hidden size must be stated;
    the other defaults are GPT-2's (2019 paper, Tables 1 and 2)."""

    family: Literal["gpt2", "bert", "transformer-xl"] = "gpt2"
    """Architecture of the model (`engine/family.py`)."""
    num_layers: Size
    """Number of transformer layers."""
    hidden_size: Size
    """Width of the residual stream, `h`."""
    num_heads: PositiveInt
    """Number of attention heads; each is `hidden_size / num_heads` wide, in a Transformer-XL
    `transformer_xl.head_dim` if given."""
    seq_length: Size = 1024
    """Tokens of a training sample, `s`. GPT-2 and BERT learn as many positions; a Transformer-XL's
    are relative, and it sees its memory besides."""
    vocab_size: PositiveInt = 50257
    """Number of real vocabulary entries, without padding. A dataset brings its own value, and
    another value that the file states is refused."""
    padded_vocab_size: Size = 51200
    """Rows of the embedding: `vocab_size` padded to a multiple of 128 × tp. A dataset brings its
    own value."""
    dropout: Share = 0.1
    """Probability of dropping an element, in attention and on the residual stream."""
    init_std: Positive = 0.02
    """Standard deviation of weights; divided by √(2·num_layers) before residual additions."""
    gpt2: GPT2Config = GPT2Config()
    """Options of family `gpt2`; other families leave them out."""
    bert: BertConfig = BertConfig()
    """Options of family `bert`; other families leave them out."""
    transformer_xl: TransformerXLConfig = TransformerXLConfig()
    """Options of family `transformer-xl`; other families leave them out."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.hidden_size % self.num_heads and self.transformer_xl.head_dim is None:
            raise ValueError(
                f"hidden_size = {self.hidden_size} is not a multiple of num_heads ="
                f" {self.num_heads}"
            )
        if self.padded_vocab_size < self.vocab_size:
            raise ValueError(
                f"padded_vocab_size = {self.padded_vocab_size}, the number of rows of the"
                f" embedding, is below vocab_size = {self.vocab_size}: set padded_vocab_size too,"
                " to that or more"
            )
        # An option of another family would have no effect, and nobody would hear of it.
        for name, section in self:
            if (
                isinstance(section, FamilySection)
                and section is not self.section
                and section != type(section)()
            ):
                raise ValueError(
                    f"the options in [model.{name}] have no effect on family = {self.family!r}:"
                    " leave them out, or set the family that they belong to"
                )
        self.section.check(self)
        return self

    @property
    def section(self) -> FamilySection:
        """FamilySection of this model's family, its own options: the value of the key that is named
        after the family, such as `gpt2` or `transformer_xl`."""
        section: FamilySection = getattr(self, self.family.replace("-", "_"))
        return section

    @property
    def text_vocab_size(self) -> int:
        """Number of vocabulary entries less the family's special tokens, 4 for a BERT and else 0:
        the entries of a tokenizer that has no such tokens. For one that has them it is 4 too
        few."""
        return self.vocab_size - self.section.special_tokens

    @property
    def head_dim(self) -> int:
        """Width of one attention head, `d`: `transformer_xl.head_dim` if that is set, else
        hidden_size / num_heads."""
        return self.transformer_xl.head_dim or self.hidden_size // self.num_heads

    @property
    def inner_size(self) -> int:
        """Width between the two products of the MLP: `transformer_xl.inner_size` if that is set,
        else 4 × hidden_size."""
        return self.transformer_xl.inner_size or 4 * self.hidden_size


class Seam(Config):
    """End of an earlier run that a run continues: its directory, iterations and samples; `mlm-train
    run --continue` writes it."""

    run: Path
    """Directory of the continued run."""
    iteration: int
    """Number of iterations that the continued run has finished; the training goes on after them,
    with that run's optimizer state."""
    samples: int
    """Number of samples in all finished iterations of the continued run, by its metrics.jsonl."""


class TrainConfig(Config):
    """Section `train` of the configuration: how a model is trained. The defaults are the recipe of
    the 2019 paper's Section 4.2."""

    init_from: Path | None = None
    """Run or checkpoint whose weights the training starts from, with a fresh optimizer; `mlm-train
    import` makes one of Hugging Face's or Megatron-LM's weights. The tokenizer and `[model]` must
    be the same."""
    continues: Seam | None = None
    """End of an earlier run that this run continues, with its optimizer; `--continue RUN` sets
    it."""
    iterations: PositiveInt = 300_000
    """Optimizer steps, counted from the start of a continued run. Here, in the schedule's lengths
    and in the intervals below, `"300e9 tokens"` and `"183105 samples"` are turned into
    iterations."""
    global_batch_size: PositiveInt = 512
    """Sequences per iteration over all data-parallel ranks."""
    rampup_batch_size: tuple[PositiveInt, PositiveInt, PositiveInt] | None = None
    """Start, increment and samples, as Megatron-LM's `--rampup-batch-size`: sequences per iteration
    grow from start to the global batch by increments, spread evenly over the samples. `clock` says
    what the learning rate follows."""
    microbatch_size: PositiveInt = 8
    """Sequences per forward pass of one rank."""
    normalise: Literal["microbatch", "batch"] = "microbatch"
    """Tokens that a BERT's masked loss is averaged over. `microbatch`: the masked tokens of a
    microbatch, and then over microbatches, as in Megatron-LM; it depends on `microbatch_size` and
    on the data-parallel ranks. `batch`: the masked tokens of the whole batch, which depends on
    neither. Where every token counts both are the same."""
    learning_rate: NotNegative = 1.5e-4
    """Highest learning rate, the peak of the schedule."""
    min_learning_rate: NotNegative = 1e-5
    """Learning rate that is the floor of the schedule; `decay` says how the rate falls to it."""
    clock: Literal["updates", "samples"] = "updates"
    """Clock of the learning rate. `updates`: the first update has the rate at 1, the next the rate
    at 2. `samples`, as in Megatron-LM since v2: an update has the rate at the samples of all
    updates before it, divided by `global_batch_size`; the first has the rate at 0."""
    warmup_iterations: Batches = 3000
    """Length of the linear warm-up by the clock; unless named, a hundredth of the schedule, at most
    the paper's 3000. With `clock = "samples"` it is a number of whole batches, which need not be an
    integer."""
    decay: Literal[
        "clipped-cosine",
        "cosine",
        "linear",
        "constant",
        "inverse-square-root",
        "WSD",
        "exponential",
    ] = "clipped-cosine"
    """`clipped-cosine` falls towards 0 and is clipped at the floor (the 2019 code); `cosine`
    (Megatron-LM since v2) and `linear` (BERT) fall to the floor exactly at the end; `constant`
    stays at the peak; `inverse-square-root` falls with the root of the clock; `WSD` stays at the
    peak and falls in the last `wsd_iterations`; `exponential` rises from the floor to the peak, for
    the learning-rate finder."""
    decay_iterations: Annotated[Batches, Field(gt=0)] | None = None
    """End of the fall of the learning rate, by the clock, as `--lr-decay-iters`; by default the end
    of the training. Later the rate stays."""
    wsd_iterations: Annotated[Batches, Field(gt=0)] | None = None
    """Length of the fall of the learning rate with `decay = "WSD"`, by the clock, as
    `--lr-wsd-decay-iters`."""
    wsd_decay: Literal["exponential", "linear", "cosine", "minus_sqrt"] = "exponential"
    """Form of the fall of the learning rate with `decay = "WSD"`, as `--lr-wsd-decay-style`."""
    optimizer: Annotated[str, Field(json_schema_extra={"enum": [*OPTIMIZERS]})] = "adam"
    """`lamb` is LAMB of You et al. 2020, with bias correction. The others are
    cybertronai/pytorch-lamb: `lamb-2019-05` as "Scaling Transformer-XL to 128 GPUs" had it, with
    the correction on the rate and ratios up to 10; `lamb-clamped` since 2019-06-16, without it and
    with weight norms up to 10. Every optimizer takes Adam's constants below."""
    weight_decay: NotNegative = 0.01
    """Decoupled decay of every weight matrix and embedding; biases and layer norms have none."""
    clip_gradient: NotNegative = 1.0
    """Largest global gradient norm; 0 turns clipping off."""
    adam_beta1: Share = 0.9
    """Adam's β₁: the share of the first moment that an update keeps."""
    adam_beta2: Share = 0.999
    """Adam's β₂: the share of the second moment that an update keeps."""
    adam_epsilon: NotNegative = 1e-8
    """Adam's ε, a number that is added to the root of the second moment."""
    skip_spikes: bool = False
    """Make no update in an iteration whose loss or gradient norm is a spike
    (`engine/guard/guards.py`)."""
    precision: Precision = Field(
        default_factory=lambda: "bf16" if list_gpus() else "fp32",
        json_schema_extra={"default": "bf16 or fp32"},
    )
    """Number format of parameters and activations; by default bf16 on a GPU and fp32 on a
    processor. fp16 and bf16 keep fp32 master weights, moments and gradient sums; fp16 scales its
    loss dynamically. `fp16-pure` has everything in fp16 and no scale, as tried in "Scaling
    Transformer-XL to 128 GPUs"."""
    initial_loss_scale: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 2.0**16
    """First loss scale of fp16. Megatron-LM's, which the published recipes state, is 2³² and skips
    the first updates.
    """
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 1234
    """Seed of initial values, data order and dropout."""
    validation_interval: PositiveInt = 1000
    """Iterations between validations."""
    validation_samples: PositiveInt = 5120
    """Sequences of a validation, from the start of the split; the last validation uses the whole
    split."""
    checkpoint_interval: PositiveInt = 5000
    """Iterations between checkpoints; one is always written at the end."""
    keep_checkpoints: PositiveInt = 2
    """Number of newest checkpoints that are kept."""

    @model_validator(mode="before")
    @classmethod
    def _give_warmup(cls, values: Any) -> Any:
        """Return the section's values, before validation, with `warmup_iterations` added if that
        key is missing and the schedule's end is a number: `decay_iterations` or, without it,
        `iterations`. The warm-up is a hundredth of the end, rounded up, at most 3,000. Other values
        are returned as they are."""
        if not isinstance(values, dict):
            return values
        # Before validation, because only here a warm-up that is named differs from the default.
        end = values.get("decay_iterations") or values.get("iterations")
        if (
            "warmup_iterations" not in values
            and isinstance(end, int | float)
            and not isinstance(end, bool)
        ):
            values = values | {"warmup_iterations": max(min(-(-end // 100), 3000), 0)}
        return values

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.global_batch_size % self.microbatch_size:
            raise ValueError(
                f"global_batch_size = {self.global_batch_size} is not a multiple of microbatch_size"
                f" = {self.microbatch_size}"
            )
        # Not a Literal: an optimizer is added in the table alone (`docs/extend/optimizer.md`).
        if self.optimizer not in OPTIMIZERS:
            raise ValueError(
                f"optimizer = {self.optimizer!r} is not one of {', '.join(OPTIMIZERS)}"
            )
        if self.decay == "exponential" and not self.min_learning_rate:
            raise ValueError(
                "decay = 'exponential' rises from min_learning_rate to learning_rate: set"
                " min_learning_rate above 0"
            )
        if self.rampup_batch_size:
            start, increment, samples = self.rampup_batch_size
            # Each size on the way has to be whole microbatches, and the last one the global batch.
            shown = [start, increment, samples]
            size = self.microbatch_size
            if start > self.global_batch_size or (self.global_batch_size - start) % increment:
                raise ValueError(
                    f"rampup_batch_size = {shown}: {start} plus steps of {increment} never gives"
                    f" global_batch_size = {self.global_batch_size}; choose numbers that do"
                )
            if start % size or increment % size:
                raise ValueError(
                    f"rampup_batch_size = {shown}: its first two numbers, start and increment, must"
                    f" be multiples of microbatch_size = {size}"
                )
        if self.continues and self.continues.iteration >= self.iterations:
            raise ValueError(
                f"iterations = {self.iterations} counts from the start of the continued run, and"
                f" {self.continues.run} has {self.continues.iteration} already: set"
                " train.iterations above that"
            )
        name = "decay_iterations" if self.decay_iterations else "iterations"
        end = self.decay_iterations or self.iterations
        parts = [self.warmup_iterations, self.decay_iterations, self.wsd_iterations]
        # Updates are whole; only a clock of samples can stop within a batch.
        if self.clock == "updates" and any(isinstance(part, float) for part in parts):
            raise ValueError(
                "warmup_iterations, decay_iterations and wsd_iterations must be whole numbers"
                " unless clock = 'samples'"
            )
        if (self.decay == "WSD") != (self.wsd_iterations is not None):
            raise ValueError(
                "decay = 'WSD' needs wsd_iterations, the length of its fall, and no other decay"
                " takes wsd_iterations: set both or neither"
            )
        if self.wsd_iterations and self.wsd_iterations + self.warmup_iterations > end:
            raise ValueError(
                f"wsd_iterations = {self.wsd_iterations} and warmup_iterations ="
                f" {self.warmup_iterations} are together more than {name} = {end}, the whole"
                " schedule: make one of them smaller"
            )
        if self.warmup_iterations >= end:
            raise ValueError(
                f"warmup_iterations = {self.warmup_iterations} must be below {name} = {end}, where"
                " the schedule ends"
            )
        if self.decay == "clipped-cosine" and 3 * self.warmup_iterations > 2 * end:
            raise ValueError(
                f"warmup_iterations = {self.warmup_iterations} is above two thirds of {name} ="
                f" {end}, and the rate of decay = 'clipped-cosine' would fall by over a quarter at"
                f" once: make it at most {end // 2}, or set decay = 'cosine'"
            )
        if self.decay != "constant" and self.min_learning_rate > self.learning_rate:
            raise ValueError(
                f"min_learning_rate = {self.min_learning_rate:g}, the floor of the schedule, is"
                f" above its peak, learning_rate = {self.learning_rate:g}: set min_learning_rate"
                " lower too"
            )
        return self

    @model_serializer(mode="wrap")
    def _write_dependent_defaults(self, handler: Callable[[Any], JSON]) -> JSON:
        """Return the section's values for a file, as a dict: those that pydantic's `handler` gives,
        and always `precision` and `warmup_iterations`, whose defaults depend on the machine or on
        other settings."""
        # A run's identity leaves out what equals its default. These defaults differ between
        # machines and recipes, and a resumed run must not find another one.
        return {
            **handler(self),
            "precision": self.precision,
            "warmup_iterations": self.warmup_iterations,
        }

    @property
    def batch_in_microbatches(self) -> int:
        """Number of microbatches in an iteration's global batch, over all data-parallel ranks. If
        the batch grows, it is the greatest common divisor of the numbers for all sizes of the
        batch."""
        # The greatest common divisor, so that what divides it divides every size of the batch.
        start, increment, _ = self.rampup_batch_size or (0, 0, 0)
        return math.gcd(self.global_batch_size, start, increment) // self.microbatch_size


class ParallelConfig(Config):
    """Section `parallel` of the configuration: how the model is divided over ranks. Data
    parallelism takes the remaining ranks."""

    tp: PositiveInt = 1
    """Number of tensor-parallel ranks."""
    pp: PositiveInt = 1
    """Number of pipeline-parallel ranks."""
    chunks: PositiveInt = 1
    """Stages per pipeline rank, `v`; more than one needs the interleaved schedule."""
    schedule: ScheduleName = "1f1b"
    """Order of forward and backward passes in the pipeline."""
    shard_optimizer: bool = False
    """Divide the optimizer's state over the data-parallel ranks (ZeRO stage 1)."""
    shard_parameters: bool = False
    """Divide parameters, gradients and the optimizer's state over the data-parallel ranks and
    gather each layer when it computes (ZeRO stage 3, by torch's FSDP2). Only for a GPT-2 that is
    divided in no other way."""
    sequence_parallel: bool = False
    """Divide activations along the sequence outside tensor-parallel regions (Korthikanti et al.
    2022)."""
    scatter_gather: bool = True
    """Send each activation between stages once, divided over the tensor-parallel ranks (2021 paper,
    Section 4.1)."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activations computed again in the backward pass: none, the attention core (scores, softmax,
    dropout and product with the values; Korthikanti et al. 2022, Section 5), or whole layers.
    Dropout is keyed by its site (`mlm_repro.engine.rng`), so a recomputed pass drops the same
    elements."""
    recompute_layers: PositiveInt = 1
    """Number of layers in each group that is recomputed as a whole, with `recompute = "full"`."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.chunks > 1 and self.schedule != "interleaved":
            raise ValueError(
                f"chunks = {self.chunks} needs schedule = 'interleaved', not {self.schedule!r}"
            )
        return self

    @property
    def recomputed_layers(self) -> int:
        """Number of layers in each group that is recomputed as a whole in the backward pass; 0 if
        no layer is, as with selective recomputation."""
        return self.recompute_layers if self.recompute == "full" else 0


SERIAL = ParallelConfig()
"""ParallelConfig of one rank: every setting has its default, so that nothing is divided."""


class TwinScale(Config):
    """Factors between a published recipe and its twin: published value = twin value × factor,
    before rounding; for the learning rate, twin value = published value × factor."""

    hidden_size: PositiveInt = 16
    num_heads: PositiveInt = 4
    num_layers: PositiveInt = 12
    seq_length: PositiveInt = 8
    vocab_size: PositiveInt = 16
    global_batch_size: PositiveInt = 64
    iterations: PositiveInt = 250
    warmup_iterations: PositiveInt = 50
    learning_rate: PositiveInt = 8
    """Factor of both learning rates: twin value = published value × factor, since the best rate
    grows as width and batch shrink (8.3b twin)."""


class DataSection(Config):
    """Section `data` of the configuration: the dataset that a run trains on, or several that are
    blended."""

    dataset: Path | tuple[tuple[Path, float], ...] | None = None
    """Dataset directory made by `mlm-data run`, or several, each with its weight: `[["runs/a",
    0.7], ["runs/b", 0.3]]`. Weights are divided by their sum."""

    @field_validator("dataset", mode="wrap")
    @classmethod
    def _in_words(cls, value: Any, handler: Callable[[Any], Any]) -> Any:
        try:
            # In a sentence, because pydantic prints one error for each type that a value is not.
            return handler(value)
        except ValidationError as error:
            raise ValueError(
                f"{value!r} is neither the directory of a dataset nor a list of [directory, weight]"
                " pairs"
            ) from error

    @model_validator(mode="after")
    def _check(self) -> Self:
        if isinstance(self.dataset, tuple):
            if not self.dataset:
                raise ValueError(
                    "dataset = [] names no dataset: name a directory that `mlm-data run` made"
                )
            # Checked here, where the directory can be named beside its weight.
            for number, (directory, weight) in enumerate(self.dataset):
                if not 0 < weight < math.inf:
                    raise ValueError(
                        f"the weight of dataset {directory}, {weight}, must be above 0 and finite"
                    )
                if directory in dict(self.dataset[:number]):
                    raise ValueError(
                        f"dataset {directory} is named twice: name it once, with one weight"
                    )
        return self


FORMER_RECORDS = ("tensorboard", "noise_scale", "trust_ratio")
"""Keys of `[record]` in earlier versions, which changed no result. A file may still set them to
false."""


class RecordConfig(Config):
    """Section `record` of the configuration: what a run writes or prints beside its results, and
    how often. It does not change the results."""

    loggers: tuple[Literal["tensorboard"], ...] = ()
    """Loggers that receive the metrics beside metrics.jsonl; the extra of the same name installs
    the library."""
    log_interval: PositiveInt | None = None
    """Iterations from one printed line to the next; by default one comes every 15 seconds, on a
    terminal a bar."""
    evaluate: tuple[str, ...] = ()
    """Protocols of `mlm-eval list` by which each checkpoint is scored when it is complete, such as
    `lambada`. Training waits meanwhile. The results are files of the run's folder `scores`."""
    checkpoint_minutes: PositiveFloat | None = None
    """Minutes of training after which a checkpoint is written too, by the first rank's clock; by
    default iterations alone decide."""

    @field_validator("loggers", "evaluate", mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        # `--set record.loggers=tensorboard` gives a text.
        return tuple(value.split(",")) if isinstance(value, str) and value else value or ()

    @model_validator(mode="before")
    @classmethod
    def _drop_earlier_switches(cls, values: Any) -> Any:
        """Return the section's values, before validation, without keys of earlier versions that are
        false, such as `tensorboard = false`. Values that are no dict are returned as they are."""
        if not isinstance(values, dict):
            return values
        return {
            key: value
            for key, value in values.items()
            if key not in FORMER_RECORDS or value is not False
        }


LENGTH = re.compile(r"(\d[\d_]*(?:\.\d*)?(?:e\+?\d+)?) *(samples|tokens)")
MOST_SAMPLES = 2.0**53
"""Samples that a length may have at most: a float holds every whole number up to here."""
COUNTED = (
    "iterations",
    "warmup_iterations",
    "decay_iterations",
    "wsd_iterations",
    "validation_interval",
    "checkpoint_interval",
)
"""Keys of `train` that may be stated in samples or tokens."""


class RunConfig(Config):
    """Configuration of one training run: its name, model, training, parallel layout, data and
    records and, for a shrunk twin of a published recipe, the factors by which it differs."""

    other_names: ClassVar[dict[str, str]] = {
        **dict.fromkeys(("lr", "max_lr"), "train.learning_rate"),
        "min_lr": "train.min_learning_rate",
        **dict.fromkeys(("max_iters", "train_iters", "max_steps", "steps"), "train.iterations"),
        **dict.fromkeys(("batch_size", "micro_batch_size"), "train.microbatch_size"),
        "epochs": "train.iterations; `mlm-train run --dry-run` says how many epochs they are",
        "gradient_accumulation_steps": "train.global_batch_size, the sequences of an update",
        **dict.fromkeys(("dp", "data_parallel_size"), "the ranks that tp and pp leave (--ranks)"),
        **dict.fromkeys(("dtype", "bf16", "fp16"), "train.precision"),
        "block_size": "model.seq_length",
        "n_layer": "model.num_layers",
        "n_head": "model.num_heads",
        "n_embd": "model.hidden_size",
    }
    """Dict key of another program → our key or advice, as text, which the message about an unknown
    key names."""
    name: str
    """First part of the name of the run's directory."""
    model: ModelConfig
    train: TrainConfig = Field(default_factory=TrainConfig)
    parallel: ParallelConfig = ParallelConfig()
    data: DataSection = DataSection()
    record: RecordConfig = RecordConfig()
    twin: TwinScale | None = None
    """Factors by which a twin differs from its published recipe; None for a published recipe."""

    @model_validator(mode="before")
    @classmethod
    def _count_in_iterations(cls, values: Any) -> Any:
        """Return the configuration's values, before validation, with those lengths in `train` that
        are stated in samples or tokens, such as "300e9 tokens", turned into numbers of iterations.

        The training's length follows the growing batch, and an incomplete last batch is not
        counted. The other lengths are divided by the global batch and rounded, intervals to at
        least 1; warm-up, decay and fall are not rounded where `clock` is "samples". All values are
        returned as they are if `model` is missing or its `seq_length` is not a positive number.
        Raises ValueError for a length above MOST_SAMPLES.
        """
        train = values.get("train") if isinstance(values, dict) else None
        if not isinstance(train, dict):
            return values
        matches = {key: LENGTH.fullmatch(str(train.get(key))) for key in COUNTED}
        lengths = {key: match for key, match in matches.items() if match}
        if not lengths:
            return values
        others = {key: value for key, value in train.items() if key not in lengths}
        recipe = {
            key: others[key]
            for key in ("global_batch_size", "microbatch_size", "rampup_batch_size")
            if key in others
        }
        # Only what decides the batch, because the other settings may still be texts.
        batches = TrainConfig(**recipe)
        schedule = BatchSchedule(batches)
        batch = batches.global_batch_size
        try:
            default = ModelConfig.model_fields["seq_length"].default
            tokens = int(values["model"].get("seq_length", default))
        except (KeyError, AttributeError, TypeError, ValueError):
            tokens = 0
        if tokens < 1:
            return values  # the check of `model` refuses it
        for key, match in lengths.items():
            samples = float(match[1]) / (tokens if match[2] == "tokens" else 1)
            if samples > MOST_SAMPLES:
                raise ValueError(
                    f"train.{key} = {match[0]!r} is more than {MOST_SAMPLES:g} samples"
                )
            if key == "iterations":
                others[key] = schedule.whole_iterations(samples)
            elif key.endswith("_interval"):
                # At least one, because an interval of 0 is refused, and a short one is meant.
                others[key] = max(round(samples / batch), 1)
            else:
                others[key] = (
                    samples / batch if others.get("clock") == "samples" else round(samples / batch)
                )
        return values | {"train": others}

    @model_validator(mode="after")
    def _check(self) -> Self:
        # It begins the name of a directory, and must not lead out of the folder of runs.
        if not re.fullmatch(r"\w[\w.-]*", self.name):
            raise ValueError(
                f"name = {self.name!r} begins the name of the run's directory: it must begin with a"
                " letter, a digit or '_' and have only these, '-' and '.'"
            )
        if isinstance(self.data.dataset, tuple) and self.model.family != "gpt2":
            raise ValueError(
                f"a model of family = {self.model.family!r} reads one dataset: set data.dataset to"
                " one directory, not to a list"
            )
        return self
