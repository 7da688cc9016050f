"""The page of results, written from the files under `results/`."""

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path

from benchmarks.tables import sentences, tables
from docs.hooks.commands import cell, table
from mlm_repro.evaluation.models.places import SMOLLM2, SMOLLM2_NOTE
from mlm_repro.experiments.benchmark import AGAINST, read_benchmark
from mlm_repro.experiments.catalogue import load_experiments
from mlm_repro.experiments.verdicts import (
    count_outcomes,
    headlines,
    judge,
    load_results,
    totals,
    unanswered,
)
from mlm_repro.lineage.files import read_object
from mlm_repro.reports.engines import engines_exhibit
from mlm_repro.reports.exhibit import Table
from mlm_repro.reports.load import load_reproduction
from mlm_repro.reports.reproduced import order_of, twins_table
from mlm_repro.reports.tables import comparison_tables, models_tables

REPRODUCTION = "reproduce-8.3b"
PRETRAINED_HEADS = ("here", "others' programs")


def results(folder: Path) -> Iterator[str]:
    """Yield Markdown texts, headings, sentences, tables and commands without figures, that together
    are the documentation's page of results: a pretrained model's scores, the reproduction, the
    verdicts on published claims, other engines, benchmarks and faults. They are read from the
    folder `folder`, `results` in the repository. Raises BadInput, IntegrityFailure or
    FileNotFoundError if a file that a section reads is missing there."""
    for section in (_pretrained, _reproduction, _verdicts, _engines, _benchmarks, _faults):
        yield from section(folder)


def markdown(shown: Table) -> str:
    """Return a Table as Markdown text, with its title, if it has one, in bold above; its cells are
    escaped."""
    title = f"**{shown.title}**\n\n" if shown.title else ""
    heads, *rows = (tuple(map(cell, row)) for row in (shown.heads, *shown.rows))
    return title + table(heads, rows)


def pretrained_rows(folder: Path) -> list[tuple[str, str, str]]:
    """Return a list with a row of texts (protocol, our number, the other program's number) for the
    kept results wikitext103-stride1024, lambada and lambada-lm-eval and for each wikitext2-*.json
    in `folder`; other files have no row. The other program's number is from lm-eval.json or
    transformers.jsonl, which must both be in `folder`; the text is empty if no other program was
    run. Raises IntegrityFailure for a missing JSON file, FileNotFoundError without
    transformers.jsonl."""
    wikitext, lambada, passages, theirs = (
        read_object(folder / f"{name}.json")
        for name in ("wikitext103-stride1024", "lambada", "lambada-lm-eval", "lm-eval")
    )
    loop = math.exp(_loop_sums(folder)["float64"] / wikitext["normaliser"])
    harness = f"{theirs['acc']:.4f} and {theirs['perplexity']:.3f}, lm-evaluation-harness"
    shown = (
        (wikitext, f"{wikitext['perplexity']:.3f}", f"{loop:.3f}, transformers' loop"),
        (lambada, f"{lambada['accuracy']:.2%}", ""),
        (passages, f"{passages['accuracy']:.4f} and {passages['perplexity']:.3f}", harness),
    )
    rows = [(f"`{score['task']}`", *numbers) for score, *numbers in shown]
    for path in sorted(folder.glob("wikitext2-*.json")):
        score = read_object(path)
        rows.append((f"`{score['task']}`", f"{score['perplexity']:.3f}", ""))
    return rows


def _loop_sums(folder: Path) -> dict[str, float]:
    lines = (folder / "transformers.jsonl").read_text(encoding="utf-8").splitlines()
    return {
        name: math.fsum(json.loads(line)[name] for line in lines) for name in ("float32", "float64")
    }


def _pretrained(results: Path) -> Iterator[str]:
    yield "## A pretrained model"
    yield f"{SMOLLM2_NOTE}. The whole test sets; accuracy and perplexity of the last word."
    yield table(("protocol", *PRETRAINED_HEADS), pretrained_rows(results / SMOLLM2))
    sums = _loop_sums(results / SMOLLM2)
    yield (
        "transformers' loop is shown with a float64 softmax, as here. torch's float32"
        f" `cross_entropy` gives {1 - sums['float32'] / sums['float64']:.1e} of the loss less on"
        " the same windows."
    )


def _reproduction(results: Path) -> Iterator[str]:
    reproduction = load_reproduction(results / REPRODUCTION)
    summary = reproduction.summary
    yield "## The reproduction"
    yield f"`make reproduce-8.3b`, on {summary.hardware}. {summary.twin_rule}"
    yield order_of(reproduction)
    yield from map(markdown, models_tables(summary.models, reproduction.own_kind))
    yield markdown(twins_table(reproduction))
    yield from map(markdown, comparison_tables(reproduction.records))


def _verdicts(results: Path) -> Iterator[str]:
    experiments = load_experiments()
    verdicts = [
        *judge(experiments.values(), load_results([results, results / "ablations"])),
        *unanswered(experiments.values()),
    ]
    yield "## The published claims"
    yield "What `mlm-experiment compare --all` says in a clone."
    yield markdown(totals(verdicts))
    yield " ".join(headlines(verdicts))
    yield markdown(totals(verdicts, True))
    yield "### By table and figure"
    rows = [
        (
            name,
            experiment.title,
            count_outcomes(verdict for verdict in verdicts if verdict.experiment == name),
        )
        for name, experiment in experiments.items()
    ]
    yield markdown(Table(("experiment", "title", "claims"), rows, 3))


def _benchmarks(results: Path) -> Iterator[str]:
    yield "## Benchmarks"
    yield (
        "Each row was measured in one run on one machine, interleaved with what it is compared"
        " with."
    )
    for path in sorted((results / "bench").glob("*.json")):
        result = read_benchmark(path)
        yield f"### {result.title}"
        yield " ".join((*result.disagreements, *sentences(result)))
        every = tables(result)
        yield from map(
            markdown, [each for each in every if each.title in ("ratios", "not measured")] or every
        )


def measures(record: Path) -> Iterator[str]:
    """Yield as Markdown texts every table of a benchmark's record except the table of its ratios;
    `record` is the path of the record's file. Raises the errors of `read_benchmark`."""
    for rows in tables(read_benchmark(record)):
        if rows.title != "ratios":
            yield markdown(rows)


def _engines(results: Path) -> Iterator[str]:
    yield "## Beside other engines"
    yield "The same weights and samples in two engines ([how](other-engines.md))."
    for path in sorted((results / "against").glob(f"*/{AGAINST}")):
        exhibit = engines_exhibit(path.parent)
        yield f"### {exhibit.title}"
        yield " ".join(exhibit.caption)
        yield f"```sh\n{exhibit.command}\n```"


def _faults(results: Path) -> Iterator[str]:
    yield "## Faults"
    chaos = (results / "chaos" / "chaos.md").read_text(encoding="utf-8")
    yield re.sub(r"^#", "###", chaos, flags=re.MULTILINE)
