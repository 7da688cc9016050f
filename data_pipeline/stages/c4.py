"""C4's rules on lines and pages (Raffel et al. 2020, section 2.2).

Two rules of the paper are left out: the list of bad words, and the removal of spans of three
sentences that came before. A third, on language, is `language.min_probability = 0.99`. The paper
leaves open: here white space divides words, a sentence ends with a period, an exclamation or a
question mark before white space, whatever closes between, and a marker of a citation is a number,
"edit" or "citation needed" in brackets.
"""

import re

from mlm_repro.data_pipeline.document import Drop
from mlm_repro.data_pipeline.stages.prose import SENTENCE_END
from mlm_repro.data_pipeline.stages.stage import Example, TextFilter

TERMINAL = (".", "!", "?", '"', "”")
MARKER = re.compile(r"\[(?:\d*|edit|citation needed)\]")
NOTICE = re.compile(
    "javascript|terms of use|privacy policy|cookie policy|uses cookies|use of cookies|use cookies",
    re.IGNORECASE,
)
MIN_WORDS = 5
MIN_SENTENCES = 3
PAGE = (
    "The mill stands by the river.\nIts wheel has not turned for years! Who will mend it now?"
    '\n"We may," the miller said, "in spring."'
)


class C4(TextFilter):
    """Keep the lines that read like sentences, and drop pages with too few, as C4 does. A kept line
    ends like a sentence, has at least five words and is no notice, such as on cookies. A page with
    "lorem ipsum", an opening curly bracket or fewer than three sentences in its kept lines is
    dropped, and counts for the first rule it breaks."""

    name = verb = "c4"
    examples = (
        Example(f"{PAGE}\nHome | News | About us\nPlease enable JavaScript to see this.", PAGE),
        Example("", Drop("fewer than 3 sentences")),
    )

    def apply(self, text: str) -> str | Drop:
        """Return as one text the lines, stripped and without their citation markers, that end like
        a sentence, have at least five words and are no notice. Return a Drop for a text with "lorem
        ipsum" or an opening curly bracket, or with fewer than three sentences in these lines."""
        if "lorem ipsum" in text.lower():
            return Drop("lorem ipsum")
        if "{" in text:
            return Drop("curly bracket")
        lines = (MARKER.sub("", line).strip() for line in text.split("\n"))
        page = "\n".join(filter(_is_kept, lines))
        enough = len(SENTENCE_END.findall(page)) >= MIN_SENTENCES
        return page if enough else Drop(f"fewer than {MIN_SENTENCES} sentences")


def _is_kept(line: str) -> bool:
    is_long = len(line.split()) >= MIN_WORDS
    return is_long and line.endswith(TERMINAL) and not NOTICE.search(line)
