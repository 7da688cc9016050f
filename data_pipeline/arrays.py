"""Names for the types of arrays of whole numbers."""

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]
Integers32 = NDArray[np.int32]
