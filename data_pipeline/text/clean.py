"""Repair of broken Unicode (the paper's ftfy step)."""

from collections.abc import Callable
from functools import cache, partial

import ftfy

from data_pipeline.document import Document, Drop
from data_pipeline.exact import checked
from data_pipeline.text.exact_ftfy import Normalization, fast_fix_text

SAMPLES = (
    "",
    "as it was, line by line\n\n\ttabs\x0c and $ % ( ~ [ ] & not an &entity\n",
    "&lt;&amp;amp; caf&eacute; &#39;&#x41;&NTILDE; &unknown;\nx < y &amp; z\n&amp;",
    "<p>&amp;</p>",
    "“curly” ‘quotes’ &amp; ‚low‛ „double‟ ʼ\n",
    "âœ” No problem, schÃ¶n\nâ€œquotedâ€\x9d Ã la mode\nÃ l’heure",
    "l’humanitÃ© — “cafÔ\nРџСЂРёРІРµС‚ Â£5 à² √± в‚¬ 2Â°",
    "ﬁne ﬂow Ǆ ŉ ＬＯＵＤ　ＮＯＩＳＥ ｶﾞ\n",
    "a\r\nb\rc\u2028d\u2029e\x85f\x0bg\x0c\x7f\x00\x1b[31mred\x1b[0m",
    "\ufeffBOM \ud83d\ude00 \ud800 \udc00 \ufffc\u206a \U0001f600",
    "e\u0301 A\u030a \u212b \u1e9b\u0323 \uac00\u11a8 \u037e \u1fef x² ½ ﷺ",
    "&amp\u037e &am‘p; \u0391\u0301\n",
    "voilà, naïve Straße, Привет мир, Ωμέγα, 你好, العربية, हिन्दी — œuvre Œ. €5 ©2020 ×² ØªØ\n",
    "Âlêtre Â ici\n Â \nÃ ",
)


def clean(document: Document, normalization: Normalization = "NFC") -> Document | Drop:
    """The document with mojibake, entities, quotes and control characters repaired; dropped if nothing is left."""
    text = _fix_text(normalization)(document.text)
    return Document(document.id, text) if text.strip() else Drop("empty")


@cache
def _fix_text(normalization: Normalization) -> Callable[[str], str]:
    reference: Callable[[str], str] = partial(ftfy.fix_text, normalization=normalization)
    return checked("cleaning", lambda: fast_fix_text(normalization), reference, SAMPLES)
