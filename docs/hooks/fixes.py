"""The table of upstream's fixes of silent parallel faults, from the cases and the record of their
last run."""

import json
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from docs.hooks.commands import cell, table
from mlm_repro.lineage.atomic import JSON

REPOSITORIES = {"megatron": "NVIDIA/Megatron-LM", "torchtitan": "pytorch/torchtitan"}


def fixes(folder: Path) -> Iterator[str]:
    """Yield as Markdown texts a sentence of counts, the table of cases that were run, and the table
    of faults without a case, from `fixes.toml`, the cases, and `fixes.json`, their last run's
    record, in `folder`."""
    cases = tomllib.loads((folder / "fixes.toml").read_text(encoding="utf-8"))
    rows = json.loads((folder / "fixes.json").read_text(encoding="utf-8"))["rows"]
    results = Counter(row["result"] for row in rows)
    counts = ", ".join(f"{count} {result}" for result, count in results.items())
    seconds = sum(row["before"]["seconds"] + row["after"]["seconds"] for row in rows)
    yield (
        f"{len(rows)} cases: {counts}; findings after the fixes:"
        f" {sum(row['alarms'] for row in rows)}; {seconds:.0f} s in all on a busy machine."
    )
    by_name = {row["name"]: row for row in rows}
    yield table(
        ("fault", "fix", "how", "asked", "before", "after"),
        [line(case, by_name[case["name"]]) for case in cases["case"] if case["name"] in by_name],
    )
    yield table(
        ("published", "fault", "why there is no case"),
        [tuple(map(cell, (left["where"], left["title"], left["why"]))) for left in cases["left"]],
    )


def line(case: JSON, row: JSON) -> tuple[str, ...]:
    """Return a tuple of the cells of a case's row in Markdown: fault, fix, way of the test, options
    of `mlm-verify layouts`, and the answers before the fix and after it, each with its seconds and
    the beginning of its first sentence. A result other than `found` stands, in bold, before the
    first answer; the case's reason `why` stands behind the first answer, or behind the second if
    the fault was found. `case` is a table of `fixes.toml`, `row` the row of that name in
    `fixes.json`, both as dicts."""
    repository = REPOSITORIES[case.get("repository", "megatron")]
    fix = (
        f"[`{case['commit']}`](https://github.com/{repository}/commit/{case['commit']})"
        f" {case['number']}, "
    )
    how = f"old lines put back on `{case['tree']}`" if "tree" in case else "parent and fix"
    asked = " ".join(f"`{field}`" for field in case.get("fields", ())) + f" {case['layouts']}"
    answers = []
    for when in ("before", "after"):
        sentence = next(iter(row[when]["sentences"]), "").partition("; ")[0].removeprefix("error: ")
        answers.append(f"{row[when]['state']} ({row[when]['seconds']:.0f} s) {sentence}")
    reason = f"; {case['why']}" if "why" in case else ""
    is_found = row["result"] == "found"
    answers = (
        [answers[0], answers[1] + reason]
        if is_found
        else [f"**{row['result']}** {answers[0]}{reason}", answers[1]]
    )
    return tuple(map(cell, (case["title"], fix + str(case["date"]), how, asked, *answers)))
