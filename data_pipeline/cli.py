"""`mlm-data`: build a dataset from a recipe, look at its text, read its ledger."""

import json
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from data_pipeline.config import DataConfig
from lineage.command import run_command
from lineage.config import load_config
from lineage.digest import is_sealed, sha256_json
from lineage.errors import BadInput, IntegrityFailure
from lineage.run import RunDirectory

app = typer.Typer(help="Clean, deduplicate, decontaminate and tokenize text.", no_args_is_help=True)


@app.command()
def run(
    config: Annotated[Path, typer.Argument(help="Recipe, a TOML file such as data_pipeline/recipes/twin.toml.")],
    overrides: Annotated[
        list[str] | None, typer.Option("--set", help="Override one setting: section.key=value.")
    ] = None,
    runs: Annotated[Path, typer.Option(help="Directory that holds run directories.")] = Path("runs"),
    workers: Annotated[int | None, typer.Option(help="Worker processes; 0 means one for each core.", min=0)] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print the resolved recipe and its digest.")] = False,
) -> None:
    """Build the dataset of a recipe, or find it if it is already built."""
    settings = [*(overrides or []), *([] if workers is None else [f"workers={workers}"])]
    recipe = load_config(config, DataConfig, settings)
    if dry_run:
        print(json.dumps(recipe.model_dump(mode="json"), indent=2, ensure_ascii=False))
        print(f"digest {sha256_json(recipe.identity())}")
        return
    from data_pipeline.runner import build_dataset

    directory = build_dataset(recipe, runs).path
    splits = _read_json(directory / "dataset.json")["splits"]
    counts = "; ".join(
        f"{name} {split['documents']:,} documents, {split['tokens']:,} tokens" for name, split in splits.items()
    )
    print(f"dataset {directory}: {counts}")


@app.command()
def inspect(
    dataset: Annotated[Path, typer.Argument(help="Dataset directory.")],
    sample: Annotated[int, typer.Option(help="Training documents to print.", min=1)] = 3,
) -> None:
    """Print training documents as a model sees them: decoded from the token file, evenly spread over it."""
    from data_pipeline.token_file import TokenFile
    from data_pipeline.tokenizer import Tokenizer

    directory = _open(dataset)
    tokenizer = Tokenizer.load(directory / "tokenizer")
    tokens = TokenFile(directory / _read_json(directory / "dataset.json")["splits"]["train"]["prefix"])
    for number in np.unique(np.linspace(0, len(tokens) - 1, sample).astype(int)):
        print(f"--- training document {number:,}: {tokens.sizes[number]:,} tokens")
        print(tokenizer.decode(tokens[number]))


@app.command()
def stats(dataset: Annotated[Path, typer.Argument(help="Dataset directory.")]) -> None:
    """Print the attrition ledger: what each stage kept and dropped, and why."""
    from data_pipeline.ledger import format_ledger

    print(format_ledger(_read_json(_open(dataset) / "ledger.json")))


def _open(dataset: Path) -> Path:
    run = RunDirectory.open(dataset)
    if run.manifest.get("kind") != "data":
        raise BadInput(f"{dataset} is not a dataset")
    if not is_sealed(run.path):
        raise IntegrityFailure(f"{dataset} is not complete: build it again")
    return run.path


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise IntegrityFailure(f"{path} cannot be read: {error}") from error


def main() -> None:
    """Entry point."""
    run_command(app, "run", ("run", "inspect", "stats"))
