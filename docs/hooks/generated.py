"""Writes the parts of the documentation that follow from the code: `python -m
docs.hooks.generated`.

On a page a part stands between `<!-- generated: NAME -->` and `<!-- end of NAME -->`.
"""

import re
from pathlib import Path

from docs.hooks.commands import exit_codes, read_commands_table, table
from docs.hooks.errata import errata
from docs.hooks.fixes import fixes
from docs.hooks.formats import keys
from docs.hooks.lamb import arms, correction
from docs.hooks.protocols import section
from docs.hooks.results import measures, results
from docs.hooks.seeds import seeds
from mlm_repro.evaluation.tasks.names import TASKS
from mlm_repro.lineage.atomic import write_text

ROOT = Path(__file__).resolve().parents[2]
PART = re.compile(r"(<!-- generated: (.+?) -->\n).*?(<!-- end of \2 -->)", re.DOTALL)


def rewrite(page: str) -> str:
    """Return `page`, the Markdown text of a page, with new text between the marks of each pair,
    `<!-- generated: NAME -->` and `<!-- end of NAME -->`: the text that the function `made` of this
    module returns for NAME. Marks without a partner and all other text stay. Nothing is
    written."""
    return PART.sub(lambda match: f"{match[1]}\n{made(match[2])}\n\n{match[3]}", page)


def made(name: str) -> str:
    """Return the Markdown of a generated part by the name in its mark, such as `commands`,
    `errata`, `measures RECORD` or `keys MODEL`. Any other name gives the exit codes."""
    match name.split():
        case ["keys", dotted]:
            return keys(dotted)
        case ["protocols"]:
            return "\n\n".join(map(section, TASKS))
        case ["results"]:
            return "\n\n".join(results(ROOT / "results"))
        case ["errata"]:
            return "\n\n".join(errata())
        case ["fixes"]:
            return "\n\n".join(fixes(ROOT / "benchmarks"))
        case ["lamb", "correction"]:
            return correction()
        case ["lamb", "arms"]:
            return arms(ROOT / "results")
        case ["seeds"]:
            return "\n\n".join(seeds())
        case ["measures", record]:
            return "\n\n".join(measures(ROOT / "results" / "bench" / f"{record}.json"))
        case ["commands"]:
            return read_commands_table(ROOT)
    return table(("code", "error", "meaning"), exit_codes())


def pages() -> list[Path]:
    """Return a list of the paths, sorted, of the Markdown pages below docs/ that have generated
    parts."""
    return [
        path
        for path in sorted((ROOT / "docs").rglob("*.md"))
        if PART.search(path.read_text(encoding="utf-8"))
    ]


if __name__ == "__main__":
    for path in pages():
        write_text(path, rewrite(path.read_text(encoding="utf-8")))
