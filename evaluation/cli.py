"""`mlm-eval`: a checkpoint's numbers on WikiText-103 and LAMBADA."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from evaluation.protocol import ClozeResult, PerplexityResult, Result
from lineage.atomic import write_json
from lineage.command import run_command
from lineage.errors import BadInput

app = typer.Typer(help="Evaluate a checkpoint by a named protocol.", no_args_is_help=True)

Checkpoint = Annotated[
    Path, typer.Option("--ckpt", help="Checkpoint directory, or a run directory for its newest one.")
]
Json = Annotated[Path | None, typer.Option("--json", help="Also write the result to this file.")]
Limit = Annotated[
    int | None,
    typer.Option(min=1, help="Score only so many windows or examples, spread evenly; the result is partial."),
]
BatchSize = Annotated[
    int | None, typer.Option(min=1, help="Rows per forward pass; by default as many as fit in memory.")
]
Workers = Annotated[int | None, typer.Option(min=1, help="Processes on a CPU; by default one per available core.")]


@app.command("wikitext103")
def wikitext103_command(
    ckpt: Checkpoint,
    json: Json = None,
    limit: Limit = None,
    batch_size: BatchSize = None,
    workers: Workers = None,
) -> None:
    """Word-level perplexity on the WikiText-103 test file, by Megatron-LM's recipe."""
    from evaluation.evaluate import evaluate_wikitext103

    _refuse_directory(json)
    _report(evaluate_wikitext103(ckpt, limit, batch_size, workers), json)


@app.command("lambada")
def lambada_command(
    ckpt: Checkpoint,
    json: Json = None,
    limit: Limit = None,
    batch_size: BatchSize = None,
    workers: Workers = None,
) -> None:
    """Strict last-word accuracy on OpenAI's LAMBADA test file."""
    from evaluation.evaluate import evaluate_lambada

    _refuse_directory(json)
    _report(evaluate_lambada(ckpt, limit, batch_size, workers), json)


def _refuse_directory(json: Path | None) -> None:
    if json is not None and json.is_dir():
        raise BadInput(f"--json {json} is a directory, not a file to write")


def _report(result: Result, json: Path | None) -> None:
    console = Console()
    console.print(result.protocol, soft_wrap=True, markup=False, highlight=False)
    console.print(_table(result))
    if result.partial:
        console.print("PARTIAL: only part of the test was scored; this is an estimate.", style="bold", soft_wrap=True)
    for line in (result.note, *result.warnings):
        if line:
            console.print(f"WARNING: {line}", style="bold", soft_wrap=True, markup=False, highlight=False)
    if json is not None:
        try:
            write_json(json, result.model_dump(mode="json"))
        except OSError as error:
            raise BadInput(f"{json} cannot be written: {error.strerror}") from error


def _table(result: Result) -> Table:
    table = Table(title=f"{result.task} ({result.kind}{', partial' if result.partial else ''})", show_header=False)
    table.add_column(justify="left")
    table.add_column(justify="right")
    match result:
        case PerplexityResult():
            table.add_row("perplexity", _number(result.perplexity))
            table.add_row("perplexity per sub-word", _number(result.subword_perplexity))
            table.add_row("loss per sub-word", f"{result.loss_per_token:.5f}")
            table.add_row("bits per byte", f"{result.bits_per_byte:.5f}")
            table.add_row("original tokens", f"{result.num_original_tokens:,}")
        case ClozeResult():
            table.add_row("accuracy", f"{result.accuracy:.2%} ± {result.standard_error:.2%}")
            table.add_row("correct", f"{result.num_correct:,} of {result.num_examples:,}")
            table.add_row("perplexity of the last word", _number(result.perplexity))
    table.add_row("sub-words scored", f"{result.num_scored_tokens:,}")
    table.add_row("checkpoint", result.checkpoint_digest[:16])
    table.add_row("seconds", f"{result.seconds:,.1f}")
    return table


def _number(value: float) -> str:
    return f"{value:,.3f}" if value < 1e7 else f"{value:.3e}"


def main() -> None:
    """Entry point."""
    run_command(app)
