"""WikiText-103's detokenizers: Megatron's, and a detokenizer that can be undone for every text.

Megatron's has 24 rules, in order, on the whole file as a string (`tasks/zeroshot_gpt2/detokenizer.py` of Megatron-LM
v1.0). The published perplexities depend on its defects, so they are kept: quotes and apostrophes are paired across the
whole file (an odd quote turns all later pairs inside out), one rule can never match, and one belongs to another corpus.
It loses no word, but it is not invertible.

WikiText separates words and punctuation by single spaces. The invertible detokenizer writes them as English is written,
and `retokenize` takes each chunk between two spaces apart by fixed rules. If the rules would not give the original back
("Mr." as a word, "1,000" without WikiText's marks), the words stay apart, and a word that even then would be misread
begins with a backslash. So `retokenize(detokenize_invertibly(text)) == text` holds for every text.
"""

import re
from collections.abc import Callable

NAME, INVERTIBLE_NAME = "megatron-wikitext", "invertible-wikitext"

Rule = Callable[[str], str]


def _replace(old: str, new: str) -> Rule:
    return lambda text: text.replace(old, new)


def _substitute(pattern: str, replacement: str) -> Rule:
    compiled = re.compile(pattern)
    return lambda text: compiled.sub(replacement, text)


WIKITEXT_RULES: tuple[Rule, ...] = (
    _replace("s '", "s'"),  # plural possessive: "boys ' club"; also hits an opening quote after any final s
    _substitute("/' [0-9]/", "/'[0-9]/"),  # meant for "' 90s"; its slashes are literal, so it never matches
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
    _substitute(r'"\s*([^"]*?)\s*"', r'"\1"'),  # quotes, paired left to right over the whole file, newlines too
    _substitute(r"'\s*([^']*?)\s*'", r"'\1'"),  # every second apostrophe closes, contractions included
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
    """`text` after every rule of `WIKITEXT_RULES` in turn; give it the whole file, not single lines."""
    for rule in WIKITEXT_RULES:
        text = rule(text)
    return text


ESCAPE = "\\"
QUOTE = '"'
OPENING = frozenset("([{$£€")
CLOSING = frozenset(")]}.,;:!?%°")
CLITICS = ("'s", "'t", "'re", "'ve", "'ll", "'d", "'m")
MARKS = {"@-@": "-", "@,@": ",", "@.@": "."}
"""WikiText's marks for a hyphen, a thousands separator and a decimal point inside a word."""
WHOLE = re.compile(
    r"(?:[A-Za-z]\.)+|\.{2,}|"
    r"(?:Mr|Mrs|Ms|Dr|St|Jr|Sr|vs|No|Nos|Co|Corp|Bros|Inc|Ltd|Capt|Lt|Maj|Col|Gen|Gov|Sgt|Prof|Rev|Mt|Ave|var|pp|p|v)\."
)
"""Words whose last character is a period."""

_MARK = re.compile(r"(?<=[^-])-(?=[^-])|(?<=[0-9])[,.](?=[0-9])")
_HEADING = re.compile(r"=+")


def detokenize_invertibly(text: str) -> str:
    """The text with WikiText's spacing turned into ordinary spacing."""
    *lines, rest = text.split("\n")
    return "\n".join([*map(_join_line, lines), ESCAPE + rest if rest else ""])


def retokenize(text: str) -> str:
    """The original text of `detokenize_invertibly`."""
    *lines, rest = text.split("\n")
    return "\n".join([*map(_split_line, lines), rest.removeprefix(ESCAPE)])


def _join_line(line: str) -> str:
    """A line ` a b c ` joined; a line of another shape is kept behind an escape and a space."""
    if line == " ":
        return ""
    words = line[1:-1].split(" ")
    if len(line) < 3 or line[0] != " " or line[-1] != " " or "" in words:
        return f"{ESCAPE} {line}"
    joined: list[str] = []
    for chunk in _chunks(words):
        together = "".join(MARKS.get(word, word) for word in chunk)
        if _split_chunk(together) == chunk:
            joined.append(together)
        else:
            joined += [word if _split_chunk(word) == [word] else ESCAPE + word for word in chunk]
    return " ".join(joined)


def _split_line(line: str) -> str:
    if line.startswith(f"{ESCAPE} "):
        return line[2:]
    if not line:
        return " "
    return f" {' '.join(word for chunk in line.split(' ') for word in _split_chunk(chunk))} "


def _chunks(words: list[str]) -> list[list[str]]:
    """Groups of words that English writes together; quotation marks open and close in turn within the line."""
    chunks: list[list[str]] = []
    attach = open_quote = False
    for word in words:
        closes_quote = word == QUOTE and open_quote
        before = chunks[-1][-1] if chunks else ""
        to_the_left = (
            word in CLOSING
            or word in CLITICS
            or word in MARKS
            or closes_quote
            or (word == "'" and before.endswith("s"))
            or (word == before == "=")
        )
        if chunks and (attach or to_the_left):
            chunks[-1].append(word)
        else:
            chunks.append([word])
        if word == QUOTE:
            open_quote = not open_quote
        attach = word in OPENING or word in MARKS or (word == QUOTE and open_quote)
    return chunks


def _split_chunk(chunk: str) -> list[str]:
    """The words of a chunk."""
    if chunk.startswith(ESCAPE):
        return [chunk[1:]]
    if _HEADING.fullmatch(chunk):
        return ["="] * len(chunk)
    if chunk in MARKS.values():
        return [chunk]
    start, end = 0, len(chunk)
    while end - start > 1 and (chunk[start] in OPENING or chunk[start] == QUOTE):
        start += 1
    tail: list[str] = []
    while end - start > 1 and not WHOLE.fullmatch(chunk, start, end):
        clitic = next((c for c in CLITICS if chunk.endswith(c, start + 1, end)), None)
        if clitic is None and not (chunk[end - 1] in CLOSING or chunk[end - 1] in (QUOTE, "'")):
            break
        tail.append(clitic or chunk[end - 1])
        end -= len(tail[-1])
    core = _MARK.sub(r" @\g<0>@ ", chunk[start:end]).split(" ") if end > start else []
    return [*chunk[:start], *core, *reversed(tail)]
