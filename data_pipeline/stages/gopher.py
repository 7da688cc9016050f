"""Gopher's rules on quality and repetition (Rae et al. 2021, appendix A.1.1 and table A1).

The paper leaves open: here white space divides words, bullet points are • ‣ ◦ ▪ * and -, and a stop
word counts once. Of a repeated line, paragraph or n-gram every occurrence but the first counts; of
the most frequent n-gram (the first of several) all occurrences count. A character counts once,
however many n-grams it is in, and white space does not.
"""

import re
from collections import Counter
from collections.abc import Iterator

from mlm_repro.data_pipeline.document import Drop
from mlm_repro.data_pipeline.stages.stage import Example, TextFilter

WORD = r"\S+"
LINE = r"\S.*"
QUALITY = (
    ("words not 50 to 100,000", WORD, r"\A", 50, 100_000),
    ("mean word length not 3 to 10", r"\S", WORD, 3, 10),
    ("hashes", "#", WORD, 0, 0.1),
    ("ellipses", r"\.\.\.|…", WORD, 0, 0.1),
    ("bullet points", r"(?m)^[^\S\n]*[•‣◦▪*-]", LINE, 0, 0.9),
    ("lines that end with an ellipsis", r"(?m)(?:\.\.\.|…)[^\S\n]*$", LINE, 0, 0.3),
    ("words without a letter", r"(?<!\S)(?:[^\w\s]|[\d_])*+\w", WORD, 0.8, 1),
)
"""Rules on a ratio of counts: the reason for a drop, the pattern counted above, the pattern counted
below, and the smallest and largest accepted ratio."""
STOP_WORDS = re.compile(r"\b(?:the|be|to|of|and|that|have|with)\b")
LIMITS = (0.20, 0.18, 0.16, 0.15, 0.14, 0.13, 0.12, 0.11, 0.10)
"""Largest share of a text's characters in the most frequent n-gram, for n from 2 to 4, then in
repeated n-grams, for n from 5 to 10."""
PAGE = (
    "An old mill stands by the river, and people have walked there with their dogs since anyone can"
    " remember. Its wheel turned until some winter broke it; then nobody came to mend it. Today"
    " swallows nest under that roof, children climb around inside, while tourists take pictures"
    " from across a bridge before they all drive home again."
)


class Gopher(TextFilter):
    """Drop documents by Gopher's rules on quality and repetition. A document counts for the first
    rule it breaks."""

    name = verb = "gopher"
    examples = (
        Example(PAGE, PAGE),
        Example("", Drop("words not 50 to 100,000")),
    )

    def apply(self, text: str) -> str | Drop:
        """Return the text unchanged if it keeps all of Gopher's rules, else a Drop with the name of
        the first rule that it breaks."""
        return next(map(Drop, _broken(text)), text)


def _broken(text: str) -> Iterator[str]:
    """Yield the names of Gopher's rules that a text breaks, in order, each rule tried when the next
    name is asked for; nothing for a text that is kept. A caller must ask for the first name alone
    if the text may have fewer than 10 words: the rules on repetition fail on such a text."""
    for rule, sought, whole, least, most in QUALITY:
        if (
            not least
            <= len(re.findall(sought, text)) / max(1, len(re.findall(whole, text)))
            <= most
        ):
            yield rule
    if len({*STOP_WORDS.findall(text.lower())}) < 2:
        yield "fewer than 2 stop words"
    for name, ends in (("lines", r"\n"), ("paragraphs", r"\n\s*\n")):
        parts = [*filter(None, ("".join(part.split()) for part in re.split(ends, text)))]
        if len(parts) - len({*parts}) > 0.3 * len(parts):
            yield f"repeated {name}"
        if _repeated(parts, 1) > 0.2:
            yield f"characters of repeated {name}"
    for n, limit in enumerate(LIMITS, 2):
        if _repeated(text.split(), n) > limit:
            yield f"{n}-grams"


def _repeated(parts: list[str], n: int) -> float:
    """Return the share, from 0 to 1, of the parts' characters that lie in the most frequent n-gram
    of parts, for n from 2 to 4, or in repeated n-grams, all but the first of equal ones, for any
    other n. There must be at least `n` parts."""
    grams = [*zip(*(parts[start:] for start in range(n)), strict=False)]
    first = dict[tuple[str, ...], int]()
    often = Counter(grams).most_common(1)[0][0]
    again = set[int]()
    for place, gram in enumerate(grams):
        if gram == often if 1 < n < 5 else first.setdefault(gram, place) < place:
            again.update(range(place, place + n))
    return sum(len(parts[place]) for place in again) / len("".join(parts))
