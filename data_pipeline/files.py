"""Schemas of a finished dataset's files, ledger.json and dataset.json, and the datasets that a
training run names."""

import math
from collections.abc import Container
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NamedTuple, Self

from pydantic import ConfigDict, Field

from mlm_repro.data_pipeline.document import Document
from mlm_repro.lineage.atomic import JSON
from mlm_repro.lineage.digest import by_digest, content_digest, is_sealed
from mlm_repro.lineage.errors import BadInput, DataMissing
from mlm_repro.lineage.files import FileSchema
from mlm_repro.lineage.run import MANIFEST, RunDirectory

LEDGER = "ledger.json"
DATASET = "dataset.json"
UNSPLIT = "all"
"""Name that the token files have instead of a split's if the documents were not divided into
splits."""
DATED_FILES = frozenset({MANIFEST, LEDGER})
"""Names of the files that contain times, which the digest of a dataset's content leaves out."""
MAX_SAMPLES = 5
EXCERPT_CHARACTERS = 300
Share = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=0)]


@dataclass
class Amount:
    """A number of documents with the numbers of their UTF-8 bytes and of their tokens, each
    document's end-of-text token included; either is None if it was not counted."""

    documents: int = 0
    bytes: int | None = 0
    tokens: int | None = 0
    """Number of tokens; None if they were not counted."""

    def add(self, documents: int, size: int | None, tokens: int | None) -> None:
        """Add the given numbers of documents, bytes and tokens to this amount, in place. None
        counts as 0, in this amount too, whose bytes and tokens are numbers afterwards."""
        self.documents += documents
        self.bytes = (self.bytes or 0) + (size or 0)
        self.tokens = (self.tokens or 0) + (tokens or 0)


class DroppedSample(FileSchema):
    """The id and the beginning of a dropped document: untrusted text."""

    id: str | int = ""
    excerpt: str = ""


class StageAttrition(FileSchema, frozen=False):
    """The ledger's entry for one stage: how many documents, bytes and tokens came in and came out,
    how many were dropped for each reason, with samples of these documents, how many documents were
    changed, the seconds and a note. Bytes and tokens are None where they were not counted. Its
    methods `enter`, `keep` and `drop` add documents to its own counts, and `merge` adds another
    task's entry for the same stage."""

    name: str
    documents_in: int
    documents_out: int
    bytes_in: int | None = None
    bytes_out: int | None = None
    tokens_in: int | None = None
    tokens_out: int | None = None
    dropped: dict[str, Amount] = Field(default_factory=dict)
    changed: int = 0
    samples: dict[str, list[DroppedSample]] = Field(default_factory=dict)
    seconds: float = 0.0
    """Seconds by the clock, summed over all tasks."""
    note: str = ""
    __setattr__ = object.__setattr__  # unchecked, because counts change with every document

    @classmethod
    def begin(cls, name: str) -> Self:
        """Return a StageAttrition for the stage `name` with all counts 0. Every field is set, so
        that each is written."""
        counts = dict.fromkeys(
            ("documents_in", "documents_out", "bytes_in", "bytes_out", "tokens_in", "tokens_out"), 0
        )
        return cls(name=name, **counts, dropped={}, changed=0, samples={}, seconds=0.0, note="")

    @property
    def kept(self) -> Amount:
        """The documents, bytes and tokens that came out of the stage, as an Amount."""
        return Amount(self.documents_out, self.bytes_out, self.tokens_out)

    def enter(self, size: int | None, tokens: int | None = 0, documents: int = 1) -> None:
        """Add to the amounts that came into the stage: `documents` further documents, one by
        default, with `size` bytes and `tokens` tokens in all. None counts as 0, as an argument and
        as an earlier amount."""
        self.documents_in += documents
        self.bytes_in = (self.bytes_in or 0) + (size or 0)
        self.tokens_in = (self.tokens_in or 0) + (tokens or 0)

    def keep(self, size: int | None, tokens: int | None = 0, documents: int = 1) -> None:
        """Add to the amounts that came out of the stage: `documents` further documents, one by
        default, with `size` bytes and `tokens` tokens in all. An argument that is None counts as 0,
        and so does an amount that was None before."""
        self.documents_out += documents
        self.bytes_out = (self.bytes_out or 0) + (size or 0)
        self.tokens_out = (self.tokens_out or 0) + (tokens or 0)

    def drop(self, document: Document, reason: str, size: int, tokens: int = 0) -> None:
        """Add one dropped document, with `size` bytes and `tokens` tokens, to the amount under its
        reason. The ids and first characters of the first MAX_SAMPLES documents of a reason are kept
        as samples."""
        self.dropped.setdefault(reason, Amount()).add(1, size, tokens)
        samples = self.samples.setdefault(reason, [])
        if len(samples) < MAX_SAMPLES:
            samples.append(
                DroppedSample(id=document.id, excerpt=document.text[:EXCERPT_CHARACTERS])
            )

    def merge(self, other: "StageAttrition") -> None:
        """Add to this entry another task's counts and seconds for the same stage, and its samples
        as long as a reason has fewer than MAX_SAMPLES."""
        self.enter(other.bytes_in, other.tokens_in, other.documents_in)
        self.keep(other.bytes_out, other.tokens_out, other.documents_out)
        for reason, amount in other.dropped.items():
            self.dropped.setdefault(reason, Amount()).add(
                amount.documents, amount.bytes, amount.tokens
            )
        for reason, samples in other.samples.items():
            own_samples = self.samples.setdefault(reason, [])
            own_samples += samples[: MAX_SAMPLES - len(own_samples)]
        self.changed += other.changed
        self.seconds += other.seconds


class InputShard(FileSchema):
    """A shard of the input: its ranges in sources, of bytes or of a table's row groups, the number
    of documents that the first pass kept, and the digest of that pass's files."""

    read: list[tuple[str, int, int]] = Field(default_factory=list)
    """Ranges of the input: each has its source's name, its first byte and its end byte, or for a
    table the numbers of its first and end row group."""
    documents: int
    digest: str


class NearDuplicates(FileSchema):
    """Ledger entry of the search for near-duplicates: its rule and settings, the banding of MinHash
    signatures, the probability that a pair of a given similarity is compared, the number of pairs
    that were compared, and an upper bound on the number of pairs that were left out."""

    rule: str
    bands: int
    rows: int
    permutations: int
    shingle_characters: int
    threshold: Share
    min_agreement: int = 0
    """Number of minima of the whole signature in which two documents must agree to be compared,
    besides sharing a band."""
    s_curve: list[tuple[Share, Share]] = Field(min_length=2)
    """Pairs of a Jaccard similarity and the probability that documents of that similarity are
    compared."""
    expected_recall: dict[str, Share] = Field(default_factory=dict)
    compared_pairs: Count
    compared_pairs_by_similarity: list[Count] = Field(min_length=1)
    """Numbers of compared pairs in equal bins of [0, 1]."""
    partly_compared_documents: Count = 0
    """Number of documents that were not compared with every earlier document in their buckets."""
    uncompared_pairs: Count = 0
    """Upper bound on the number of pairs that these documents left uncompared: a pair counts once
    for each full bucket that it shares."""

    @property
    def left_out(self) -> str:
        """A sentence for a warning: how many documents were not compared with every earlier one in
        their buckets, and how many pairs that leaves out at most. An empty text if there are no
        such documents."""
        if not self.partly_compared_documents:
            return ""
        return (
            f"{self.partly_compared_documents:,} documents were not compared with every earlier one"
            f" in their buckets; at most {self.uncompared_pairs:,} pairs were left out, and"
            " duplicates may be among them"
        )


class Ledger(FileSchema, frozen=False):
    """ledger.json of a dataset or of a verb's output: its source, how many documents entered it,
    what each stage dropped, the size of each split, the numbers of malformed and blank lines, the
    shards of the input, and the search for near-duplicates."""

    source: str = ""
    stages: list[StageAttrition] = Field(min_length=1)
    splits: dict[str, Amount] = Field(default_factory=dict)
    malformed_lines: int = 0
    blank_lines: int | None = None
    shards: list[InputShard] = Field(default_factory=list)
    near_duplicates: NearDuplicates | None = None

    @property
    def lines(self) -> int:
        """Number of documents and malformed lines that were read; a table's row and a whole text
        file count as lines too. Blank lines are not counted, nor the documents of datasets that are
        only compared with."""
        return self.malformed_lines + self.stages[0].documents_in

    def stage(self, name: str) -> StageAttrition:
        """Return the ledger's own StageAttrition for the stage `name`, not a copy, so that a caller
        counts in it. If the ledger has none, one with all counts 0 is appended first."""
        entry = next((stage for stage in self.stages if stage.name == name), None)
        if entry is None:
            entry = StageAttrition.begin(name)
            self.stages.append(entry)
        return entry

    def enter(self, tasks: list[JSON]) -> None:
        """Add the stage entries of finished tasks to the entries of the same names in this ledger's
        list `stages`, in place; an entry that is missing there is appended. Each of `tasks` is the
        dict of counts that a task returned: under the key `stages` it has a list of the task's
        entries as JSON."""
        for counts in tasks:
            for stage in counts["stages"]:
                self.stage(stage["name"]).merge(StageAttrition.model_validate(stage))

    def check(self) -> None:
        """Raise BadInput if the sources gave no document, or if a stage kept none, with the reasons
        for the drops."""
        for stage in self.stages:
            if stage.documents_out:
                continue
            if stage.name == self.stages[0].name:
                quarantined = (
                    f" ({self.malformed_lines:,} malformed lines)" if self.malformed_lines else ""
                )
                raise BadInput(
                    "the corpus is empty: correct the sources or name others, as"
                    f" {self.source} gave no documents{quarantined}"
                )
            reasons = ", ".join(
                f"{reason}: {amount.documents:,}" for reason, amount in stage.dropped.items()
            )
            raise BadInput(
                f"nothing is left of the corpus after the {stage.name} stage, which dropped every"
                f" document ({reasons}): loosen that stage's settings, or add other text to the"
                " sources"
            )

    def finish(self, uncounted: Container[str]) -> None:
        """Make the ledger ready to be written: put the most frequent reasons for a drop first,
        round the seconds, and set the numbers of tokens to None in the stages that `uncounted`
        names."""
        for stage in self.stages:
            reasons = sorted(
                stage.dropped, key=lambda reason: (-stage.dropped[reason].documents, reason)
            )
            stage.dropped = {reason: stage.dropped[reason] for reason in reasons}
            stage.samples = {reason: stage.samples[reason] for reason in reasons}
            stage.seconds = round(stage.seconds, 3)
            if stage.name in uncounted:
                stage.tokens_in = stage.tokens_out = None
                for amount in stage.dropped.values():
                    amount.tokens = None


class TokenizerFacts(FileSchema):
    """The origin of a dataset's tokenizer, `gpt2`, `train`, `words` or `path`, and the digest of
    its `tokenizer.json`."""

    kind: str
    digest: str


class Split(FileSchema):
    """One split of a dataset: the prefix of its token files in the dataset's directory, a glob
    pattern if there are several prefixes, and its numbers of documents, of bytes of text and of
    tokens."""

    prefix: str
    documents: int
    bytes: int
    tokens: int

    @property
    def bits_per_nat(self) -> float:
        """Bits per byte that a loss of one nat per token amounts to on the text of this split."""
        return self.tokens / self.bytes / math.log(2)


class DatasetFile(FileSchema):
    """Size in bytes and SHA-256, hexadecimal, of a file of the dataset."""

    bytes: int
    sha256: str


class DataCard(FileSchema, frozen=False):
    """dataset.json: the content of a dataset, with its splits, files and vocabulary, and how it was
    made, with source, seed and tokenizer, the amount that each stage kept, in the dict `stages`,
    and the settings of each stage that has some, in the dict `settings`.

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
    files: dict[str, DatasetFile] = Field(default_factory=dict)
    stages: dict[str, Amount] = Field(default_factory=dict)
    """Amount that each stage kept."""
    settings: dict[str, JSON] = Field(default_factory=dict)
    language: dict[str, str | int] = Field(default_factory=dict)
    near_duplicates: NearDuplicates | None = None
    packages: JSON = Field(default_factory=dict)
    """Version of each installed package, Python among them, whose documentation is read if
    `installed-docs` is a source. Earlier versions kept the amount and digest of its text too."""


def dataset_digest(directory: Path) -> str:
    """Return the digest of the content of a complete dataset, without its files with times, so that
    a second build from the same text has the same digest. The files' digests are read from the
    seal. Raises IntegrityFailure if there is no readable seal."""
    return content_digest(directory, without=DATED_FILES)


class TrainedOn(NamedTuple):
    """One dataset that a run was trained on: its name among the run's inputs, its directory now,
    its weight in the blend, in any scale, the digest that the run recorded, and whether the
    directory has that digest."""

    parent: str
    """Name of the dataset among the run's parents."""
    place: Path
    """Directory whose content has the recorded digest: the one that the run names or, if that has
    changed, one beside it, beside the run or one folder above.

    If none has the digest, the directory that the run names if it is complete, else the one of that
    name beside the run.
    """
    weight: float
    digest: str
    """Digest that the run recorded."""
    is_here: bool
    """True if the directory in `place` has the recorded digest."""


def named_datasets(run: Path) -> list[TrainedOn]:
    """Return the datasets that the run in the directory `run` was trained on, a list of TrainedOn
    in the order of the run's configuration. Each says where the dataset is now; one that is not
    found is listed too, with `is_here` False and a likely directory. Raises BadInput if there is no
    run, IntegrityFailure if its manifest is damaged, DataMissing if its manifest does not name its
    datasets."""
    manifest = RunDirectory.open(run).manifest
    try:
        named = manifest["config"]["data"]["dataset"]
        parents = manifest["parents"]
        weighted = (
            [(named, 1.0)]
            if isinstance(named, str)
            else [(str(name), float(weight)) for name, weight in named]
        )
        datasets = []
        for number, (name, weight) in enumerate(weighted, 1):
            parent = "dataset" if len(weighted) == 1 else f"dataset {number}"
            directory = Path(name)
            digest = parents[parent]
            folder = run.resolve().parent
            here = by_digest(directory, digest, dataset_digest, folder, folder.parent)
            directory = here or (directory if is_sealed(directory) else folder / directory.name)
            datasets.append(TrainedOn(parent, directory, weight, digest, here is not None))
    except (KeyError, TypeError, ValueError) as error:
        raise DataMissing(
            f"manifest.json of the run {run} does not name a dataset with its digest, as that of a"
            " training does under config.data.dataset and parents: name the run of a training"
        ) from error
    return datasets


def trained_datasets(run: Path) -> list[tuple[Path, float]]:
    """Return the datasets that the run in the directory `run` was trained on, as a list of pairs of
    a dataset's directory and its weight in the blend, as the run states it, in any scale; 1 for a
    single dataset. Raises BadInput if there is no run, IntegrityFailure if its manifest is damaged,
    DataMissing if its manifest does not name its datasets, or if a dataset is absent or has another
    digest."""
    datasets = named_datasets(run)
    for dataset in datasets:
        if not dataset.is_here:
            raise DataMissing(
                f"the dataset that {run.name} was trained on is not at {dataset.place}, or has"
                " changed since: put the unchanged dataset there, or build it again from its"
                " recipe with `mlm-data run`"
            )
    return [(dataset.place, dataset.weight) for dataset in datasets]
