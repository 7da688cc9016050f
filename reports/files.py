"""What a page cannot show of files that other rooms wrote, and names of its own files."""

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """Something the page cannot show, in one sentence."""

    part: str
    """File it concerns."""
    sentence: str
    damaged: bool
    """False where the file is only absent or empty; True where it is not what it was when it was written."""


def file_name(text: str) -> str:
    """The text with a hyphen for whatever does not belong in a file's name."""
    return re.sub(r"[^\w.-]", "-", text)
