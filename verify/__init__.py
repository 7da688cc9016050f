"""Check a finished run, the engine's layouts against its serial run, and the engine against other programs."""

import lineage  # noqa: F401  (refuses a Python that is too old, before anything else fails on it)
