"""What the page shows with its caption, its data and the commands that make it."""

import base64
import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from reports.render import Drawing


@dataclass(frozen=True)
class Exhibit:
    """A figure or table with its caption, its data and the commands that make it."""

    name: str
    title: str
    caption: list[str]
    csv: str
    command: str
    drawing: Drawing | None = None
    rows: tuple[dict[str, str], ...] = ()
    """The numbers behind a figure, one record each."""

    @property
    def download(self) -> Markup:
        """The CSV as a link that needs no other file."""
        data = base64.b64encode(self.csv.encode("utf-8", "replace")).decode("ascii")
        return Markup(f"data:text/csv;charset=utf-8;base64,{data}")


def csv_text(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Rows under a header as CSV."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)
    return buffer.getvalue()
