"""How much memory a build takes: the bound that is stated, in closed form."""

WORKER_BYTES = 700_000_000
"""A worker with every library, table and n-gram of the test sets loaded."""
LARGEST_DOCUMENT_FACTOR = 12
DOCUMENT_BYTES = 40
"""Arrays of document numbers, in one process at a time."""


def memory_bound_bytes(documents: int, largest_document_bytes: int, workers: int) -> int:
    """The most memory that all processes of a build hold together, whatever the size of the corpus.

    40 bytes for each document in the process that links them, and for each worker 0.7 GB and 12 times its largest
    document. The process that hands out work counts as a worker if there are several.
    """
    processes = workers + 1 if workers > 1 else 1
    each = WORKER_BYTES + LARGEST_DOCUMENT_FACTOR * largest_document_bytes
    return processes * each + DOCUMENT_BYTES * documents
