"""Near-duplicates: MinHash over character shingles proposes pairs, exact Jaccard similarity decides."""

from math import floor, sqrt
from typing import Annotated, Literal

from pydantic import Field

from data_pipeline.stages.stage import Stage


class DeduplicateConfig(Stage):
    """Drop near-duplicates. MinHash over character shingles proposes pairs, exact Jaccard similarity decides."""

    name, verb = "deduplicate", "dedup"
    after = "length"

    rule: Literal["verified", "megatron-2019"] = "verified"
    """`verified`: a document is dropped if its similarity to an earlier kept one is at least the threshold.
    `megatron-2019`: one document stays of each group that Megatron-LM v2.6 tools/openwebtext would make."""
    bands: Annotated[int, Field(ge=1, le=1024)] = 25
    """Bands of a signature; documents that agree in a whole band are compared."""
    rows: Annotated[int, Field(ge=1, le=64)] = 5
    """Minima in a band."""
    threshold: Annotated[float, Field(gt=0, le=1)] = 0.7
    """Least exact Jaccard similarity of duplicates."""
    shingle_characters: Annotated[int, Field(ge=1, le=13)] = 5
    """Length of a shingle; 13 characters of four bytes fit one block of SHA-1."""

    @property
    def num_permutations(self) -> int:
        """Length of a MinHash signature."""
        return self.bands * self.rows

    @property
    def min_agreement(self) -> int:
        """Minima in which a pair must agree to be compared: five standard deviations below the mean at the threshold.

        The published rule compares all pairs that share a band: 0.
        """
        if self.rule == "megatron-2019":
            return 0
        mean = self.num_permutations * self.threshold
        return max(0, floor(mean - 5 * sqrt(mean * (1 - self.threshold))))
