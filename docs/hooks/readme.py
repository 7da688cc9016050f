"""Writes what README shows from the result files in `results/` and from commands, so that no number is typed.

`python -m docs.hooks.readme README.md` rewrites the blocks between markers and the outputs in `console` blocks.
"""

import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import fmean

from experiments.files import ReproductionScores, order_sentence
from experiments.reproduce.files import ReproductionSummary
from lineage.atomic import write_text
from lineage.errors import BadInput, Diverged
from lineage.files import read_document
from lineage.progress import format_duration
from lineage.records import read_records

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "results" / "reproduce-8.3b"


class Kept:
    """The reproduction that is kept with the code."""

    def __init__(self, directory: Path) -> None:
        self.summary = read_document(directory / "summary.json", ReproductionSummary)
        self.records = read_records(directory / "records.jsonl")
        self.scores = read_document(directory / "scores.json", ReproductionScores)

    def published(self, series: str, quantity: str) -> str:
        """A model's number, several where sources print several; for a curve its last point."""
        mine = [r for r in self.records if (r.series, r.quantity, r.kind) == (series, quantity, "published")]
        last = max((r.x for r in mine if r.x is not None), default=None)
        values = [f"{r.value:,.2f}{r.unit}" for r in mine if r.x == last]
        return " / ".join(dict.fromkeys(values)) or "not run"

    def own(self, series: str, quantity: str) -> list[float]:
        """A twin's number, by seed."""
        return [r.value for r in self.records if (r.series, r.quantity) == (series, quantity) and r.seed is not None]


def results_block(kept: Kept) -> str:
    """Each model's twin, the mean of its seeds, beside the published model, and in how many seeds the order holds."""
    scores, end = kept.scores, "final_validation_perplexity"
    less = {each.larger: f"{-each.difference:.3f} ({-each.high:.3f} to {-each.low:.3f})" for each in scores.comparisons}
    rows = {
        "": scores.models,
        "---": ["--:"] * len(scores.models),
        "published perplexity": [kept.published(name, "validation_perplexity") for name in scores.models],
        "twin's": [f"{fmean(kept.own(name, end)):.1f}" for name in scores.models],
        f"bits per byte, {scores.text}": [f"{fmean(kept.own(name, scores.quantity)):.3f}" for name in scores.models],
        "fewer (90 %)": [less.get(place, "") for place in range(len(scores.models))],
    }
    seeds = dict.fromkeys(str(model.seed) for model in kept.summary.models)
    scaled = f"Scaled: {kept.summary.hardware}, seed {', '.join(seeds)}."
    orders = (order_sentence(quantity, kept.records) for quantity in (scores.quantity, end))
    return "\n".join([*(f"|{head}|{'|'.join(row)}|" for head, row in rows.items()), "", " ".join([scaled, *orders])])


def tiers_block(kept: Kept) -> str:
    """What each size of hardware can run: one command, how long it takes, the number to expect."""
    names = kept.scores.models
    of_one_seed = kept.summary.models[: len(names)]
    trained = format_duration(sum(model.train_seconds or 0 for model in of_one_seed))
    ends = ", ".join(f"{fmean(kept.own(name, 'final_validation_perplexity')):.0f}" for name in names)
    small, large = names[0], names[-1]
    return "\n".join(
        [
            "| hardware | command | duration | expect |",
            "|---|---|---|---|",
            f"| laptop | `make reproduce-8.3b` | {trained} (training) | perplexity {ends}, scaled |",
            f"| one GPU | `make reproduce-{small}` | not run yet | WikiText-103 "
            f"{kept.published(small, 'wikitext103_perplexity')}, published |",
            f"| cluster | `mlm-experiment launch experiments/jobs/{large}.toml --out launch` | not run yet | "
            f"WikiText-103 {kept.published(large, 'wikitext103_perplexity')}, published |",
        ]
    )


BLOCKS: dict[str, Callable[[Kept], str]] = {"tiers": tiers_block, "results": results_block}
CONSOLE = re.compile(r"```console\n((?:\$ [^\n]*\n)+)(.*?)```", re.DOTALL)
"""Commands, each after `$ `, and what the last of them prints."""


def rewrite(readme: str, results: Path = RESULTS) -> str:
    """The README with every block made anew. Raises BadInput where a marker is missing or a command fails."""
    kept = Kept(results)
    for name, block in BLOCKS.items():
        begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
        if begin not in readme or end not in readme:
            raise BadInput(f"README has no {begin} and {end}")
        before, rest = readme.split(begin, 1)
        readme = f"{before}{begin}\n{block(kept)}\n{end}{rest.split(end, 1)[1]}"
    return CONSOLE.sub(lambda match: f"```console\n{match[1]}{_output(match[1])}```", readme)


def _output(commands: str) -> str:
    """What the last of the commands prints, run in a folder that has this checkout's results and nothing else."""
    output = ""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "results").symlink_to(ROOT / "results")
        for line in commands.splitlines():
            program, *arguments = shlex.split(line.removeprefix("$ "))
            command = [str(Path(sys.executable).with_name(program)), *arguments]
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
            if done.returncode not in (0, Diverged.exit_code):  # a number that diverged is shown, not an error
                raise BadInput(f"{line.removeprefix('$ ')} failed: {done.stderr.strip()}")
            output = done.stdout
    return "".join(f"{line.rstrip()}\n" for line in output.splitlines())


if __name__ == "__main__":
    target = Path(sys.argv[1])
    write_text(target, rewrite(target.read_text(encoding="utf-8")))
