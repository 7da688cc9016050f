"""Token files in Megatron-LM's indexed format: `<prefix>.bin` holds tokens, `<prefix>.idx` says where each lies.

The index (magic `MMIDIDX`, version 1, little endian) is: 9 bytes magic, u64 version, u8 dtype code, u64 number of
sequences N, u64 length D of the document index, i32[N] sequence lengths in tokens, i64[N] byte offsets into the
`.bin`, i64[D] sequence at which each document starts, ending with N (Megatron-LM
megatron/data/indexed_dataset.py, class MMapIndexedDataset).
"""

import os
import struct
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lineage.errors import BadInput, IntegrityFailure

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
DTYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}


def token_dtype(vocab_size: int) -> "np.dtype[Any]":
    """uint16 for vocabularies under 65,500, int32 above (Megatron-LM's limit)."""
    return np.dtype(np.uint16 if vocab_size < 65_500 else np.int32)


def token_paths(prefix: Path) -> tuple[Path, Path]:
    """The `.bin` and `.idx` of a prefix."""
    return prefix.with_name(prefix.name + ".bin"), prefix.with_name(prefix.name + ".idx")


class TokenFile:
    """A token file mapped into memory. Raises BadInput if there is none, IntegrityFailure if it is damaged."""

    sizes: NDArray[np.int32]
    """Length of each sequence in tokens, [N]."""
    document_index: NDArray[np.int64]
    """Sequence at which each document starts, and N at the end, [D]."""
    dtype: "np.dtype[Any]"
    tokens: NDArray[Any]
    """All tokens back to back."""

    def __init__(self, prefix: Path) -> None:
        bin_path, idx_path = token_paths(prefix)
        for path in (bin_path, idx_path):
            if not path.is_file():
                raise BadInput(f"token file {path} does not exist")
        index = idx_path.read_bytes()
        if len(index) < HEADER.size:
            raise IntegrityFailure(f"{idx_path} is too short to be a token index")
        magic, version, code, sequences, documents = HEADER.unpack_from(index)
        if magic != MAGIC or version != 1 or code not in DTYPES:
            raise IntegrityFailure(f"{idx_path} is not a version 1 token index with integer tokens")
        if len(index) < HEADER.size + 12 * sequences + 8 * documents:
            raise IntegrityFailure(f"{idx_path} is shorter than its header says")
        self.dtype = np.dtype(DTYPES[code]).newbyteorder("<")
        self.sizes = np.frombuffer(index, "<i4", sequences, HEADER.size).copy()
        offsets = np.frombuffer(index, "<i8", sequences, HEADER.size + 4 * sequences)
        self.document_index = np.frombuffer(index, "<i8", documents, HEADER.size + 12 * sequences).copy()
        size = bin_path.stat().st_size
        ends = offsets + self.sizes.astype(np.int64) * self.dtype.itemsize
        if size % self.dtype.itemsize or (sequences and (offsets.min() < 0 or ends.max() > size)):
            raise IntegrityFailure(f"{bin_path} does not hold the tokens that {idx_path.name} lists")
        self._starts = offsets // self.dtype.itemsize
        self.tokens = np.memmap(bin_path, self.dtype, "r") if size else np.empty(0, self.dtype)

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, sequence: int) -> NDArray[Any]:
        """The tokens of one sequence."""
        start = int(self._starts[sequence])
        return self.tokens[start : start + int(self.sizes[sequence])]


class TokenFileWriter:
    """Writes a token file, one sequence per document; both files appear when the block ends without an error."""

    def __init__(self, prefix: Path, dtype: "np.dtype[Any]") -> None:
        self._paths = token_paths(prefix)
        self._partial = [path.with_name(f".{path.name}.partial-{os.getpid()}") for path in self._paths]
        self._dtype = np.dtype(dtype).newbyteorder("<")
        self._code = next(code for code, known in DTYPES.items() if np.dtype(known) == np.dtype(dtype))
        self._sizes: list[int] = []

    def __enter__(self) -> Self:
        self._paths[0].parent.mkdir(parents=True, exist_ok=True)
        self._bin = self._partial[0].open("wb")
        return self

    def add_document(self, ids: ArrayLike) -> None:
        """Append one document's tokens. Raises ValueError for a token the dtype cannot hold."""
        array = np.asarray(ids, dtype=np.int64)
        limits = np.iinfo(self._dtype)
        if array.size and (array.min() < limits.min or array.max() > limits.max):
            raise ValueError(f"a token lies outside {self._dtype}")
        self._bin.write(array.astype(self._dtype).tobytes())
        self._sizes.append(array.size)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._bin.flush()
            os.fsync(self._bin.fileno())
            self._bin.close()
            if kind is None:
                self._write_index()
                for partial, path in zip(self._partial, self._paths, strict=True):
                    os.replace(partial, path)
        finally:
            for partial in self._partial:
                partial.unlink(missing_ok=True)

    def _write_index(self) -> None:
        sizes = np.array(self._sizes, "<i8")
        offsets = (np.cumsum(sizes) - sizes) * self._dtype.itemsize
        count = len(sizes)
        with self._partial[1].open("wb") as file:
            file.write(HEADER.pack(MAGIC, 1, self._code, count, count + 1))
            file.write(sizes.astype("<i4").tobytes())
            file.write(offsets.astype("<i8").tobytes())
            file.write(np.arange(count + 1, dtype="<i8").tobytes())
            file.flush()
            os.fsync(file.fileno())
