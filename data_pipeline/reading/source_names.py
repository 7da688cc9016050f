"""The names of sources, without the code that reads them."""

import difflib

HUB_NAMES = ("wikipedia", "openwebtext", "realnews", "cc-stories")
FILE_KINDS = ("jsonl", "parquet", "text", "documents")
INSTALLED_DOCS = "installed-docs"


def check_source_name(name: str) -> None:
    """Raise ValueError, with the nearest known name, for a source that does not exist."""
    kind, colon, path = name.partition(":")
    if colon and kind in FILE_KINDS:
        if not path:
            raise ValueError(f"source {name!r} has no path after the colon")
        return
    if name in (*HUB_NAMES, INSTALLED_DOCS):
        return
    if name in FILE_KINDS:
        raise ValueError(f"source {name!r} needs a path: {name}:PATH")
    known = [*HUB_NAMES, INSTALLED_DOCS, *(f"{kind}:" for kind in FILE_KINDS)]
    close = difflib.get_close_matches(f"{kind}{colon}", known, 1)
    hint = close[0] + path if close and close[0].endswith(":") else "".join(close)
    raise ValueError(
        f"unknown source {name!r}; " + (f"did you mean {hint!r}?" if hint else f"known: {', '.join(known)}")
    )
