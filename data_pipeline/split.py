"""Training and validation documents: the paper's 29:1 random split."""

import numpy as np
from numpy.typing import NDArray


def split(
    documents: int, train: int = 29, valid: int = 1, seed: int = 1234
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Shuffled document numbers of the two splits, in the ratio `train:valid` to the nearest document.

    Each split has at least one document if there are two or more. The shuffle is NumPy's RandomState, whose
    stream is fixed for good.
    """
    order = np.random.RandomState(seed).permutation(documents).astype(np.int64)
    count = round(documents * valid / (train + valid))
    count = min(max(count, 1), documents - 1) if documents > 1 else 0
    return order[: documents - count], order[documents - count :]
