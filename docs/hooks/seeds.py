"""The page of the seeds: the documents that the project grew from, item by item, with commands and
outcomes."""

from collections.abc import Iterator
from pathlib import Path

from docs.hooks.commands import cell, table
from docs.hooks.readme import every_verdict
from mlm_repro.experiments.catalogue import matches
from mlm_repro.experiments.verdicts import count_outcomes
from mlm_repro.lineage.config import read_toml

ROWS = Path(__file__).with_suffix(".toml")


def seeds() -> Iterator[str]:
    """Yield as Markdown texts a heading, then a table, for each document in the file seeds.toml
    beside this module, in its order: a row for each item, with its place, command and outcome. The
    outcome counts the verdicts on the item's claims (`every_verdict`), made from results kept in
    the repository and from computed and simulated numbers, names the needs of claims that were not
    tried, and adds what seeds.toml states: a kept result, a test or a reason."""
    verdicts = every_verdict()
    for seed in read_toml(ROWS)["seeds"]:
        yield f"## {seed['title']}"
        rows = []
        for row in seed["rows"]:
            judged = [
                verdict for verdict in verdicts if matches(verdict.claim, row.get("claims", ()))
            ]
            needs = ", ".join(
                dict.fromkeys(
                    claimed.needs for claimed in judged if claimed.needs not in ("", "nothing")
                )
            )
            outcomes = (
                judged and count_outcomes(judged),
                needs and f"needs {needs}",
                row.get("kept"),
                row.get("test") and f"held by `{row['test'].partition('::')[2]}`",
                row.get("why"),
            )
            command = f"`{row['command']}`" if "command" in row else "none"
            rows.append(
                (cell(row["item"]), f"`{row['place']}`", command, "; ".join(filter(None, outcomes)))
            )
        yield table(("item", "where", "command", "outcome"), rows)
