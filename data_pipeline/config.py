"""The recipe of a dataset, assembled from the sections that sources and stages declare."""

from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, PositiveInt, create_model, model_validator

from mlm_repro.data_pipeline.reading.config import SourcesConfig
from mlm_repro.data_pipeline.stages import PAPER, TEXT_FILTERS, TOKEN_FILTERS, Known
from mlm_repro.data_pipeline.stages.decontaminate import DecontaminateConfig, TestSets
from mlm_repro.data_pipeline.stages.deduplicate import DeduplicateConfig
from mlm_repro.data_pipeline.stages.split import SplitConfig
from mlm_repro.data_pipeline.stages.stage import Stage
from mlm_repro.lineage.atomic import JSON
from mlm_repro.lineage.config import Config
from mlm_repro.lineage.errors import did_you_mean

BY_NAME = Known(Stage)
ORDER = "filters of text, then filters of tokens, deduplicate, decontaminate, split, tokenize"


class OverlapConfig(Config):
    """Settings for the share of test-set n-grams that a corpus contains (Shoeybi et al. 2019;
    Radford et al. 2019, section 4)."""

    test_sets: TestSets = ("wikitext103", "lambada")
    """Names of the test sets to search for, as in `decontaminate.test_sets`."""
    ngram_words: PositiveInt = 8
    """Number of words in an n-gram."""


class TokenizerConfig(Config):
    """Settings of the tokenizer, and of the size that a model pads its vocabulary to."""

    kind: Literal["gpt2", "train", "words"] = "gpt2"
    """`gpt2`: the published vocabulary; `train`: byte-level BPE trained on the documents in the
    kept language; `words`: their most frequent words and, for all others, bytes, for adaptive
    embeddings (`model.transformer_xl.cutoffs`). With `path` this has no meaning."""
    path: Path | None = None
    """An existing tokenizer: a dataset, a `tokenizer.json` or a Hugging Face directory. Datasets
    with one tokenizer can be blended."""
    end_of_text: str | None = None
    """Token of `path` that ends a document, if its files name none or another one is wanted."""
    vocab_size: Annotated[int, Field(ge=257)] = 50257
    """Tokens of the vocabulary, end-of-text included; GPT-2's has 50,257."""
    multiple: PositiveInt = 128
    """The padded vocabulary is a multiple of this times `tp`."""
    tp: PositiveInt = 1
    """Tensor-parallel size of the largest model the dataset is for."""

    @property
    def origin(self) -> str:
        """Origin of the tokenizer: "path" if `path` is set, else its `kind`: "gpt2", "train" or
        "words"."""
        return "path" if self.path else self.kind

    @property
    def is_trained(self) -> bool:
        """True if the build makes the tokenizer from its documents, because `path` is not set and
        `kind` is "train" or "words"; False if it takes an existing one."""
        return self.origin in ("train", "words")

    @model_validator(mode="after")
    def _gpt2_has_its_size(self) -> Self:
        if self.end_of_text and not self.path:
            raise ValueError(
                "`tokenizer.end_of_text` names a token of the tokenizer at `tokenizer.path`, which"
                " is not set: set it, or leave end_of_text out"
            )
        if self.kind == "gpt2" and self.vocab_size != 50257:
            raise ValueError(
                f"`tokenizer.vocab_size` = {self.vocab_size} can be set only with `tokenizer.kind`"
                " = train or words: leave it out, because GPT-2's vocabulary has 50257 tokens and"
                " a tokenizer at `path` has its own"
            )
        return self


WITHOUT = {"workers", "shard_bytes", "overlap"}
"""Keys of a recipe that do not change the dataset. Its identity leaves them out."""


class _Beginning(Config):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    """Name of the run; its directory is `<name>-<identity>`."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 1234
    """Seed of the sample of `installed-docs` and of the shuffle before the split."""
    workers: Annotated[int, Field(ge=0)] = 0
    """Worker processes; 0 means one for each core. The dataset does not depend on it."""
    shard_bytes: PositiveInt | None = None
    """Input bytes in a unit of work: 64 MiB, less for a corpus under 4 GiB. The dataset does not
    depend on it."""
    stages: tuple[str, ...] = PAPER
    """The stages that are done, in order: filters of text, then filters of tokens such as `length`,
    `deduplicate`, `decontaminate`, and at the end `split` and `tokenize`. A stage that is not
    listed has no section either. `module:Class` is a filter of the user's own code, with the
    settings that it has there."""
    shards: PositiveInt | None = None
    """Number of token files of the largest split, and of Parquet tables of its documents; the other
    splits have theirs in proportion. Without a number a split has one token file and one file of
    JSON lines."""
    keep_dropped: bool = False
    """Write the documents that stages drop, each as it came to its stage, with `stage` and
    `reason`, as `dropped.jsonl`."""
    sources: SourcesConfig


if TYPE_CHECKING:
    _WithFilters = _Beginning
else:
    _FILTERS = {name: (stage, stage()) for name, stage in (TEXT_FILTERS | TOKEN_FILTERS).items()}
    _WithFilters = create_model("_WithFilters", __base__=_Beginning, **_FILTERS)


class DataConfig(_WithFilters):
    """The recipe of one dataset: its sources, its stages and their settings, and the tokenizer."""

    other_names: ClassVar[dict[str, str]] = {"without": "stages"}
    ends_with: ClassVar[tuple[str, ...]] = ("split", "tokenize")

    deduplicate: DeduplicateConfig = DeduplicateConfig()
    decontaminate: DecontaminateConfig = DecontaminateConfig()
    overlap: OverlapConfig = OverlapConfig()
    split: SplitConfig = SplitConfig()
    tokenizer: TokenizerConfig = TokenizerConfig()

    @model_validator(mode="after")
    def _stages_can_be_done(self) -> Self:
        """Return the recipe itself if its `stages` can be done. Raise ValueError for a stage that
        is unknown, doubled or out of order, for stages that do not end with `split` and `tokenize`
        (in a VerbConfig they need not), and for the section of a stage that is not listed."""
        for name in self.stages:
            if name not in BY_NAME:
                hint = did_you_mean(name, BY_NAME, f"known: {', '.join(BY_NAME)}")
                raise ValueError(f"`stages` names {name!r}, which is not a stage; {hint}")
            if self.stages.count(name) > 1:
                raise ValueError(f"`stages` names {name!r} twice, and a stage runs at most once")
        for before, after in pairwise(self.stages):
            if BY_NAME[before].step > BY_NAME[after].step:
                raise ValueError(
                    f"`stages` cannot have {before!r} before {after!r}: a build does {ORDER}, in"
                    " this order"
                )
        if self.stages[len(self.stages) - len(self.ends_with) :] != self.ends_with:
            raise ValueError(
                f"`stages` must end with {' and '.join(self.ends_with)}, because `mlm-data run`"
                " makes a dataset; to run a stage alone, use its verb of `mlm-data`"
            )
        if idle := sorted(BY_NAME.keys() & self.model_fields_set - {*self.stages}):
            raise ValueError(
                f"there is a section {idle[0]!r}, and `stages` does not name it"
                f" ({', '.join(self.stages)}): name it there, or remove the section and what --set"
                " gives it"
            )
        return self

    def model_dump(self, **options: Any) -> JSON:
        """Return the recipe as a dict by key, nested by section, without the sections of stages
        that the recipe does not list, so that the recipe's identity stays the same when another
        kind of stage is added to the program. `options` go to pydantic's `model_dump`."""
        idle = BY_NAME.keys() - {*self.stages}
        return {
            name: value for name, value in super().model_dump(**options).items() if name not in idle
        }

    @property
    def needs_tokenizer(self) -> bool:
        """True if a stage of the recipe counts or writes tokens."""
        return any(BY_NAME[name].needs_tokenizer for name in self.stages)

    def identity(self) -> JSON:
        """Return a dict, nested as in the recipe, with the JSON values of all settings that change
        the dataset and differ from their defaults. Their digest identifies the dataset."""
        return self.model_dump(mode="json", exclude_defaults=True, exclude=WITHOUT)


class VerbConfig(DataConfig):
    """The recipe of one verb, such as `clean`. It is like the recipe of a dataset, but its stages
    need not end with `split` and `tokenize`."""

    ends_with = ()
