"""The training engine: one GPT-2 definition on a mesh of ranks, its optimizer, batches, checkpoints and trainer."""

import lineage  # noqa: F401  (refuses a Python that is too old, before anything else fails on it)
