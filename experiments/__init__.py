"""Published tables and figures: their numbers, the runs that reproduce them, and the machines for that."""

import lineage  # noqa: F401  (refuses a Python that is too old, before anything else fails on it)
