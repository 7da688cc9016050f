"""Megatron-LM's detokenizer of WikiText-103.

It has 24 rules, in order, on the whole file as a string (`tasks/zeroshot_gpt2/detokenizer.py` of
Megatron-LM v1.0). The published perplexities depend on its defects, so they are kept: quotes and
apostrophes are paired across the whole file (an odd quote turns all later pairs inside out), one
rule can never match, and one belongs to another corpus. It loses no word, but it is not invertible.
"""

import re
from collections.abc import Callable

NAME = "megatron-wikitext"
Rule = Callable[[str], str]


def _replace(old: str, new: str) -> Rule:
    return lambda text: text.replace(old, new)


def _substitute(pattern: str, replacement: str) -> Rule:
    compiled = re.compile(pattern)
    return lambda text: compiled.sub(replacement, text)


WIKITEXT_RULES: tuple[Rule, ...] = (
    # plural possessive: "boys ' club"; also hits an opening quote after any final s
    _replace("s '", "s'"),
    # meant for "' 90s"; its slashes are literal, so it never matches
    _substitute("/' [0-9]/", "/'[0-9]/"),
    _replace(" @-@ ", "-"),  # WikiText's mark for a hyphen inside a word
    _replace(" @,@ ", ","),  # and for a thousands separator
    _replace(" @.@ ", "."),  # and for a decimal point
    _replace(" : ", ": "),  # punctuation joins the word before it, if a space follows
    _replace(" ; ", "; "),
    _replace(" . ", ". "),
    _replace(" ! ", "! "),
    _replace(" ? ", "? "),
    _replace(" , ", ", "),
    _substitute(r"\(\s*([^\)]*?)\s*\)", r"(\1)"),  # no white space inside brackets
    _substitute(r"\[\s*([^\]]*?)\s*\]", r"[\1]"),
    _substitute(r"{\s*([^}]*?)\s*}", r"{\1}"),  # no brace stands in the test file
    # quotes, paired left to right over the whole file, newlines too
    _substitute(r'"\s*([^"]*?)\s*"', r'"\1"'),
    # every second apostrophe closes, contractions included
    _substitute(r"'\s*([^']*?)\s*'", r"'\1'"),
    _replace("= = = =", "===="),  # headings, the deepest first
    _replace("= = =", "==="),
    _replace("= =", "=="),
    _replace(" ° ", "°"),  # degrees
    _replace(" \n", "\n"),  # WikiText begins and ends each line with a space
    _replace("\n ", "\n"),
    _replace(" N ", " 1 "),  # the Penn Treebank's mark for a number; no WikiText mark
    _replace(" 's", "'s"),  # singular possessive and "it 's"
)


def detokenize_wikitext(text: str) -> str:
    """Return a WikiText file's text after every rule of `WIKITEXT_RULES` in turn. The text must be
    the whole file, not single lines."""
    for rule in WIKITEXT_RULES:
        text = rule(text)
    return text
