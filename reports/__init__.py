"""One page, its figures and its tables, made from a reproduction directory's files alone."""

import lineage  # noqa: F401  (refuses a Python that is too old, before anything else fails on it)
