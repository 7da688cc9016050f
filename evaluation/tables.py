"""Results on a terminal."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from mlm_repro.evaluation.schema import ClozeResult, PerplexityResult, Result

if TYPE_CHECKING:
    from mlm_repro.evaluation.compare import Difference

CONSOLE = Console(soft_wrap=True)
TABLES = Console(width=1_000)
"""Cuts no digit off where the terminal is narrower than a table."""
MOST_WARNINGS = 2


def print_result(result: Result) -> None:
    """A result: its protocol, its numbers under every convention, and its warnings."""
    CONSOLE.print(result.protocol, soft_wrap=True, markup=False, highlight=False)
    table = Table(title=f"{result.task} ({_kind(result)})", show_header=False)
    table.add_column(justify="left")
    table.add_column(justify="right")
    match result:
        case PerplexityResult():
            table.add_row("perplexity", _perplexity(result))
            by_words = _number(result.original_token_perplexity)
            table.add_row(f"per original token, {result.num_original_tokens:,}", by_words)
            table.add_row("as Megatron prints it, one token less", _number(result.megatron.get("adjusted ppl")))
            table.add_row(f"per lm-eval word, {result.num_lm_eval_words:,}", _number(result.lm_eval_word_perplexity))
            table.add_row("per sub-word", _number(result.subword_perplexity))
            table.add_row("loss per sub-word", f"{result.loss_per_token:.5f}")
            table.add_row("bits per byte", f"{result.bits_per_byte:.5f}")
        case ClozeResult():
            table.add_row("accuracy", f"{result.accuracy:.2%} ± {result.standard_error:.2%}")
            table.add_row("correct", f"{result.num_correct:,} of {result.num_examples:,}")
            table.add_row("perplexity of the target", _perplexity(result))
    table.add_row("sub-words scored", f"{result.num_scored_tokens:,}")
    table.add_row("checkpoint", result.checkpoint_digest[:16])
    table.add_row("seconds", f"{result.seconds:,.1f}")
    TABLES.print(table)
    _print_remarks({result.task: result})


def print_conventions(results: Mapping[str, Result], missing: Mapping[str, str]) -> None:
    """Many protocols side by side."""
    texts = {name: result for name, result in results.items() if isinstance(result, PerplexityResult)}
    clozes = {name: result for name, result in results.items() if isinstance(result, ClozeResult)}
    if texts:
        table = _numbers(
            f"word perplexity ({_kind(next(iter(texts.values())))})",
            ["ppl", "±", "per T_o", "per lm-eval word", "per sub-word", "bits per byte"],
        )
        for name, text in texts.items():
            error = "" if (e := text.log_perplexity_standard_error) is None else f"{e:.1%}"
            values = (text.original_token_perplexity, text.lm_eval_word_perplexity, text.subword_perplexity)
            table.add_row(name, _short(text.perplexity), error, *map(_short, values), f"{text.bits_per_byte:.4f}")
        TABLES.print(table)
    if clozes:
        kind = _kind(next(iter(clozes.values())))
        table = _numbers(f"last word ({kind})", ["accuracy", "correct", "perplexity of the target", "±"])
        for name, cloze in clozes.items():
            accuracy = f"{cloze.accuracy:.2%} ± {cloze.standard_error:.2%}"
            error = "" if (e := cloze.log_perplexity_error) is None else f"{e:.1%}"
            correct = f"{cloze.num_correct:,}/{cloze.num_examples:,}"
            table.add_row(name, accuracy, correct, _short(cloze.perplexity), error)
        TABLES.print(table)
    for name, result in results.items():
        CONSOLE.print(f"{name}: {result.protocol}", soft_wrap=True, markup=False, highlight=False)
    for name, reason in missing.items():
        CONSOLE.print(f"{name}: NOT RUN: {reason}", soft_wrap=True, markup=False, highlight=False)
    _print_remarks(results)


def print_differences(differences: Sequence["Difference"]) -> None:
    """Differences of models from the first."""
    table = _numbers("less the first, paired", ["ln perplexity", "95 % interval", "accuracy", "p", "pairs"])
    for row in differences:
        accuracy = "" if row.accuracy is None else f"{row.accuracy:+.2%}{_error(row.accuracy_standard_error, '.2%')}"
        loss = f"{row.log_perplexity:+.5f}{_error(row.log_perplexity_standard_error, '.5f')}"
        interval = "" if row.interval is None else " to ".join(f"{end:+.5f}" for end in row.interval)
        p = "" if row.p is None else f"{row.p:.2g}"
        table.add_row(f"{row.model}: {row.task}", loss, interval, accuracy, p, f"{row.num_pairs:,}")
    TABLES.print(table)


def _print_remarks(results: Mapping[str, Result]) -> None:
    if any(result.partial for result in results.values()):
        CONSOLE.print("PARTIAL: only part of the test was scored; this is an estimate.", style="bold", soft_wrap=True)
    notes = [result.note for result in results.values() if result.note]
    warnings = list(dict.fromkeys(warning for result in results.values() for warning in result.warnings))
    if len(results) > 1 and len(warnings) > MOST_WARNINGS:
        warnings = [*warnings[:MOST_WARNINGS], f"and {len(warnings) - MOST_WARNINGS} more such warnings"]
    for remark in (*dict.fromkeys(notes), *warnings):
        CONSOLE.print(f"warning: {remark}", style="bold", soft_wrap=True, markup=False, highlight=False)


def _numbers(title: str, heads: Sequence[str]) -> Table:
    table = Table(title=title, box=SIMPLE, padding=(0, 1, 0, 0))
    table.add_column("", no_wrap=True)
    for head in heads:
        table.add_column(head, justify="right")
    return table


def _kind(result: Result) -> str:
    return f"{result.kind}{', partial' if result.partial else ''}"


def _perplexity(result: Result) -> str:
    return _number(result.perplexity) + ("" if result.spread is None else f" ± {_number(result.spread)}")


def _number(value: float | None) -> str:
    if value is None:
        return "—"
    return f"{value:,.3f}" if value < 1e7 else f"{value:.3e}"


def _short(value: float | None) -> str:
    if value is None:
        return "—"
    return f"{value:.2f}" if value < 1e5 else f"{value:.2e}"


def _error(value: float | None, form: str) -> str:
    return "" if value is None else f" ± {value:{form}}"
