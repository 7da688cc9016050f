"""Prose filter: removes the lists of parameters, tables and code in documentation."""

from typing import Annotated

from pydantic import Field, PositiveFloat, PositiveInt

from data_pipeline.document import Drop
from data_pipeline.reading.prose import CLOSING, measure, paragraphs
from data_pipeline.stages.stage import Example, TextFilter

SHORT = "It is a good thing to have a friend when the night is long and the way home is dark."
LONG = f"{SHORT} {SHORT} {SHORT}"

Share = Annotated[float, Field(ge=0, le=1)]


class Prose(TextFilter):
    """Keep the paragraphs of English prose, each as one line. A document with too few words of them is dropped."""

    name = verb = "prose"
    after = "language"
    optional = True
    examples = (
        Example(LONG, LONG),
        Example(f"A Title\n=======\n\n{LONG}\n\nx : int\n    The number.", LONG),
        Example(f"{SHORT}\n{SHORT}\n{SHORT}\n\n>>> print(17)\n17", LONG),
        Example("Bug fixes\n\n- #1 fixed\n- #2 fixed", Drop("too little prose")),
        Example(SHORT, Drop("too little prose")),
        Example("", Drop("too little prose")),
    )

    min_words: PositiveInt = 50
    """Words of prose that a document needs (MassiveText's least)."""
    min_paragraph_words: PositiveInt = 5
    """Words that a paragraph needs (C4's least of a line)."""
    min_function_words: Share = 0.2
    """Share of the words of a paragraph that are function words; English prose has 0.4 to 0.5."""
    min_letters: Share = 0.8
    """Share of the characters of a paragraph that are letters or white space."""
    max_sentence_words: PositiveFloat = 60
    """Words of a sentence, on average over a paragraph."""

    def apply(self, text: str) -> str | Drop:
        """Paragraphs of prose, divided by blank lines; prose alone comes out unchanged."""
        prose = self.prose_of(text)
        words = sum(len(paragraph.split()) for paragraph in prose)
        return "\n\n".join(prose) if words >= self.min_words else Drop("too little prose")

    def prose_of(self, text: str) -> list[str]:
        """The paragraphs of prose."""
        return [paragraph for paragraph in paragraphs(text) if self._is_prose(paragraph)]

    def _is_prose(self, paragraph: str) -> bool:
        if not paragraph.rstrip(CLOSING).endswith((".", "!", "?")):
            return False
        made_of = measure(paragraph)
        return (
            made_of.words >= self.min_paragraph_words
            and made_of.function_words >= self.min_function_words * made_of.words
            and made_of.letters >= self.min_letters * made_of.characters
            and made_of.sentence_words <= self.max_sentence_words
        )
