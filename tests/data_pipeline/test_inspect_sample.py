"""A sample is shown as training sees it."""

from pathlib import Path

import pytest

from data_pipeline.tokens.inspect_sample import show_sample
from data_pipeline.tokens.samples import PackedSamples
from data_pipeline.tokens.token_file import TokenFile, TokenFileWriter, token_dtype
from data_pipeline.tokens.tokenizer import Tokenizer
from lineage.errors import BadInput
from tests.data_pipeline.conftest import sentences

TEXTS = [sentences(1 + seed % 5, seed) for seed in range(40)]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(TEXTS, 300)


@pytest.fixture
def token_file(tokenizer: Tokenizer, tmp_path: Path) -> TokenFile:
    with TokenFileWriter(tmp_path / "train", token_dtype(300)) as writer:
        for text in TEXTS:
            writer.add_document([*tokenizer.encode(text), tokenizer.end_of_text])
    return TokenFile(tmp_path / "train")


@pytest.mark.parametrize("number", [0, 3, 7])
def test_the_text_is_that_of_the_tokens(number: int, token_file: TokenFile, tokenizer: Tokenizer) -> None:
    head, *lines = show_sample(token_file, tokenizer, number, seq_length=200, seed=3)
    assert f"sample {number} of " in head
    assert "with seed 3: 201 tokens" in head
    shown = "".join(lines[1::2])
    sample = PackedSamples(token_file, 1, 200, seed=3).sample(number)
    assert shown == tokenizer.decode(sample)
    for boundary, text in zip(lines[::2], lines[1::2], strict=True):
        document = int(boundary.split()[2].rstrip(","))
        assert text.removesuffix("<|endoftext|>") in TEXTS[document]
        assert text.endswith("<|endoftext|>") or text is lines[-1]


def test_a_sample_that_is_not_there(token_file: TokenFile, tokenizer: Tokenizer) -> None:
    count = len(PackedSamples(token_file, 1, 100, seed=1234))
    for number in (-1, count):
        with pytest.raises(BadInput, match=f"one epoch has {count}"):
            list(show_sample(token_file, tokenizer, number, seq_length=100))
    with pytest.raises(BadInput, match="fewer than one sample"):
        list(show_sample(token_file, tokenizer, 0, seq_length=100_000))
