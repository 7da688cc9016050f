"""The tokenizer: exact GPT-2 ids, those of `tokenizers` and tiktoken, lossless text, repeatable
training."""

import hashlib
import itertools
import json
import os
import random
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from pydoc_data import topics
from typing import Any

import pytest
import tiktoken
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import BertWordPieceTokenizer

from mlm_repro.data_pipeline.contamination.testsets import TEST_SETS, find_gpt2_vocabulary
from mlm_repro.data_pipeline.tokens.sentences import Vocabulary
from mlm_repro.data_pipeline.tokens.tokenizer import (
    CHECKED_TEXTS,
    END_OF_TEXT,
    Tokenizer,
    _byte_level,
    padded_vocab_size,
)
from mlm_repro.lineage.errors import BadInput, IntegrityFailure
from tests.data_pipeline.conftest import sentences

CORPUS = [sentences(20, seed) for seed in range(20)]


@pytest.fixture(scope="module")
def trained() -> Tokenizer:
    return Tokenizer.train(CORPUS, 400)


@given(vocab_size=st.integers(1, 10**6), multiple=st.integers(1, 1024), tp=st.integers(1, 64))
def test_padded_size_is_the_smallest_multiple(vocab_size: int, multiple: int, tp: int) -> None:
    padded = padded_vocab_size(vocab_size, multiple, tp)
    assert padded % (multiple * tp) == 0
    assert vocab_size <= padded < vocab_size + multiple * tp


@pytest.mark.parametrize(
    ("tp", "padded"), [(1, 50_304), (2, 50_432), (4, 50_688), (8, 51_200), (16, 51_200)]
)
def test_padded_sizes_of_gpt2(tp: int, padded: int) -> None:
    assert padded_vocab_size(50_257, 128, tp) == padded


def test_trained_vocabulary_has_the_asked_size(trained: Tokenizer) -> None:
    assert trained.vocab_size == 400
    assert trained.end_of_text == 399
    assert max(trained.encode(CORPUS[0])) < 399
    assert len(trained.encode(CORPUS[0])) < 0.5 * len(CORPUS[0])


@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_text_survives_the_round_trip(trained: Tokenizer, text: str) -> None:
    assert trained.decode(trained.encode(text)) == text
    assert trained.encode_batch([text, "", text]) == [
        trained.encode(text),
        [],
        trained.encode(text),
    ]


def test_tokens_do_not_cross_words(trained: Tokenizer) -> None:
    frequent = Tokenizer.train(["of the of the of the of the"] * 50, 262)
    assert frequent.encode("of the") == frequent.encode("of") + frequent.encode(" the")
    assert len(frequent.encode("of the")) == 2
    assert trained.encode("it's 1234") == [
        t for part in ("it", "'s", " 1234") for t in trained.encode(part)
    ]


def test_literal_end_of_text_is_ordinary_text(trained: Tokenizer) -> None:
    ids = trained.encode("a<|endoftext|>b")
    assert trained.end_of_text not in ids
    assert trained.decode(ids) == "a<|endoftext|>b"
    assert trained.decode([trained.end_of_text]) == "<|endoftext|>"


def test_saved_tokenizer_is_the_same(trained: Tokenizer, tmp_path: Path) -> None:
    trained.save(tmp_path)
    loaded = Tokenizer.load(tmp_path)
    content = (tmp_path / "tokenizer.json").read_bytes()
    assert loaded.digest == trained.digest == hashlib.sha256(content).hexdigest()
    assert loaded.encode(CORPUS[1]) == trained.encode(CORPUS[1])
    assert loaded.end_of_text == trained.end_of_text


def test_training_does_not_depend_on_threads(trained: Tokenizer) -> None:
    code = (
        "import json, sys; from mlm_repro.data_pipeline.tokens.tokenizer import Tokenizer; "
        "print(Tokenizer.train(json.load(sys.stdin), 400).digest)"
    )
    for setting in ({"RAYON_NUM_THREADS": "3"}, {"TOKENIZERS_PARALLELISM": "false"}):
        digest = subprocess.check_output(
            [sys.executable, "-c", code],
            env=os.environ | setting,
            input=json.dumps(CORPUS),
            text=True,
        )
        assert digest.strip() == trained.digest


def test_unusable_files(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"tokenizer\.json"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(IntegrityFailure):
        Tokenizer.load(tmp_path)
    with pytest.raises(BadInput, match="vocabulary"):
        Tokenizer.from_gpt2_files(tmp_path / "tokenizer.json", tmp_path / "tokenizer.json")
    with pytest.raises(BadInput, match="too small"):
        Tokenizer.train(["abab"], 1000)


GROWING = [{"type": "Replace", "pattern": {"String": "e"}, "content": "e" * 5}] * 2


@pytest.mark.parametrize(
    "text", [{"type": "Sequence", "normalizers": GROWING}, {"type": "Lowercase"}], ids=str
)
def test_what_is_done_to_text_before_is_bounded_and_told(
    trained: Tokenizer, tmp_path: Path, text: Any
) -> None:
    trained.save(tmp_path)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps(content | {"normalizer": text}))
    if "normalizers" in text:
        with pytest.raises(IntegrityFailure, match="may make a text over 16 times longer"):
            Tokenizer.load(tmp_path)
    else:
        assert "comes back as \"it's they'll" in Tokenizer.load(tmp_path).changes()
        assert trained.changes() == ""


def test_of_a_sentencepiece_model_is_said_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"\n\x0e\n\x05<unk>")
    for path in (tmp_path, tmp_path / "tokenizer.model"):
        with pytest.raises(
            BadInput, match=r"; transformers makes tokenizer\.json from a SentencePiece model"
        ):
            Tokenizer.open(path)


def test_a_tokenizer_of_transformers_keeps_its_ids(tmp_path: Path) -> None:
    """A word piece vocabulary, whose files name no end of text; it parts signs, so that a special
    token is pieces."""
    words = BertWordPieceTokenizer()
    words.train_from_iterator(CORPUS, vocab_size=300, show_progress=False)
    words.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(
        BadInput, match=r"no <\|endoftext\|> token to end a text; its special tokens are .*\[SEP\]"
    ):
        Tokenizer.open(tmp_path)
    ours = Tokenizer.open(tmp_path / "tokenizer.json", "[SEP]")
    theirs = words.encode(f"{CORPUS[0]} [ SEP ]", add_special_tokens=False).ids
    assert ours.encode(f"{CORPUS[0]} [SEP]") == theirs
    assert ours.end_of_text == words.token_to_id("[SEP]") not in ours.encode("a [SEP] b")
    ours.save(tmp_path)
    assert Tokenizer.open(tmp_path).end_of_text == ours.end_of_text


def test_ids_are_from_0_on(trained: Tokenizer, tmp_path: Path) -> None:
    trained.save(tmp_path)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    content["model"]["vocab"]["zzzz"] = 4_000_000_000
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    if (process := os.fork()) == 0:  # where its memory is not enough, the library ends it
        try:
            resource.setrlimit(resource.RLIMIT_DATA, (3 << 30, 3 << 30))
            with pytest.raises(IntegrityFailure, match="have gaps"):
                Tokenizer.load(tmp_path)
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(process, 0)[1] == 0


def test_half_a_surrogate_pair_is_no_text(trained: Tokenizer) -> None:
    with pytest.raises(ValueError, match="surrogates"):
        trained.encode("a\ud800b")


WORDY = ["the cat, the dog: the end!", "a cat; the end. <|endoftext|>", "all the cats"]


def test_words_are_numbered_by_falling_frequency(tmp_path: Path) -> None:
    words = Tokenizer.of_words(WORDY, 259)
    words.save(tmp_path)
    loaded = Tokenizer.load(tmp_path)
    assert (loaded.vocab_size, loaded.end_of_text, loaded.is_of_words) == (259, 0, True)
    assert words.digest == loaded.digest == Tokenizer.of_words(iter(WORDY), 259).digest
    counts = [sum(loaded.encode(text).count(token) for text in WORDY) for token in (257, 258)]
    assert [loaded.decode([257]), loaded.decode([258]), counts] == [" the", " cat", [4, 2]]
    assert Vocabulary.of(loaded).begins_with_space[257:].tolist() == [True, True]
    assert 0 not in loaded.encode("<|endoftext|>")


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_a_word_outside_a_vocabulary_of_words_is_spelled(text: str) -> None:
    words = Tokenizer.of_words(WORDY, 262)
    assert words.decode(words.encode(text)) == text
    assert words.encode(" cat zebra")[1:] == [
        byte for letter in " zebra" for byte in words.encode(letter)
    ]


def test_a_vocabulary_of_more_words_than_there_are_is_refused() -> None:
    with pytest.raises(BadInput, match="it gives 267 bytes and words"):
        Tokenizer.of_words(WORDY, 300)


VOCABULARIES = ["trained-300", "trained-1500"]
MIXED = [
    *(sentences(20, seed) for seed in range(20)),
    *CHECKED_TEXTS,
    Path(json.__file__).read_text(encoding="utf-8"),
]
PIECES = st.sampled_from(
    [
        "  ",
        "\n",
        "\r\n",
        "\t",
        "\u00a0",
        "\u3000",
        "'",
        "'s",
        "'S",
        "'re",
        "'ll",
        "'v",
        "the",
        " of",
        "é",
        "e\u0301",
        "1",
        "²",
        "٣",
        "日本",
        "!",
        "...",
        "🙂",
        "\u200d",
        "\x00",
        "\x1c",
        "ﬀ",
        "<|endoftext|>",
        "\U00011de1",
    ]
)
ANY_TEXTS = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"])),
    st.lists(PIECES, max_size=30).map("".join),
    st.text("abeht '\n", max_size=80),
)


@cache
def vocabulary(name: str) -> Tokenizer:
    if name == "gpt2":
        return Tokenizer.from_gpt2_files(*find_gpt2_vocabulary())
    return Tokenizer.train(MIXED, int(name.split("-")[1]))


def differing(vocabulary: Tokenizer, texts: list[str]) -> Iterator[str]:
    """The texts on which the fast encoder and `tokenizers` differ."""
    encode = vocabulary._fast()
    for text, theirs in zip(
        texts, vocabulary._backend.encode_batch_fast(texts, add_special_tokens=False), strict=True
    ):
        if encode(text).tolist() != theirs.ids:
            yield text[:100]


@pytest.mark.parametrize("name", VOCABULARIES)
@settings(max_examples=300)
@given(texts=st.lists(ANY_TEXTS, min_size=1, max_size=5))
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
        for alphabet in (
            "a",
            " ",
            "ab",
            "=",
            "the",
            "abcdefghijklmnopqrstuvwxyz",
            "日本語",
            "é",
            "\n ",
        )
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
    byte_of = {letter: ord(letter) for letter in letters} | {
        chr(256 + n): byte for n, byte in enumerate(hidden)
    }
    known = vocabulary(name)._backend.get_vocab()
    ranks = {
        bytes(byte_of[letter] for letter in token): known[token]
        for token in known
        if token != END_OF_TEXT
    }
    expression = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    return tiktoken.Encoding(name, pat_str=expression, mergeable_ranks=ranks, special_tokens={})


def test_the_published_vocabulary_has_the_ids_of_both_outsiders(published: Path) -> None:
    """On every text of the tests above and on the test sets."""
    files = [
        (published / TEST_SETS[name].place).read_text(encoding="utf-8")
        for name in ("wikitext103", "lambada")
    ]
    lines = [line for file in files for line in file.splitlines(keepends=True)]
    texts = [*every_code_point(), *words_of_any_length(), *megabytes(), *found_texts(), *lines]
    assert list(differing(vocabulary("gpt2"), texts)) == []
    outsider = in_tiktoken("gpt2")
    for text in (*MIXED, files[0]):
        assert vocabulary("gpt2").encode(text) == outsider.encode_ordinary(text)


def test_a_vocabulary_without_every_byte_is_left_to_its_library(
    capsys: pytest.CaptureFixture[str],
) -> None:
    backend = _byte_level({"a": 0, "b": 1, "ab": 2, END_OF_TEXT: 3}, [("a", "b")])
    assert Tokenizer(backend).encode("abcab") == [2, 2]
    assert "warning: the fast byte-level BPE failed with ValueError" in capsys.readouterr().err


def test_the_end_of_a_text_is_asked_for_of_gpt2_s_files_too(tmp_path: Path) -> None:
    tokenizer = Tokenizer.train(MIXED, 300)
    model = json.loads(tokenizer._backend.to_str())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]), encoding="utf-8")
    merges = "\n".join(map(" ".join, model["merges"]))
    (tmp_path / "merges.txt").write_text(f"#version: 0.2\n{merges}\n", encoding="utf-8")
    assert Tokenizer.open(tmp_path).end_of_text == tokenizer.end_of_text
    assert Tokenizer.open(tmp_path, "e").end_of_text == model["vocab"]["e"]
    with pytest.raises(BadInput, match="</s>"):
        Tokenizer.open(tmp_path, "</s>")
