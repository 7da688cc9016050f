"""BERT's samples: Megatron-LM's own code as outsider, and the statistics of masks."""

from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlm_repro.data_pipeline.tokens.sentence_pairs import Masking, PairSamples
from mlm_repro.data_pipeline.tokens.sentences import Sentences, Vocabulary
from mlm_repro.data_pipeline.tokens.token_file import TokenFile, TokenFileWriter, token_dtype
from mlm_repro.data_pipeline.tokens.tokenizer import Tokenizer
from mlm_repro.lineage.errors import BadInput

WORDS, PIECES = 60, 20
"""Tokens that are whole words, and tokens that go on with one."""
S = 64


def plain_vocabulary() -> Vocabulary:
    """Ids below WORDS begin a word, the next PIECES go on with one, the last is end-of-text; none
    ends a sentence."""
    size = WORDS + PIECES + 1
    going_on = (np.arange(size) >= WORDS) & (np.arange(size) < size - 1)
    no = np.zeros(size, np.bool_)
    return Vocabulary(going_on, ~no, no, no, no, size - 1, tuple(range(size, size + 4)))


def write_sentences(prefix: Path, documents: list[list[int]], seed: int = 0) -> TokenFile:
    """Documents of sentences with so many tokens, a sequence each, as Megatron-LM's preprocessing
    splits them."""
    random = np.random.RandomState(seed)
    with TokenFileWriter(prefix, token_dtype(100)) as writer:
        for number, sizes in enumerate(documents):
            part = prefix.with_name(f"part-{number}")
            with TokenFileWriter(part, token_dtype(100)) as sentences:
                for size in sizes:
                    sentences.add_document(
                        [random.randint(WORDS), *random.randint(0, WORDS + PIECES, size - 1)]
                    )
            one = TokenFile(part)
            writer._bin.write(np.ascontiguousarray(one.tokens).data)
            writer._extend(one.sizes, np.array([len(sizes)]))
    return TokenFile(prefix)


def random_documents(count: int, seed: int = 0) -> list[list[int]]:
    random = np.random.RandomState(seed)
    return [random.randint(1, 28, random.randint(1, 12)).tolist() for _ in range(count)]


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> PairSamples:
    file = write_sentences(tmp_path_factory.mktemp("pairs") / "text", random_documents(60))
    return PairSamples(file, plain_vocabulary(), S, seed=7)


def theirs(samples: PairSamples) -> Any:
    """Their dataset over the same sentences and the same index."""
    from megatron.core.datasets.bert_dataset import BERTMaskedWordPieceDataset

    vocabulary = {
        token: f"w{token}" if token < WORDS else f"##p{token}"
        for token in range(WORDS + PIECES + 1)
    }
    masking = samples.masking
    dataset = BERTMaskedWordPieceDataset.__new__(BERTMaskedWordPieceDataset)
    dataset.config = SimpleNamespace(
        tokenizer=SimpleNamespace(
            cls=masking.cls, sep=masking.sep, mask=masking.mask, inv_vocab=vocabulary
        ),
        sequence_length=S,
        random_seed=7,
        classification_head=True,
        masking_probability=0.15,
        masking_max_ngram=3,
        masking_do_full_word=True,
        masking_do_permutation=False,
        masking_use_longer_ngrams=False,
        masking_use_geometric_distribution=False,
    )
    dataset.dataset, dataset.sample_index = samples._file, samples.index
    dataset.token_lookup, dataset._pad_token_id = list(vocabulary), masking.pad
    return dataset


def test_a_sample_is_megatron_s(samples: PairSamples) -> None:
    dataset = theirs(samples)
    compared = 0
    for place in range(len(samples)):
        found, expected = samples.make(place, place), dataset[place]
        length, b = found.length, int(found.token_types.argmax())
        original = np.where(found.targets >= 0, found.targets, found.tokens)
        if samples.masking.vocabulary.begins_in_word[original[[1, b]]].any():
            continue  # a part was cut within a word, which theirs then joins across [SEP]
        compared += 1
        np.testing.assert_array_equal(found.tokens[:length], expected["text"][:length])
        np.testing.assert_array_equal(found.targets[:length], expected["labels"][:length])
        np.testing.assert_array_equal(found.token_types[:length], expected["types"][:length])
        assert (expected["padding_mask"][:length] == 1).all()
        assert found.is_swapped == expected["is_random"]
    assert compared > 0.6 * len(samples) > 40


@pytest.mark.parametrize("seed", [1, 1234])
def test_the_index_is_megatron_s(seed: int, tmp_path: Path) -> None:
    from megatron.core.datasets import helpers

    file = write_sentences(tmp_path / "text", random_documents(50, seed), seed)
    found = PairSamples(file, plain_vocabulary(), S, seed).index
    documents = file.document_index.astype(np.int64)
    expected = helpers.build_mapping(documents, file.sizes, 1, 10**6, S - 3, 0.1, seed, False, 2)
    np.testing.assert_array_equal(found[np.lexsort(found.T)], expected[np.lexsort(expected.T)])


@settings(max_examples=80)
@given(st.lists(st.integers(0, WORDS + PIECES - 1), min_size=2, max_size=60), st.integers(0, 2**31))
def test_words_are_masked_whole_and_special_tokens_never(tokens: list[int], seed: int) -> None:
    masking = Masking(plain_vocabulary())
    middle = len(tokens) // 2
    sequence = np.array([masking.cls, *tokens[:middle], masking.sep, *tokens[middle:], masking.sep])
    _, targets = masking.apply(sequence, len(sequence), np.random.RandomState(seed))
    for word in masking.words(sequence):
        assert len({bool(targets[position] >= 0) for position in word}) == 1
        assert (sequence[word] < masking.cls).all()
    assert (
        sorted(p for word in masking.words(sequence) for p in word)
        == np.flatnonzero(sequence < masking.cls).tolist()
    )
    assert (targets >= 0).sum() <= max(1, round(len(sequence) * 0.15))


def test_each_pass_has_every_sample_once_in_another_order_with_other_masks(
    samples: PairSamples,
) -> None:
    size = len(samples)
    first, again = [[samples._epoch(epoch).tolist() for epoch in range(2)] for _ in range(2)]
    assert first == again
    assert sorted(first[0]) == sorted(first[1]) == list(range(size))
    assert first[0] != first[1]
    one, other = samples.make(3, 3), samples.make(3, size + 3)
    assert not np.array_equal(one.targets, other.targets)


def test_sentences_are_told_from_tokens(tmp_path: Path) -> None:
    text = 'The cat sat. "Did it?" It did not! Version 3.12 is out\nA new line (yes.) Last'
    tokenizer = Tokenizer.train([text] * 3, 270)
    with TokenFileWriter(tmp_path / "text", token_dtype(270)) as writer:
        writer.add_document([*tokenizer.encode(text), tokenizer.end_of_text])
        writer.add_document([tokenizer.end_of_text])
        writer.add_document(tokenizer.encode("One more"))
    file, vocabulary = TokenFile(tmp_path / "text"), Vocabulary.of(tokenizer)
    found = Sentences.of(file, vocabulary, longest=100)
    texts = [
        tokenizer.decode(file.tokens[a:b]) for a, b in zip(found.starts, found.ends, strict=True)
    ]
    assert texts == [
        "The cat sat.",
        ' "Did it?"',
        " It did not!",
        " Version 3.12 is out\n",
        "A new line (yes.)",
        " Last",
        "One more",
    ]
    assert found.documents.tolist() == [0, 6, 6, 7]
    assert Sentences.of(file, vocabulary, longest=3).ends[0] == 3


def test_words_begin_where_letters_and_digits_do_not_run_on() -> None:
    text = "don't unbelievably(nice) 3rd é漢"
    tokenizer = Tokenizer.train(["abc"], 258)  # bytes and the end of text, but for one merge
    ids = np.array(tokenizer.encode(text), np.int64)
    starts = Vocabulary.of(tokenizer).word_starts(ids)
    cuts = [*np.flatnonzero(starts).tolist(), len(ids)]
    assert [tokenizer.decode(ids[a:b]) for a, b in pairwise(cuts)] == [
        "don",
        "'",
        "t",
        " ",
        "unbelievably",
        "(",
        "nice",
        ")",
        " ",
        "3rd",
        " ",
        "é漢",
    ]


def test_a_file_without_pairs_is_refused(tmp_path: Path) -> None:
    file = write_sentences(tmp_path / "text", [[5], [9]])
    with pytest.raises(BadInput, match=r"no document of the token file .*text has two sentences"):
        PairSamples(file, plain_vocabulary(), S, 1)
