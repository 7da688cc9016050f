"""Whether the numbers on a built report are those of records: its data files, the tables of its page, what is shown.

Backed is a number that a sealed record says, of the run the report is in or of a run that the report names. What is not
a record's (timings of benchmarks, curves and sizes kept of training) and what is drawn is not looked at.
"""

import base64
import binascii
import csv
import io
import json
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator
from decimal import Decimal, InvalidOperation
from html.parser import HTMLParser
from pathlib import Path
from typing import get_args

from lineage.digest import is_sealed, read_digest, sealed_files, sha256_file
from lineage.errors import UserError
from lineage.records import Kind, Record, read_records

REPORT, PAGE, FIGURES, RECORDS, SOURCES = "report", "index.html", "figures", "records.jsonl", "sources.json"
KEY = ("experiment", "series", "quantity", "kind", "x", "value", "source", "digest")
"""Columns by which a line of a table is a record."""
KINDS = frozenset(get_args(Kind))
LINK = "data:text/csv;charset=utf-8;base64,"

Line = dict[str, str]


def unbacked_numbers(run: Path) -> Iterator[str]:
    """A sentence for each file and table of a run's report with numbers that no record backs."""
    report = run / REPORT
    if not (report / PAGE).is_file():
        return
    records = _records(run)
    for name, digest in _sources(report / SOURCES).items():
        other = run.resolve() / name
        if is_sealed(other) and read_digest(other) == digest:
            records += _records(other)
        else:
            yield f"{REPORT} was made of the run {name} with digest {digest[:16]}, which is not there"
    backed = _Backed(records)
    for path in sorted((report / FIGURES).glob("*.csv")):
        text = path.read_text(encoding="utf-8", errors="replace")
        yield from backed.missing(f"{REPORT}/{FIGURES}/{path.name}", csv.DictReader(io.StringIO(text)))
    page = _Page()
    page.feed((report / PAGE).read_text(encoding="utf-8", errors="replace"))
    yield from backed.missing(f"{REPORT}/{PAGE}", page.lines)
    for text, kind in page.shown:
        if not backed.is_shown(text, kind):
            yield f"{REPORT}/{PAGE} shows {text} as {kind}, which no record says"
    for name, content in page.downloads:
        if not (report / FIGURES / name).is_file() or content != (report / FIGURES / name).read_bytes():
            yield f"{REPORT}/{PAGE} gives out another {name} than {REPORT}/{FIGURES}/{name}"


def describe_sources(run: Path, others: Iterable[Path]) -> dict[str, str]:
    """What sources.json says: the digest of every other run behind a report of `run`, by its path seen from there."""
    return {os.path.relpath(other, run.resolve()): read_digest(other) for other in sorted(others)}


def _sources(path: Path) -> dict[str, str]:
    try:
        return {str(name): str(digest) for name, digest in json.loads(path.read_text(encoding="utf-8")).items()}
    except (OSError, ValueError, AttributeError, RecursionError):
        return {}


def _records(run: Path) -> list[Record]:
    """Those a run was sealed with; none if they were changed since, or cannot be read."""
    path = run / RECORDS
    try:
        if not path.is_file() or sealed_files(run).get(RECORDS, {}).get("sha256") != sha256_file(path):
            return []
        return read_records(path)
    except (UserError, OSError):
        return []


class _Backed:
    """What records say."""

    def __init__(self, records: Iterable[Record]) -> None:
        self._lines: set[tuple[object, ...]] = set()
        self._values: dict[str, set[float]] = defaultdict(set)
        self._published: set[tuple[str, str]] = set()
        for record in records:
            values = record.model_dump()
            self._lines.add(tuple(values[name] for name in KEY))
            self._values[record.kind] |= {record.value, 100 * record.value}
            if record.kind == "published":
                self._published.add((record.experiment, record.source))

    def missing(self, where: str, lines: Iterable[Line]) -> Iterator[str]:
        """One sentence for all of these lines that claim to be records and are none."""
        unknown = [line for line in lines if line.keys() >= {*KEY} and not self._says(line)]
        if unknown:
            line = unknown[0]
            at = f" at {line['x']}" if line["x"] else ""
            more = f", nor {len(unknown) - 1} more" if len(unknown) > 1 else ""
            what = f"{line['experiment']} {line['series']} {line['quantity']}{at}"
            yield f"{where} says {line['value']} for {what} ({line['kind']}), which no record says{more}"

    def _says(self, line: Line) -> bool:
        """Published numbers that no run here has taken over are claims of the catalogue, not records."""
        if line["kind"] == "published" and (line["experiment"], line["source"]) not in self._published:
            return True
        try:
            numbers = {name: float(line[name]) if line[name] else None for name in ("x", "value")}
        except ValueError:
            return False
        return tuple((line | numbers | {"digest": line["digest"] or None})[name] for name in KEY) in self._lines

    def is_shown(self, text: str, kind: str) -> bool:
        """Whether a record of this kind has a value that is written so, as it is or in per cent."""
        try:
            shown = Decimal(text.removesuffix("%").strip().replace(",", ""))
        except InvalidOperation:
            return True  # words, or no number at all
        place = shown.as_tuple().exponent
        half = 0.5 * 10.0**place if isinstance(place, int) else 0.0
        return kind == "published" or any(
            abs(float(shown) - value) <= half * (1 + 1e-6) for value in self._values[kind]
        )


class _Page(HTMLParser):
    """The lines of a page's data tables, the numbers that it shows with their kind, the data that it gives out."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[Line] = []
        self.shown: list[tuple[str, str]] = []
        self.downloads: list[tuple[str, bytes]] = []
        self._heads: list[str] = []
        self._cells: list[str] = []
        self._is_known = False
        """Whether the cell's text was read from its title or its badge."""
        self._is_number = False
        self._number = ""

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        """Begin a table, a line, a cell or a number; a badge says the kind of what is before it."""
        given = {name: value or "" for name, value in attributes}
        classes = given.get("class", "").split()
        if tag == "table":
            self._heads = []
        elif tag == "tr":
            self._cells, self._number = [], ""
        elif tag in ("td", "th"):
            self._cells.append(given.get("title", ""))
            self._is_known = "title" in given
        elif "badge" in classes and (kind := next((name for name in classes if name in KINDS), None)):
            self._meet(kind)
        elif (tag == "span" and "value" in classes) or given.get("href", "").startswith("#run-"):
            self._is_number, self._number = True, ""
        elif given.get("href", "").startswith(LINK):
            self.downloads.append((given.get("download", ""), _decoded(given["href"].removeprefix(LINK))))

    def handle_endtag(self, tag: str) -> None:
        """End a number, or a line under its heads."""
        self._is_number = False
        if tag == "tr" and self._heads:
            self.lines.append(dict(zip(self._heads, self._cells, strict=False)))
        elif tag == "tr":
            self._heads = self._cells

    def handle_data(self, data: str) -> None:
        """Text of a number, of a cell or of nothing that is looked at."""
        if self._is_number:
            self._number += data
        if self._cells and not self._is_known:
            self._cells[-1] += data.strip()

    def _meet(self, kind: str) -> None:
        if self._number:
            self.shown.append((self._number.strip(), kind))
            self._number = ""
        if self._cells:
            self._cells[-1], self._is_known = kind, True


def _decoded(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return b""
