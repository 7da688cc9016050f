"""Rearranges shards in input order into splits in training order: slices of the final files, then the files."""

import os
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlm_repro.data_pipeline.passes.measure import NUMBERS, SIZES, TOKENS
from mlm_repro.data_pipeline.passes.selection import ENTRIES
from mlm_repro.data_pipeline.tokens.token_file import TokenFileWriter, join_files, merge_token_files
from mlm_repro.data_pipeline.work.document_shard import DocumentShard
from mlm_repro.data_pipeline.work.tasks import Counts, Settings

STARTS, SLICE_TOKENS, SLICE_LINES = "starts.npy", "tokens", "documents.jsonl"
SLICE_BYTES = 64 << 20


def choose_order(settings: Settings, inputs: list[Path], directory: Path) -> Counts:
    """Write the order of the remaining documents, a file of numbers for each split.

    Settings: `counts`, documents left in each shard; `splits`, the split of each shard, "" before splitting;
    `shuffle`, section and seed of the split, or None for the order of the input.
    """
    starts = np.concatenate([[0], np.cumsum(settings["counts"], dtype=np.int64)])
    np.save(directory / STARTS, starts)
    orders: dict[str, NDArray[np.int64]] = {}
    if shuffle := settings["shuffle"]:
        orders = dict(zip(("train", "valid"), split(int(starts[-1]), **shuffle), strict=True))
    else:
        names = settings["splits"]
        for name in dict.fromkeys(names):
            own = [np.arange(starts[n], starts[n + 1]) for n in range(len(names)) if names[n] == name]
            orders[name] = np.concatenate(own)
    for name, order in orders.items():
        np.save(directory / f"order-{name}.npy", order)
    return {"documents": {name: len(order) for name, order in orders.items()}}


def split(
    documents: int, train: int = 29, valid: int = 1, seed: int = 1234
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Shuffled document numbers of the two splits, in the ratio `train:valid` to the nearest document.

    Each split has at least one document if there are two or more. The shuffle is NumPy's RandomState, whose
    stream is fixed for good.
    """
    order = np.random.RandomState(seed).permutation(documents).astype(np.int64)
    count = round(documents * valid / (train + valid))
    count = min(max(count, 1), documents - 1) if documents > 1 else 0
    return order[: documents - count], order[documents - count :]


def gather_slice(settings: Settings, inputs: list[Path], directory: Path) -> Counts:
    """Write the documents at places `first` to before `last` of a split.

    Settings: `split`, `first`, `last`, `lines` (True if texts are wanted), `dtype` of tokens or None.
    Inputs: the order, and all shards after each pass and after selection.
    """
    order = np.load(inputs[0] / "00000" / f"order-{settings['split']}.npy", mmap_mode="r")
    numbers = np.array(order[settings["first"] : settings["last"]])
    starts = np.load(inputs[0] / "00000" / STARTS)
    shards = np.searchsorted(starts, numbers, side="right") - 1
    dtype = np.dtype(settings["dtype"]) if settings["dtype"] else None
    total = np.zeros(2, np.int64)
    lines, tokens = [b""] * len(numbers), [np.empty(0, dtype)] * len(numbers)
    for number, slots in groupby(np.argsort(numbers).tolist(), lambda slot: int(shards[slot])):
        shard = _Shard(inputs[1:], f"{number:05d}", dtype)
        for slot in slots:
            place = int(numbers[slot] - starts[number])
            total += shard.entries[place, 1:]
            if settings["lines"]:
                lines[slot] = shard.line(place)
            if dtype:
                tokens[slot] = shard.tokens(place)
    if settings["lines"]:
        with (directory / SLICE_LINES).open("wb") as file:
            file.writelines(lines)
    if dtype:
        with TokenFileWriter(directory / SLICE_TOKENS, dtype) as writer:
            writer.add_documents(np.concatenate([np.empty(0, dtype), *tokens]), [*map(len, tokens)])
    return {"documents": len(numbers), "bytes": int(total[0]), "tokens": int(total[1])}


def assemble(settings: Settings, inputs: list[Path], directory: Path) -> Counts:
    """Join the slices of a split from `first` to before `last` into one file of its `kind`: lines or tokens."""
    folders = [inputs[0] / f"{number:05d}" for number in range(settings["first"], settings["last"])]
    if settings["kind"] == "lines":
        (directory / "documents").mkdir()
        with (directory / "documents" / f"{settings['split']}.jsonl").open("wb") as whole:
            join_files((folder / SLICE_LINES for folder in folders), whole)
    else:
        merge_token_files(
            [folder / SLICE_TOKENS for folder in folders], directory / f"{settings['split']}_text_document"
        )
    return {}


class _Shard:
    """Remaining documents of a shard; `select_documents` wrote its entries."""

    def __init__(self, stages: list[Path], name: str, dtype: "np.dtype[Any] | None") -> None:
        prepared, measured, selected = (stage / name for stage in stages)
        self.entries = np.load(selected / ENTRIES)
        self._numbers = np.load(measured / NUMBERS)
        self._documents, self._parts = DocumentShard(prepared), DocumentShard(selected)
        if dtype:
            self._dtype = dtype
            sizes = np.load(measured / SIZES)[:, 1]
            self._starts = np.concatenate([[0], np.cumsum(sizes)])
            part_sizes = self.entries[self.entries[:, 0] < 0, 2]
            self._part_starts = np.concatenate([[0], np.cumsum(part_sizes)])
            self._tokens, self._part_tokens = ((folder / TOKENS).open("rb") for folder in (measured, selected))

    def line(self, place: int) -> bytes:
        """The line of an entry."""
        number = int(self.entries[place, 0])
        return self._documents.line(int(self._numbers[number])) if number >= 0 else self._parts.line(-1 - number)

    def tokens(self, place: int) -> NDArray[Any]:
        """The token ids of an entry."""
        number = int(self.entries[place, 0])
        if number >= 0:
            file, (start, end) = self._tokens, self._starts[number : number + 2].tolist()
        else:
            file, (start, end) = self._part_tokens, self._part_starts[-1 - number : 1 - number].tolist()
        width = self._dtype.itemsize
        return np.frombuffer(os.pread(file.fileno(), (end - start) * width, start * width), self._dtype)
