"""The sample index equals Megatron-LM's, array for array."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_pipeline.token_file import TokenFile, TokenFileWriter, token_dtype
from engine.batches import TrainingBatches, ValidationBatches, build_sample_index
from lineage.errors import BadInput

SIZES = np.array([5, 3, 7, 4, 6], dtype=np.int32)
GOLDEN = {
    5: (
        [4, 0, 1, 2, 3],
        [[0, 0], [0, 4], [1, 2], [2, 1], [3, 2], [3, 6], [4, 3]],
        [5, 2, 3, 1, 0, 4],
    ),
    8: (
        [4, 0, 1, 2, 3, 3, 2, 1, 0, 4],
        [[0, 0], [0, 4], [1, 2], [2, 1], [3, 2], [3, 6], [4, 3], [5, 3], [6, 3], [7, 0], [8, 1], [9, 0], [9, 4]],
        [0, 4, 3, 2, 5, 1, 7, 6, 9, 8, 11, 10],
    ),
    11: (
        [2, 2, 4, 1, 0, 3, 4, 0, 1, 3],
        [[0, 0], [0, 4], [1, 1], [1, 5], [2, 2], [3, 0], [4, 1], [5, 0], [6, 0], [6, 4], [7, 2], [8, 1], [9, 2]],
        [3, 11, 2, 1, 7, 5, 4, 0, 8, 6, 10, 9],
    ),
}  # produced by Megatron-LM v2.6's own index functions: seed 1234, sequence length 4


@pytest.mark.parametrize("num_samples", GOLDEN)
def test_index_equals_megatron(num_samples: int) -> None:
    index = build_sample_index(SIZES, num_samples, seq_length=4, seed=1234)
    documents, samples, shuffle = GOLDEN[num_samples]
    assert index.documents.tolist() == documents
    assert index.samples.tolist() == samples
    assert index.shuffle.tolist() == shuffle


@pytest.fixture
def token_file(tmp_path: Path) -> TokenFile:
    with TokenFileWriter(tmp_path / "train", token_dtype(100)) as writer:
        start = 0
        for size in SIZES:
            writer.add_document(np.arange(start, start + size))
            start += int(size)
    return TokenFile(tmp_path / "train")


def test_samples_are_cut_from_the_packed_documents(token_file: TokenFile) -> None:
    batches = TrainingBatches(token_file, 4, global_batch_size=1, microbatch_size=1, iterations=5, seed=1234)
    packed = np.concatenate([token_file[int(d)] for d in batches.index.documents])
    for number in range(5):
        start = int(batches.index.shuffle[number]) * 4
        assert batches.sample(number).tolist() == packed[start : start + 5].tolist()


def test_every_dp_degree_sees_the_same_global_batch(token_file: TokenFile) -> None:
    batches = TrainingBatches(token_file, 2, global_batch_size=4, microbatch_size=1, iterations=2, seed=7)
    seen = {}
    for dp in (1, 2, 4):
        rows: dict[int, list[int]] = {}
        for rank in range(dp):
            for batch in batches.microbatches(1, rank, dp):
                rows |= {place: row.tolist() for place, row in zip(batch.places, batch.tokens, strict=True)}
        seen[dp] = rows
    assert sorted(seen[1]) == [0, 1, 2, 3]
    assert seen[1] == seen[2] == seen[4]


def test_validation_covers_each_target_once(token_file: TokenFile) -> None:
    validation = ValidationBatches(token_file, 4)
    rows = [row for rank in range(2) for batch in validation.batches(100, 2, rank, 2) for row in batch]
    targets = sorted(int(token) for row in rows for token in row[1:])
    assert targets == list(range(1, 25))


@given(
    sizes=st.lists(st.integers(1, 12), min_size=3, max_size=20),
    num_samples=st.integers(1, 60),
    seq_length=st.integers(1, 6),
)
def test_enough_samples_each_inside_its_document(sizes: list[int], num_samples: int, seq_length: int) -> None:
    array = np.array(sizes, dtype=np.int32)
    if array.sum() <= seq_length:
        with pytest.raises(BadInput):
            build_sample_index(array, num_samples, seq_length, seed=1)
        return
    index = build_sample_index(array, num_samples, seq_length, seed=1)
    assert len(index.shuffle) >= num_samples
    assert sorted(index.shuffle.tolist()) == list(range(len(index.shuffle)))
    assert len(index.samples) == len(index.shuffle) + 1
    for position, offset in index.samples:
        assert 0 <= offset < array[index.documents[position]]
