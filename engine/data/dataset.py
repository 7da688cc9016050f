"""Datasets that a training reads: their digests, vocabulary, tokenizer and token files. Imports no
torch."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mlm_repro.data_pipeline.files import DATASET, UNSPLIT, DataCard, dataset_digest
from mlm_repro.data_pipeline.tokens.samples import normalized
from mlm_repro.data_pipeline.tokens.token_file import TokenFile, blend, split_prefixes
from mlm_repro.data_pipeline.tokens.tokenizer import FILE_NAME, Tokenizer, padded_vocab_size
from mlm_repro.engine.config import ModelConfig
from mlm_repro.lineage.digest import is_sealed, sha256_file, sha256_json
from mlm_repro.lineage.errors import BadInput, DataMissing, IntegrityFailure, cause
from mlm_repro.lineage.files import read_document
from mlm_repro.lineage.verified import check_seal_once


@dataclass(frozen=True)
class DatasetFacts:
    """Facts about a dataset made by `mlm-data run`, or about several that are blended: directories,
    weights, digests and sizes of the vocabulary."""

    directories: tuple[Path, ...]
    weights: tuple[float, ...]
    """Share of each dataset in the training samples; the shares add up to 1."""
    digests: tuple[str, ...]
    """Content digest of each dataset, hexadecimal text in the order of the directories. It is the
    same when the dataset is rebuilt from the same text."""
    vocab_size: int
    padded_vocab_size: int

    @classmethod
    def read(cls, dataset: Path | Sequence[tuple[Path, float]]) -> "DatasetFacts":
        """Return the DatasetFacts of `dataset`: the directory of one complete dataset, or pairs
        (directory, weight) of several, whose order stays and whose weights are divided by their
        sum. Token files are not read.

        Raises DataMissing for a dataset that is missing or not split, IntegrityFailure for one that
        is incomplete, or if its dataset.json or its tokenizer cannot be read, BadInput for several
        that differ in vocabulary, tokenizer or end-of-text token.
        """
        parts = [(dataset, 1.0)] if isinstance(dataset, Path) else dataset
        directories = tuple(directory for directory, _ in parts)
        # With the tokenizer's digest: two tokenizers of one size number their tokens differently.
        vocabularies = [_read_vocabulary(directory) for directory in directories]
        for directory, vocabulary in zip(directories, vocabularies, strict=True):
            if vocabulary != vocabularies[0]:
                raise BadInput(
                    f"datasets {directories[0]} and {directory} have different vocabularies,"
                    " tokenizers or end-of-text tokens, and a blend needs the same: build both"
                    " with one `tokenizer.path`"
                )
        return cls(
            directories,
            tuple(normalized([weight for _, weight in parts]).tolist()),
            tuple(map(dataset_digest, directories)),
            *vocabularies[0][:2],
        )

    @property
    def digest(self) -> str:
        """Digest of the dataset's content, as hexadecimal text; with several datasets, a SHA-256
        over their digests and shares."""
        return (
            self.digests[0] if len(self.digests) == 1 else sha256_json([self.digests, self.weights])
        )

    @property
    def parents(self) -> dict[str, str]:
        """Digests that a run records for its data, as a dict: `dataset` → the digest of the whole,
        and for several datasets also `dataset 1`, `dataset 2` and on → the digest of that dataset
        alone."""
        # Each dataset by itself too, so that one of a blend can be followed to its text.
        several = {f"dataset {number}": digest for number, digest in enumerate(self.digests, 1)}
        return {"dataset": self.digest} | (several if len(several) > 1 else {})

    def check(self) -> None:
        """Compare all files of the datasets with the digests in their seals. A dataset that was not
        touched since this user's last check is not read again. Raises IntegrityFailure naming the
        first file that differs."""
        for directory in self.directories:
            check_seal_once(directory)

    def prefixes(self, split: str) -> list[tuple[Path, float]]:
        """Return a list of (path without its ending, weight), one for each token file of a split,
        such as `train`, in the order of the datasets and their shards. The shards that are there
        share the dataset's weight by the bytes of their `.bin`; a dataset without shards has one
        path with the whole weight, whether the file is there or not."""
        weighted = []
        for directory, weight in zip(self.directories, self.weights, strict=True):
            weighted += blend(split_prefixes(directory, split), weight)
        return weighted

    def token_files(self, split: str) -> list[tuple[TokenFile, float]]:
        """Open the token files of a split, such as `train`, and return a list of (TokenFile,
        weight), one for each file, in the order of the datasets and their shards. The shards of a
        dataset share its weight in proportion to the bytes of their `.bin`. Raises BadInput for a
        missing file, IntegrityFailure for a damaged one."""
        return [(TokenFile(prefix), weight) for prefix, weight in self.prefixes(split)]

    @property
    def tokenizer(self) -> Path:
        """Path of the directory with the vocabulary and rules by which the texts of all the
        datasets were divided into tokens; it lies in the first dataset's directory."""
        return self.directories[0] / "tokenizer"

    def resize(self, model: ModelConfig) -> ModelConfig:
        """Return a ModelConfig, a copy of `model` with `vocab_size` and `padded_vocab_size` of this
        dataset. A BERT's vocabulary has its special tokens too, after the dataset's entries unless
        the tokenizer has them, and is padded anew. Raises BadInput if a Transformer-XL's last
        cutoff is not below `vocab_size`, or if the tokenizer is missing that a BERT needs, and
        IntegrityFailure if it is damaged."""
        if (cutoffs := model.transformer_xl.cutoffs) and cutoffs[-1] >= self.vocab_size:
            raise BadInput(
                f"model.transformer_xl.cutoffs = {list(cutoffs)} must all be below the size of the"
                f" dataset's vocabulary, {self.vocab_size}"
            )
        sizes = {"vocab_size": self.vocab_size, "padded_vocab_size": self.padded_vocab_size}
        if model.section.special_tokens:
            # A tokenizer that has a BERT's special tokens keeps their ids; else they follow its
            # own.
            vocab_size = max(
                self.vocab_size,
                *(token + 1 for token in Tokenizer.load(self.tokenizer).special_ids),
            )
            sizes = {"vocab_size": vocab_size, "padded_vocab_size": padded_vocab_size(vocab_size)}
        return model.model_copy(update=sizes)


def _read_vocabulary(directory: Path) -> tuple[int, int, str, int | None]:
    """Return a complete dataset's vocabulary as a tuple: number of entries, padded number of
    entries, SHA-256 of the tokenizer's file, and id of the end-of-text token or None. Raises
    DataMissing if the dataset is missing or not split, IntegrityFailure if it is incomplete, or if
    its dataset.json or its tokenizer cannot be read."""
    # `os.path`, because it is also false for a name that no path can have.
    if not os.path.isdir(directory):
        raise DataMissing(f"there is no dataset at {directory}; `mlm-data run` makes one")
    if (directory / f"{UNSPLIT}_text_document.bin").is_file():
        raise DataMissing(
            f"{directory} has no training and validation split: divide the documents with `mlm-data"
            " split` before `mlm-data tokenize`"
        )
    if not is_sealed(directory):
        raise IntegrityFailure(
            f"the dataset {directory} is not complete: run `mlm-data run` again with its recipe"
        )
    card = read_document(directory / DATASET, DataCard)
    file = directory / "tokenizer" / FILE_NAME
    try:
        return card.vocab_size, card.padded_vocab_size, sha256_file(file), card.end_of_text
    except OSError as error:
        raise IntegrityFailure(
            f"the dataset's tokenizer {file} cannot be read ({cause(error)}): put it back, or make"
            " the dataset again with `mlm-data run`"
        ) from error
