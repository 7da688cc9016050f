"""The text in one file of documentation: Python modules, package descriptions, HTML, plain text, compressed or not."""

import ast
import inspect
import re
import zlib
from collections.abc import Iterator
from email import message_from_string
from html.parser import HTMLParser
from pathlib import Path, PurePosixPath

from data_pipeline.document import Document, Malformed
from data_pipeline.reading.lines import TooCompressed, open_bytes
from data_pipeline.reading.readers import EXPANDS, Limits, malformed, mend_surrogates, text_document

TOPICS = "pydoc_data/topics.py"
LEGAL = re.compile(r"copyright|licen[cs]e", re.IGNORECASE)
IN_PYTHON = re.compile(
    r"""((?:^[ \t]*\#.*\n)+)|\#.*|("{3}|'{3})([\s\S]*?)\2|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'""", re.MULTILINE
)
"""Comments of whole lines (group 1), strings in three quotes (group 3), and what neither can begin in."""
COMMENT_SIGN = re.compile(r"^[ \t]*#+[:!]? ?", re.MULTILINE)
BLOCK = re.compile(r"p|div|section|article|li|[uod]l|d[td]|h[1-6r]|t[rdh]|blockquote|body|br")
UNSEEN = {"head", "script", "style", "nav", "pre", "svg"}

Place = tuple[str, str, Path]
"""Owner, path inside it, path on disk."""


def extract(place: Place, limits: Limits) -> list[Document | Malformed]:
    """The documents in one file."""
    owner, inside, path = place
    name = mend_surrogates(f"{owner}:{inside}")
    try:
        with open_bytes(path, limits.max_ratio) as file:
            found = text_document(name, file.read(limits.max_line_bytes + 1), limits)
    except TooCompressed:
        return [malformed(name, 1, EXPANDS.format(limits.max_ratio), b"")]
    except (OSError, EOFError, zlib.error) as error:
        return [Malformed(name, 1, f"cannot be read: {getattr(error, 'strerror', None) or error}", "")]
    if isinstance(found, Malformed):
        return [found]
    suffixes, texts = PurePosixPath(inside.removesuffix(".gz")), [(name, found.text)]
    if suffixes.name == "METADATA":
        texts = [(name, str(message_from_string(found.text).get_payload()))]
    elif inside == TOPICS:
        texts = list(_topics(name, ast.parse(found.text)))
    elif suffixes.suffix == ".py":
        texts = [(name, "\n\n".join(_said_in_python(found.text)))]
    elif suffixes.suffix in (".html", ".htm"):
        texts = [(name, _shown(found.text))]
    return [Document(identifier, mend_surrogates(text)) for identifier, text in texts if text.strip()]


def _said_in_python(code: str) -> Iterator[str]:
    """Paragraphs of strings in three quotes and of whole lines of comment, but legal ones; the code is not parsed."""
    for match in IN_PYTHON.finditer(code):
        text = inspect.cleandoc(match[3]) if match[3] else COMMENT_SIGN.sub("", match[1] or "").strip("\n")
        yield from (part for part in re.split(r"\n\s*\n", text) if part and not LEGAL.search(part))


def _topics(name: str, tree: ast.Module) -> Iterator[tuple[str, str]]:
    """The language reference that `help()` shows: a dictionary of topics."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            for topic, text in sorted(ast.literal_eval(node.value).items()):
                yield f"{name}:{topic}", text


class _Page(HTMLParser):
    """What a page shows; blocks are paragraphs."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[str] = []
        self._within = ""

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self._within = self._within or (tag if tag in UNSEEN else "")
        self.parts += ["\n\n"] if BLOCK.fullmatch(tag) else []

    def handle_endtag(self, tag: str) -> None:
        self._within = "" if tag == self._within else self._within
        self.parts += ["\n\n"] if BLOCK.fullmatch(tag) else []

    def handle_data(self, data: str) -> None:
        self.parts += [] if self._within else [data]


def _shown(page: str) -> str:
    parser = _Page()
    parser.feed(page)
    parser.close()
    return "".join(parser.parts)
