"""How much of a test set a training corpus contains: the 8-gram overlap of the GPT-2 and Megatron-LM papers.

Radford et al. 2019, section 4, give the percentage of the 8-grams of a dataset that are also found in the training
set, of words that are lower-cased and alphanumeric; Shoeybi et al. 2019 give it so for their corpus: at most 10.8 % of
WikiText-103's test set and at most 1.4 % of LAMBADA's. They ask Bloom filters of the training set; this keeps the test
set's n-grams and reads the training set, in shards and on any number of machines, and is exact.

Neither paper says whether an n-gram that the test set has twice counts twice. Here it does; the share of distinct
n-grams stands beside it. N-grams do not run across lines or across WikiText's `<unk>`, which training text cannot have.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from data_pipeline.contamination.passages import ngrams_of_files, read_documents
from data_pipeline.contamination.words import ngrams_of

WORDS = 8


@dataclass(frozen=True)
class OverlapCounts:
    """What a part of a training corpus has of a test set."""

    texts: int
    """Training texts read."""
    found: frozenset[str]
    """The test set's n-grams that are in them."""

    def merge(self, other: "OverlapCounts") -> "OverlapCounts":
        """The counts of both parts together; the order does not matter."""
        return OverlapCounts(self.texts + other.texts, self.found | other.found)


@dataclass(frozen=True)
class Share:
    """N-grams, and how many of them are in the training corpus."""

    ngrams: int
    found: int

    @property
    def percent(self) -> float:
        """The share that was found, 0 to 100; 0 where there are no n-grams."""
        return 100 * self.found / self.ngrams if self.ngrams else 0.0


@dataclass(frozen=True)
class Overlap:
    """The overlap of a training corpus with a test set."""

    texts: int
    """Training texts read."""
    occurrences: Share
    """The papers' statistic: n-grams of the test set, each as often as it occurs there."""
    distinct: Share
    """The test set's different n-grams."""
    documents: tuple[Share, ...]
    """`occurrences` for each document of the test set, in the order of its file."""


def count_overlap(texts: Iterable[str], test_set: Path, words: int = WORDS) -> OverlapCounts:
    """Look for the n-grams of a test-set file in the texts of one shard."""
    ngrams = ngrams_of_files((test_set,), words, words)
    read, found = 0, set[str]()
    for text in texts:
        read += 1
        found.update(ngram for _, ngram in ngrams.matches(text))
    return OverlapCounts(read, frozenset(found))


def overlap(counts: OverlapCounts, test_set: Path, words: int = WORDS) -> Overlap:
    """The statistic, from the merged counts of all shards with the same test set and `words`.

    Raises ValueError for counts of another test set.
    """
    documents = [
        [ngram for passage in document for ngram in ngrams_of(passage, words, words)]
        for document in read_documents(test_set)
    ]
    distinct = {ngram for document in documents for ngram in document}
    if not counts.found <= distinct:
        raise ValueError(f"the counts are not of {test_set} in {words}-grams")
    shares = tuple(Share(len(document), sum(ngram in counts.found for ngram in document)) for document in documents)
    occurrences = Share(sum(share.ngrams for share in shares), sum(share.found for share in shares))
    return Overlap(counts.texts, occurrences, Share(len(distinct), len(counts.found)), shares)
