"""`ftfy.fix_text` of ftfy 6.3, restricted to the passes that could change a line: the same text in
less time.

ftfy repairs each line (each million characters of a longer line) by itself, with about twelve
passes, repeated until none changes it. Most lines need none of the repairs, or only ligatures and
wide characters replaced, straight quotes and Unicode normalization:

* A repair of characters is made only if one of its characters is there.
* An ampersand matters only where an entity starts, and only before the line with the first `<`,
  from which on ftfy leaves entities alone.
* Encodings are repaired only if `BADNESS_RE` matches; a line in which it does gets ftfy's repair of
  encodings first.

A line that may need any other repair is given to ftfy's repairs in ftfy's order, which makes the
result exact by construction. Only text that someone made to be slow is refused: a line that is not
repaired after `MOST_PASSES`, and marks without end, which Unicode normalization would sort in
quadratic time.
"""

import re
import sys
from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import chain
from typing import Any, Literal
from unicodedata import combining, is_normalized, normalize

import ftfy
import numpy as np
from ftfy import FIXERS, TextFixerConfig, chardata
from ftfy.badness import BADNESS_RE, MOJIBAKE_CATEGORIES
from ftfy.fixes import uncurl_quotes
from numpy.typing import NDArray

from mlm_repro.data_pipeline.document import Unfit
from mlm_repro.data_pipeline.fast.exact import LAST_LETTER, checked
from mlm_repro.lineage.loops import call_first, compiled

Codes = NDArray[np.uint32]


def as_codes(text: str) -> Codes:
    """Return the text's code points as uint32 [characters], lone surrogates included, a read-only
    array."""
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)


LAST_OF_ASCII = 0x7F
AMPERSAND, TRANSLATED, QUOTE, REPAIRED, MARK, MOJIBAKE, CLOSE = (1 << bit for bit in range(7))
"""Kinds of characters; CLOSE stands for two adjacent ones beyond ASCII, whichever these are, and
for one that is mojibake by itself."""


@compiled
def _kinds_of(codes: Codes, kinds: NDArray[np.uint8]) -> int:
    """Return the kinds of characters that a text has, as bits of one number; CLOSE is among them if
    two adjacent ones are beyond ASCII. `codes` are the text's code points; `kinds` [0x110000] has
    the bits of each code point, which may be several."""
    present = 0
    before = np.uint32(0)
    for code in codes:
        present |= int(kinds[code])
        if min(code, before) > LAST_OF_ASCII:
            present |= CLOSE
        before = code
    return present


Normalization = Literal["NFC", "NFKC"]

SUPPORTED = "6.3."
SEGMENT = TextFixerConfig().max_decode_length
BLOCK = 1 << 12
"""Approximate number of characters in a block, whose lines are examined together. Only if a block
may need further repairs is each of its lines examined by itself."""
LINE_BREAKS_AND_ESCAPE = "\r\x1b\x85\u2028\u2029"
MOST_PASSES = 64
"""Largest number of passes of all repairs over one line."""
MOST_MARKS = 1000
"""Largest number of consecutive marks; Unicode's stream-safe format allows 30."""
MARKS = "".join(c for c in map(chr, range(LAST_LETTER + 1)) if combining(normalize("NFKD", c)[0]))
FIND_MARKS = re.compile(f"[{re.escape(MARKS)}]++").finditer
AFTER_DECODING = (
    "fix_c1_controls",
    "fix_latin_ligatures",
    "fix_character_width",
    "uncurl_quotes",
    "fix_line_breaks",
    "fix_surrogates",
    "remove_terminal_escapes",
    "remove_control_chars",
)
"""ftfy's repairs that follow its repairs of entities and encodings, in order."""
LETTERS = MOJIBAKE_CATEGORIES["lower_common"] + MOJIBAKE_CATEGORIES["upper_common"]
"""Greek and Cyrillic letters, as a set in a regular expression."""
RARE = "".join(
    members for name, members in MOJIBAKE_CATEGORIES.items() if not name.endswith("common")
)
"""Characters of mojibake that are neither those letters nor common punctuation, also as a set."""
ALONE = "ŒœÂÃÎÐØÙЂ√"
"""Characters that are a part of a match of `BADNESS_RE` beside a character of ASCII too."""
SUSPECT = re.compile(
    f"[{LETTERS}{RARE}](?:(?<=[{ALONE}])|(?=[{RARE}])|(?<=[{RARE}])(?=[{LETTERS}]))"
)
"""Finds a character of each match of `BADNESS_RE` that has no C1 control: one of ALONE, or the
first of two adjacent ones of which one is rare. It takes a fiftieth of the time of `BADNESS_RE`."""
BADNESS_WIDTH = 7
"""Largest number of characters of a match of `BADNESS_RE`."""
find_badness = re.compile(BADNESS_RE.pattern, BADNESS_RE.flags | re.MULTILINE).search


def may_be_decoded(text: str) -> bool:
    """Return True if ftfy might repair the encoding of a line of the text. The answer holds only
    for a text without characters that ftfy always repairs, such as control characters."""
    return any(
        find_badness(text, suspect.start() - BADNESS_WIDTH, suspect.start() + BADNESS_WIDTH)
        for suspect in SUSPECT.finditer(text)
    )


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


@cache
def fix_text(normalization: Normalization, *left_out: str) -> Callable[[str], str]:
    """Return a function that repairs a text as `ftfy.fix_text` does, with the normalization given
    and without the repairs `left_out`, such as `uncurl_quotes`: the fast function if it repairs a
    set of samples as ftfy's does, else ftfy's, with a warning on standard error. The fast function
    raises Unfit for a text whose repair would take more than linear time."""
    switches: dict[str, Any] = {"normalization": normalization} | dict.fromkeys(left_out, False)
    reference: Callable[[str], str] = partial(ftfy.fix_text, **switches)
    return checked("cleaning", lambda: fast_fix_text(normalization, *left_out), reference, SAMPLES)


def fast_fix_text(normalization: Normalization, *left_out: str) -> Callable[[str], str]:
    """Return a function, text → text, equal to `ftfy.fix_text` with the Unicode normalization
    `normalization`, `NFC` or `NFKC`; time and memory are linear in the text.

    `left_out`, the further arguments, are the names of repairs that are not made, by default none:
    any of `unescape_html`, `fix_character_width` and `uncurl_quotes`.

    The function raises Unfit for a text whose repair would not be linear. Raises RuntimeError for a
    version of ftfy that this was not derived from; `fix_text` warns of it and uses ftfy's own
    function.
    """
    if not ftfy.__version__.startswith(SUPPORTED):
        raise RuntimeError(
            f"fast cleaning is written for ftfy {SUPPORTED}x, and ftfy {ftfy.__version__} is"
            " installed"
        )
    decoded_once: Callable[[str, TextFixerConfig], tuple[str, object]] = vars(ftfy)[
        "_fix_encoding_one_step_and_explain"
    ]
    config = TextFixerConfig()
    controls = chain(chardata.CONTROL_CHARS, range(0x80, 0xA0), range(0xD800, 0xE000))
    repaired = chain(map(chr, controls), LINE_BREAKS_AND_ESCAPE)
    characters = "".join(map(chr, range(0x10000)))  # ftfy's sets have none beyond these
    quote = f"{chardata.SINGLE_QUOTE_RE.pattern}|{chardata.DOUBLE_QUOTE_RE.pattern}"
    quotes = re.findall(quote, characters)
    after_decoding = [FIXERS[repair] for repair in AFTER_DECODING if repair not in left_out]
    widths = {} if "fix_character_width" in left_out else chardata.WIDTH_MAP
    kinds = np.zeros(sys.maxunicode + 1, np.uint8)
    translated = map(chr, (*chardata.LIGATURES, *widths))
    rare = re.findall(f"[{RARE}{ALONE}]", characters)
    for bit, members in enumerate(("&", translated, quotes, repaired, MARKS, rare, ALONE)):
        kinds[[ord(character) for character in members]] |= np.uint8(1 << bit)
    call_first(_kinds_of, as_codes(""), kinds)
    straightened = [(character, uncurl_quotes(character)) for character in quotes]
    find_entity = chardata.HTML_ENTITY_RE.search

    def needs(text: str, entities: bool) -> int | None:
        """Return the kinds of characters in the text, as bits, or None if it may need another
        repair than ligatures, widths, quotes and normalization. HTML entities count only if
        `entities` is True."""
        kinds_here = _kinds_of(as_codes(text), kinds)
        if entities and kinds_here & AMPERSAND and find_entity(text):
            return None
        is_suspect = kinds_here & MOJIBAKE and kinds_here & CLOSE
        if kinds_here & REPAIRED or (is_suspect and may_be_decoded(text)):
            return None
        return kinds_here

    def normalized(text: str, kinds_here: int = MARK) -> str:
        """Return the text in the chosen Unicode normal form. `kinds_here` are its kinds of
        characters, as bits; by default the text may have marks. Raises Unfit for a text with marks
        that has too many of them in a row."""
        if kinds_here & MARK and any(len(run.group()) > MOST_MARKS for run in FIND_MARKS(text)):
            raise Unfit(
                f"more than {MOST_MARKS:,} accents or other marks on one character, which would"
                " take too long to clean: the document goes to quarantine"
            )
        return text if is_normalized(normalization, text) else normalize(normalization, text)

    def settle(text: str, entities: bool) -> str | None:
        """Repeat the cheap repairs (ligatures, widths, quotes, normalization) until the text stops
        changing, and return it. Return None if the text may need another repair, before or after
        them; HTML entities count as in need of repair only if `entities` is True. Raises Unfit for
        too many marks in a row."""
        while (kinds_here := needs(text, entities)) is not None:
            fixed = text
            if kinds_here & TRANSLATED:
                fixed = fixed.translate(chardata.LIGATURES).translate(widths)
            if kinds_here & QUOTE and "uncurl_quotes" not in left_out:
                for curly, straight in straightened:
                    fixed = fixed.replace(curly, straight)
            if fixed == text:
                fixed = normalized(text, kinds_here)
            if fixed == text:
                return text
            text = fixed
        return None

    def decoded(text: str, passes: Iterator[int]) -> str:
        """Return the text with its encoding repaired, as `ftfy.fix_encoding` does. Each pass that
        changes it takes a number from `passes`, an iterator that raises Unfit when none is
        left."""
        after = decoded_once(text, config)[0]
        while after != text:
            next(passes)
            text = after
            after = decoded_once(after, config)[0]
        return text

    def repaired_with(text: str, entities: bool) -> str:
        """Return the text with the repairs that `ftfy.fix_and_explain` makes, except those in
        `left_out`, and in the chosen normalization; HTML entities are repaired only if `entities`
        is True. Raises Unfit if that takes too many passes, or for too many combining marks in a
        row."""
        passes = _passes()
        before = ""
        while text != before:
            next(passes)
            before = text
            text = decoded(FIXERS["unescape_html"](text) if entities else text, passes)
            for repair in (*after_decoding, normalized):
                text = repair(text)
        return text

    def fix_segment(segment: str, entities: bool) -> str:
        """Return one of ftfy's segments, a line or a part of a long line, after its repair: by the
        cheap repairs if they suffice, else by all. HTML entities are repaired only if `entities` is
        True. Raises Unfit if that takes too many passes, or for too many marks in a row."""
        settled = settle(segment, entities)
        if settled is None and not (entities and find_entity(segment)):
            settled = settle(decoded(segment, _passes()), entities)
        return repaired_with(segment, entities) if settled is None else settled

    def fix_text(text: str) -> str:
        """Return `text`, a whole document, as `ftfy.fix_text` repairs it without the repairs in
        `left_out`: block by block with the cheap repairs, and segment by segment where a block
        needs more. Raises Unfit for a text whose repair would take more than linear time."""
        tag = 0 if "unescape_html" in left_out else text.find("<")
        tagged = len(text) if tag < 0 else tag - (tag - text.rfind("\n", 0, tag) - 1) % SEGMENT
        fixed = []
        for start, end in _blocks(text, tagged):
            block = settle(text[start:end], start < tagged)
            if block is None:
                fixed += [
                    fix_segment(text[slice(*span)], start < tagged)
                    for span in _segments(text, start, end)
                ]
            else:
                fixed.append(block)
        return "".join(fixed)

    return fix_text


def _passes() -> Iterator[int]:
    """Yield a number for each of MOST_PASSES allowed passes over a line, then raise Unfit."""
    yield from range(MOST_PASSES)
    raise Unfit(
        f"a line is not repaired after {MOST_PASSES} passes of cleaning: its document goes to"
        " quarantine"
    )


def _segments(text: str, start: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield a pair, start and end in `text`, for each of ftfy's segments, which are lines or parts
    of long lines, between the positions `start`, where a segment must begin, and `end`."""
    while start < end:
        after = text.find("\n", start, min(start + SEGMENT, end)) + 1 or min(start + SEGMENT, end)
        yield start, after
        start = after


def _blocks(text: str, tagged: int) -> Iterator[tuple[int, int]]:
    """Yield a pair, start and end, for each block of a text, in order: whole segments (ftfy's:
    lines or parts of long lines) with at most BLOCK characters in all, or one longer segment. A
    block starts at `tagged`, where the segment with the first tag starts; without a tag `tagged` is
    the text's length."""
    start = 0
    while start < len(text):
        stop = tagged if start < tagged else len(text)
        end = stop if stop <= start + BLOCK else text.rfind("\n", start, start + BLOCK) + 1
        if not end:
            end = next(_segments(text, start, stop))[1]
        yield start, end
        start = end
