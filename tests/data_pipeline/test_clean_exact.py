"""The fast cleaning gives ftfy's text, character for character."""

import re
import sys
import tracemalloc
from collections.abc import Iterator
from importlib import import_module
from itertools import pairwise, product
from typing import Any
from unicodedata import combining, normalize

import ftfy
import pytest
from ftfy import chardata
from ftfy.badness import BADNESS_RE, MOJIBAKE_CATEGORIES
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mlm_repro.data_pipeline.document import Unfit
from mlm_repro.data_pipeline.fast import exact_ftfy
from mlm_repro.data_pipeline.fast.exact_ftfy import (
    SAMPLES,
    SEGMENT,
    Normalization,
    fast_fix_text,
    fix_text,
)
from tests.data_pipeline.foreign_text import found_texts, made_texts, package_descriptions
from tests.made_data import ARTICLES, wikitext

FAST = {form: fast_fix_text(form) for form in ("NFC", "NFKC")}
forms = st.sampled_from(("NFC", "NFKC"))

ENCODINGS = (
    "latin-1",
    "cp1252",
    "cp1251",
    "cp1250",
    "cp1253",
    "cp1254",
    "cp1257",
    "iso8859-2",
    "mac_roman",
    "cp437",
)
MOJIBAKE = sorted(
    character
    for character in map(chr, range(0x80, 0x10000))
    if re.match("[" + "".join(MOJIBAKE_CATEGORIES.values()) + "]", character)
)
GAPS = (*[""] * 6, "x" * 6, "x" * 7, "x" * 14, "\n")
PIECES = [
    *"ab &<>;\n\r\t'\"\\",
    "&amp;",
    "&lt;",
    "&#39;",
    "&#x110000;",
    "&nbsp;",
    "&NTILDE;",
    "&amp\u037e",
    "<b>",
    "\x1b[0m",
    "\x00",
    "\x0b",
    "\x0c",
    "\x7f",
    "\x85",
    "\x92",
    "\xa0",
    "\u2028",
    "\ufeff",
    "\ufffc",
    "\ufffd",
    "\u206a",
    "\ud83d",
    "\ude00",
    "😀",
    "â€™",
    "Ã©",
    "Â ",
    "Ã",
    "ÃÂ",
    "à",
    "“",
    "”",
    "‘",
    "’",
    "„",
    "…",
    "—",
    "é",
    "e\u0301",
    "\u0338",
    "\u212b",
    "\u1fef",
    "\uac00",
    "\u11a8",
    "ﬁ",
    "ŉ",
    "Ǆ",
    "Ａ",
    "ｶﾞ",
    "\u3000",
    "€",
    "™",
    "×²",
    "œ ",
    "Ä",
    "°",
    "Ø",
    "Ù",
    "в",
    "Ђ",
    "˜",
    "plain words ",
    "one line\n",
]


def assert_same(text: str, form: Normalization = "NFC") -> None:
    assert FAST[form](text) == ftfy.fix_text(text, normalization=form)


@pytest.mark.parametrize("form", FAST)
@pytest.mark.parametrize("text", SAMPLES)
def test_samples(text: str, form: Normalization) -> None:
    assert_same(text, form)


@given(
    text=st.lists(st.sampled_from(PIECES), max_size=16).map("".join),
    block=st.sampled_from((1, 16, exact_ftfy.BLOCK)),
    form=forms,
)
@example(text="x &amp; y\n<p> &amp;\n&amp;", block=16, form="NFC")
@example(text="&am‘p; &amp\u037e", block=16, form="NFC")
@settings(max_examples=700)
def test_pieces_that_ftfy_repairs(text: str, block: int, form: Normalization) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exact_ftfy, "BLOCK", block)
        assert_same(text, form)


@given(
    text=st.lists(
        st.tuples(st.sampled_from([*MOJIBAKE, *"aZ. "]), st.sampled_from(GAPS)), max_size=10
    ).map(lambda parts: "".join(character + gap for character, gap in parts)),
    form=forms,
)
@settings(max_examples=800)
def test_suspect_characters_near_and_far(text: str, form: Normalization) -> None:
    assert_same(text, form)


@given(
    text=st.text(st.characters(codec=None, categories=None), max_size=20),
    encoding=st.sampled_from(ENCODINGS),
    rounds=st.integers(0, 2),
    form=forms,
)
@settings(max_examples=700)
def test_text_decoded_with_another_encoding(
    text: str, encoding: str, rounds: int, form: Normalization
) -> None:
    for _ in range(rounds):
        text = text.encode("utf-8", "surrogatepass").decode(encoding, "replace")
    assert_same(text, form)


@given(
    line=st.lists(
        st.sampled_from(
            (
                *(bytes([byte]) for byte in range(0x80, 0x100)),
                *[b" ", b"?", b"\x1a", b"a", b". "] * 8,
            )
        ),
        max_size=8,
    ).map(b"".join),
    encoding=st.sampled_from(chardata.CHARMAP_ENCODINGS),
    lost=st.sampled_from(("", "\ufffd", "\u2026", "Ａ")),
    form=forms,
)
@example(line="“".encode(), encoding="sloppy-windows-1252", lost="\ufffd", form="NFC")
@example(line=b"\xc3? \xc3\xa9", encoding="latin-1", lost="", form="NFC")
@settings(max_examples=400)
def test_bytes_that_are_nearly_utf8(
    line: bytes, encoding: str, lost: str, form: Normalization
) -> None:
    text = line.decode(encoding, "replace")
    assert_same(text, form)
    assert_same(f"{text}{lost} and {text[:2]}{lost}\n", form)


@pytest.mark.parametrize("form", FAST)
def test_every_thirteenth_code_point_in_a_line(form: Normalization) -> None:
    assert_same(
        "\n".join(
            f"a{chr(code)}b" for code in (*range(0x3100), *range(0x3100, sys.maxunicode, 131))
        ),
        form,
    )
    assert_same("\n".join(f"a{chr(code)}b" for code in range(0xF900, 0x10000)), form)


def members(node: tuple[Any, Any]) -> set[str] | None:
    """Return the characters up to U+FFFF of a node of a parsed expression; None if it is no set."""
    kind, value = str(node[0]), node[1]
    if kind == "LITERAL":
        return {chr(value)}
    if kind != "IN":
        return None
    chosen = set[str]()
    for part, codes in value:
        if str(part) == "LITERAL":
            chosen.add(chr(codes))
        elif str(part) == "RANGE":
            chosen.update(map(chr, range(codes[0], codes[1] + 1)))
        elif str(part) != "NEGATE":
            return None
    every = set(map(chr, range(0x10000)))
    return every - chosen if str(value[0][0]) == "NEGATE" else chosen


def test_every_match_of_the_expression_for_mojibake_has_a_suspect_character() -> None:
    """Each alternative of `BADNESS_RE` has two adjacent sets of which each pair of members is
    suspect, or one set whose members are each suspect alone or C1 controls."""
    parsed = import_module("re._parser").parse(BADNESS_RE.pattern, BADNESS_RE.flags)
    [(kind, (_, alternatives))] = parsed
    assert str(kind) == "BRANCH"
    assert len(alternatives) > 30
    assert parsed.getwidth()[1] == exact_ftfy.BADNESS_WIDTH
    suspect = exact_ftfy.SUSPECT.search
    controls = set(map(chr, range(0x80, 0xA0)))

    def is_always_suspect(left: set[str] | None, right: set[str] | None) -> bool:
        if left is None or right is None or not suspect(min(left - controls) + min(right)):
            return False
        pairs = product(left - controls, right - controls)
        return all(suspect(first + second) for first, second in pairs)

    for alternative in alternatives:
        sets = [members(node) for node in alternative]
        assert (
            any(chosen and chosen <= controls for chosen in sets)
            or any(chosen and all(map(suspect, chosen)) for chosen in sets)
            or any(is_always_suspect(*pair) for pair in pairwise(sets))
        ), alternative


def test_suspect_characters_are_of_the_kinds_that_are_searched_for_them() -> None:
    """A block without one that is suspect alone is searched only if it has a rare one and two
    adjacent ones beyond ASCII."""
    every = list(map(chr, range(0x10000)))
    suspect = exact_ftfy.SUSPECT.search
    assert {*filter(suspect, every)} == {*exact_ftfy.ALONE}
    rare = {*re.findall(f"[{exact_ftfy.RARE}]", "".join(every))} - {*exact_ftfy.ALONE}
    assert not suspect("".join(sorted({*every} - rare - {*exact_ftfy.ALONE})))
    assert not any(suspect(f"{first}{other}{first}") for first, other in product(rare, "aZ.7 \n"))
    assert min(map(ord, rare)) > exact_ftfy.LAST_OF_ASCII


def test_every_mark_is_known() -> None:
    every = map(chr, range(sys.maxunicode + 1))
    assert "".join(c for c in every if combining(normalize("NFKD", c)[0])) == exact_ftfy.MARKS


def real_texts() -> Iterator[str]:
    yield from package_descriptions()
    yield from found_texts(150)
    yield from made_texts(2, seed=1)
    yield from wikitext(ARTICLES, seed=1).split("\n = ")


def test_real_text_and_the_same_text_broken() -> None:
    texts = list(real_texts())
    assert sum(not text.isascii() for text in texts) > 100
    for number, text in enumerate(texts):
        assert_same(text)
        if number % 10 == 0:
            assert_same(text, "NFKC")
            broken = (
                text[:3000]
                .encode("utf-8", "surrogatepass")
                .decode(ENCODINGS[number // 10 % 10], "replace")
            )
            assert_same(broken)
            assert_same("a < b\n" + broken)


@pytest.mark.parametrize("distance", [-1, 0, 1])
def test_lines_longer_than_ftfys_segments(distance: int) -> None:
    plain = "plain " * (SEGMENT // 6 + 1)
    head = plain[: SEGMENT + distance]
    assert_same(f"first &amp; line\n{head}“é&amp;\n&lt; last é\n")
    assert_same(f"{head}\n{head}<b>&amp;“{head}&amp;e\u0301")
    assert_same(f"{head[:-1]}e\u0301&amp; â€™")


def test_a_document_of_one_endless_line_in_memory_of_its_size() -> None:
    text = "R&D & “é” & so on; " * 60_000
    expected = 'R&D & "é" & so on; ' * 60_000
    tracemalloc.start()
    try:
        fixed = FAST["NFC"](text)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert fixed == expected
    assert peak < 4 * sys.getsizeof(text)


def test_an_unknown_ftfy_is_used_itself(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(exact_ftfy, "SUPPORTED", "7.0.")
    fix_text.cache_clear()
    try:
        assert [fix_text("NFC")("schÃ¶n") for _ in range(3)] == ["schön"] * 3
    finally:
        fix_text.cache_clear()
    assert (
        capsys.readouterr().err.count(
            "warning: the fast cleaning failed with RuntimeError: fast cleaning is written for"
        )
        == 1
    )


SLOW = {
    "marks": "a" + "\u0301\u0323" * 800_000,
    "marks that decompose": "\u0f73" * 1_600_000,
    "marks as entities": "a" + "&#x301;&#x323;" * 120_000,
    "entities in entities": "&" + "amp;" * 100_000,
    "encodings in encodings": "Ã" + "ƒ" * 100_000,
}


@pytest.mark.parametrize("form", FAST)
@pytest.mark.parametrize("text", SLOW.values(), ids=SLOW)
def test_text_made_to_be_slow_is_refused(text: str, form: Normalization) -> None:
    with pytest.raises(Unfit):
        FAST[form](text)


@pytest.mark.parametrize("form", FAST)
def test_text_that_is_nearly_slow_is_repaired(form: Normalization) -> None:
    for text in (
        "a" + "\u0301\u0323" * 500,
        "&" + "amp;" * 50,
        "Ã" + "ƒ" * 50,
        ("\u0323" * 999 + "a\u0301") * 20,
    ):
        assert_same(text, form)
