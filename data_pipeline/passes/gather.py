"""From shards in input order to splits in training order: slices of the final files, then the files."""

import shutil
from contextlib import ExitStack
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_pipeline.passes.measure import NUMBERS, SIZES, TOKENS
from data_pipeline.passes.selection import ENTRIES
from data_pipeline.split import split
from data_pipeline.tokens.token_file import TokenFileWriter, merge_token_files
from data_pipeline.work.document_shard import DocumentShard
from data_pipeline.work.tasks import Counts, Settings

STARTS, SLICE_TOKENS, SLICE_LINES = "starts.npy", "tokens", "documents.jsonl"
SLICE_BYTES = 64 << 20
OPEN_SHARDS = 128


def choose_order(settings: Settings, inputs: list[Path], directory: Path) -> Counts:
    """The order of the documents that are left, a file of numbers for each split.

    Settings: `counts`, documents left in each shard; `splits`, the shard's split, all "" where there are none yet;
    `shuffle`, section and seed of the split, or None for the order of the input.
    """
    starts = np.concatenate([[0], np.cumsum(settings["counts"], dtype=np.int64)])
    np.save(directory / STARTS, starts)
    orders: dict[str, NDArray[np.int64]] = {}
    if shuffle := settings["shuffle"]:
        train, valid = split(int(starts[-1]), shuffle["train"], shuffle["valid"], shuffle["seed"])
        orders = {"train": train, "valid": valid}
    else:
        names = settings["splits"]
        for name in dict.fromkeys(names):
            own = [np.arange(starts[n], starts[n + 1]) for n in range(len(names)) if names[n] == name]
            orders[name] = np.concatenate(own)
    for name, order in orders.items():
        np.save(directory / f"order-{name}.npy", order)
    return {"documents": {name: len(order) for name, order in orders.items()}}


def gather_slice(settings: Settings, inputs: list[Path], directory: Path) -> Counts:
    """The documents at places `first` to before `last` of a split.

    Settings: `split`, `first`, `last`, `lines` (whether texts are wanted), `dtype` of tokens or None.
    Inputs: the order, and all shards after each pass and after selection.
    """
    order = np.load(inputs[0] / "00000" / f"order-{settings['split']}.npy", mmap_mode="r")
    numbers = np.array(order[settings["first"] : settings["last"]])
    starts = np.load(inputs[0] / "00000" / STARTS)
    shards = np.searchsorted(starts, numbers, side="right") - 1
    dtype = np.dtype(settings["dtype"]) if settings["dtype"] else None
    opened = lru_cache(OPEN_SHARDS)(lambda shard: _Shard(inputs[1:], f"{shard:05d}", dtype))
    total = np.zeros(2, np.int64)
    with ExitStack() as stack:
        lines = stack.enter_context((directory / SLICE_LINES).open("wb")) if settings["lines"] else None
        tokens = stack.enter_context(TokenFileWriter(directory / SLICE_TOKENS, dtype)) if dtype else None
        for number, place in zip(shards.tolist(), (numbers - starts[shards]).tolist(), strict=True):
            shard = opened(number)
            total += shard.entries[place, 1:]
            if lines:
                lines.write(shard.line(int(shard.entries[place, 0])))
            if tokens:
                tokens.add_document(shard.tokens(place))
    return {"documents": len(numbers), "bytes": int(total[0]), "tokens": int(total[1])}


def assemble(settings: Settings, inputs: list[Path], directory: Path) -> Counts:
    """The slices of each split, given as `[name, first, last]`, joined into files: `lines`, `tokens` or both."""
    for name, first, last in settings["splits"]:
        folders = [inputs[0] / f"{number:05d}" for number in range(first, last)]
        if settings["lines"]:
            (directory / "documents").mkdir(exist_ok=True)
            with (directory / "documents" / f"{name}.jsonl").open("wb") as whole:
                for folder in folders:
                    with (folder / SLICE_LINES).open("rb") as part:
                        shutil.copyfileobj(part, whole, 1 << 20)
        if settings["tokens"]:
            prefixes = [folder / SLICE_TOKENS for folder in folders]
            merge_token_files(prefixes, directory / f"{name}_text_document")
    return {}


class _Shard:
    """What is left of a shard: entries as `select_documents` writes them."""

    def __init__(self, stages: list[Path], name: str, dtype: "np.dtype[Any] | None") -> None:
        prepared, measured, selected = (stage / name for stage in stages)
        self.entries = np.asarray(np.load(selected / ENTRIES, mmap_mode="r"))
        self._numbers = np.asarray(np.load(measured / NUMBERS, mmap_mode="r"))
        self._documents, self._parts = DocumentShard(prepared), DocumentShard(selected)
        if dtype:
            sizes = np.load(measured / SIZES)[:, 1]
            self._starts = np.concatenate([[0], np.cumsum(sizes)])
            part_sizes = np.array([entry[2] for entry in self.entries if entry[0] < 0], np.int64)
            self._part_starts = np.concatenate([[0], np.cumsum(part_sizes)])
            self._tokens, self._part_tokens = (_mapped(folder / TOKENS, dtype) for folder in (measured, selected))

    def line(self, number: int) -> bytes:
        """The document as a line."""
        return self._documents.line(int(self._numbers[number])) if number >= 0 else self._parts.line(-1 - number)

    def tokens(self, place: int) -> NDArray[Any]:
        """Token ids of the entry at that place."""
        number = int(self.entries[place, 0])
        if number >= 0:
            return self._tokens[self._starts[number] : self._starts[number + 1]]
        return self._part_tokens[self._part_starts[-1 - number] : self._part_starts[-number]]


def _mapped(path: Path, dtype: "np.dtype[Any]") -> NDArray[Any]:
    return np.asarray(np.memmap(path, dtype, "r")) if path.stat().st_size else np.empty(0, dtype)
