"""Prose filter: removes the lists of parameters, tables and code in documentation.

The rules come from C4 (Raffel et al. 2020, section 2.2: five words, the end of a sentence) and from
MassiveText (Rae et al. 2021, appendix A.1.1: stop words, letters, no lists). They are applied to
paragraphs instead of lines and pages. Two stop words in a page say little about a paragraph, so the
share of all function words is measured.
"""

import re
from collections.abc import Iterable, Iterator
from typing import Annotated

from pydantic import Field, PositiveFloat, PositiveInt

from mlm_repro.data_pipeline.document import Drop
from mlm_repro.data_pipeline.stages.stage import Example, TextFilter

_LISTED = """
a about above after again against all almost along already also although always am among an and
another any are around as at away be because been before being below between both but by can cannot
could did do does done down during each either else enough even ever every few for from had has have
he hence her here him his how however i if in instead into is it its itself just least less like
many may me might more most much must my neither never no nor not now of off often on once one only
or other others otherwise our out over own per perhaps quite rather same several shall she should
since so some still such than that the their them then there therefore these they this those though
through thus to together too toward under unless until up upon us very was we well were what when
where whereas whether which while who whom whose why will with within without would yet you your
"""
FUNCTION_WORDS = frozenset(_LISTED.split())
OTHER_ASCII = bytes(code for code in range(128) if not (chr(code).isalpha() or chr(code).isspace()))
BEYOND_ASCII = re.compile(r"[^\x00-\x7f]")
CLOSING = "\"'`”’)]*_"
AROUND_WORDS = CLOSING + "“‘(.,;:!?["
PARAGRAPHS = re.compile(r"\n(?:\s*\n|[ \t]*[-=~^*+#]{3,}[ \t]*(?=\n))")
SENTENCE_END = re.compile(rf"[.!?][{re.escape(CLOSING)}]*(?=\s|$)")
LIST_ITEM = re.compile(r"\s*(?:(?:[-*+•]|\.\.|\(?\d{1,2}[.)]|\(?[a-z]\)|:[\w ]+:)\s|[@|>])")


def letters(text: str) -> int:
    """Return how many characters of a text are letters or white space, both counted together."""
    ascii_letters = text.encode("ascii", "ignore").translate(None, OTHER_ASCII)
    return len(ascii_letters) + sum(
        sign.isalpha() or sign.isspace() for sign in BEYOND_ASCII.findall(text)
    )


def function_words(words: Iterable[str]) -> int:
    """Return the number of the words that are English function words, such as "the"; case and the
    punctuation around a word are ignored."""
    return sum(word.lower().strip(AROUND_WORDS) in FUNCTION_WORDS for word in words)


def paragraphs(text: str) -> Iterator[str]:
    """Yield the paragraphs of `text` that are laid out as prose, whatever their words, in order,
    each as one line.

    Blank lines divide paragraphs, and so do lines of signs such as the one below a title. The lines
    of prose begin in the same column; the first may be indented further. None begins like an item
    of a list.
    """
    for paragraph in PARAGRAPHS.split(text):
        lines = [line for line in paragraph.split("\n") if line.strip()]
        columns = [len(line) - len(line.lstrip()) for line in lines]
        if (
            lines
            and len(set(columns[1:])) < 2
            and columns[0] >= columns[-1]
            and not any(map(LIST_ITEM.match, lines))
        ):
            yield " ".join(paragraph.split())


SHORT = "It is a good thing to have a friend when the night is long and the way home is dark."
LONG = f"{SHORT} {SHORT} {SHORT}"

Share = Annotated[float, Field(ge=0, le=1)]


class Prose(TextFilter):
    """Keep the paragraphs of English prose, each as one line. A document with too few words of them
    is dropped."""

    name = verb = "prose"
    examples = (
        Example(LONG, LONG),
        Example(f"A Title\n=======\n\n{LONG}\n\nx : int\n    The number.", LONG),
        Example("", Drop("too little prose")),
    )

    min_words: PositiveInt = 50
    """Smallest number of words of prose in a kept document (MassiveText's minimum)."""
    min_paragraph_words: PositiveInt = 5
    """Smallest number of words in a paragraph of prose (C4's minimum for a line)."""
    min_function_words: Share = 0.2
    """Smallest share of function words among a paragraph's words; English prose has 0.4 to 0.5."""
    min_letters: Share = 0.8
    """Smallest share of letters and white space among a paragraph's characters."""
    max_sentence_words: PositiveFloat = 60
    """Largest mean number of words in a paragraph's sentences."""

    def apply(self, text: str) -> str | Drop:
        """Return the paragraphs of `text` that are prose by this filter's settings, each as one
        line, divided by blank lines, or a Drop if together they have fewer than `min_words` words.
        A text that has this form already comes out unchanged."""
        prose = self.prose_of(text)
        words = sum(len(paragraph.split()) for paragraph in prose)
        return "\n\n".join(prose) if words >= self.min_words else Drop("too little prose")

    def prose_of(self, text: str) -> list[str]:
        """Return a list of the paragraphs of `text` that are prose by this stage's settings, in
        order, each as one line; empty if none is prose."""
        return [paragraph for paragraph in paragraphs(text) if self._is_prose(paragraph)]

    def _is_prose(self, paragraph: str) -> bool:
        """Return True if a paragraph ends like a sentence and meets the settings' limits for a
        paragraph, which are all but `min_words`."""
        if not paragraph.rstrip(CLOSING).endswith((".", "!", "?")):
            return False
        words = paragraph.split()
        sentences = len(SENTENCE_END.findall(paragraph))
        return (
            len(words) >= self.min_paragraph_words
            and function_words(words) >= self.min_function_words * len(words)
            and letters(paragraph) >= self.min_letters * len(paragraph)
            and len(words) <= self.max_sentence_words * max(1, sentences)
        )
