"""Token files go to megatron-core and come back."""

from pathlib import Path

import numpy as np
import pytest
import torch

from data_pipeline.tokens.token_file import TokenFile, TokenFileWriter, merge_token_files, token_dtype

DOCUMENTS = [[1, 2, 3], [], [65_499], *([number] * (number % 7) for number in range(100))]
pytestmark = pytest.mark.filterwarnings("ignore")


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


@pytest.mark.parametrize(("dtype", "multimodal"), [(np.uint16, False), (np.int32, False), (np.uint16, True)])
def test_ours_reads_megatrons(dtype: type, multimodal: bool, tmp_path: Path) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=dtype, multimodal=multimodal)
    for document in DOCUMENTS:
        builder.add_document(torch.tensor(document), [len(document)], [0] if multimodal else None)
    builder.finalize(str(tmp_path / "theirs.idx"))
    ours = TokenFile(tmp_path / "theirs")
    assert [ours[number].tolist() for number in range(len(ours))] == DOCUMENTS
    assert ours.dtype == dtype
    assert ours.document_index.tolist() == list(range(len(DOCUMENTS) + 1))


def test_the_same_bytes_are_written_and_merged(tmp_path: Path) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    whole = IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=np.uint16)
    for part, documents in enumerate((DOCUMENTS[:40], DOCUMENTS[40:])):
        builder = IndexedDatasetBuilder(str(tmp_path / f"part-{part}.bin"), dtype=np.uint16)
        for document in documents:  # a document of two sequences
            builder.add_document(torch.tensor([*document, *document]), [len(document), len(document)])
        builder.finalize(str(tmp_path / f"part-{part}.idx"))
        whole.add_index(str(tmp_path / f"part-{part}"))
    whole.finalize(str(tmp_path / "theirs.idx"))
    merge_token_files([tmp_path / "part-0", tmp_path / "part-1"], tmp_path / "ours")
    for ending in ("bin", "idx"):
        assert (tmp_path / f"ours.{ending}").read_bytes() == (tmp_path / f"theirs.{ending}").read_bytes()
