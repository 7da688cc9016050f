"""`ftfy.fix_text` of ftfy 6.3, restricted to the passes that could change a line: the same text in less time.

ftfy repairs each line (each million characters of a longer line) by itself, with about twelve passes, again and again
until none changes it. Most lines need none of the repairs, or only ligatures and wide characters replaced, straight
quotes and Unicode normalization:

* Characters of `PLAIN` are touched by no repair, so a line is looked at only if it has another one.
* An ampersand matters only where an entity starts, and only before the line with the first `<`, from which on ftfy
  leaves entities alone.
* Encodings are repaired only if `BADNESS_RE` matches, which is searched only around its pairs of characters. A line
  in which it matches is left as it is unless its bytes in some encoding are laid out like UTF-8 throughout, or
  `BADNESS_RE` matches in a part that `UTF8_DETECTOR_RE` finds; one that is not gets ftfy's repair of encodings first.

A line that may need any other repair is given to ftfy's repairs in ftfy's order, which makes the result exact by
construction. Only text that someone made to be slow is refused: what is not repaired after `MOST_PASSES`, and marks
without end, which Unicode normalization would sort in quadratic time.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache, partial
from importlib import import_module
from itertools import chain
from string import printable
from typing import Any, Literal
from unicodedata import combining, is_normalized, normalize

import ftfy
import numpy as np
from ftfy import FIXERS, TextFixerConfig, chardata
from ftfy.badness import BADNESS_RE
from ftfy.fixes import uncurl_quotes
from numpy.typing import NDArray

from mlm_repro.data_pipeline.document import Unfit
from mlm_repro.data_pipeline.fast.exact import LAST_LETTER, checked
from mlm_repro.lineage.loops import call_first, compiled

LAST = 0xFFFF
"""Code point that stands for itself and all after it; ftfy's sets have none of those."""

Codes = NDArray[np.uint32]


def as_codes(text: str) -> Codes:
    """The text's code points, lone surrogates too."""
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)


def kinds_search(characters: Mapping[int, Iterable[str]], others: int) -> Callable[[Codes], int]:
    """A function that gives the kinds of characters in a text. A kind is one bit; a character may be of several kinds.

    `characters` holds the characters of each bit; `others` holds the kinds of all other characters.
    """
    kinds = np.zeros(LAST + 1, np.uint8)
    for bit, members in characters.items():
        kinds[[ord(character) for character in members]] |= np.uint8(bit)
    kinds[kinds == 0] = others
    call_first(_kinds_of, as_codes(""), kinds)
    return lambda codes: int(_kinds_of(codes, kinds))


def badness_search(known: set[str]) -> Callable[[str, Codes], bool]:
    """A function that is true if `BADNESS_RE` matches a text without `known`, or would with other line ends.

    Raises ValueError if the expression is not made of pairs and of characters in `known`.
    """
    parsed = parse(BADNESS_RE)
    operation, argument = parsed[0]
    if str(operation) != "BRANCH" or len(parsed) > 1 or BADNESS_RE.flags != re.VERBOSE | re.UNICODE:
        raise ValueError("ftfy's BADNESS_RE is not a list of alternatives")
    alternatives = [[character_set(item) for item in alternative] for alternative in argument[1]]
    pairs = [_last_pair(each) for each in alternatives if not _is_within(each, set(map(ord, known)))]
    left, right = np.zeros((2, LAST + 1), np.uint64)
    for number, pair in enumerate(pairs):
        for table, (members, negated) in zip((left, right), pair, strict=True):
            chosen = np.full(LAST + 1, negated)
            chosen[sorted(members)] = not negated
            table[chosen] |= np.uint64(1 << number)
    width = parsed.getwidth()[1]
    search = re.compile(BADNESS_RE.pattern, BADNESS_RE.flags | re.MULTILINE).search
    call_first(_next_pair, as_codes(""), 0, left, right)

    def is_bad(text: str, codes: Codes) -> bool:
        place = _next_pair(codes, 0, left, right)
        while place < len(codes):
            if search(text, max(place - width, 0), place + width):
                return True
            place = _next_pair(codes, place, left, right)
        return False

    return is_bad


def parse(expression: re.Pattern[str]) -> Any:
    """Parse tree of a regular expression, from Python's own parser."""
    return import_module("re._parser").parse(expression.pattern, expression.flags)


Set = tuple[set[int], bool]
"""Code points, and True if all others are meant."""


def character_set(item: tuple[Any, Any]) -> Set | None:
    """Characters that a node of a parsed expression matches, if it is a set or its complement."""
    operation, argument = item
    members: set[int] = set()
    negated = False
    for kind, value in {"LITERAL": [item], "IN": argument}.get(str(operation), [(None, None)]):
        if str(kind) == "NEGATE":
            negated = True
        elif str(kind) in ("LITERAL", "RANGE"):
            low, high = (value, value) if str(kind) == "LITERAL" else value
            members.update(range(low, high + 1))
        else:
            return None
    return members, negated


def _is_within(sets: list[Set | None], known: set[int]) -> bool:
    """True if the node is one character of `known`."""
    return len(sets) == 1 and sets[0] is not None and not sets[0][1] and sets[0][0] <= known


def _last_pair(sets: list[Set | None]) -> tuple[Set, Set]:
    """The last two adjacent sets; the later characters are the ones that distinguish such text."""
    for left, right in zip(sets[-2::-1], sets[:0:-1], strict=True):
        if left and right:
            return left, right
    raise ValueError("an alternative of ftfy's BADNESS_RE has no two sets of characters side by side")


@compiled
def _kinds_of(codes: Codes, kinds: NDArray[np.uint8]) -> int:
    present = 0
    for code in codes:
        present |= int(kinds[min(code, np.uint32(LAST))])
    return present


@compiled
def _next_pair(codes: Codes, start: int, left: NDArray[np.uint64], right: NDArray[np.uint64]) -> int:
    """The place of the second of the next two characters of a pair, the first being at `start` or later."""
    before = np.uint64(0)
    for place in range(start, len(codes)):
        code = min(codes[place], np.uint32(LAST))
        if before & right[code]:
            return place
        before = left[code]
    return len(codes)


Normalization = Literal["NFC", "NFKC"]

SUPPORTED = "6.3."
SEGMENT = TextFixerConfig().max_decode_length
BLOCK = 1 << 12
"""Number of characters of whole lines that are tested together before each line is tested."""
PLAIN = set(printable) - set("&\r\v")
"""ASCII without controls and the ampersand; a form feed is left alone."""
PLAIN_CHARACTER, AMPERSAND, TRANSLATED, QUOTE, REPAIRED, OTHER, MARK = (1 << bit for bit in range(7))
UNTOUCHED = PLAIN_CHARACTER | AMPERSAND
LINE_BREAKS_AND_ESCAPE = "\r\x1b\x85\u2028\u2029"
MOST_PASSES = 64
"""Most passes of all repairs over one line."""
MOST_MARKS = 1000
"""Most consecutive marks; Unicode's stream-safe format allows 30."""
MARKS = "".join(c for c in map(chr, range(LAST_LETTER + 1)) if combining(normalize("NFKD", c)[0]))
FIND_MARKS = re.compile(f"[{re.escape(MARKS)}]++").finditer
AFTER_DECODING = (
    "fix_c1_controls", "fix_latin_ligatures", "fix_character_width", "uncurl_quotes", "fix_line_breaks",
    "fix_surrogates", "remove_terminal_escapes", "remove_control_chars",
)  # fmt: skip
"""ftfy's repairs that follow those of entities and of encodings."""
LOST_BYTES = set(" ?\x1a\ufffd")
"""Characters that ftfy takes for a lost byte of UTF-8."""

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
    """`ftfy.fix_text` with that normalization, without some repairs: the fast one if it is exact here, else ftfy's."""
    switches: dict[str, Any] = {"normalization": normalization} | dict.fromkeys(left_out, False)
    reference: Callable[[str], str] = partial(ftfy.fix_text, **switches)
    return checked("cleaning", lambda: fast_fix_text(normalization, *left_out), reference, SAMPLES)


def fast_fix_text(normalization: Normalization, *left_out: str) -> Callable[[str], str]:
    """A function equal to `ftfy.fix_text` with that normalization; time and memory are linear in the text.

    `left_out` are repairs that are not made: `unescape_html`, `fix_character_width`, `uncurl_quotes`.

    The function raises Unfit where they would not be. Raises RuntimeError for a version of ftfy that this was not
    derived from.
    """
    if not ftfy.__version__.startswith(SUPPORTED):
        raise RuntimeError(f"ftfy {ftfy.__version__} is not {SUPPORTED}x")
    decoded_once: Callable[[str, TextFixerConfig], tuple[str, object]] = vars(ftfy)[
        "_fix_encoding_one_step_and_explain"
    ]
    config = TextFixerConfig()
    repaired = set(map(chr, chain(chardata.CONTROL_CHARS, range(0x80, 0xA0), range(0xD800, 0xE000))))
    repaired |= set(LINE_BREAKS_AND_ESCAPE)
    quotes = sorted(_quotes())
    after_decoding = [FIXERS[repair] for repair in AFTER_DECODING if repair not in left_out]
    widths = {} if "fix_character_width" in left_out else chardata.WIDTH_MAP
    kinds_of = kinds_search(
        {PLAIN_CHARACTER: PLAIN, AMPERSAND: "&", TRANSLATED: map(chr, (*chardata.LIGATURES, *widths)), QUOTE: quotes,
         REPAIRED: repaired, MARK: {min(mark, chr(LAST)) for mark in MARKS}}, OTHER
    )  # fmt: skip
    may_be_repaired = _repair_test(repaired)
    straightened = [(character, uncurl_quotes(character)) for character in quotes]
    find_entity = chardata.HTML_ENTITY_RE.search

    def needs(text: str, entities: bool) -> int | None:
        """Kinds of characters in the text; None if it may need more than `settle` does."""
        codes = as_codes(text)
        kinds_here = kinds_of(codes)
        if entities and kinds_here & AMPERSAND and find_entity(text):
            return None
        if kinds_here & REPAIRED or (kinds_here & ~UNTOUCHED and may_be_repaired(text, codes)):
            return None
        return kinds_here

    def normalized(text: str) -> str:
        """Raises Unfit for too many marks in a row."""
        if kinds_of(as_codes(text)) & MARK and any(len(run.group()) > MOST_MARKS for run in FIND_MARKS(text)):
            raise Unfit(f"more than {MOST_MARKS:,} marks on one character")
        return text if is_normalized(normalization, text) else normalize(normalization, text)

    def settle(text: str, entities: bool) -> str | None:
        """The text after the repairs that need no decoding; None if it needs other repairs, or would afterwards."""
        while (kinds_here := needs(text, entities)) is not None:
            if not kinds_here & ~UNTOUCHED:
                return text
            fixed = text
            if kinds_here & TRANSLATED:
                fixed = fixed.translate(chardata.LIGATURES).translate(widths)
            if kinds_here & QUOTE and "uncurl_quotes" not in left_out:
                for curly, straight in straightened:
                    fixed = fixed.replace(curly, straight)
            fixed = normalized(fixed)
            if fixed == text:
                return fixed
            text = fixed
        return None

    def decoded(text: str, passes: Iterator[int]) -> str:
        """`ftfy.fix_encoding`. Raises Unfit where it takes too many passes."""
        after = decoded_once(text, config)[0]
        while after != text:
            next(passes)
            text, after = after, decoded_once(after, config)[0]
        return text

    def repaired_with(text: str, entities: bool) -> str:
        """`ftfy.fix_and_explain`. Raises Unfit where it takes too many passes."""
        passes, before = _passes(), ""
        while text != before:
            next(passes)
            before = text
            text = decoded(FIXERS["unescape_html"](text) if entities else text, passes)
            for repair in (*after_decoding, normalized):
                text = repair(text)
        return text

    def fix_segment(segment: str, entities: bool) -> str:
        settled = settle(segment, entities)
        if settled is None and not (entities and find_entity(segment)):
            settled = settle(decoded(segment, _passes()), entities)
        return repaired_with(segment, entities) if settled is None else settled

    def fix_text(text: str) -> str:
        tag = 0 if "unescape_html" in left_out else text.find("<")
        tagged = len(text) if tag < 0 else tag - (tag - text.rfind("\n", 0, tag) - 1) % SEGMENT
        fixed: list[str] = []
        for start, end in _blocks(text, tagged):
            block = settle(text[start:end], start < tagged)
            if block is None:
                fixed += [fix_segment(text[slice(*each)], start < tagged) for each in _segments(text, start, end)]
            else:
                fixed.append(block)
        return "".join(fixed)

    return fix_text


def _passes() -> Iterator[int]:
    """Numbers of passes. Raises Unfit after the last."""
    yield from range(MOST_PASSES)
    raise Unfit(f"not repaired after {MOST_PASSES} passes")


def _segments(text: str, start: int, end: int) -> Iterator[tuple[int, int]]:
    """Starts and ends of ftfy's segments in a range that begins and ends at segments."""
    while start < end:
        after = text.find("\n", start, min(start + SEGMENT, end)) + 1 or min(start + SEGMENT, end)
        yield start, after
        start = after


def _blocks(text: str, tagged: int) -> Iterator[tuple[int, int]]:
    """Starts and ends of whole segments together, each about BLOCK characters, of which `tagged` starts one."""
    start = 0
    while start < len(text):
        stop = tagged if start < tagged else len(text)
        end = stop if stop <= start + BLOCK else text.rfind("\n", start, start + BLOCK) + 1
        if not end:
            end = next(_segments(text, start, stop))[1]
        yield start, end
        start = end


def _repair_test(repaired: set[str]) -> Callable[[str, Codes], bool]:
    """A function that is false only if ftfy would repair no line's encoding in a text without `repaired`."""
    is_bad = badness_search(repaired)
    decodable = [re.compile(_utf8_read_as(encoding)).fullmatch for encoding in chardata.CHARMAP_ENCODINGS]

    def may_be_repaired(text: str, codes: Codes) -> bool:
        if not is_bad(text, codes):
            return False
        if "\n" in text[:-1]:
            return True
        if any(BADNESS_RE.search(part.group()) for part in chardata.UTF8_DETECTOR_RE.finditer(text)):
            return True
        return any(may_be(text) for may_be in decodable)

    return may_be_repaired


def _utf8_read_as(encoding: str) -> str:
    """An expression that matches a whole text which ftfy may encode in this encoding and decode as UTF-8.

    Each byte above 0xBF has continuations or lost ones after it, and there are no others.
    """
    first, continuation = (
        {character for byte in range(low, high) if (character := bytes([byte]).decode(encoding, "ignore"))}
        for low, high in ((0xC0, 0x100), (0x80, 0xC0))
    )
    return rf"(?:[\x00-\x7f\ufffd]++|{_set(first)}{_set(continuation | LOST_BYTES)}++)*+"


def _set(characters: Iterable[str]) -> str:
    return "[" + "".join(map(re.escape, sorted(characters))) + "]"


def _quotes() -> set[str]:
    """Every character of the two sets that are ftfy's expressions for quotes."""
    expressions = (chardata.SINGLE_QUOTE_RE, chardata.DOUBLE_QUOTE_RE)
    sets = (character_set(parse(expression)[0]) for expression in expressions)
    return {chr(code) for each in sets if each for code in each[0]}
