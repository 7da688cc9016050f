"""Rearranges shards in input order into splits in training order: first slices of the final files,
then the files."""

import os
from contextlib import ExitStack
from functools import cache
from itertools import groupby
from pathlib import Path

import numpy as np

from mlm_repro.data_pipeline.arrays import Integers
from mlm_repro.data_pipeline.passes.measure import TOKENS
from mlm_repro.data_pipeline.passes.selection import PLACES
from mlm_repro.data_pipeline.tokens.token_file import TokenFileWriter
from mlm_repro.data_pipeline.work.document_shard import LINES
from mlm_repro.data_pipeline.work.tasks import Counts, Settings

STARTS = "starts.npy"
SLICE_TOKENS = "tokens"
SLICE_LINES = "documents.jsonl"
SLICE_BYTES = 64 << 20
PLACE_BYTES = 48
SLICE_DOCUMENTS = 1 << 16
"""Largest number of documents in a slice: each takes a few hundred bytes of memory beside its
text."""
DOCUMENTS_AT_ONCE = 64


def slice_documents(documents: int, size: int) -> int:
    """Return the number of documents in a slice of about SLICE_BYTES, a whole number from 1 to
    SLICE_DOCUMENTS, for a corpus of `documents` documents with `size` bytes in all; 1 for an empty
    corpus."""
    return max(1, min(SLICE_DOCUMENTS, round(SLICE_BYTES * documents / max(1, size))))


def choose_order(settings: Settings, inputs: list[Path], directory: Path) -> Counts:
    """Task: write the order of the remaining documents, for each split a file `order-SPLIT.npy` of
    their numbers, counted from 0 through all shards, and `starts.npy`, the number of each shard's
    first document and the total.

    Settings: `counts`, documents left in each shard; `shuffle`, a dict with the ratio's `train` and
    `valid` and the `seed`, by which all documents are shuffled and divided into these two splits,
    or None for the order of the input; `splits`, the split of each shard, used without `shuffle`
    alone: shards with "" are not left out but make up a split of that name, in `order-.npy`.
    Returns under `documents` a dict split → number of its documents.
    """
    starts = np.cumsum([0, *settings["counts"]])
    np.save(directory / STARTS, starts)
    orders = {}
    if shuffle := settings["shuffle"]:
        orders = dict(zip(("train", "valid"), split(int(starts[-1]), **shuffle), strict=True))
    else:
        names = settings["splits"]
        for name in dict.fromkeys(names):
            numbers = [
                np.arange(starts[n], starts[n + 1]) for n in range(len(names)) if names[n] == name
            ]
            orders[name] = np.concatenate(numbers)
    for name, order in orders.items():
        np.save(directory / f"order-{name}.npy", order)
    return {"documents": {name: len(order) for name, order in orders.items()}}


def split(
    documents: int, train: int = 29, valid: int = 1, seed: int = 1234
) -> tuple[Integers, Integers]:
    """Return two int64 arrays, the shuffled numbers of the training and of the validation
    documents, for a corpus of `documents` documents. The integers `train` and `valid` are the two
    sides of the ratio, by default 29 to 1; it is kept to the nearest document. Equal `seed`s give
    equal splits.

    Each split has at least one document if there are two or more; one alone is for training. The
    shuffle is NumPy's RandomState, whose stream is fixed for good.
    """
    order = np.random.RandomState(seed).permutation(documents).astype(np.int64)
    count = round(documents * valid / (train + valid))
    count = min(max(count, 1), documents - 1) if documents > 1 else 0
    return order[: documents - count], order[documents - count :]


def gather_slice(settings: Settings, inputs: list[Path], directory: Path) -> Counts:
    """Task: write the documents from `first` to before `last` in the order of a split, as JSON
    lines to `documents.jsonl` and as the token file `tokens`.

    Only the shards that hold one of them are opened, and only their own bytes are read. Settings:
    `split`, `first`, `last`, `lines` (True if texts are wanted), `dtype` of tokens, or None if no
    token file is wanted. Inputs: the folder of the order, then the folder of each pass and of the
    selection, each with all shards. Returns the numbers of `documents`, their `bytes` of text and
    `tokens`.
    """
    order = np.load(inputs[0] / "00000" / f"order-{settings['split']}.npy", mmap_mode="r")
    numbers = np.array(order[settings["first"] : settings["last"]])
    starts = np.load(inputs[0] / "00000" / STARTS)
    shards = np.searchsorted(starts, numbers, side="right") - 1
    dtype = np.dtype(settings["dtype"]) if settings["dtype"] else None
    total = np.zeros(2, np.int64)
    lines = [b""] * len(numbers)
    tokens = [np.empty(0, dtype)] * len(numbers)
    prepared, measured, selected = inputs[1:]
    # Documents are fetched in the order of the input, so that each shard is opened once.
    for number, slots in groupby(np.argsort(numbers).tolist(), lambda slot: int(shards[slot])):
        with ExitStack() as stack:

            @cache
            def opened(
                folder: Path, name: str, stack: ExitStack = stack, number: int = number
            ) -> int:
                return stack.enter_context((folder / f"{number:05d}" / name).open("rb", 0)).fileno()

            for slot in slots:
                row = os.pread(
                    opened(selected, PLACES),
                    PLACE_BYTES,
                    PLACE_BYTES * int(numbers[slot] - starts[number]),
                )
                is_part, start, end, first, last, size = np.frombuffer(row, np.int64).tolist()
                total += size, last - first
                if settings["lines"]:
                    lines[slot] = os.pread(
                        opened(selected if is_part else prepared, LINES), end - start, start
                    )
                if dtype:
                    descriptor = opened(selected if is_part else measured, TOKENS)
                    width = dtype.itemsize
                    tokens[slot] = np.frombuffer(
                        os.pread(descriptor, (last - first) * width, first * width), dtype
                    )
    if settings["lines"]:
        with (directory / SLICE_LINES).open("wb") as file:
            file.writelines(lines)
    if dtype:
        with TokenFileWriter(directory / SLICE_TOKENS, dtype) as writer:
            for first in range(0, len(tokens), DOCUMENTS_AT_ONCE):
                batch = tokens[first : first + DOCUMENTS_AT_ONCE]
                writer.add_documents(np.concatenate(batch), [*map(len, batch)])
    return {"documents": len(numbers), "bytes": int(total[0]), "tokens": int(total[1])}
