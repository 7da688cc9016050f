"""The token file against the format's description, read here with struct alone, and against
megatron-core."""

import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mlm_repro.data_pipeline.tokens.token_file import (
    TokenFile,
    TokenFileWriter,
    merge_token_files,
    token_dtype,
)
from mlm_repro.lineage.errors import BadInput, IntegrityFailure

uint16_documents = st.lists(st.lists(st.integers(0, 65_535), max_size=20), max_size=12)


def read_by_description(prefix: Path) -> tuple[list[list[int]], list[int], int]:
    """Documents, document index and dtype code, from the byte layout."""
    index = Path(f"{prefix}.idx").read_bytes()
    tokens = Path(f"{prefix}.bin").read_bytes()
    assert index[:9] == b"MMIDIDX\x00\x00"
    (version,) = struct.unpack("<Q", index[9:17])
    code = index[17]
    n, d = struct.unpack("<QQ", index[18:34])
    assert version == 1
    assert len(index) == 34 + 12 * n + 8 * d
    lengths = struct.unpack(f"<{n}i", index[34 : 34 + 4 * n])
    offsets = struct.unpack(f"<{n}q", index[34 + 4 * n : 34 + 12 * n])
    starts = struct.unpack(f"<{d}q", index[34 + 12 * n :])
    letter, width = {8: ("H", 2), 4: ("i", 4)}[code]
    documents = [
        list(struct.unpack(f"<{length}{letter}", tokens[offset : offset + width * length]))
        for length, offset in zip(lengths, offsets, strict=True)
    ]
    return documents, list(starts), code


def write(prefix: Path, documents: list[list[int]], vocab_size: int) -> None:
    with TokenFileWriter(prefix, token_dtype(vocab_size)) as writer:
        for document in documents:
            writer.add_document(document)


@given(documents=uint16_documents)
def test_files_follow_the_description(
    documents: list[list[int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    prefix = tmp_path_factory.mktemp("tokens") / "train_text_document"
    write(prefix, documents, 50_257)
    assert read_by_description(prefix) == (documents, list(range(len(documents) + 1)), 8)


def test_dtype_changes_at_megatrons_limit(tmp_path: Path) -> None:
    assert token_dtype(65_499) == np.uint16
    assert token_dtype(65_500) == np.int32
    write(tmp_path / "wide", [[0, 70_000]], 100_000)
    assert read_by_description(tmp_path / "wide") == ([[0, 70_000]], [0, 1], 4)
    assert TokenFile(tmp_path / "wide")[0].tolist() == [0, 70_000]


def test_a_token_that_does_not_fit_leaves_the_old_file(tmp_path: Path) -> None:
    write(tmp_path / "t", [[1, 2]], 1000)
    for token in (-1, 65_536):
        with pytest.raises(ValueError, match="outside"):
            write(tmp_path / "t", [[7], [token]], 1000)
    assert TokenFile(tmp_path / "t")[0].tolist() == [1, 2]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["t.bin", "t.idx"]


def with_header(index: bytes, sequences: int, documents: int) -> bytes:
    return index[:18] + struct.pack("<QQ", sequences, documents) + index[34:]


def with_number(index: bytes, at: int, letter: str, value: int) -> bytes:
    return index[:at] + struct.pack(f"<{letter}", value) + index[at + struct.calcsize(letter) :]


def test_damage_is_noticed(tmp_path: Path) -> None:
    prefix = tmp_path / "t"
    with pytest.raises(BadInput, match="does not exist"):
        TokenFile(prefix)
    write(prefix, [[1, 2], [3, 4, 5]], 1000)
    index, tokens = (tmp_path / "t.idx").read_bytes(), (tmp_path / "t.bin").read_bytes()
    sizes, offsets, documents = 34, 34 + 8, 34 + 24
    for broken_index in (
        b"",
        index[:-1],
        index + b"\0",
        b"TNTIDX\0\0\0" + index[9:],
        index[:9] + b"\2" + index[10:],
        index[:17] + b"\6" + index[18:],
        with_header(index, 2**63, 3),
        with_header(index, 2, 2**64 - 1),
        with_header(index, 2**61, 2**61),
        with_header(index, 0, 6),
        with_number(index, sizes, "i", -2),
        with_number(index, sizes, "i", 2**31 - 1),
        with_number(index, offsets, "q", 2),
        with_number(index, offsets + 8, "q", 5),
        with_number(index, offsets + 8, "q", 2**62),
        with_number(index, documents, "q", 1),
        with_number(index, documents + 8, "q", 3),
        with_number(index, documents + 16, "q", 2**40),
    ):
        (tmp_path / "t.idx").write_bytes(broken_index)
        with pytest.raises(IntegrityFailure, match=r"t\.idx"):
            TokenFile(prefix)
    (tmp_path / "t.idx").write_bytes(index)
    for broken_tokens in (tokens[:-2], tokens[:-1], b"", tokens + b"\0\0"):
        (tmp_path / "t.bin").write_bytes(broken_tokens)
        with pytest.raises(IntegrityFailure):
            TokenFile(prefix)


@pytest.mark.parametrize("sizes", [[1], [2, 2], [4, -1], []])
def test_sizes_that_do_not_add_up_are_refused(sizes: list[int], tmp_path: Path) -> None:
    with (
        pytest.raises(ValueError, match="3 tokens"),
        TokenFileWriter(tmp_path / "t", token_dtype(100)) as writer,
    ):
        writer.add_documents([1, 2, 3], sizes)
    assert list(tmp_path.iterdir()) == []


def test_a_refused_merge_leaves_what_was_there(tmp_path: Path) -> None:
    write(tmp_path / "narrow", [[1, 2]], 1000)
    write(tmp_path / "wide", [[3]], 100_000)
    write(tmp_path / "out", [[9]], 1000)
    for prefixes, error, words in (
        (
            [tmp_path / "narrow", tmp_path / "wide"],
            BadInput,
            "wide holds int32 tokens, and out uint16",
        ),
        ([tmp_path / "narrow", tmp_path / "gone"], BadInput, "gone.bin does not exist"),
        ([], BadInput, "no token files"),
    ):
        with pytest.raises(error, match=words):
            merge_token_files(prefixes, tmp_path / "out")
    (tmp_path / "wide.bin").write_bytes(b"")
    with pytest.raises(IntegrityFailure, match=r"wide\.bin"):
        merge_token_files([tmp_path / "narrow", tmp_path / "wide"], tmp_path / "out")
    assert TokenFile(tmp_path / "out")[0].tolist() == [9]
    assert len(list(tmp_path.iterdir())) == 6


DOCUMENTS = [[1, 2, 3], [], [65_499], *([number] * (number % 7) for number in range(100))]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("vocab_size", [50_257, 100_000])
@pytest.mark.parametrize("mmap", [True, False])
def test_megatron_reads_ours(vocab_size: int, mmap: bool, tmp_path: Path) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    with TokenFileWriter(tmp_path / "ours", token_dtype(vocab_size)) as writer:
        for document in DOCUMENTS:
            writer.add_document(document)
    theirs = IndexedDataset(str(tmp_path / "ours"), mmap=mmap)
    assert len(theirs) == len(DOCUMENTS)
    assert [theirs[number].tolist() for number in range(len(theirs))] == DOCUMENTS
    assert theirs[0].dtype == token_dtype(vocab_size)
    assert theirs.sequence_lengths.tolist() == [len(document) for document in DOCUMENTS]
    assert theirs.document_indices.tolist() == list(range(len(DOCUMENTS) + 1))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("dtype", "multimodal"), [(np.uint16, False), (np.int32, False), (np.uint16, True)]
)
def test_ours_reads_megatrons(dtype: type, multimodal: bool, tmp_path: Path) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(
        str(tmp_path / "theirs.bin"), dtype=dtype, multimodal=multimodal
    )
    for document in DOCUMENTS:
        builder.add_document(torch.tensor(document), [len(document)], [0] if multimodal else None)
    builder.finalize(str(tmp_path / "theirs.idx"))
    ours = TokenFile(tmp_path / "theirs")
    assert [ours[number].tolist() for number in range(len(ours))] == DOCUMENTS
    assert ours.dtype == dtype
    assert ours.document_index.tolist() == list(range(len(DOCUMENTS) + 1))


@pytest.mark.filterwarnings("ignore")
def test_the_same_bytes_are_written_and_merged(tmp_path: Path) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    whole = IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=np.uint16)
    for part, documents in enumerate((DOCUMENTS[:40], DOCUMENTS[40:])):
        builder = IndexedDatasetBuilder(str(tmp_path / f"part-{part}.bin"), dtype=np.uint16)
        for document in documents:  # a document of two sequences
            builder.add_document(
                torch.tensor([*document, *document]), [len(document), len(document)]
            )
        builder.finalize(str(tmp_path / f"part-{part}.idx"))
        whole.add_index(str(tmp_path / f"part-{part}"))
    whole.finalize(str(tmp_path / "theirs.idx"))
    merge_token_files([tmp_path / "part-0", tmp_path / "part-1"], tmp_path / "ours")
    for ending in ("bin", "idx"):
        assert (tmp_path / f"ours.{ending}").read_bytes() == (
            tmp_path / f"theirs.{ending}"
        ).read_bytes()
