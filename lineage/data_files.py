"""Schemas of the files of a dataset: its ledger and its data card."""

import math
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import ConfigDict, Field

from lineage.digest import content_digest, is_sealed
from lineage.errors import DataMissing
from lineage.files import Document
from lineage.run import RunDirectory

DATED_FILES = frozenset({"manifest.json", "ledger.json"})
"""Files that say when and how fast a dataset was made, not what it is."""


def dataset_digest(directory: Path) -> str:
    """Digest of what a dataset is: the same for one built again from the same text."""
    return content_digest(directory, without=DATED_FILES)


class TrainedOn(NamedTuple):
    """A dataset as a run names it."""

    parent: str
    """Among the run's parents."""
    place: Path
    """Where the run says it is, or beside the run."""
    weight: float
    digest: str
    """As the run recorded it."""

    @property
    def is_here(self) -> bool:
        """Whether it is complete and what it was."""
        return is_sealed(self.place) and dataset_digest(self.place) == self.digest


def named_datasets(run: Path) -> list[TrainedOn]:
    """The datasets that a run was trained on. Raises BadInput for what is no run, DataMissing where it names none."""
    manifest = RunDirectory.open(run).manifest
    try:
        named, parents = manifest["config"]["data"]["dataset"], manifest["parents"]
        several = [(named, 1.0)] if isinstance(named, str) else [(str(name), float(weight)) for name, weight in named]
        found = []
        for number, (name, weight) in enumerate(several, 1):
            parent = "dataset" if len(several) == 1 else f"dataset {number}"
            each = TrainedOn(parent, Path(name), weight, parents[parent])
            beside = each._replace(place=run.resolve().parent / each.place.name)
            found.append(beside if not is_sealed(each.place) or (beside.is_here and not each.is_here) else each)
    except (KeyError, TypeError, ValueError) as error:
        raise DataMissing(f"the run {run} does not name its dataset") from error
    return found


def trained_datasets(run: Path) -> list[tuple[Path, float]]:
    """They, with their weights, if they are what they were. Raises DataMissing otherwise."""
    datasets = named_datasets(run)
    for each in datasets:
        if not each.is_here:
            raise DataMissing(f"the dataset {each.place} that {run.name} was trained on is not here")
    return [(each.place, each.weight) for each in datasets]


Share = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=0)]


class Amount(Document):
    """Documents with their size; a size is None where the stage did not count it."""

    documents: int
    bytes: int | None = None
    tokens: int | None = None


class Sample(Document):
    """A dropped document: untrusted text."""

    id: str | int = ""
    excerpt: str = ""


class Stage(Document):
    """One stage of the data pipeline: what went in, what came out, why the rest did not."""

    name: str
    documents_in: int
    documents_out: int
    bytes_in: int | None = None
    bytes_out: int | None = None
    tokens_in: int | None = None
    tokens_out: int | None = None
    dropped: dict[str, Amount] = Field(default_factory=dict)
    changed: int | None = None
    samples: dict[str, list[Sample]] = Field(default_factory=dict)
    seconds: float | None = None
    note: str = ""


class Shard(Document):
    """A shard of the input: what it was read from, the documents that its first pass kept, their digest."""

    read: list[tuple[str, int, int]] = Field(default_factory=list)
    """Source, first byte, end."""
    documents: int
    digest: str


class NearDuplicates(Document):
    """The banding of MinHash signatures: what it should find, and the pairs that were compared."""

    rule: str
    bands: int
    rows: int
    permutations: int
    shingle_characters: int
    threshold: Share
    min_agreement: int = 0
    """Of all permutations, those whose minima must agree as well."""
    s_curve: list[tuple[Share, Share]] = Field(min_length=2)
    """Jaccard similarity and the probability that a pair of it is compared."""
    expected_recall: dict[str, Share] = Field(default_factory=dict)
    expected_candidate_precision: Share | None = None
    """Share of compared pairs at or above the threshold if all similarities were equally frequent."""
    compared_pairs: Count
    compared_pairs_by_similarity: list[Count] = Field(min_length=1)
    """In equal bins of [0, 1]."""


class Ledger(Document, frozen=False):
    """ledger.json: the attrition of a dataset."""

    source: str = ""
    stages: list[Stage] = Field(min_length=1)
    splits: dict[str, Amount] = Field(default_factory=dict)
    malformed_lines: int = 0
    blank_lines: int | None = None
    shards: list[Shard] = Field(default_factory=list)
    near_duplicates: NearDuplicates | None = None


class TokenizerFacts(Document):
    """What kind of tokenizer, and the digest of its files."""

    kind: str
    digest: str


class Split(Document):
    """A split: the name of its token files without an ending, and its size."""

    prefix: str
    documents: int
    bytes: int
    tokens: int

    @property
    def bits_per_nat(self) -> float:
        """Bits per byte of a loss of one nat a token."""
        return self.tokens / self.bytes / math.log(2)


class File(Document):
    """A file of the dataset."""

    bytes: int
    sha256: str


class English(Document):
    """What the documents of one kind in a sample are made of: from files of one ending, or from one corpus."""

    kind: str
    documents: int
    words: Share
    """Share of the sample's words."""
    prose: Share
    """Share of their characters that the prose filter keeps as it is by default."""
    function_words: Share
    """Share of their words."""
    sentence_words: float
    """Mean length of a sentence."""
    median_words: float
    """Of a document."""


class DataCard(Document, frozen=False):
    """dataset.json: what a dataset is and how it was made.

    A stage whose result depends on more than its settings has a field of its own name.
    """

    model_config = ConfigDict(extra="allow")

    name: str
    source: str = ""
    seed: int
    tokenizer: TokenizerFacts
    vocab_size: int
    padded_vocab_size: int
    end_of_text: int | None = None
    splits: dict[str, Split] = Field(default_factory=dict)
    files: dict[str, File] = Field(default_factory=dict)
    stages: dict[str, Amount] = Field(default_factory=dict)
    """What each kept."""
    settings: dict[str, dict[str, Any]] = Field(default_factory=dict)
    language: dict[str, str | int] = Field(default_factory=dict)
    english: list[English] = Field(default_factory=list)
    """Of a sample, by kind, the most words first."""
    near_duplicates: NearDuplicates | None = None
