"""Megatron's 24 rules alone and in order."""

import pytest

from evaluation.detokenize import WIKITEXT_RULES, detokenize_wikitext

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
