"""Measures of English prose: function words, letters and sentences; and the paragraphs of a text.

The rules are those of C4 (Raffel et al. 2020, section 2.2: five words, the end of a sentence) and MassiveText (Rae et
al. 2021, appendix A.1.1: stop words, letters, no lists), held against paragraphs instead of lines and pages. Two stop
words in a page say little about a paragraph, so the share of all function words is measured.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import repeat

_LISTED = """
a about above after again against all almost along already also although always am among an and another any are around
as at away be because been before being below between both but by can cannot could did do does done down during each
either else enough even ever every few for from had has have he hence her here him his how however i if in instead
into is it its itself just least less like many may me might more most much must my neither never no nor not now of
off often on once one only or other others otherwise our out over own per perhaps quite rather same several shall she
should since so some still such than that the their them then there therefore these they this those though through
thus to together too toward under unless until up upon us very was we well were what when where whereas whether which
while who whom whose why will with within without would yet you your
"""
FUNCTION_WORDS = frozenset(_LISTED.split())
OTHER_ASCII = bytes(code for code in range(128) if not (chr(code).isalpha() or chr(code).isspace()))
BEYOND_ASCII = re.compile(r"[^\x00-\x7f]")
CLOSING = "\"'`”’)]*_"
AROUND_WORDS = CLOSING + "“‘(.,;:!?["
PARAGRAPHS = re.compile(r"\n(?:\s*\n|[ \t]*[-=~^*+#]{3,}[ \t]*(?=\n))")
SENTENCE_END = re.compile(rf"[.!?][{re.escape(CLOSING)}]*(?=\s|$)")
LIST_ITEM = re.compile(r"\s*(?:(?:[-*+•]|\.\.|\(?\d{1,2}[.)]|\(?[a-z]\)|:[\w ]+:)\s|[@|>])")


@dataclass(frozen=True)
class Composition:
    """Counts of the elements of a text."""

    characters: int
    letters: int
    """Letters and white space."""
    words: int
    function_words: int
    sentences: int

    @property
    def sentence_words(self) -> float:
        """Average words in a sentence; a text without the end of a sentence counts as one."""
        return self.words / max(1, self.sentences)


def measure(text: str) -> Composition:
    """Count the elements of a text; white space divides words."""
    words = text.lower().split()
    ascii_letters = text.encode("ascii", "ignore").translate(None, OTHER_ASCII)
    letters = len(ascii_letters) + sum(sign.isalpha() or sign.isspace() for sign in BEYOND_ASCII.findall(text))
    functional = sum(map(FUNCTION_WORDS.__contains__, map(str.strip, words, repeat(AROUND_WORDS))))
    return Composition(len(text), letters, len(words), functional, len(SENTENCE_END.findall(text)))


def paragraphs(text: str) -> Iterator[str]:
    """Paragraphs whose lines could be prose, each as one line.

    Blank lines and lines below titles divide paragraphs. Lines of prose begin in the same column; the first may be
    indented further. None begins like an item of a list.
    """
    for paragraph in PARAGRAPHS.split(text):
        lines = [line for line in paragraph.split("\n") if line.strip()]
        columns = [len(line) - len(line.lstrip()) for line in lines]
        if lines and len(set(columns[1:])) < 2 and columns[0] >= columns[-1] and not any(map(LIST_ITEM.match, lines)):
            yield " ".join(paragraph.split())
