"""Named protocols that score any checkpoint."""

import lineage  # noqa: F401  (refuses a Python that is too old, before anything else fails on it)
