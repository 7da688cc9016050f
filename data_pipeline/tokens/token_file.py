"""Token files in Megatron-LM's indexed format: `<prefix>.bin` holds tokens, `<prefix>.idx` their
offsets.

The index (magic `MMIDIDX`, version 1, little endian) is: 9 bytes magic, u64 version, u8 dtype code,
u64 number of sequences N, u64 length D of the document index, i32[N] sequence lengths in tokens,
i64[N] byte offsets into the `.bin`, i64[D] sequence at which each document starts, ending with N
(Megatron-LM megatron/data/indexed_dataset.py, class MMapIndexedDataset).
"""

import os
import shutil
import struct
from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mlm_repro.data_pipeline.arrays import Integers, Integers32
from mlm_repro.lineage.atomic import hidden_beside, sync
from mlm_repro.lineage.errors import BadInput, IntegrityFailure

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
DTYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}
TOKENS_OF = "_text_document"
"""Suffix of a token file's prefix, after the name of its split."""
Numbers = Sequence[int] | NDArray[Any]
CHECKED_AT_ONCE = 1 << 20
"""Number of sequences whose offsets are checked together."""


def token_dtype(vocab_size: int) -> "np.dtype[Any]":
    """Return the numpy dtype of a token file for a vocabulary of `vocab_size` tokens: uint16 for
    vocabularies under 65,500 tokens, int32 for others (Megatron-LM's limit)."""
    return np.dtype(np.uint16 if vocab_size < 65_500 else np.int32)


def token_paths(prefix: Path) -> tuple[Path, Path]:
    """Return a pair, the paths of the `.bin` and the `.idx` of a prefix, whether they exist or
    not."""
    return prefix.with_name(prefix.name + ".bin"), prefix.with_name(prefix.name + ".idx")


def split_prefixes(directory: Path, split: str) -> list[Path]:
    """Return a list of the prefixes of a split's token files in the dataset `directory`: one for
    each shard, in order, or else the prefix of the undivided split, whose files may not exist."""
    shards = sorted(directory.glob(f"{split}-*-of-*{TOKENS_OF}.bin"))
    return [path.with_suffix("") for path in shards] or [directory / f"{split}{TOKENS_OF}"]


def texts_of(prefix: Path) -> Path:
    """Return the path, in the folder `documents` beside the token file `prefix`, of the file with
    the texts of its documents: `NAME.parquet` for a file that is one part of several, with `-of-`
    in its name, else `NAME.jsonl`, where NAME is the prefix's name without `_text_document` at its
    end. The file may be absent, as in an imported dataset."""
    name = prefix.name.removesuffix(TOKENS_OF)
    return prefix.parent / "documents" / f"{name}.{'parquet' if '-of-' in name else 'jsonl'}"


def blend(prefixes: Sequence[Path], weight: float = 1.0) -> list[tuple[Path, float]]:
    """Return a list of pairs, each of `prefixes`, which lead to one split's token files, with its
    share of `weight`, in proportion to the bytes of its `.bin`, which must exist; a single prefix
    has the whole weight, and then no file is looked at."""
    if len(prefixes) == 1:
        return [(prefixes[0], weight)]
    sizes = [token_paths(prefix)[0].stat().st_size for prefix in prefixes]
    return [
        (prefix, weight * size / sum(sizes)) for prefix, size in zip(prefixes, sizes, strict=True)
    ]


class TokenFile:
    """A token file mapped into memory to be read, `prefix.bin` and `prefix.idx`; `file[number]` is
    the tokens of one sequence, in the file's integer `dtype`, and `len(file)` the number of
    sequences. Raises BadInput if a file is missing, IntegrityFailure if it is damaged."""

    sizes: Integers32
    """Length of each sequence in tokens, [N]."""
    document_index: Integers
    """Sequence at which each document starts, and N at the end, [D]."""
    dtype: "np.dtype[Any]"
    tokens: NDArray[Any]
    """All tokens back to back."""

    def __init__(self, prefix: Path) -> None:
        self.prefix = prefix
        bin_path, idx_path = token_paths(prefix)
        for path in (bin_path, idx_path):
            if not path.is_file():
                raise BadInput(
                    f"token file {path} does not exist: a prefix PREFIX stands for PREFIX.bin and"
                    " PREFIX.idx"
                )
        with idx_path.open("rb") as file:
            header = file.read(HEADER.size)
        if len(header) < HEADER.size:
            raise IntegrityFailure(
                f"{idx_path} is too short to be the index of a token file: copy or make it again"
            )
        magic, version, code, sequences, documents = HEADER.unpack(header)
        if magic != MAGIC or version != 1 or code not in DTYPES:
            raise IntegrityFailure(
                f"{idx_path} is not, by its first bytes, an index of Megatron-LM's token files,"
                " version 1, with integer tokens: copy or make it again"
            )
        length = HEADER.size + 12 * sequences + 8 * documents
        # The longer form has a mode, one byte, for each sequence.
        if idx_path.stat().st_size not in (length, length + sequences):
            raise IntegrityFailure(
                f"{idx_path} is not as long as its first bytes say: it was cut off or changed, so"
                " copy or make it again"
            )
        index = np.asarray(np.memmap(idx_path, np.uint8, "r"))[HEADER.size :]
        self.dtype = np.dtype(DTYPES[code]).newbyteorder("<")
        self.sizes = index[: 4 * sequences].view("<i4").copy()
        self._offsets = index[4 * sequences : 12 * sequences].view("<i8")
        self.document_index = (
            index[12 * sequences : 12 * sequences + 8 * documents].view("<i8").copy()
        )
        self._check(bin_path, idx_path)
        self.tokens = (
            np.memmap(bin_path, self.dtype, "r")
            if bin_path.stat().st_size
            else np.empty(0, self.dtype)
        )

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, sequence: int) -> NDArray[Any]:
        """Return the tokens of the sequence with the number `sequence`, from 0, as an array in the
        file's dtype that is a read-only view of the mapped file."""
        start = int(self._offsets[sequence]) // self.dtype.itemsize
        return self.tokens[start : start + int(self.sizes[sequence])]

    def _check(self, bin_path: Path, idx_path: Path) -> None:
        """Raise IntegrityFailure, which names the file, unless the sequences that the `.idx` lists
        lie back to back from the first byte of the `.bin` to its last, and are covered by the
        documents in order. The tokens themselves are not read."""
        end = 0
        starts = self.document_index
        for low in range(0, len(self), CHECKED_AT_ONCE):
            batch = slice(low, low + CHECKED_AT_ONCE)
            ends = end + np.cumsum(self.sizes[batch], dtype=np.int64) * self.dtype.itemsize
            expected = ends - self.sizes[batch].astype(np.int64) * self.dtype.itemsize
            if self.sizes[batch].min() < 0 or not np.array_equal(self._offsets[batch], expected):
                raise IntegrityFailure(
                    f"{idx_path} is damaged: the sequences that it lists leave gaps, overlap or"
                    " have a negative length; copy or make it again"
                )
            end = int(ends[-1])
        if end != bin_path.stat().st_size:
            raise IntegrityFailure(
                f"{bin_path} is longer or shorter than the tokens that {idx_path.name} lists: one"
                " of the two is damaged or of another dataset, so copy or make both again"
            )
        if (
            not len(starts)
            or starts[0] != 0
            or starts[-1] != len(self)
            or (starts[1:] < starts[:-1]).any()
        ):
            raise IntegrityFailure(
                f"{idx_path} is damaged: its documents do not cover all of its sequences in order;"
                " copy or make it again"
            )


class TokenFileWriter:
    """Context manager that writes a token file, `<prefix>.bin` and `<prefix>.idx`, of tokens of
    `dtype`, one of the values of DTYPES; the methods `add_document`, `add_documents` and `add_file`
    append to it. Both files appear, in place of earlier ones, when the block ends without an error;
    after an error earlier ones stay. The folder is made if it is missing."""

    def __init__(self, prefix: Path, dtype: "np.dtype[Any]") -> None:
        self._paths = token_paths(prefix)
        self._partial = [hidden_beside(path, "partial") for path in self._paths]
        self._dtype = np.dtype(dtype).newbyteorder("<")
        self._code = next(
            code for code, known in DTYPES.items() if np.dtype(known) == np.dtype(dtype)
        )
        self._limits = np.iinfo(self._dtype)
        self._sizes = array("i")
        self._document_ends = array("q", [0])

    def __enter__(self) -> Self:
        self._paths[0].parent.mkdir(parents=True, exist_ok=True)
        self._bin = self._partial[0].open("wb")
        return self

    def add_document(self, ids: ArrayLike) -> None:
        """Append the token ids `ids` of one document, as one sequence; no end-of-text token is
        added. Raises ValueError for a token the dtype cannot hold."""
        tokens = np.asarray(ids)
        self.add_documents(tokens, [tokens.size])

    def add_documents(
        self, tokens: ArrayLike, sizes: Numbers, sequences: Numbers | None = None
    ) -> None:
        """Append sequences that lie back to back in `tokens`, of `sizes` tokens each.

        Each sequence is a document, unless `sequences` gives the number of sequences in each
        document. Raises ValueError for a token that the dtype cannot hold, or if sizes and tokens
        disagree.
        """
        values = np.asarray(tokens)
        lengths = np.asarray(sizes, np.int32)
        fits = values.dtype == self._dtype or not values.size
        if not fits and (values.min() < self._limits.min or values.max() > self._limits.max):
            raise ValueError(
                f"a token id lies outside {self._dtype}, the numbers that the token file can hold:"
                " begin the file with a dtype that holds the largest id"
            )
        if lengths.sum(dtype=np.int64) != values.size or (lengths < 0).any():
            raise ValueError(
                f"sizes of sequences add up to {lengths.sum(dtype=np.int64)} and not to"
                f" {values.size} tokens, or one is negative"
            )
        self._bin.write(np.ascontiguousarray(values, self._dtype).data)
        self._extend(
            lengths, np.arange(1, len(lengths) + 1) if sequences is None else np.cumsum(sequences)
        )

    def add_file(self, prefix: Path) -> None:
        """Append the sequences and documents of the token file at `prefix`. Raises BadInput if its
        tokens have another dtype or a file is missing, IntegrityFailure if it is damaged."""
        other = TokenFile(prefix)
        if other.dtype != self._dtype:
            raise BadInput(
                f"token file {prefix} holds {other.dtype} tokens, and {self._paths[0].stem}"
                f" {self._dtype}: only files of one type can be joined"
            )
        join_files([token_paths(prefix)[0]], self._bin)
        self._extend(other.sizes, other.document_index[1:])

    def _extend(self, sizes: Integers32, document_ends: Integers) -> None:
        self._document_ends.frombytes((document_ends.astype(np.int64) + len(self._sizes)).tobytes())
        self._sizes.frombytes(sizes.astype(np.int32).tobytes())

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        try:
            self._bin.close()
            sync(self._partial[0])
            if kind is None:
                self._write_index()
                self._publish()
        finally:
            for partial in self._partial:
                partial.unlink(missing_ok=True)

    def _publish(self) -> None:
        """Give both files, which are finished under their temporary names, their own names, and
        replace earlier files of these names. An index never stands beside tokens that it does not
        describe."""
        directory = self._paths[0].parent
        self._paths[1].unlink(missing_ok=True)
        sync(directory)
        for partial, path in zip(self._partial, self._paths, strict=True):
            os.replace(partial, path)
        sync(directory)

    def _write_index(self) -> None:
        """Write the index of all sequences and documents that were added, the `.idx`, under its
        temporary name and flush it to disk."""
        sizes = np.frombuffer(self._sizes, np.int32)
        offsets = np.cumsum(sizes, dtype=np.int64)
        offsets -= sizes
        offsets *= self._dtype.itemsize
        with self._partial[1].open("wb") as file:
            file.write(HEADER.pack(MAGIC, 1, self._code, len(sizes), len(self._document_ends)))
            for column in (
                sizes.astype("<i4"),
                offsets.astype("<i8"),
                np.array(self._document_ends, "<i8"),
            ):
                column.tofile(file)
        sync(self._partial[1])


def merge_token_files(prefixes: Sequence[Path], out: Path) -> None:
    """Write the sequences and documents of the token files at `prefixes`, one after the other, as
    one token file at the prefix `out`, in place of an earlier one.

    Raises BadInput if `prefixes` is empty, a file is missing or the tokens have different dtypes,
    IntegrityFailure if a file is damaged.
    """
    if not prefixes:
        raise BadInput(f"no token files were given to merge into {out}")
    with TokenFileWriter(out, TokenFile(prefixes[0]).dtype) as writer:
        for prefix in prefixes:
            writer.add_file(prefix)


def join_files(paths: Iterable[Path], out: BinaryIO) -> None:
    """Append the content of the files at `paths`, one after the other, to the open binary file
    `out`, a megabyte at a time. Raises OSError for a file that is missing."""
    for path in paths:
        with path.open("rb") as file:
            shutil.copyfileobj(file, out, 1 << 20)
