"""Batches: every rank its slice of the same global batch, validation once over."""

from pathlib import Path

import numpy as np
import pytest

from mlm_repro.data_pipeline.tokens.token_file import TokenFile, TokenFileWriter, token_dtype
from mlm_repro.engine.data.batches import validation_text

SIZES = np.array([5, 3, 7, 4, 6], dtype=np.int32)


@pytest.fixture
def token_file(tmp_path: Path) -> TokenFile:
    with TokenFileWriter(tmp_path / "train", token_dtype(100)) as writer:
        start = 0
        for size in SIZES:
            writer.add_document(np.arange(start, start + size))
            start += int(size)
    return TokenFile(tmp_path / "train")


def test_validation_covers_each_target_once(token_file: TokenFile) -> None:
    validation = validation_text([(token_file, 1.0)], 4)
    rows = [
        row
        for rank in range(2)
        for batch in validation.microbatches(100, 2, rank, 2)
        for row in batch.tokens
    ]
    targets = sorted(int(token) for row in rows for token in row[1:])
    assert targets == list(range(1, 25))


def test_validation_of_a_blend_keeps_its_shares(token_file: TokenFile, tmp_path: Path) -> None:
    with TokenFileWriter(tmp_path / "other", token_dtype(100)) as writer:
        writer.add_document(np.arange(50, 99))
    parts = [(token_file, 0.5), (TokenFile(tmp_path / "other"), 0.5)]
    validation = validation_text(parts, 4)
    rows = [row.tolist() for batch in validation.microbatches(100, 4, 0, 1) for row in batch.tokens]
    assert len(rows) == validation.num_samples == 12
    assert rows[0] == [0, 1, 2, 3, 4]
    assert rows[1] == [50, 51, 52, 53, 54]
    targets = [token for row in rows for token in row[1:]]
    assert len(targets) == len(set(targets))
    assert sorted(token for token in targets if token < 50) == list(range(1, 25))
