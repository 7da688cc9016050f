"""Published numbers as records. The files beside this one hold values read from the documents they name."""

import csv
from collections.abc import Iterator
from pathlib import Path

from lineage.records import Record

HERE = Path(__file__).parent


def published_records(models: tuple[str, ...]) -> Iterator[Record]:
    """Figure 6 and Table 3 of the 2019 paper for the named models.

    Figure 6 was digitised from the plot to ±0.03; the 8.3B value at 300,000 iterations, 9.27, is printed in the paper.
    """
    for row in _rows("figure-6.csv"):
        for model in models:
            if value := row[model.upper()]:
                yield Record(
                    experiment="2019/figure-6",
                    series=model,
                    quantity="validation_perplexity",
                    value=float(value),
                    kind="published",
                    source="arXiv:1909.08053 Figure 6",
                    x=float(row["x"]),
                    x_name="iteration",
                    note="digitised, ±0.03",
                )
    for row in _rows("table-3.csv"):
        if row["model"] in models:
            yield Record(
                experiment="2019/table-3",
                series=row["model"],
                quantity=row["quantity"],
                value=float(row["value"]),
                kind="published",
                source=row["source"],
                unit="%" if row["quantity"].endswith("accuracy") else "",
            )


def _rows(name: str) -> list[dict[str, str]]:
    with (HERE / name).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))
