"""The part of a text that langdetect looks at, without its URLs and mail addresses."""

import string

from langdetect.detector import Detector
from langdetect.utils.ngram import NGram

MAX_LENGTH = 10_000
"""Characters that langdetect looks at, counted when addresses are gone."""
LOOKAHEAD = 3_000
"""More than a URL, a mail address and a Vietnamese pair together can be: 8 + 2076, 64 + 1 + 255 + 255, and 2."""
MAILBOX, LONGEST_MAILBOX = string.ascii_letters + string.digits + "-_.", 64
"""What `Detector.MAIL_RE` takes before the "@"."""


def without_addresses(text: str) -> str:
    """What `Detector.append` would look at, before it merges spaces: a long text is read only as far as needed."""
    size = 2 * MAX_LENGTH
    while True:
        head = text[:size]
        if "http" in head:
            head = Detector.URL_RE.sub(" ", head)
        head = _without_mail(head)
        if size >= len(text) or len(head) >= MAX_LENGTH + LOOKAHEAD:
            break
        size *= 2
    if not head.isascii() and any(mark in head for mark in NGram.DMARK_CLASS):
        head = NGram.normalize_vi(head)
    return head[:MAX_LENGTH]


def _without_mail(text: str) -> str:
    """What `MAIL_RE.sub(" ", text)` is, tried only where letters lead to an "@": the expression tries every word."""
    kept: list[str] = []
    done, at = 0, text.find("@")
    while at >= 0:
        before = max(done, at - LONGEST_MAILBOX)
        start = before + len(text[before:at].rstrip(MAILBOX))
        if start < at and (address := Detector.MAIL_RE.match(text, start)):
            kept += (text[done:start], " ")
            done = address.end()
        at = text.find("@", max(done, at + 1))
    return "".join((*kept, text[done:])) if kept else text
