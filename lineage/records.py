"""Result records: one number each, with its kind and its origin."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import FiniteFloat, model_validator

from mlm_repro.lineage.atomic import parse_json, read_bytes, write_bytes
from mlm_repro.lineage.config import Config, parse_config
from mlm_repro.lineage.errors import BadInput, cause

RECORDS = "records.jsonl"
"""Name of the file of records in a run directory."""
Kind = Literal["measured", "counted", "computed", "scaled", "simulated", "published"]


class Record(Config):
    """One result of an experiment, a number with its origin. Its `kind` is printed wherever the
    number is."""

    experiment: str
    """Published table or figure, such as `2019/figure-6`."""
    series: str
    """Row or curve, such as `8.3b`."""
    quantity: str
    """Name of the measured quantity, such as `validation_perplexity`."""
    value: FiniteFloat
    kind: Kind
    """measured: time, memory, loss or accuracy on the published configuration; counted: what a run
    of the real program gives without a clock; computed: by a closed form, as the source itself did;
    scaled: on a shrunk twin; simulated: by the cost model; published: read from the source."""
    source: str
    """Origin of the number: a document if it is published, otherwise the name of the run
    directory."""
    unit: str = ""
    low: FiniteFloat | None = None
    """Lower end of an interval; `high` is the upper end. Nine in ten measurements lie in the
    interval of a simulated number. The interval of an effect at reduced scale is for its mean over
    seeds. Other numbers have no interval."""
    high: FiniteFloat | None = None
    x: FiniteFloat | None = None
    """Position on the x axis, for a curve."""
    x_name: str = ""
    """Quantity on the x axis, such as `iteration`."""
    digest: str | None = None
    """Digest of the run or checkpoint behind the number."""
    seed: int | None = None
    note: str = ""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.kind not in ("simulated", "scaled") and (self.low, self.high) != (None, None):
            raise ValueError(
                f"a {self.kind} number has no interval: leave out `low` and `high`, which only a"
                " simulated or a scaled one has"
            )
        return self


def records_bytes(records: Iterable[Record]) -> bytes:
    """Return the records as the content of a file of records, UTF-8 bytes: one line of JSON for
    each, in order."""
    return "".join(record.model_dump_json() + "\n" for record in records).encode("utf-8")


def write_records(path: Path, records: Iterable[Record]) -> None:
    """Write the Records in `records` to the file `path`, in order, each as a line of JSON: missing
    folders are made, and an existing file is replaced whole."""
    write_bytes(path, records_bytes(records))


def read_records(path: Path) -> list[Record]:
    """Return a list of all records of the file `path`, in order. Raises BadInput if the file is
    missing or unreadable, or if a line is not a record; the error names the first such line."""
    if not path.is_file():
        raise BadInput(
            f"there are no result records at {path}: name a complete run or reproduction, whose"
            " directory has this file"
        )
    try:
        text = read_bytes(path).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(
            f"{path} cannot be read: {cause(error)}; if it is damaged, put back an undamaged copy"
        ) from error
    records = []
    for number, line in enumerate(text.removesuffix("\n").split("\n") if text else [], 1):
        try:
            values: Any = parse_json(line)
        except ValueError as error:
            raise BadInput(f"{path} line {number} is not JSON: {error}") from error
        records.append(parse_config(values, Record, f"{path} line {number}"))
    return records
