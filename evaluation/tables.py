"""Prints results on a terminal."""

from collections.abc import Mapping, Sequence
from itertools import chain
from types import MappingProxyType

from rich.box import SIMPLE, Box
from rich.console import Console
from rich.table import Table

from mlm_repro.evaluation.schema import ClozeResult, PerplexityResult, Result

CONSOLE = Console(width=1_000, soft_wrap=True, markup=False, highlight=False)
"""Console wider than any table, so that a narrow terminal cuts off no digit."""


def print_results(
    results: Mapping[str, Result], missing: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Print `results`, a mapping name of a protocol → Result, to standard output: for a single
    Result its numbers, one below the other; for several a table of perplexities and a table of
    accuracies, with a row for each Result. Then print each protocol's rule, each protocol of
    `missing`, a mapping name → reason why it did not run, by default empty, and all remarks."""
    for kind in (PerplexityResult, ClozeResult):
        by_task = {
            result.task: numbers_of(result)
            for result in results.values()
            if isinstance(result, kind)
        }
        for labels in [*by_task.values()][:1]:
            if len(results) == 1:
                print_rows([(*by_task, ""), *labels.items()])
            else:
                print_rows(
                    [
                        ("", *labels),
                        *((name, *numbers.values()) for name, numbers in by_task.items()),
                    ]
                )
    for result in results.values():
        CONSOLE.print(f"{result.task}: {result.protocol}")
    for name, reason in missing.items():
        CONSOLE.print(f"{name}: NOT RUN: {reason}")
    print_remarks([*results.values()])


def numbers_of(result: Result) -> dict[str, str]:
    """Return a dict of a result's numbers as text, each under the name of its convention, the
    protocol's own number first; then its number of scored sub-words, its kind, the beginning of its
    checkpoint's digest, and its seconds. A number that is None is shown as `—`."""
    spread = "" if result.spread is None else f" ± {_number(result.spread)}"
    numbers = {"perplexity": f"{_number(result.perplexity)}{spread}"}
    if isinstance(result, ClozeResult):
        numbers = {
            "accuracy": f"{result.accuracy:.2%} ± {result.standard_error:.2%}",
            "correct": f"{result.num_correct:,} of {result.num_examples:,}",
            "perplexity of the target": numbers["perplexity"],
        }
    elif isinstance(result, PerplexityResult):
        numbers |= {
            "per original token": _number(result.original_token_perplexity),
            "Megatron's, one token less": _number(result.megatron.get("adjusted ppl")),
            "per lm-eval word": _number(result.lm_eval_word_perplexity),
            "per sub-word": _number(result.subword_perplexity),
            "loss per sub-word": f"{result.loss_per_token:.5f}",
            "bits per byte": f"{result.bits_per_byte:.5f}",
        }
    kind = f"{result.kind}{', partial' if result.partial else ''}"
    return numbers | {
        "sub-words scored": f"{result.num_scored_tokens:,}",
        "kind": kind,
        "checkpoint": result.checkpoint_digest[:16],
        "seconds": f"{result.seconds:,.1f}",
    }


def print_rows(rows: Sequence[Sequence[str]], box: Box = SIMPLE) -> None:
    """Print a table, given as rows of text, to standard output. Its first row has the headings;
    `box` has the lines to draw. All columns but the first are aligned at the right."""
    table = Table(*rows[0], box=box, padding=(0, 1, 0, 0))
    for row in rows[1:]:
        table.add_row(*row)
    for column in table.columns[1:]:
        column.justify = "right"
    CONSOLE.print(table)


def print_remarks(results: Sequence[Result]) -> None:
    """Print the notes of all `results` and then their warnings to standard output, each remark once
    and after the word `warning:`, even a note. If one of the results is partial, a line that says
    so comes first. If there are neither remarks nor partial results, nothing is printed."""
    if any(result.partial for result in results):
        CONSOLE.print(
            "PARTIAL: only part of the test was scored; this is an estimate.", style="bold"
        )
    notes = [result.note for result in results if result.note]
    warnings = chain.from_iterable(result.warnings for result in results)
    for remark in dict.fromkeys([*notes, *warnings]):
        CONSOLE.print(f"warning: {remark}", style="bold")


def _number(value: float | None) -> str:
    if value is None:
        return "—"
    return f"{value:,.3f}" if value < 1e7 else f"{value:.3e}"
