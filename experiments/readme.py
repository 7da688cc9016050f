"""Writes the numbers README shows from the result files in `results/`, so that none is typed.

`python -m experiments.readme README.md results/reproduce-8.3b` rewrites the block between the two markers.
"""

import json
import sys
from pathlib import Path

from lineage.atomic import write_text
from lineage.errors import BadInput
from lineage.progress import format_duration
from lineage.records import Record, read_records

BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"


def results_block(directory: Path) -> str:
    """A Markdown table of a reproduction's models, each number beside the published one."""
    summary = json.loads((directory / "summary.json").read_text(encoding="utf-8"))
    records = read_records(directory / "records.jsonl")
    lines = [
        "| model | parameters | tokens | training | validation perplexity | WikiText-103 | LAMBADA |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    label = "twin, scaled" if summary["twin_rule"] else "measured"
    for model in summary["models"]:
        name = model["name"]
        lines.append(
            f"| {name} {label} | {model['trained']['parameters']:,} | {model['tokens']:,} | "
            f"{format_duration(model['train_seconds'])} | {_shown(records, name, 'final_validation_perplexity')} | "
            f"{_shown(records, name, 'wikitext103_perplexity')} | {_shown(records, name, 'lambada_accuracy')} |"
        )
    for model in summary["models"]:
        name = model["name"]
        curve = [r for r in records if r.series == name and r.kind == "published" and r.x is not None]
        last = max(curve, key=lambda r: r.x or 0)
        lines.append(
            f"| {name}, published | {model['published']['parameters']:,} | | | {last.value:g} | "
            f"{_shown(records, name, 'wikitext103_perplexity', published=True)} | "
            f"{_shown(records, name, 'lambada_accuracy', published=True)} |"
        )
    seeds = ", ".join(sorted({str(model["seed"]) for model in summary["models"]}))
    partial = any(r.note.startswith("partial") for r in records)
    lines += [
        "",
        f"Measured on {summary['hardware']}; seed {seeds}; data: {summary['source']}."
        + (" *partial*: scored on evenly spread windows." if partial else ""),
    ]
    return "\n".join(lines)


def rewrite(readme: str, block: str) -> str:
    """The README with `block` between its markers. Raises BadInput when they are missing."""
    if BEGIN not in readme or END not in readme:
        raise BadInput(f"README has no {BEGIN} and {END}")
    before, rest = readme.split(BEGIN, 1)
    after = rest.split(END, 1)[1]
    return f"{before}{BEGIN}\n{block}\n{END}{after}"


def _shown(records: list[Record], series: str, quantity: str, published: bool = False) -> str:
    found = [
        r for r in records if (r.series, r.quantity) == (series, quantity) and (r.kind == "published") == published
    ]
    values = [f"{r.value:,.2f}{' %' if r.unit else ''}{' (partial)' if r.note else ''}" for r in found]
    return " / ".join(dict.fromkeys(values)) or "not run"


if __name__ == "__main__":
    target = Path(sys.argv[1])
    write_text(target, rewrite(target.read_text(encoding="utf-8"), results_block(Path(sys.argv[2]))))
