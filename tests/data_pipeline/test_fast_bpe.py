"""The fast encoder gives the ids of `tokenizers` and tiktoken, for any text and any vocabulary of ours."""

import itertools
import json
import random
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from pydoc_data import topics

import pytest
import tiktoken
from hypothesis import given, settings
from hypothesis import strategies as st

from data_pipeline.contamination.testsets import TEST_SETS, find_gpt2_vocabulary
from data_pipeline.tokens.tokenizer import CHECKED_TEXTS, END_OF_TEXT, Tokenizer, _byte_level
from tests.data_pipeline.conftest import sentences
from tests.made_data import ARTICLES, wikitext

VOCABULARIES = ["trained-300", "trained-1500"]
CORPUS = [*(sentences(20, seed) for seed in range(20)), *CHECKED_TEXTS, Path(json.__file__).read_text(encoding="utf-8")]
PIECES = st.sampled_from(
    ["  ", "\n", "\r\n", "\t", "\u00a0", "\u3000", "'", "'s", "'S", "'re", "'ll", "'v", "the", " of", "é", "e\u0301",
     "1", "²", "٣", "日本", "!", "...", "🙂", "\u200d", "\x00", "\x1c", "ﬀ", "<|endoftext|>", "\U00011de1"]
)  # fmt: skip
TEXTS = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"])),
    st.lists(PIECES, max_size=30).map("".join),
    st.text("abeht '\n", max_size=80),
)


@cache
def vocabulary(name: str) -> Tokenizer:
    if name == "gpt2":
        return Tokenizer.from_gpt2_files(*find_gpt2_vocabulary())
    return Tokenizer.train(CORPUS, int(name.split("-")[1]))


def differing(vocabulary: Tokenizer, texts: list[str]) -> Iterator[str]:
    """The texts on which the fast encoder and `tokenizers` differ."""
    encode = vocabulary._fast()
    for text, theirs in zip(texts, vocabulary._backend.encode_batch_fast(texts, add_special_tokens=False), strict=True):
        if encode(text).tolist() != theirs.ids:
            yield text[:100]


@pytest.mark.parametrize("name", VOCABULARIES)
@settings(max_examples=300)
@given(texts=st.lists(TEXTS, min_size=1, max_size=5))
def test_any_text_has_the_ids_of_the_reference(name: str, texts: list[str]) -> None:
    assert list(differing(vocabulary(name), texts)) == []


def every_code_point() -> list[str]:
    shown = [chr(code) for code in itertools.chain(range(0xD800), range(0xE000, 0x30000, 7))]
    texts = [f"a{one}1 {one}!{one} {one}{one}\n" for one in shown]
    return ["".join(texts[at : at + 500]) for at in range(0, len(texts), 500)]


def words_of_any_length() -> list[str]:
    rng = random.Random(0)
    return [
        "".join(rng.choices(alphabet, k=size))
        for alphabet in ("a", " ", "ab", "=", "the", "abcdefghijklmnopqrstuvwxyz", "日本語", "é", "\n ")
        for size in (1, 2, 7, 8, 9, 10, 31, 32, 33, 34, 64, 100, 1000, 5000)
    ]


def megabytes() -> list[str]:
    """Words of a megabyte."""
    return [letter * (1_000_000 // len(letter.encode())) for letter in ("a", " ", "日")]


def found_texts() -> list[str]:
    files = [Path(topics.__file__), *sorted(Path(json.__file__).parents[1].glob("*.py"))[:80]]
    return [file.read_text(encoding="utf-8", errors="replace") for file in files]


@pytest.mark.parametrize("texts", [every_code_point, words_of_any_length, megabytes, found_texts])
@pytest.mark.parametrize("name", VOCABULARIES)
def test_texts_have_the_ids_of_the_reference(name: str, texts: Callable[[], list[str]]) -> None:
    assert list(differing(vocabulary(name), texts())) == []


def in_tiktoken(name: str) -> tiktoken.Encoding:
    """The vocabulary in tiktoken."""
    letters = {chr(code) for code in (*range(33, 127), *range(161, 173), *range(174, 256))}
    hidden = (byte for byte in range(256) if chr(byte) not in letters)
    byte_of = {letter: ord(letter) for letter in letters} | {chr(256 + n): byte for n, byte in enumerate(hidden)}
    known = vocabulary(name)._backend.get_vocab()
    ranks = {bytes(byte_of[letter] for letter in token): known[token] for token in known if token != END_OF_TEXT}
    expression = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    return tiktoken.Encoding(name, pat_str=expression, mergeable_ranks=ranks, special_tokens={})


@pytest.mark.parametrize("name", VOCABULARIES)
def test_a_second_outsider_agrees(name: str) -> None:
    outsider = in_tiktoken(name)
    for text in (*CORPUS, wikitext(ARTICLES, seed=1)):
        assert vocabulary(name).encode(text) == outsider.encode_ordinary(text)


def test_the_published_vocabulary_has_the_ids_of_both_outsiders(published: Path) -> None:
    """On every text of the tests above and on the test sets."""
    files = [(published / TEST_SETS[name].place).read_text(encoding="utf-8") for name in ("wikitext103", "lambada")]
    lines = [line for file in files for line in file.splitlines(keepends=True)]
    texts = [*every_code_point(), *words_of_any_length(), *megabytes(), *found_texts(), *lines]
    assert list(differing(vocabulary("gpt2"), texts)) == []
    outsider = in_tiktoken("gpt2")
    for text in (*CORPUS, files[0]):
        assert vocabulary("gpt2").encode(text) == outsider.encode_ordinary(text)


def test_a_vocabulary_without_every_byte_is_left_to_its_library(capsys: pytest.CaptureFixture[str]) -> None:
    backend = _byte_level({"a": 0, "b": 1, "ab": 2, END_OF_TEXT: 3}, [("a", "b")])
    assert Tokenizer(backend).encode("abcab") == [2, 2]
    assert "WARNING: the fast byte-level BPE failed with ValueError" in capsys.readouterr().err
