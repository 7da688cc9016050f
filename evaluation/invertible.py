"""A WikiText detokenizer that can be undone for every text, beside Megatron-LM's, which cannot.

WikiText separates words and punctuation by single spaces. `detokenize` writes them as English is written; `retokenize`
takes any chunk between two spaces apart again by fixed rules. Where those rules would not give back what stood there
("Mr." as one word, "1,000" without WikiText's marks), the words stay apart, and what even then would be misread begins
with a backslash. So `retokenize(detokenize(text)) == text` holds whatever the text is.
"""

import re

NAME = "invertible-wikitext"

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
"""Words that end in a period of their own."""

_MARK = re.compile(r"(?<=[^-])-(?=[^-])|(?<=[0-9])[,.](?=[0-9])")
_HEADING = re.compile(r"=+")


def detokenize(text: str) -> str:
    """The text with WikiText's spacing turned into ordinary spacing."""
    *lines, rest = text.split("\n")
    return "\n".join([*map(_join_line, lines), ESCAPE + rest if rest else ""])


def retokenize(text: str) -> str:
    """What `detokenize` was given."""
    *lines, rest = text.split("\n")
    return "\n".join([*map(_split_line, lines), rest.removeprefix(ESCAPE)])


def _join_line(line: str) -> str:
    """A line ` a b c ` joined; any other shape is kept behind an escape and a space."""
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
    """Words that stand together in English; quotation marks open and close in turn within the line."""
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
    """The words of a chunk, whatever it was made of."""
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
