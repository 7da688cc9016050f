"""`mlm-data`: build a dataset from a recipe, run one stage on any text, look at a dataset and its
ledger."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from typer import Argument, Option

from mlm_repro.data_pipeline.verbs import stage_verbs
from mlm_repro.lineage.command import CommandLine, run_command
from mlm_repro.lineage.errors import BadInput, DataMissing, IntegrityFailure
from mlm_repro.lineage.shipped import Shipped, find_file

if TYPE_CHECKING:
    from mlm_repro.data_pipeline.config import VerbConfig
    from mlm_repro.data_pipeline.files import Amount, Ledger

app = CommandLine(help="Clean, deduplicate, decontaminate and tokenize text.", no_args_is_help=True)

Settings = Annotated[
    list[str] | None, Option("--set", help="Override one setting: section.key=value.")
]
WorkersOption = Annotated[
    int | None, Option(help="Worker processes; 0 means one for each core.", min=0)
]
ExecutorOption = Annotated[
    Literal["local", "ray"],
    Option(help="Where the work is done; RAY_ADDRESS names a Ray cluster."),
]
DryRun = Annotated[
    bool,
    Option("--dry-run", help="Only print the resolved recipe, its digest, cost and time."),
]
Part = Annotated[
    str, Option(metavar="I/N", help="Do part I of N: N machines give the same command.")
]
Source = Annotated[
    str,
    Argument(
        metavar="IN", help="jsonl:PATH, parquet:PATH, text:PATH, or a directory that a verb wrote."
    ),
]
Out = Annotated[Path, Argument(metavar="OUT", help="Directory for the result, empty or new.")]


@app.command()
def run(
    config: Annotated[Path, Argument(help="A shipped recipe, such as twin, or a TOML file.")],
    overrides: Settings = None,
    runs: Annotated[Path, Option(help="Directory that holds run directories.")] = Path("runs"),
    workers: WorkersOption = None,
    executor: ExecutorOption = "local",
    part: Part = "",
    dry_run: DryRun = False,
) -> None:
    """Build the dataset of a recipe, or find it if it is already built, and print its directory and
    size."""
    from mlm_repro.data_pipeline.config import DataConfig
    from mlm_repro.lineage.config import load_config
    from mlm_repro.lineage.digest import sha256_json

    # The recipe is read first: a mistake in it is named before slow modules are imported.
    recipe = load_config(
        find_file(config, Shipped.RECIPE), DataConfig, _overrides(overrides, workers)
    )
    from mlm_repro.data_pipeline.runner import build_dataset, forecast

    if dry_run:
        print(json.dumps(recipe.model_dump(mode="json"), indent=2, ensure_ascii=False))
        print(f"digest {sha256_json(recipe.identity())}")
        try:
            forecast(recipe)
        except DataMissing as error:
            print(f"no cost: {error}", file=sys.stderr)
        return
    directory = build_dataset(recipe, runs, executor, part).path
    print(f"dataset {directory}: {_counts(directory)}")


def _add_verb(name: str, summary: str) -> None:
    """Add the command `name IN OUT` to `mlm-data`: it runs the stage whose verb is `name` or, if no
    stage has it, the measurement of overlap, writes the directory OUT, and prints its path and a
    summary of its content. Its help begins with `summary`."""

    def verb(
        source: Source,
        out: Out,
        overrides: Settings = None,
        workers: WorkersOption = None,
        executor: ExecutorOption = "local",
    ) -> None:
        from mlm_repro.data_pipeline.stages import STAGES
        from mlm_repro.lineage.config import override_config

        stage = next((stage for stage in STAGES if stage.verb == name), None)
        config = override_config(
            _one_source(source, [stage.name] if stage else []), _overrides(overrides, workers)
        )
        from mlm_repro.data_pipeline.runner import run_overlap, run_stage

        made = (
            run_stage(stage, config, out, executor) if stage else run_overlap(config, out, executor)
        )
        print(f"{name} {made.path}: {_counts(made.path)}")

    app.command(name, help=f"{summary} Reads IN, writes OUT.")(verb)


for _name, _summary in stage_verbs().items():
    _add_verb(_name, _summary)
_add_verb("overlap", "Measure which share of the test sets' 8-grams a corpus contains.")


@app.command("import")
def import_(
    prefix: Annotated[
        Path, Argument(metavar="PREFIX", help="Megatron-LM's PREFIX.bin and PREFIX.idx.")
    ],
    out: Out,
    tokenizer: Annotated[
        Path,
        Option(help="The tokenizer of these tokens, as in `tokenizer.path` of a recipe."),
    ],
    end_of_text: Annotated[
        str | None, Option(help="The tokenizer's token that ends a document.")
    ] = None,
) -> None:
    """Make a dataset from a token file of Megatron-LM; the last thirtieth of its documents becomes
    the validation split."""
    from mlm_repro.data_pipeline.config import TokenizerConfig
    from mlm_repro.data_pipeline.imported import import_tokens

    made = import_tokens(prefix, TokenizerConfig(path=tokenizer, end_of_text=end_of_text), out)
    print(f"import {made.path}: {_counts(made.path)}")


@app.command()
def trace(
    run: Annotated[Path, Argument(help="Training run.")],
    step: Annotated[int, Option(help="Iteration, as metrics.jsonl counts them.", min=1)],
) -> None:
    """Print the text that a training run saw in an iteration, with documents, ranges of tokens and
    data-parallel ranks."""
    from mlm_repro.data_pipeline.tokens.trace import trace_iteration

    for line in trace_iteration(run, step):
        print(line)


@app.command()
def stats(
    directory: Annotated[Path, Argument(help="Directory that `run` or a verb wrote.")],
    page: Annotated[
        Path | None,
        Option(help="New folder for a page on a dataset, and a README for the hub."),
    ] = None,
) -> None:
    """Print the attrition ledger: what each stage kept and dropped, and why."""
    print(_table(_read_ledger(_open(directory))))
    if page:
        from mlm_repro.data_pipeline.page import write_page

        write_page(directory.resolve(), page)
        print(f"written: {page / 'page.html'} and {page / 'README.md'}")


@app.command()
def fetch(
    out: Annotated[Path, Argument(help="Folder to write; MLM_DATA_DIR can name it afterwards.")],
) -> None:
    """Write the published test sets and GPT-2's vocabulary into a folder, for a machine without a
    connection."""
    from mlm_repro.data_pipeline.contamination.testsets import fetch_published

    for path in fetch_published(out):
        print(f"written: {path}")


def _one_source(source: str, stages: list[str]) -> "VerbConfig":
    """Return a VerbConfig, the recipe for a verb: it does `stages`, and its one source is `source`,
    the argument IN. A directory without `KIND:` before it is read as `documents:`. Raises BadInput
    for a source of an unknown kind."""
    from mlm_repro.data_pipeline.config import VerbConfig
    from mlm_repro.data_pipeline.reading.config import ENDINGS
    from mlm_repro.lineage.config import parse_config

    kind, colon, _ = source.partition(":")
    name = (
        f"documents:{source}"
        if Path(source).is_dir() and not (colon and kind in ENDINGS)
        else source
    )
    values: dict[str, Any] = {"name": "documents", "stages": stages, "sources": {"names": [name]}}
    return parse_config(values, VerbConfig, "IN")


def _overrides(overrides: list[str] | None, workers: int | None) -> list[str]:
    return [*(overrides or []), *([] if workers is None else [f"workers={workers}"])]


def _counts(directory: Path) -> str:
    """Return one line of text on the content of a finished directory. If it has an overlap.json,
    the line says only, for each test set, which percentage of its n-grams was found. Else the line
    has, from the directory's ledger.json, documents and tokens of each split, or bytes where no
    tokens were counted, and a warning of malformed lines. Raises IntegrityFailure if the file that
    is read is damaged."""
    from mlm_repro.lineage.files import read_values

    if (directory / "overlap.json").is_file():
        test_sets = read_values(directory / "overlap.json")["test_sets"]
        return "; ".join(
            f"{name} {result['percent']:.2f} % found" for name, result in test_sets.items()
        )
    ledger = _read_ledger(directory)
    sentences = []
    for name, split in ledger.splits.items():
        size = f"{split.bytes:,} bytes" if split.tokens is None else f"{split.tokens:,} tokens"
        prefix, total = (
            (f"{name} ", "") if len(ledger.splits) > 1 else ("", f" of {ledger.lines:,}")
        )
        sentences.append(f"{prefix}{split.documents:,} documents{total}, {size}")
    if lost := ledger.malformed_lines:
        sentences.append(
            f"warning: {lost:,} of {ledger.lines:,} lines are not documents, see quarantine.jsonl"
        )
    return "; ".join(sentences)


def _read_ledger(directory: Path) -> "Ledger":
    from mlm_repro.data_pipeline.files import LEDGER, Ledger
    from mlm_repro.lineage.files import read_document

    return read_document(directory / LEDGER, Ledger)


def _table(ledger: "Ledger") -> str:
    """Return the ledger as a text of several lines, a table for a terminal: one line for each
    stage, below it one for each reason for a drop, and one for each split. The source stands above
    the table; the number of malformed lines, the stages' notes and a warning of pairs left out
    stand below."""
    rows: list[tuple[str, ...]] = [("stage", "documents", "bytes", "tokens", "changed", "seconds")]
    notes = []
    for stage in ledger.stages:
        rows.append((stage.name, *_cells(stage.kept), f"{stage.changed:,}", f"{stage.seconds:.1f}"))
        for reason, amount in stage.dropped.items():
            rows.append((f"  {reason}", *_cells(amount, "-"), "", ""))
        if stage.note:
            notes.append(f"{stage.name}: {stage.note}")
    if ledger.near_duplicates and ledger.near_duplicates.left_out:
        notes.append(f"warning: {ledger.near_duplicates.left_out}")
    rows += [(f"= {name}", *_cells(split), "", "") for name, split in ledger.splits.items()]
    first, *widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join([name.ljust(first), *map(str.rjust, cells, widths)]).rstrip()
        for name, *cells in rows
    ]
    return "\n".join(
        [f"source: {ledger.source}", *lines, f"malformed lines: {ledger.malformed_lines:,}", *notes]
    )


def _cells(amount: "Amount", sign: str = "") -> tuple[str, ...]:
    numbers = (amount.documents, amount.bytes, amount.tokens)
    return tuple("" if number is None else f"{sign}{number:,}" for number in numbers)


def _open(dataset: Path) -> Path:
    """Return the path of `dataset`, without links in it: a complete directory that a verb of
    `mlm-data`, such as `run` or `import`, wrote. Raises BadInput if `dataset` is no run's directory
    or has a run of another kind, IntegrityFailure if it is not complete or its manifest is
    damaged."""
    from mlm_repro.lineage.digest import is_sealed
    from mlm_repro.lineage.run import RunDirectory

    run = RunDirectory.open(dataset)
    if not str(run.manifest.get("kind")).startswith("data"):
        raise BadInput(
            f"{dataset} is a run of another kind: name a dataset, or the directory that a verb of"
            " `mlm-data` wrote"
        )
    if not is_sealed(run.path):
        raise IntegrityFailure(
            f"{dataset} is not complete: run again the command that began it, which manifest.json"
            " there has under environment.argv"
        )
    return run.path


def main() -> None:
    """Run the command line of `mlm-data` with this process's arguments, and exit with its exit
    code. A first argument that is neither a verb nor an option becomes the argument of the verb
    `run`."""
    run_command(app, "run")
