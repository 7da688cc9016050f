"""Writes the results that README shows, from the files in `results/` and from commands, so that no
number is typed.

`python -m docs.hooks.readme README.md` rewrites the blocks between markers, the outputs in
`console` blocks, and the pictures.
"""

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import fmean

from mlm_repro.evaluation.models.places import SMOLLM2
from mlm_repro.experiments.catalogue import load_experiments
from mlm_repro.experiments.reproduce.plan import make_plan
from mlm_repro.experiments.scores import END
from mlm_repro.experiments.verdicts import (
    Verdict,
    headlines,
    judge,
    load_results,
    totals,
    unanswered,
)
from mlm_repro.lineage.atomic import write_bytes, write_text
from mlm_repro.lineage.errors import BadInput
from mlm_repro.lineage.files import read_object
from mlm_repro.reports.claims import forecast_of_order
from mlm_repro.reports.engines import apart, read_engines
from mlm_repro.reports.load import Reproduction, load_reproduction
from mlm_repro.reports.render import render
from mlm_repro.reports.reproduced import order_of, reproduction_exhibits

ROOT = Path(__file__).resolve().parents[2]
KEPT = ROOT / "results"
RESULTS = KEPT / "reproduce-8.3b"
FIGURES = KEPT / "figures"


def published(kept: Reproduction, series: str, quantity: str) -> str:
    """Return, as text with its unit, the published number of a quantity for the model `series`,
    from a reproduction's records: several between slashes if sources print several; for a curve its
    last point; "not run" without a number."""
    mine = [
        r for r in kept.records if (r.series, r.quantity, r.kind) == (series, quantity, "published")
    ]
    last = max((r.x for r in mine if r.x is not None), default=None)
    values = [f"{r.value:,.2f}{r.unit}" for r in mine if r.x == last]
    return " / ".join(dict.fromkeys(values)) or "not run"


def results_block(kept: Reproduction) -> str:
    """Return in Markdown the sentence on the twins' order over their seeds, a table of their sizes
    and perplexities, and the result of the forecast that was sealed before its trainings."""
    summary = kept.summary
    names = [*summary.labels]
    trained = {model.series: model.trained for model in summary.models}
    ends = [
        [r.value for r in kept.records if (r.series, r.quantity) == (name, END) and r.seed]
        for name in names
    ]
    rows = {
        "": names,
        "---": ["--:"] * len(names),
        "published perplexity": [published(kept, name, "validation_perplexity") for name in names],
        "twin's parameters": [f"{trained[name].parameters:,}" for name in names],
        "twin's perplexity": [f"{fmean(end):.1f}" for end in ends],
    }
    table = [line((head, *row)) for head, row in rows.items()]
    said = f"{order_of(kept)} {summary.limits}"
    return "\n".join([said, "", *table, "", forecast_of_order(every_verdict())])


def tiers_block(kept: Reproduction) -> str:
    """Return a Markdown table with a row for each kind of hardware: the command that runs there,
    its duration and the number to expect. The reproduction `kept` gives the twins' times."""
    names = [*kept.summary.labels]
    small = names[0]
    large = names[-1]
    twins = make_plan(large, "scaled", False, None).configs
    models = kept.summary.models[: len(twins)]
    sizes = [twin.model.hidden_size for twin in twins]
    is_of_these = [model.trained.hidden_size for model in models] == sizes
    minutes = sum(model.train_seconds or 0 for model in models) / 60
    duration = f"{minutes:.0f} minutes of training" if is_of_these else "not timed yet"
    smollm2 = read_object(KEPT / SMOLLM2 / "wikitext2-gptq.json")["perplexity"]
    return "\n".join(
        [
            "|hardware|command|duration|expect|",
            "|---|---|---|---|",
            f"|laptop|`make reproduce-{large}`|{duration}|the order of three twins|",
            (
                "|laptop|[SmolLM2](docs/results.md#a-pretrained-model)|not timed|WikiText-2"
                f" {smollm2:.2f} by GPTQ's recipe|"
            ),
            (
                f"|one GPU|`make reproduce-{small}`|not run yet|WikiText-103 "
                f"{published(kept, small, 'wikitext103_perplexity')}, published|"
            ),
            (
                f"|cluster|`mlm-experiment launch experiments/jobs/{large}.toml --out launch`|not"
                f" run yet|WikiText-103 {published(kept, large, 'wikitext103_perplexity')},"
                " published|"
            ),
        ]
    )


def engines_block(_: Reproduction) -> str:
    """Return a sentence on the largest difference between the losses of Megatron-Core and of ours,
    on each layout, in the trainings kept below `results/against`; the argument is not used."""
    return apart([read_engines(run) for run in sorted((KEPT / "against").glob("against-*"))])


@cache
def every_verdict() -> list[Verdict]:
    """Return a verdict on every published claim, from the results kept below `results` and from
    computed numbers; claims that no experiment answers have a verdict too. They are computed once a
    process."""
    experiments = load_experiments().values()
    return [*judge(experiments, load_results([KEPT, KEPT / "ablations"])), *unanswered(experiments)]


def verdicts_block(_: Reproduction) -> str:
    """Return in Markdown a table of how many published claims have each outcome at each scale, by
    kept results, and a sentence that sums them up; the argument is not used."""
    table = totals(every_verdict())
    marks = ["---"] * table.words + ["--:"] * (len(table.heads) - table.words)
    return "\n".join(
        [*map(line, (table.heads, marks, *table.rows)), "", headlines(every_verdict())[0]]
    )


def line(cells: Sequence[str]) -> str:
    """Return the cells joined to a row of a Markdown table, as they are."""
    return f"|{'|'.join(cells)}|"


BLOCKS: dict[str, Callable[[Reproduction], str]] = {
    "tiers": tiers_block,
    "results": results_block,
    "engines": engines_block,
    "verdicts": verdicts_block,
}
CONSOLE = re.compile(r"```console\n((?:\$ [^\n]*\n)+)(.*?)```", re.DOTALL)
"""Commands of a shell, each after `$ `, and the output of the last of them."""


def rewrite(readme: str, results: Path = RESULTS) -> str:
    """Return the README's text with every block between marks, such as `<!--tiers-->`, and every
    output in a `console` block made anew; the commands are run, nothing is written. `results` is
    the directory of the kept reproduction. Raises BadInput if a mark is missing or a command
    fails."""
    reproduction = load_reproduction(results)
    for name, block in BLOCKS.items():
        begin = f"<!--{name}-->"
        end = f"<!--/{name}-->"
        if begin not in readme or end not in readme:
            raise BadInput(f"README does not have both marks, {begin} and {end}")
        before, rest = readme.split(begin, 1)
        readme = f"{before}{begin}\n{block(reproduction)}\n{end}{rest.split(end, 1)[1]}"
    return CONSOLE.sub(lambda match: f"```console\n{match[1]}{_output(match[1])}```", readme)


def draw(folder: Path) -> Path:
    """Draw README's picture, the curves of the kept reproduction, into `twins.svg` in a folder, and
    return its path."""
    curves = reproduction_exhibits(load_reproduction(RESULTS))["2019-figure-6"]
    path = folder / "twins.svg"
    write_bytes(path, render(replace(curves, name="twins")).svg)
    return path


@cache
def _output(commands: str) -> str:
    """Run the commands in a shell, in a new empty folder, and return the output of the last. Each
    line is a command after `$ `. Raises BadInput if one fails or prints nothing. A text is run once
    a process."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    with tempfile.TemporaryDirectory() as folder:
        for line in commands.splitlines():
            command = line.removeprefix("$ ")
            done = subprocess.run(
                command,
                shell=True,
                cwd=folder,
                env={**os.environ, "PATH": path},
                capture_output=True,
                text=True,
                check=False,
            )
            if done.returncode or not done.stdout:  # a pipe's exit code is its last command's alone
                raise BadInput(f"{command} failed or printed nothing: {done.stderr.strip()}")
    return "".join(f"{line.rstrip()}\n" for line in done.stdout.splitlines())


if __name__ == "__main__":
    target = Path(sys.argv[1])
    write_text(target, rewrite(target.read_text(encoding="utf-8")))
    draw(FIGURES)
