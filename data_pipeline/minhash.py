"""MinHash signatures: datasketch's `affine32` scheme over SHA-1 hashes of UTF-8 shingles."""

from functools import cache

import numpy as np
from datasketch import MinHash
from numpy.typing import NDArray

from data_pipeline.shingles import shingles

SCHEME = "affine32"
BATCH_SHINGLES = 1 << 16


def signature(text: str, num_permutations: int = 128, shingle_characters: int = 5) -> NDArray[np.uint32]:
    """Smallest permuted hash of the text's shingles for each permutation, [num_permutations]."""
    sketch = as_sketch(None, num_permutations)
    found = [shingle.encode("utf-8") for shingle in shingles(text, shingle_characters)]
    for start in range(0, len(found), BATCH_SHINGLES):
        sketch.update_batch(found[start : start + BATCH_SHINGLES])
    return np.asarray(sketch.hashvalues, np.uint32)


def as_sketch(values: NDArray[np.uint32] | None, num_permutations: int) -> MinHash:
    """datasketch's object for a signature, or an empty one."""
    return MinHash(
        num_perm=num_permutations,
        hashvalues=values,
        permutations=_permutations(num_permutations),
        scheme=SCHEME,
    )


@cache
def _permutations(count: int) -> NDArray[np.uint32]:
    return np.asarray(MinHash(num_perm=count, seed=1, scheme=SCHEME).permutations)
