"""What must hold before any test imports anything."""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton is imported; without effect where it is not
