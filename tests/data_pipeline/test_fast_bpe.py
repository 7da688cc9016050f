"""The compiled BPE gives the ids of `tokenizers` and tiktoken, for any text and any vocabulary of ours."""

import itertools
import json
import random
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from pydoc_data import topics

import numpy as np
import pytest
import tiktoken
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, pre_tokenizers
from tokenizers import Tokenizer as Backend

from data_pipeline.contamination.testsets import TEST_SETS, find_gpt2_vocabulary
from data_pipeline.fast.bpe import LAST_CLASSIFIED, LETTER, NUMBER, OTHER, SPACE, FastBpe, character_classes
from data_pipeline.tokens.tokenizer import CHECKED_TEXTS, END_OF_TEXT, Tokenizer
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
def vocabulary(name: str) -> tuple[Backend, FastBpe]:
    """The `tokenizers` of a vocabulary, and ours."""
    if name == "gpt2":
        tokenizer = Tokenizer.from_gpt2_files(*find_gpt2_vocabulary())
    else:
        tokenizer = Tokenizer.train(CORPUS, int(name.split("-")[1]))
    model = json.loads(tokenizer._content())["model"]
    return tokenizer._backend, FastBpe(model["vocab"], model["merges"])


def differing(name: str, texts: list[str]) -> Iterator[str]:
    """The texts on which the two differ."""
    backend, fast = vocabulary(name)
    for text, theirs in zip(texts, backend.encode_batch_fast(texts, add_special_tokens=False), strict=True):
        if fast.encode(text).tolist() != theirs.ids:
            yield text[:100]


def test_every_code_point_has_the_class_the_reference_gives_it() -> None:
    classes = character_classes()
    codes = np.array([code for code in range(0x110000) if not 0xD800 <= code < 0xE000])
    text = "".join(map(chr, codes))
    for kind, expression in ((LETTER, r"\p{L}+"), (NUMBER, r"\p{N}+"), (SPACE, r"\s+"), (OTHER, r"[^\s\p{L}\p{N}]+")):
        others = pre_tokenizers.Split(Regex(expression), "removed").pre_tokenize_str(text)
        expected = np.ones(len(codes), bool)
        for _, (start, end) in others:
            expected[start:end] = False
        assert np.array_equal(classes[codes] == kind, expected)
        assert np.count_nonzero(classes == kind) > 10
    assert set(classes[LAST_CLASSIFIED + 1 :].tolist()) == {OTHER}


@pytest.mark.parametrize("name", VOCABULARIES)
@settings(max_examples=300)
@given(text=TEXTS)
def test_any_text_has_the_ids_of_the_reference(name: str, text: str) -> None:
    assert list(differing(name, [text])) == []


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
    assert list(differing(name, texts())) == []


def in_tiktoken(name: str) -> tiktoken.Encoding:
    """The vocabulary in tiktoken."""
    letters = {chr(code) for code in (*range(33, 127), *range(161, 173), *range(174, 256))}
    hidden = (byte for byte in range(256) if chr(byte) not in letters)
    byte_of = {letter: ord(letter) for letter in letters} | {chr(256 + n): byte for n, byte in enumerate(hidden)}
    known = vocabulary(name)[0].get_vocab()
    ranks = {bytes(byte_of[letter] for letter in token): known[token] for token in known if token != END_OF_TEXT}
    expression = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    return tiktoken.Encoding(name, pat_str=expression, mergeable_ranks=ranks, special_tokens={})


@pytest.mark.parametrize("name", VOCABULARIES)
def test_a_second_outsider_agrees(name: str) -> None:
    outsider, (_, fast) = in_tiktoken(name), vocabulary(name)
    for text in (*CORPUS, wikitext(ARTICLES, seed=1)):
        assert fast.encode(text).tolist() == outsider.encode_ordinary(text)


def test_the_published_vocabulary_has_the_ids_of_both_outsiders(published: Path) -> None:
    """On every text of the tests above and on the test sets."""
    files = [(published / TEST_SETS[name].place).read_text(encoding="utf-8") for name in ("wikitext103", "lambada")]
    lines = [line for file in files for line in file.splitlines(keepends=True)]
    texts = [*every_code_point(), *words_of_any_length(), *megabytes(), *found_texts(), *lines]
    assert list(differing("gpt2", texts)) == []
    outsider, (_, fast) = in_tiktoken("gpt2"), vocabulary("gpt2")
    for text in (*CORPUS, files[0]):
        assert fast.encode(text).tolist() == outsider.encode_ordinary(text)


def test_words_that_share_a_place_in_the_cache() -> None:
    """So many of each kind, short and long, that thousands drive another out between their two visits."""
    rng = random.Random(1)
    words = [" " + "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(4, 10))) for _ in range(100_000)]
    assert list(differing("trained-300", ["".join(words), "".join(words[::-1])])) == []


def test_a_vocabulary_without_every_byte_is_refused() -> None:
    with pytest.raises(KeyError):
        FastBpe({"a": 0, "b": 1, "ab": 2}, [("a", "b")])


def test_ids_beyond_16_bits() -> None:
    model = json.loads(vocabulary("trained-1500")[0].to_str())["model"]
    wide = FastBpe({token: number + 100_000 for token, number in model["vocab"].items()}, model["merges"])
    for text in CORPUS:
        assert np.array_equal(wide.encode(text), vocabulary("trained-1500")[1].encode(text) + 100_000)
