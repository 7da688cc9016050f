"""`ftfy.fix_text` of ftfy 6.3 that looks only at what ftfy could change: the same text, without the other passes.

ftfy repairs each line (each million characters of a longer line) by itself, with about twelve passes, again and again
until none changes it. Most lines need none of the repairs, or only ligatures and wide characters replaced, straight
quotes and Unicode normalization:

* Characters of `PLAIN` are touched by no repair, so a line is looked at only if it has another one.
* An ampersand matters only where an entity starts, and only before the line with the first `<`, from which on ftfy
  leaves entities alone.
* Encodings are repaired only if `BADNESS_RE` matches. Every alternative of it contains one of a small set of
  characters, so it is searched only around those. A line in which it matches is left as it is unless its bytes in
  some encoding are laid out like UTF-8 throughout, or `BADNESS_RE` matches in a part that `UTF8_DETECTOR_RE` finds.

A line that may need any other repair is given to ftfy, which makes the result exact by construction.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Set as AbstractSet
from importlib import import_module
from typing import Any, Literal
from unicodedata import category, is_normalized, normalize

import ftfy
from ftfy import TextFixerConfig, chardata, fix_and_explain
from ftfy.badness import BADNESS_RE
from ftfy.fixes import uncurl_quotes

Normalization = Literal["NFC", "NFKC"]

SUPPORTED = "6.3."
SEGMENT = TextFixerConfig().max_decode_length
BLOCK = 1 << 12
"""Characters of whole lines that are looked at together before they are looked at one by one."""
PLAIN = r"\t\n\f -%'-~"
"""As a regular expression's set: ASCII without controls and the ampersand."""
ENTITY = chardata.HTML_ENTITY_RE.pattern
LINE_BREAKS_AND_ESCAPE = "\r\x1b\x85\u2028\u2029"
LOST_BYTES = set(" ?\x1a\ufffd")
"""What ftfy takes for a byte of UTF-8 that was lost."""


def _set(characters: Iterable[str]) -> str:
    return "[" + "".join(map(re.escape, sorted(characters))) + "]"


_plain_or_entity = re.compile(f"[^&{PLAIN}]|{ENTITY}")
_not_plain = re.compile(f"[^&{PLAIN}]")
_entity = re.compile(ENTITY)
_translated = re.compile(_set(map(chr, (*chardata.LIGATURES, *chardata.WIDTH_MAP))))


def fast_fix_text(normalization: Normalization) -> Callable[[str], str]:
    """A function equal to `ftfy.fix_text` with that normalization; time and memory are linear in the text.

    Raises RuntimeError if ftfy is not a version that this was derived from.
    """
    if not ftfy.__version__.startswith(SUPPORTED):
        raise RuntimeError(f"ftfy {ftfy.__version__} is not {SUPPORTED}x")
    configs = [
        TextFixerConfig(unescape_html=entities, normalization=normalization, explain=False)
        for entities in (False, True)
    ]
    needs_repair = _repair_test()
    quotes = [(character, uncurl_quotes(character)) for character in sorted(_quotes())]

    def settle(text: str, entities: bool) -> str | None:
        """The text with what needs no decoding replaced, and normalized; None if it needs more, or then would."""
        while True:
            if (entities and _entity.search(text)) or needs_repair(text):
                return None
            fixed = text
            if _translated.search(text):
                fixed = fixed.translate(chardata.LIGATURES).translate(chardata.WIDTH_MAP)
            for curly, straight in quotes:
                fixed = fixed.replace(curly, straight)
            if not is_normalized(normalization, fixed):
                fixed = normalize(normalization, fixed)
            if fixed == text or (fixed.isascii() and "&" not in fixed):
                return fixed
            text = fixed

    def fix_text(text: str) -> str:
        tag = text.find("<")
        tagged = len(text) if tag < 0 else _segment(text, text.rfind("\n", 0, tag) + 1, tag)[0]
        done = tried = 0
        fixed: list[str] = []
        while match := _plain_or_entity.search(text, done, tagged) or _not_plain.search(text, max(done, tagged)):
            line = max(text.rfind("\n", done, match.start()) + 1, done)
            start, end = _segment(text, line, match.start())
            fixed.append(text[done:start])
            if start >= tried:
                tried = max(end, text.rfind("\n", end, start + BLOCK) + 1) if text[end - 1] == "\n" else end
                if (block := settle(text[start:tried], start < tagged)) is not None:
                    fixed.append(block)
                    done = tried
                    continue
            segment = text[start:end]
            settled = settle(segment, start < tagged)
            if settled is None:
                settled = fix_and_explain(segment, configs[start < tagged]).text
            fixed.append(settled)
            done = end
        return "".join((*fixed, text[done:])) if fixed else text

    return fix_text


def _segment(text: str, line: int, place: int) -> tuple[int, int]:
    """Start and end of the segment around `place`, in the line (or a later segment of one) that starts at `line`."""
    start = place - (place - line) % SEGMENT
    end = text.find("\n", place, start + SEGMENT) + 1
    return start, end or min(start + SEGMENT, len(text))


def _repair_test() -> Callable[[str], bool]:
    """A function that is false only if ftfy would change no more in any line than `settle` does, besides entities."""
    repaired = {chr(code) for codes in _repaired_codes() for code in codes} | set(LINE_BREAKS_AND_ESCAPE)
    suspects, width = _required_characters()
    find = re.compile(_set(repaired | suspects)).finditer
    has_repaired = re.compile(_set(repaired)).search
    search = re.compile(BADNESS_RE.pattern, BADNESS_RE.flags | re.MULTILINE).search
    decodable = [re.compile(_utf8_read_as(encoding)).fullmatch for encoding in chardata.CHARMAP_ENCODINGS]

    def needs_if_bad(text: str) -> bool:
        if "\n" in text[:-1] or has_repaired(text):
            return True
        if any(BADNESS_RE.search(part.group()) for part in chardata.UTF8_DETECTOR_RE.finditer(text)):
            return True
        return any(may_be(text) for may_be in decodable)

    def needs_repair(text: str) -> bool:
        start = end = 0
        for match in find(text):
            place = match.start()
            if text[place] in repaired:
                return True
            if place - width > end:
                if search(text, start, end):
                    return needs_if_bad(text)
                start = place - width
            end = place + 1 + width
        return end > 0 and search(text, start, end) is not None and needs_if_bad(text)

    return needs_repair


def _utf8_read_as(encoding: str) -> str:
    """An expression for all of a text that ftfy may encode so and decode as UTF-8.

    Each byte above 0xBF has continuations or lost ones after it, and there are no others.
    """
    first, continuation = (
        {character for byte in range(low, high) if (character := bytes([byte]).decode(encoding, "ignore"))}
        for low, high in ((0xC0, 0x100), (0x80, 0xC0))
    )
    return rf"(?:[\x00-\x7f\ufffd]++|{_set(first)}{_set(continuation | LOST_BYTES)}++)*+"


def _repaired_codes() -> Iterator[Iterable[int]]:
    yield chardata.CONTROL_CHARS
    yield range(0x80, 0xA0)
    yield range(0xD800, 0xE000)


def _quotes() -> set[str]:
    patterns = (chardata.SINGLE_QUOTE_RE, chardata.DOUBLE_QUOTE_RE)
    return set().union(*(_characters_at(item) for found in patterns for item in _parse(found)))


def _parse(expression: re.Pattern[str]) -> Any:
    return import_module("re._parser").parse(expression.pattern, expression.flags)


def _required_characters() -> tuple[set[str], int]:
    """Characters outside ASCII of which every match of `BADNESS_RE` has one, and the width of the widest match.

    Of each alternative the set at one place is taken: the one with fewest letters, for those are common in text.
    Raises ValueError if that cannot be said of the expression.
    """
    parsed = _parse(BADNESS_RE)
    ((operation, (_, alternatives)),) = parsed
    if str(operation) != "BRANCH" or BADNESS_RE.flags != re.VERBOSE | re.UNICODE:
        raise ValueError("ftfy's BADNESS_RE is not a list of alternatives")
    required: set[str] = set()
    for alternative in alternatives:
        places = [found for item in alternative if (found := _characters_at(item))]
        required |= min(reversed(places), key=_commonness)
    return required, parsed.getwidth()[1]


def _commonness(characters: AbstractSet[str]) -> tuple[int, int]:
    """Numbers of lower-case letters and of letters: an order of sets by how often text has one of them."""
    kinds = [category(character) for character in characters]
    return kinds.count("Ll"), sum(kind[0] == "L" for kind in kinds)


def _characters_at(item: tuple[Any, Any]) -> set[str]:
    """What a place of a parsed regular expression matches, if that is certainly one of few non-ASCII characters."""
    operation, argument = item
    items = {"LITERAL": [item], "IN": argument}.get(str(operation), [])
    found: set[str] = set()
    for kind, value in items:
        if str(kind) not in ("LITERAL", "RANGE"):
            return set()
        low, high = (value, value) if str(kind) == "LITERAL" else value
        found.update(map(chr, range(low, high + 1)))
    return set() if any(character.isascii() for character in found) else found
