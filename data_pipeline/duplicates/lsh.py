"""Locality-sensitive hashing: documents whose signatures agree in a whole band share a bucket.

A document's fingerprint is a row of 64-bit words: one key for each band, then its sketch, the
lowest byte of every minimum. Keys propose pairs; sketches estimate the similarity of a pair (two
minima agree with a probability equal to the Jaccard similarity), so that unrelated documents, which
share a bucket of few rows by the thousand in a large corpus, are told apart without their texts.

With `rows` r and `bands` b, two documents of Jaccard similarity j share a band with probability 1 -
(1 - j^r)^b, the S-curve (Leskovec, Rajaraman and Ullman, Mining of Massive Datasets, section
3.4.2).
"""

from collections.abc import Sequence
from functools import partial
from math import comb
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mlm_repro.data_pipeline.arrays import Integers
from mlm_repro.data_pipeline.fast.minhash import signature
from mlm_repro.data_pipeline.files import NearDuplicates
from mlm_repro.data_pipeline.stages.deduplicate import DeduplicateConfig
from mlm_repro.lineage.loops import compiled

WORD_BYTES = 8

Words = NDArray[np.uint64]
Buckets = tuple[Integers, Integers]
"""Two arrays: the documents of all buckets, back to back, and the start of each bucket; the last
start is the total."""


def fingerprints(texts: Sequence[str], config: DeduplicateConfig) -> NDArray[np.uint64]:
    """Return the MinHash fingerprints of the texts as uint64 [texts, bands + sketch words]. A row
    has one key for each band, then the sketch, which is the lowest byte of every minimum of the
    text's signature. `config` gives the numbers of bands and permutations and the length of a
    shingle."""
    minima = np.empty((len(texts), config.num_permutations), np.uint32)
    for row, text in zip(minima, texts, strict=True):
        row[:] = signature(text, config.num_permutations, config.shingle_characters)
    return np.concatenate([band_keys(minima, config.banding[0]), sketch(minima)], axis=1)


def fingerprint_words(config: DeduplicateConfig) -> int:
    """Return the length of a fingerprint in 64-bit words under the settings `config`: one word for
    each band, and one for every eight of the `num_permutations`, rounded up, because the sketch has
    a byte for each permutation."""
    return config.banding[0] + -(-config.num_permutations // WORD_BYTES)


@compiled
def band_keys(minima: NDArray[np.uint32], bands: int) -> NDArray[np.uint64]:
    """Return a 64-bit hash of each of the `bands` bands of each signature, [texts, bands]. `minima`
    are the signatures, [texts, permutations]; a band is a run of permutations // bands of them. Two
    texts with equal minima in a band have the same hash of that band."""
    documents = minima.shape[0]
    rows = minima.shape[1] // bands
    keys = np.empty((documents, bands), np.uint64)
    for document in range(documents):
        for band in range(bands):
            key = np.uint64(band)
            for row in range(band * rows, (band + 1) * rows):
                key = (key ^ np.uint64(minima[document, row])) * np.uint64(0x9E3779B97F4A7C15)
                key ^= key >> np.uint64(29)
                key *= np.uint64(0xBF58476D1CE4E5B9)
                key ^= key >> np.uint64(32)
            keys[document, band] = key
    return keys


def buckets(keys: NDArray[np.uint64]) -> Buckets:
    """Return the buckets of one band, each of two or more documents that have the same key, as two
    arrays: the documents bucket by bucket, as indices of `keys` and ascending in each bucket, and
    the start of each bucket, [buckets + 1]; the last start is the total.

    `keys` [documents] may be a memory map. Needs up to 32 bytes of memory for each document.
    """
    order = np.argsort(keys)
    return runs(order, keys[order])


def sketch(minima: NDArray[np.uint32]) -> NDArray[np.uint64]:
    """Return the lowest byte of each minimum of signatures [..., permutations], packed in order
    into uint64 words of eight bytes, [..., words]. Zeros fill the last word."""
    words = np.zeros((*minima.shape[:-1], -(-minima.shape[-1] // WORD_BYTES)), np.uint64)
    words.view(np.uint8)[..., : minima.shape[-1]] = minima & 0xFF
    return words


@compiled
def agreement(left: Words, right: Words) -> int:
    """Return the number of places at which two sketches, each one row of 64-bit words, have the
    same byte; padding counts, as equal."""
    mine = left.view(np.uint8)
    theirs = right.view(np.uint8)
    count = 0
    for place in range(mine.shape[0]):
        count += mine[place] == theirs[place]
    return count


def required_agreement(config: DeduplicateConfig) -> int:
    """Return the number of bytes in which two sketches must be equal for their documents to be
    compared: the `min_agreement` of the settings, plus the padding bytes, which are always
    equal."""
    return config.min_agreement + -config.num_permutations % WORD_BYTES


@compiled
def runs(documents: Integers, keys: NDArray[np.uint64]) -> Buckets:
    """Return two arrays: the documents of each run of two or more equal keys, run by run and
    ascending in each, and the starts of these runs, [runs + 1]. The last start is the total. `keys`
    [documents] are sorted, and `documents[n]` has the key `keys[n]`."""
    shared = np.empty(documents.shape[0], np.int64)
    starts = np.zeros(documents.shape[0] // 2 + 1, np.int64)
    start = 0
    filled = 0
    runs = 0
    for end in range(1, documents.shape[0] + 1):
        if end < documents.shape[0] and keys[end] == keys[start]:
            continue
        if end - start > 1:
            shared[filled : filled + end - start] = np.sort(documents[start:end])
            filled += end - start
            runs += 1
            starts[runs] = filled
        start = end
    return shared[:filled].copy(), starts[: runs + 1].copy()


SIMILARITIES = (0.7, 0.75, 0.8, 0.9)
CURVE = tuple(step / 20 for step in range(21))
HISTOGRAM_BINS = 20


def recall(similarity: float, bands: int, rows: int, min_agreement: int = 0) -> float:
    """Return the probability that a pair of documents of the Jaccard similarity `similarity` is
    compared, with signatures of `bands` bands of `rows` minima each.

    The pair must share a whole band and agree in at least `min_agreement` of all bands x rows
    minima. A minimum agrees with the probability `similarity`.
    """
    band = np.array(
        [comb(rows, k) * similarity**k * (1 - similarity) ** (rows - k) for k in range(rows + 1)]
    )
    partial = band.copy()
    partial[rows] = 0
    agreeing = np.ones(1)
    without_a_band = np.ones(1)
    for _ in range(bands):
        agreeing = np.convolve(agreeing, band)
        without_a_band = np.convolve(without_a_band, partial)
    return float(
        np.clip(agreeing[min_agreement:].sum() - without_a_band[min_agreement:].sum(), 0, 1)
    )


class Compared(NamedTuple):
    """The pairs of documents that deduplication compared, counted by similarity; the documents that
    it did not compare with every earlier document in their buckets, counted too; and an upper bound
    on the number of pairs that these documents left uncompared."""

    by_similarity: Integers
    """Number of compared pairs in each of HISTOGRAM_BINS equal bins of similarity over [0, 1],
    [HISTOGRAM_BINS]."""
    partly: int = 0
    """Number of documents that were not compared with every earlier document in their buckets."""
    left: int = 0
    """Upper bound on the number of pairs left uncompared by the documents that `partly` counts."""


def describe(config: DeduplicateConfig, compared: Compared) -> NearDuplicates:
    """Return a NearDuplicates, the ledger's entry on the search for near-duplicates: the settings
    `config`, the numbers of bands and rows, the S-curve and the expected recall that follow from
    them, and, from `compared`, the counts of pairs that were compared and of pairs that were left
    out."""
    bands, rows = config.banding
    found_at = partial(recall, bands=bands, rows=rows, min_agreement=config.min_agreement)
    return NearDuplicates(
        **config.model_dump(exclude={"bands", "rows", "min_recall", "against"}),
        bands=bands,
        rows=rows,
        permutations=config.num_permutations,
        min_agreement=config.min_agreement,
        s_curve=[(similarity, found_at(similarity)) for similarity in CURVE],
        expected_recall={
            str(similarity): found_at(similarity)
            for similarity in sorted({*SIMILARITIES, config.threshold})
        },
        compared_pairs=int(compared.by_similarity.sum()),
        compared_pairs_by_similarity=compared.by_similarity.tolist(),
        partly_compared_documents=compared.partly,
        uncompared_pairs=compared.left,
    )
