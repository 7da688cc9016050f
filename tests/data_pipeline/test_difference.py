"""What a change does to a text's number of tokens is told by the lines that changed, whatever stands around them."""

import re
import tempfile
from functools import cache
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, pre_tokenizers
from tokenizers import Tokenizer as Backend

from data_pipeline.passes.prepare import difference
from data_pipeline.tokens.tokenizer import Tokenizer
from tests.data_pipeline.conftest import sentences

WORDS = st.sampled_from(
    ["\n", "\n\n", "\n  ", " \n", "\r\n", "\t", "\u00a0", "\u180e", "\u2028", "\x1c", " ", "'", "'s", "'re", "the",
     " of", "é", "1", "日本", "!", "..."]
)  # fmt: skip
TEXTS = st.lists(st.tuples(WORDS, WORDS | st.none()), max_size=20)
"""Words and what each becomes, None if it stays."""


@cache
def backend() -> Backend:
    with tempfile.TemporaryDirectory() as folder:
        Tokenizer.train([sentences(20, seed).replace(". ", "\n\n  ") for seed in range(20)], 600).save(Path(folder))
        return Backend.from_file(str(Path(folder) / "tokenizer.json"))


def count(text: str) -> int:
    return len(backend().encode(text, add_special_tokens=False).ids)


@settings(max_examples=1000)
@given(TEXTS)
def test_the_parts_differ_by_as_many_tokens_as_the_texts(words: list[tuple[str, str | None]]) -> None:
    before = "".join(old for old, _ in words)
    after = "".join(old if new is None else new for old, new in words)
    left, right = difference(before, after)
    assert count(left) - count(right) == count(before) - count(after)


def test_lines_that_stay_are_left_out() -> None:
    text = "\n".join(f"line {number} is like this" for number in range(1000))
    left, right = difference(text, text.replace("line 500 ", "line “500” "))
    assert "line 500 " in left
    assert "line “500” " in right
    assert max(len(left), len(right)) < 100


def test_white_space_of_the_tokenizer_is_white_space_here() -> None:
    text = "".join(chr(code) for code in range(0x30000) if not 0xD800 <= code < 0xE000)
    others = pre_tokenizers.Split(Regex(r"\S+"), "removed").pre_tokenize_str(text)
    spaces = "".join(found for found, _ in others)
    assert len(spaces) > 20
    assert re.fullmatch(r"\s+", spaces)
