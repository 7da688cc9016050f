"""What a banding finds: the S-curve of locality-sensitive hashing, with the check of agreeing minima that follows it.

With `rows` r and `bands` b, two documents of Jaccard similarity j share a band with probability 1 - (1 - j^r)^b
(Leskovec, Rajaraman and Ullman, Mining of Massive Datasets, section 3.4.2).
"""

from collections.abc import Sequence
from math import comb

import numpy as np
from numpy.typing import NDArray

from data_pipeline.stages.deduplicate import DeduplicateConfig
from lineage.data_files import NearDuplicates

SIMILARITIES = (0.7, 0.75, 0.8, 0.9)
CURVE = tuple(step / 20 for step in range(21))
HISTOGRAM_BINS = 20


def recall(similarity: float, bands: int, rows: int, min_agreement: int = 0) -> float:
    """Probability that a pair of this Jaccard similarity is compared.

    It must share a whole band and agree in at least `min_agreement` of all bands x rows minima, each of which
    agrees with the probability `similarity`.
    """
    band = np.array([comb(rows, k) * similarity**k * (1 - similarity) ** (rows - k) for k in range(rows + 1)])
    partial = band.copy()
    partial[rows] = 0
    agreeing, without_a_band = np.ones(1), np.ones(1)
    for _ in range(bands):
        agreeing, without_a_band = np.convolve(agreeing, band), np.convolve(without_a_band, partial)
    return float(np.clip(agreeing[min_agreement:].sum() - without_a_band[min_agreement:].sum(), 0, 1))


def candidate_precision(threshold: float, bands: int, rows: int, min_agreement: int = 0) -> float:
    """Share of compared pairs at or above the threshold if every similarity from 0 to 1 were equally frequent."""
    centres = (np.arange(1000) + 0.5) / 1000
    compared = np.array([recall(float(similarity), bands, rows, min_agreement) for similarity in centres])
    return float(compared[centres >= threshold].sum() / compared.sum())


def histogram(similarities: Sequence[float]) -> NDArray[np.int64]:
    """Compared pairs by Jaccard similarity, in HISTOGRAM_BINS equal bins of [0, 1], the last one closed."""
    edges = np.arange(HISTOGRAM_BINS + 1) / HISTOGRAM_BINS
    return np.histogram(similarities, edges)[0].astype(np.int64)


def describe(config: DeduplicateConfig, compared: NDArray[np.int64]) -> NearDuplicates:
    """What the ledger says of the banding: parameters, S-curve, expected recall and precision, `compared` pairs.

    `compared` is a sum of `histogram`s; the survivors of verification have precision 1 by construction.
    """
    banding = (config.bands, config.rows, config.min_agreement)
    return NearDuplicates(
        **config.model_dump(),
        permutations=config.num_permutations,
        min_agreement=config.min_agreement,
        s_curve=[(similarity, recall(similarity, *banding)) for similarity in CURVE],
        expected_recall={str(similarity): recall(similarity, *banding) for similarity in SIMILARITIES},
        expected_candidate_precision=candidate_precision(config.threshold, *banding),
        compared_pairs=int(compared.sum()),
        compared_pairs_by_similarity=compared.tolist(),
    )
