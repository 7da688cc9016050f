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
    """Return, as text with its unit, the number that the papers state as the `quantity` of the
    model `series`, from the published records of the reproduction `kept`: several between slashes
    if they state several; for a curve its last point; "not run" without a number."""
    mine = [
        r for r in kept.records if (r.series, r.quantity, r.kind) == (series, quantity, "published")
    ]
    last = max((r.x for r in mine if r.x is not None), default=None)
    values = [f"{r.value:,.2f}{r.unit}" for r in mine if r.x == last]
    return " / ".join(dict.fromkeys(values)) or "not run"


def results_block(kept: Reproduction) -> str:
    """Return as one Markdown text three things. From the reproduction `kept`: a sentence on whether
    its larger twins, the published models made small, end lower in perplexity in every seed, with
    one on what models of their size can show; and a table of the models' published perplexities,
    the twins' numbers of parameters, and the twins' perplexities as means over their seeds. From
    the results kept below `results`: the outcome of the forecast of that order in other runs, which
    was sealed before they were trained."""
    summary = kept.summary
    names = [*summary.labels]
    trained = {model.series: model.trained for model in summary.models}
    ends = [
        [
            r.value
            for r in kept.records
            if (r.series, r.quantity) == (name, END) and r.seed is not None
        ]
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
    """Return as text a Markdown table of four rows: on a laptop the largest model's scaled twins,
    on a laptop SmolLM2, on one GPU the smallest model, and on a cluster the largest model. A row
    has the command to run, its duration and the result to expect. The reproduction `kept` gives the
    published numbers, and the twins' times if their sizes are still those of the plan; SmolLM2's
    perplexity is read from the results kept below `results`."""
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
    """Return a sentence on the largest difference, in nats, between the losses of another engine
    and of ours, on each layout, in the comparisons kept below `results/against`. There must be at
    least one; the argument is not used. Raises the errors of `read_engines`."""
    return apart([read_engines(run) for run in sorted((KEPT / "against").glob("against-*"))])


@cache
def every_verdict() -> list[Verdict]:
    """Return a list of a Verdict on every published claim, from the results kept below `results`
    and from computed and simulated numbers; a claim that no experiment answers has a verdict too.
    The list is made once a process, so it must not be changed."""
    experiments = load_experiments().values()
    return [*judge(experiments, load_results([KEPT, KEPT / "ablations"])), *unanswered(experiments)]


def verdicts_block(_: Reproduction) -> str:
    """Return as one Markdown text a table of how many facts, and in brackets claims, are confirmed,
    contradicted, predicted and not tried at each scale, by the results kept below `results` and by
    computed and simulated numbers, and a sentence on what these outcomes mean; the argument is not
    used."""
    table = totals(every_verdict())
    marks = ["---"] * table.words + ["--:"] * (len(table.heads) - table.words)
    return "\n".join(
        [*map(line, (table.heads, marks, *table.rows)), "", headlines(every_verdict())[0]]
    )


def line(cells: Sequence[str]) -> str:
    """Return the texts `cells` as one row of a Markdown table, with a bar before, between and after
    them and neither spaces nor a line end; nothing in them is escaped."""
    return f"|{'|'.join(cells)}|"


BLOCKS: dict[str, Callable[[Reproduction], str]] = {
    "tiers": tiers_block,
    "results": results_block,
    "engines": engines_block,
    "verdicts": verdicts_block,
}
CONSOLE = re.compile(r"```console\n((?:\$ [^\n]*\n)+)(.*?)```", re.DOTALL)
"""Regular expression of a `console` block: commands of a shell, each after `$ `, and the output of
the last of them."""


def rewrite(readme: str, results: Path = RESULTS) -> str:
    """Return `readme`, the README's text, with each of the blocks of `BLOCKS` between its marks,
    such as `<!--tiers-->` and `<!--/tiers-->`, and every output in a `console` block made anew; the
    commands are run, no file is written. `results` is the directory of the kept reproduction.
    Raises BadInput if a mark is missing or a command fails or prints nothing, and the errors of
    `load_reproduction`."""
    reproduction = load_reproduction(results)
    for name, block in BLOCKS.items():
        begin = f"<!--{name}-->"
        end = f"<!--/{name}-->"
        if begin not in readme or end not in readme:
            raise BadInput(
                f"README does not have both marks, {begin} and {end}: put them back, around the"
                " text that is generated"
            )
        before, rest = readme.split(begin, 1)
        readme = f"{before}{begin}\n{block(reproduction)}\n{end}{rest.split(end, 1)[1]}"
    return CONSOLE.sub(lambda match: f"```console\n{match[1]}{_output(match[1])}```", readme)


def draw(folder: Path) -> Path:
    """Draw README's picture, the curves of validation perplexity of the kept reproduction, into
    `twins.svg` in `folder`, and return the path of that file."""
    curves = reproduction_exhibits(load_reproduction(RESULTS))["2019-figure-6"]
    path = folder / "twins.svg"
    write_bytes(path, render(replace(curves, name="twins")).svg)
    return path


@cache
def _output(commands: str) -> str:
    """Run the commands one after another, each in a shell of its own that starts in the same new
    folder, empty at first, and return the standard output of the last, without white space at the
    ends of lines. Each line of `commands` is a command after `$ `. Raises BadInput at the first
    command that fails or prints nothing to standard output. The same commands are run once a
    process; later calls return the same text."""
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
                raise BadInput(
                    f"the command {command} of README failed or printed nothing; mend it or the"
                    f" program that it runs: {done.stderr.strip()}"
                )
    return "".join(f"{line.rstrip()}\n" for line in done.stdout.splitlines())


if __name__ == "__main__":
    target = Path(sys.argv[1])
    write_text(target, rewrite(target.read_text(encoding="utf-8")))
    draw(FIGURES)
