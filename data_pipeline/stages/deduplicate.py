"""Near-duplicates: MinHash over character shingles proposes pairs, exact Jaccard similarity
decides."""

from functools import cache
from math import floor, sqrt
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from mlm_repro.data_pipeline.stages.stage import Stage

MOST_ROWS, LEAST_BANDS, MOST_PERMUTATIONS, CHOSEN_RECALL = 5, 25, 256, 0.9999
"""Limits of `choose_banding`: the largest number of rows, the smallest number of bands, the largest
signature length, and the smallest expected recall at the threshold."""


@cache
def choose_banding(threshold: float) -> tuple[int, int]:
    """Return a pair, the numbers of bands and rows for pairs at the Jaccard similarity `threshold`:
    the most rows, and then the fewest bands, that find a pair at the threshold with a probability
    of at least CHOSEN_RECALL; MOST_PERMUTATIONS bands of one row if no numbers within the limits
    do.

    Each row fewer makes chance buckets of unrelated documents many times as frequent.
    """
    for rows in range(MOST_ROWS, 0, -1):
        for bands in range(LEAST_BANDS, MOST_PERMUTATIONS // rows + 1):
            if 1 - (1 - threshold**rows) ** bands >= CHOSEN_RECALL:
                return bands, rows
    return MOST_PERMUTATIONS, 1


class DeduplicateConfig(Stage):
    """Drop near-duplicates. MinHash over character shingles proposes pairs, exact Jaccard
    similarity decides."""

    name = "deduplicate"
    verb = "dedup"
    step = 3

    rule: Literal["verified", "megatron-2019"] = "verified"
    """`verified`: a document is dropped if its similarity to an earlier kept one is at least the
    threshold. `megatron-2019`: one document stays from each group that Megatron-LM v2.6
    tools/openwebtext would make."""
    bands: Annotated[int | None, Field(ge=1, le=1024)] = None
    """Bands of a signature; documents that agree in a whole band are compared. Without a number it
    follows from the threshold, 51 at 0.7 and 25 at 0.8, so that a pair at the threshold is found
    with a probability of 0.9999."""
    rows: Annotated[int | None, Field(ge=1, le=64)] = None
    """Minima in a band; without a number 5, or fewer below a threshold of 0.7."""
    threshold: Annotated[float, Field(gt=0, le=1)] = 0.7
    """Smallest exact Jaccard similarity of duplicates."""
    min_recall: Annotated[float, Field(ge=0, le=1)] = 0.99
    """Smallest expected share of found pairs at the threshold; with the rule `verified`, bands and
    rows that find a smaller share are refused."""
    against: tuple[Path, ...] = ()
    """Datasets, or directories that a verb wrote, to compare with. Documents similar to one of
    theirs are dropped; their own documents are not written."""
    shingle_characters: Annotated[int, Field(ge=1, le=13)] = 5
    """Length of a shingle; 13 characters of four bytes fit one block of SHA-1."""

    @property
    def banding(self) -> tuple[int, int]:
        """Pair of the numbers of bands and rows: each from the settings if they give it, else from
        the threshold."""
        chosen = choose_banding(self.threshold)
        return self.bands or chosen[0], self.rows or chosen[1]

    @property
    def num_permutations(self) -> int:
        """Length of a MinHash signature: the number of bands times the number of rows."""
        return self.banding[0] * self.banding[1]

    @property
    def expected_recall(self) -> float:
        """Probability, from 0 to 1, that a pair at the threshold shares at least one band."""
        bands, rows = self.banding
        return float(1 - (1 - self.threshold**rows) ** bands)

    @model_validator(mode="after")
    def _finds_pairs(self) -> Self:
        if self.against and self.rule != "verified":
            raise ValueError(
                "`deduplicate.against` can be used only with `deduplicate.rule` = verified"
            )
        # As many decimals as people write: 0.9895 is the 0.99 that was asked for.
        reached = max(self.expected_recall, round(self.expected_recall, 2))
        if self.rule == "verified" and reached < self.min_recall:
            raise ValueError(
                f"{self.banding[0]} bands of {self.banding[1]} rows are expected to find"
                f" {self.expected_recall:.1%} of the pairs at threshold = {self.threshold}, and"
                f" min_recall = {self.min_recall} in `deduplicate`: leave bands and rows out, raise"
                " the threshold, or lower min_recall"
            )
        return self

    @property
    def min_agreement(self) -> int:
        """Number of minima of the whole signature in which two documents that share a band must
        agree to be compared: five standard deviations below the mean at the threshold, at least 0.

        The published rule, `megatron-2019`, compares all pairs that share a band: 0.
        """
        if self.rule == "megatron-2019":
            return 0
        mean = self.num_permutations * self.threshold
        return max(0, floor(mean - 5 * sqrt(mean * (1 - self.threshold))))
