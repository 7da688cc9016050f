"""Which runs reproduce which published table or figure, on what hardware, and the published numbers themselves."""

import lineage  # noqa: F401  (refuses a Python that is too old, before anything else fails on it)
