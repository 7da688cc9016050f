"""What a dataset is made of and how: the pipeline's configuration."""

from math import floor, sqrt
from typing import Annotated, Any, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, field_validator, model_validator

from data_pipeline.contamination.testsets import check_test_set_name
from data_pipeline.reading.readers import Limits
from data_pipeline.reading.source_names import check_source_name
from lineage.config import Config


class SourcesConfig(Config):
    """Where text comes from."""

    names: tuple[str, ...] = Field(min_length=1)
    """`wikipedia`, `openwebtext`, `realnews`, `cc-stories`, `installed-docs`, `jsonl:PATH`, `parquet:PATH`,
    `text:PATH` or `documents:PATH`, read in this order; PATH is a file, a directory or a pattern, of `documents` a
    directory that a verb wrote."""
    offline_fallback: Literal["installed-docs"] | None = None
    """Source used instead when the Hugging Face hub is needed and cannot be reached; without it the run stops."""
    max_documents: PositiveInt | None = None
    """Most documents taken from each source."""
    max_bytes: PositiveInt | None = None
    """Most UTF-8 bytes taken from each source. Streams and files are cut off; `installed-docs` is sampled."""
    max_line_bytes: PositiveInt = 256 << 20
    """A longer line, or text file, is no document."""
    max_decompression_ratio: PositiveFloat = 200.0
    """A compressed file is read until it exceeds this many times its compressed size, and 16 MiB."""
    max_bad_fraction: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Share of the lines that may be malformed; above it the run stops."""

    @property
    def limits(self) -> Limits:
        """What a line and a file may be."""
        return Limits(self.max_line_bytes, self.max_decompression_ratio)

    @field_validator("names")
    @classmethod
    def _names_are_known(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            check_source_name(name)
        return names


class CleanConfig(Config):
    """Repair of broken Unicode with ftfy."""

    normalization: Literal["NFC", "NFKC"] = "NFC"
    """Unicode normal form of the repaired text."""


class LanguageConfig(Config):
    """Language detection with langdetect, its seed fixed at 0."""

    keep: str = "en"
    """ISO 639-1 code of the language that is kept."""


class LengthConfig(Config):
    """The shortest document that is kept."""

    min_tokens: PositiveInt = 128
    """Tokens a document needs, its end-of-text token counted."""


class DeduplicateConfig(Config):
    """Near-duplicates: MinHash over character shingles proposes pairs, exact Jaccard similarity decides."""

    rule: Literal["verified", "megatron-2019"] = "verified"
    """`verified`: a document goes if an earlier one that is kept reaches the threshold with it. `megatron-2019`: of
    groups made as Megatron-LM v2.6 tools/openwebtext makes them, pair by pair, one document stays."""
    bands: Annotated[int, Field(ge=1, le=1024)] = 25
    """Bands of a signature; documents that agree in a whole band are compared."""
    rows: Annotated[int, Field(ge=1, le=64)] = 5
    """Minima in a band."""
    threshold: Annotated[float, Field(gt=0, le=1)] = 0.7
    """Exact Jaccard similarity from which two documents are duplicates."""
    shingle_characters: Annotated[int, Field(ge=1, le=13)] = 5
    """Length of a shingle; 13 characters of four bytes fit one block of SHA-1."""

    @property
    def num_permutations(self) -> int:
        """Length of a MinHash signature."""
        return self.bands * self.rows

    @property
    def min_agreement(self) -> int:
        """Minima in which a pair must agree to be compared: five standard deviations below the mean at the threshold.

        The published rule compares whatever shares a band: 0.
        """
        if self.rule == "megatron-2019":
            return 0
        mean = self.num_permutations * self.threshold
        return max(0, floor(mean - 5 * sqrt(mean * (1 - self.threshold))))


class DecontaminateConfig(Config):
    """Removal of test-set text by word n-grams (Megatron-LM tools/openwebtext/filter_ngrams.py)."""

    test_sets: tuple[str, ...] = ("wikitext103", "lambada")
    """Test sets whose text is removed: `wikitext103`, `wikitext103-valid`, `lambada`, `lambada-standard`,
    `jsonl:PATH` (the `text` of each line) or `text:PATH` (each line)."""
    ngram_words: PositiveInt = 13
    """Words in an n-gram."""
    min_ngram_words: PositiveInt = 8
    """A test passage of at least this many words but fewer than `ngram_words` is one n-gram as a whole."""
    frequent: PositiveInt = 10
    """An n-gram found this often in the corpus is a common phrase and is left in."""
    margin_characters: PositiveInt = 200
    """Characters cut away on each side of a match, onwards to the next end of a sentence."""
    min_part_characters: PositiveInt = 200
    """A remaining part must be longer than this to be kept."""
    max_parts: PositiveInt = 10
    """A document cut into more parts than this is dropped."""

    @field_validator("test_sets")
    @classmethod
    def _test_sets_are_known(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            check_test_set_name(name)
        return names


class OverlapConfig(Config):
    """The share of test-set n-grams that a corpus contains (Shoeybi et al. 2019; Radford et al. 2019, section 4)."""

    test_sets: tuple[str, ...] = ("wikitext103", "lambada")
    """Test sets, named as in `decontaminate`."""
    ngram_words: PositiveInt = 8
    """Words in an n-gram."""

    @field_validator("test_sets")
    @classmethod
    def _test_sets_are_known(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            check_test_set_name(name)
        return names


class SplitConfig(Config):
    """Shares of training and validation documents."""

    train: PositiveInt = 29
    valid: PositiveInt = 1


class TokenizerConfig(Config):
    """The tokenizer and the size of the vocabulary a model pads it to."""

    kind: Literal["gpt2", "train", "words"] = "gpt2"
    """`gpt2`: the published vocabulary; `train`: byte-level BPE trained on the documents in the kept language; `words`:
    their most frequent words, for adaptive embeddings (`model.transformer_xl.cutoffs`)."""
    vocab_size: Annotated[int, Field(ge=257)] = 50257
    """Tokens of the vocabulary, end-of-text included; GPT-2's has 50,257."""
    multiple: PositiveInt = 128
    """The padded vocabulary is a multiple of this times `tp`."""
    tp: PositiveInt = 1
    """Tensor-parallel size of the largest model the dataset is for."""

    @model_validator(mode="after")
    def _gpt2_has_its_size(self) -> Self:
        if self.kind == "gpt2" and self.vocab_size != 50257:
            raise ValueError(f"GPT-2's vocabulary has 50257 tokens: vocab_size = {self.vocab_size} must be that")
        return self


class DataConfig(Config):
    """One dataset."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    """Name of the run; its directory is `<name>-<identity>`."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 1234
    """Seed of the sample of `installed-docs` and of the shuffle before the split."""
    workers: Annotated[int, Field(ge=0)] = 0
    """Worker processes; 0 means one for each core. The dataset does not depend on it."""
    shard_bytes: PositiveInt | None = None
    """Input bytes in a unit of work: 64 MiB, less for a corpus under 1 GiB. The dataset does not depend on it."""
    sources: SourcesConfig
    clean: CleanConfig = CleanConfig()
    language: LanguageConfig = LanguageConfig()
    length: LengthConfig = LengthConfig()
    deduplicate: DeduplicateConfig = DeduplicateConfig()
    decontaminate: DecontaminateConfig = DecontaminateConfig()
    overlap: OverlapConfig = OverlapConfig()
    split: SplitConfig = SplitConfig()
    tokenizer: TokenizerConfig = TokenizerConfig()

    def identity(self) -> dict[str, Any]:
        """The plain values the dataset depends on."""
        return self.model_dump(mode="json", exclude={"workers", "shard_bytes", "overlap"})
