"""Writes what README shows from the result files in `results/` and from commands, so that no number is typed.

`python -m docs.hooks.readme README.md` rewrites the blocks between markers, the outputs in `console` blocks, and the
pictures.
"""

import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

from docs.hooks.errata import HEADS, rows
from docs.hooks.results import PRETRAINED_HEADS, pretrained_rows
from mlm_repro.experiments.benchmark import read_benchmark
from mlm_repro.experiments.catalogue import load_experiments, read_errata
from mlm_repro.experiments.files import LadderResult, ReproductionScores
from mlm_repro.experiments.reproduce.files import ModelShape, ReproductionSummary
from mlm_repro.experiments.reproduce.plan import make_plan
from mlm_repro.experiments.scores import order_verdict
from mlm_repro.experiments.verdicts import Verdict, headlines, judge, load_results, totals, unanswered
from mlm_repro.lineage.atomic import write_text
from mlm_repro.lineage.errors import BadInput
from mlm_repro.lineage.files import read_document
from mlm_repro.lineage.progress import format_duration
from mlm_repro.lineage.records import read_records
from mlm_repro.reports.engines import engines_exhibit
from mlm_repro.reports.ladder import ladder_exhibit
from mlm_repro.reports.render import export_exhibit

ROOT = Path(__file__).resolve().parents[2]
KEPT = ROOT / "results"
RESULTS, FIGURES = KEPT / "reproduce-8.3b", KEPT / "figures"
SHOWN_ERRATA, SENTENCES = 3, 2


class Kept:
    """The reproduction that is kept with the code."""

    def __init__(self, directory: Path) -> None:
        self.summary = read_document(directory / "summary.json", ReproductionSummary)
        self.records = read_records(directory / "records.jsonl")
        self.scores = read_document(directory / "scores.json", ReproductionScores)

    @property
    def trained(self) -> dict[str, ModelShape]:
        """The twin of each model."""
        return {model.series: model.trained for model in self.summary.models}

    def published(self, series: str, quantity: str) -> str:
        """A model's number, several where sources print several; for a curve its last point."""
        mine = [r for r in self.records if (r.series, r.quantity, r.kind) == (series, quantity, "published")]
        last = max((r.x for r in mine if r.x is not None), default=None)
        values = [f"{r.value:,.2f}{r.unit}" for r in mine if r.x == last]
        return " / ".join(dict.fromkeys(values)) or "not run"

    def own(self, series: str, quantity: str) -> list[float]:
        """A twin's number, by seed."""
        return [r.value for r in self.records if (r.series, r.quantity) == (series, quantity) and r.seed is not None]


def scores_block() -> str:
    """Scores of a pretrained model, beside those of other people's programs."""
    shown = [("", *PRETRAINED_HEADS), ("---", "--:", "--:"), *pretrained_rows(KEPT / "smollm2")]
    return "\n".join(map(line, shown))


def results_block(kept: Kept) -> str:
    """The published numbers, and what the twins' order is, over their seeds."""
    names = kept.scores.models
    rows = {
        "": names,
        "---": ["--:"] * len(names),
        "published perplexity": [kept.published(name, "validation_perplexity") for name in names],
        "tokens a parameter of the twin": [f"{kept.trained[name].tokens_per_parameter or 0:.2g}" for name in names],
    }
    seeds = dict.fromkeys(str(model.seed) for model in kept.summary.models)
    scaled = f"Scaled: {kept.summary.hardware}, seeds {', '.join(seeds)}."
    order = order_verdict(kept.records, kept.scores)
    return "\n".join([*(f"|{head}|{'|'.join(row)}|" for head, row in rows.items()), "", f"{order} {scaled}"])


def tiers_block(kept: Kept) -> str:
    """What each size of hardware can run: one command, how long it takes, the number to expect."""
    names = kept.scores.models
    small, large = names[0], names[-1]
    twins = make_plan(large, "scaled", False, None).configs
    is_of_these = [kept.trained[name].hidden_size for name in names] == [twin.model.hidden_size for twin in twins]
    trained = format_duration(sum(model.train_seconds or 0 for model in kept.summary.models[: len(names)]))
    duration = f"{trained} (training)" if is_of_these else "not timed yet"
    return "\n".join(
        [
            "| hardware | command | duration | expect |",
            "|---|---|---|---|",
            f"| laptop | `make reproduce-8.3b` | {duration} | the order of three twins, scaled |",
            f"| one GPU | `make reproduce-{small}` | not run yet | WikiText-103 "
            f"{kept.published(small, 'wikitext103_perplexity')}, published |",
            f"| cluster | `mlm-experiment launch experiments/jobs/{large}.toml --out launch` | not run yet | "
            f"WikiText-103 {kept.published(large, 'wikitext103_perplexity')}, published |",
        ]
    )


def forecast_block() -> str:
    """What the kept ladder forecast and what its largest model reached."""
    sentence = read_document(KEPT / "ladder" / "ladder.json", LadderResult).sentence.partition(": ")[2]
    return f"{sentence[0].upper()}{sentence[1:]}.".replace(" rung ", " ")


def engines_block() -> str:
    """How far the losses of the kept trainings in Megatron-Core are from ours."""
    results = [read_benchmark(path) for path in sorted((KEPT / "against").glob("*/against.json"))]
    apart = {result.title.split(", ")[-2]: result.setting["largest difference of the losses"] for result in results}
    shown = ", ".join(f"{apart[layout]} ({layout})" for layout in sorted(apart, key=lambda name: name != "serial"))
    return (
        f"Losses over {results[0].setting['iterations']} iterations on text beside Megatron-Core's: at most {shown} "
        "nats apart."
    )


def errata_block() -> str:
    """The first errata in short, and how many there are."""
    lines = [HEADS[:3], ("---",) * 3, *(row[:3] for row in rows(SHOWN_ERRATA))]
    count = len(read_errata().errata)
    return "\n".join([f"{SHOWN_ERRATA} of {count} [errata](docs/errata.md):", "", *map(line, lines)])


@cache
def every_verdict() -> list[Verdict]:
    """A verdict on every claim, from what is kept and what is worked out."""
    experiments = load_experiments().values()
    return [*judge(experiments, load_results([KEPT, KEPT / "ablations"])), *unanswered(experiments)]


def verdicts_block() -> str:
    """Outcomes of the published claims by scale."""
    table = totals(every_verdict())
    marks = ["---"] * table.words + ["--:"] * (len(table.heads) - table.words)
    return "\n".join([*map(line, (table.heads, marks, *table.rows)), "", *headlines(every_verdict())[:SENTENCES]])


def line(cells: Sequence[str]) -> str:
    """A line of a table."""
    return f"|{'|'.join(cells)}|"


KEPT_BLOCKS: dict[str, Callable[[Kept], str]] = {"tiers": tiers_block, "results": results_block}
BLOCKS: dict[str, Callable[[], str]] = {
    "forecast": forecast_block, "scores": scores_block, "engines": engines_block, "errata": errata_block,
    "verdicts": verdicts_block,
}  # fmt: skip
CONSOLE = re.compile(r"```console\n((?:\$ [^\n]*\n)+)(.*?)```", re.DOTALL)
"""Commands, each after `$ `, and what the last of them prints."""


def rewrite(readme: str, results: Path = RESULTS) -> str:
    """The README with every block made anew. Raises BadInput where a marker is missing or a command fails."""
    kept = Kept(results)
    blocks = {name: partial(block, kept) for name, block in KEPT_BLOCKS.items()} | BLOCKS
    for name in blocks:
        if f"<!-- {name}: begin -->" not in readme or f"<!-- {name}: end -->" not in readme:
            raise BadInput(f"README has no <!-- {name}: begin --> and <!-- {name}: end -->")
    for name, block in blocks.items():
        before, rest = readme.split(begin := f"<!-- {name}: begin -->", 1)
        _, after = rest.split(end := f"<!-- {name}: end -->", 1)
        readme = f"{before}{begin}\n{block()}\n{end}{after}"
    return CONSOLE.sub(lambda match: f"```console\n{match[1]}{_output(match[1])}```", readme)


def draw(folder: Path) -> list[Path]:
    """Draw README's pictures into a folder: the kept ladder with its forecast, and two engines' losses."""
    engines = engines_exhibit(sorted((KEPT / "against").glob("*-tp2-*"))[0])
    shown = [ladder_exhibit(KEPT / "ladder"), replace(engines, name="engines")]
    return [export_exhibit(shown, exhibit.name, "svg", folder) for exhibit in shown]


def _output(commands: str) -> str:
    """What the last of the commands prints, in an empty folder."""
    with tempfile.TemporaryDirectory() as folder:
        outputs = [_run(line.removeprefix("$ "), Path(folder)) for line in commands.splitlines()]
    return "".join(f"{line.rstrip()}\n" for line in outputs[-1].splitlines())


def _run(line: str, folder: Path) -> str:
    program, *arguments = shlex.split(line)
    command = [str(Path(sys.executable).with_name(program)), *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BadInput(f"{line} failed: {done.stderr.strip()}")
    return done.stdout


if __name__ == "__main__":
    target = Path(sys.argv[1])
    write_text(target, rewrite(target.read_text(encoding="utf-8")))
    draw(FIGURES)
