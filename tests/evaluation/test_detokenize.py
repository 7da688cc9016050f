"""Megatron's 24 rules alone and in order; the invertible detokenizer, undone for every text."""

from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from evaluation.detokenize import ESCAPE, WIKITEXT_RULES, detokenize_invertibly, detokenize_wikitext, retokenize

RULES = [
    ("the boys ' club", "the boys' club"),
    ("/' 9/ and ' 90s", "/'[0-9]/ and ' 90s"),
    ("well @-@ known", "well-known"),
    ("1 @,@ 000", "1,000"),
    ("3 @.@ 5", "3.5"),
    ("so : this", "so: this"),
    ("so ; this", "so; this"),
    ("so . This", "so. This"),
    ("so ! This", "so! This"),
    ("so ? This", "so? This"),
    ("so , this", "so, this"),
    ("( a b )", "(a b)"),
    ("[ a b ]", "[a b]"),
    ("{ a b }", "{a b}"),
    ('" a b " c " d "', '"a b" c "d"'),
    ("' a b ' c", "'a b' c"),
    ("= = = = Deep = = = =", "==== Deep ===="),
    ("= = = Sub = = =", "=== Sub ==="),
    ("= = Head = =", "== Head =="),
    ("40 ° N", "40°N"),
    ("line \nnext", "line\nnext"),
    ("line\n next", "line\nnext"),
    ("about N things", "about 1 things"),
    ("it 's", "it's"),
]


def test_there_is_an_example_for_each_rule() -> None:
    assert len(RULES) == len(WIKITEXT_RULES) == 24


@pytest.mark.parametrize("number", range(24))
def test_rule(number: int) -> None:
    before, after = RULES[number]
    assert WIKITEXT_RULES[number](before) == after


@pytest.mark.parametrize("number", range(24))
def test_an_example_belongs_to_its_rule_alone(number: int) -> None:
    before, after = RULES[number]
    changing = [index for index, rule in enumerate(WIKITEXT_RULES) if rule(before) == after]
    assert changing == [number]


def test_punctuation_needs_a_following_space() -> None:
    assert detokenize_wikitext("The end .") == "The end ."
    assert detokenize_wikitext("The end . \n") == "The end.\n"


def test_quotes_pair_across_lines_and_one_odd_quote_turns_the_rest_inside_out() -> None:
    assert detokenize_wikitext('he said " hello\n there " now') == 'he said "hello\nthere" now'
    assert detokenize_wikitext('an inch " , " a b " and " c') == 'an inch "," a b "and" c'


def test_apostrophes_pair_so_that_every_second_contraction_is_joined() -> None:
    assert detokenize_wikitext("do n 't or ca n 't") == "do n 't or ca n't"


def test_headings_deepest_first() -> None:
    assert detokenize_wikitext(" = = = Early life = = = \n") == " === Early life ===\n"


def test_unknown_words_stay_as_they_are() -> None:
    assert detokenize_wikitext("the <unk> , of <unk>") == "the <unk>, of <unk>"


PIECES = r"""a s Mr Mr. U.S. boys 5 1,000 3-4 @-@ @,@ @.@ 's 't ' " <unk> == -- ... don't (a)"""
words = st.one_of(
    st.sampled_from([*PIECES.split(), *"()[]{}.,;:!?%°$£€=-\\", ". . .", "\\ a"]),
    st.text(st.characters(codec="utf-8"), max_size=4),
)
lines = st.lists(words, max_size=12).map(lambda line: f" {' '.join(line)} \n")
texts = st.one_of(st.lists(lines, max_size=4).map("".join), st.text(max_size=40), st.text(" \n\\ab.,-\"'", max_size=30))


@given(texts)
@example("")
@example(" ")
@example(" \n")
@example("\\")
@example("no edges\n  two  spaces \n\n a\tb \n \\ a \n end")
def test_every_text_comes_back(text: str) -> None:
    assert retokenize(detokenize_invertibly(text)) == text


@pytest.mark.parametrize("name", ["wiki.test.tokens", "wiki.valid.tokens"])
def test_the_published_files_come_back(published: Path, name: str) -> None:
    text = (published / "wikitext-103" / name).read_bytes().decode()
    detokenized = detokenize_invertibly(text)
    assert retokenize(detokenized) == text
    escapes = sum(word.startswith(ESCAPE) for line in detokenized.split("\n") for word in line.split(" "))
    assert escapes < 60
    assert len(detokenized) < 0.97 * len(text)


@pytest.mark.parametrize(
    ("written", "english"),
    [
        (" \n = = Early life = = \n", "\n== Early life ==\n"),
        (' He said " yes , ( once ) . " \n', 'He said "yes, (once)."\n'),
        (" the boys ' club didn 't see Bob 's \n", "the boys' club didn't see Bob's\n"),
        (" a well @-@ known 1 @,@ 000 or 3 @.@ 5 % \n", "a well-known 1,000 or 3.5%\n"),
        (" Mr. Smith of the U.S. Army \n", "Mr. Smith of the U.S. Army\n"),
        (" of <unk> , <unk> . \n", "of <unk>, <unk>.\n"),
    ],
)
def test_it_reads_as_english(written: str, english: str) -> None:
    assert detokenize_invertibly(written) == english


def test_what_would_be_misread_is_escaped() -> None:
    assert detokenize_invertibly(" Mr . Smith \n") == "Mr . Smith\n"
    assert detokenize_invertibly(" end. \n") == "\\end.\n"
    assert detokenize_invertibly("bare") == "\\bare"
