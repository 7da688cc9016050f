"""`mlm-eval`: score a checkpoint by named protocols or on a user's text, compare results, identify
conventions, generate text."""

import gc
from dataclasses import asdict
from functools import partial
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from typer import Argument, Option

from mlm_repro.engine.launch.local import keep_large_buffers
from mlm_repro.evaluation.models.places import Place
from mlm_repro.evaluation.settings import Sampling, Settings, start_ranks
from mlm_repro.evaluation.tasks.names import TASKS, build_task, check_task_name
from mlm_repro.evaluation.windows import check_stride
from mlm_repro.lineage.atomic import JSON, write_json, write_text
from mlm_repro.lineage.command import CommandLine, run_command
from mlm_repro.lineage.config import override_config
from mlm_repro.lineage.errors import BadInput
from mlm_repro.lineage.lock import check_place
from mlm_repro.lineage.variables import is_first_rank

if TYPE_CHECKING:
    from mlm_repro.evaluation.evaluate import MakeTask

app = CommandLine(help="Evaluate a checkpoint by a named protocol.", no_args_is_help=True)
ALL = "all"
FILE_TASKS = (
    "perplexity",
    "perplexity-huggingface",
    "perplexity-gptq",
    "perplexity-llama.cpp",
    "perplexity-nanochat",
    "perplexity-lm-eval",
    "perplexity-lm-eval-bos-twice",
    "cloze",
)
CKPT_HELP = (
    "Checkpoint or run directory, a Hugging Face directory or hub name of any causal language"
    " model, a GGUF file, the directory of a PEFT adapter, smollm2 (with the extra of that name),"
    " or a Megatron-LM save directory."
)
Checkpoint = Annotated[Path, Option(help=CKPT_HELP)]
Json = Annotated[Path | None, Option(help="Also write the result to this file.")]
Scoring = Annotated[
    list[str] | None,
    Option(
        "--set",
        help=(
            "Override a setting: batch_size, workers, layout, backend, dtype, device, vocab or"
            " heads=VALUE."
        ),
    ),
]


@app.command()
def run(
    protocol: Annotated[
        str,
        Argument(
            help=(
                "A name from `mlm-eval list`, `all`, `cloze`, `perplexity` or one of its variants"
                " below."
            )
        ),
    ],
    ckpt: Checkpoint,
    file: Annotated[
        Path | None,
        Argument(
            help=(
                'Your text file, .jsonl file of {"text": ...} lines or .json array of them; for a'
                " named protocol its test "
                "file, where MLM_DATA_DIR and the hub do not have it."
            ),
            show_default=False,
        ),
    ] = None,
    window: Annotated[
        int | None,
        Option(
            min=2,
            help=(
                "Longest input; by default the model's context, beyond which only rotary"
                " positions go."
            ),
        ),
    ] = None,
    stride: Annotated[
        int | None,
        Option(
            min=1,
            help=(
                "Tokens between the starts of windows; by default a 32nd of a window, in"
                " transformers' recipe half."
            ),
        ),
    ] = None,
    first: Annotated[
        Literal["once", "every"],
        Option(
            help=("Put the tokenizer's first tokens before a file's text once, or in every window.")
        ),
    ] = "once",
    limit: Annotated[
        int | None,
        Option(
            min=1,
            help="Score only this many windows or examples, evenly spread; the result is partial.",
        ),
    ] = None,
    scoring: Scoring = None,
    json: Json = None,
    samples: Annotated[
        Path | None,
        Option(help="Also write every window or example to this .jsonl file."),
    ] = None,
) -> None:
    """Score a checkpoint: `mlm-eval wikitext103 --ckpt DIR`, `mlm-eval perplexity FILE --ckpt DIR`.

    `all` scores every protocol in one pass. `perplexity` joins the documents of a .jsonl or .json
    file by blank lines, `perplexity-huggingface`, `-gptq`, `-llama.cpp`, `-nanochat` (bits per
    byte), `-lm-eval` and `-lm-eval-bos-twice` do it by these programs' recipes; `cloze` is the
    strict last-word accuracy on passages, one a line or document.
    """
    if protocol not in (ALL, *FILE_TASKS):
        check_task_name(protocol)
    if protocol in ((ALL,) if file else FILE_TASKS):
        raise BadInput(
            f"{protocol} takes no file, as each protocol has its own: name the protocol of {file}"
            if file
            else f"{protocol} needs a text file: give its path after that name"
        )
    # A file that cannot be read is named before torch is imported.
    if file and protocol in FILE_TASKS:
        from mlm_repro.evaluation.tasks.heldout import read_texts

        read_texts(file)
    if (stride or first != "once") and not protocol.startswith("perplexity"):
        raise BadInput(
            f"--stride and --first are for the perplexity of a file; {protocol} has its own: leave"
            " them out"
        )
    if window and stride:
        check_stride(stride, window)
    settings = override_config(Settings(), scoring or ())
    check_place("--samples", samples, '"log_probabilities"')
    place = _start(settings, ckpt, json, '"checkpoint_digest"')
    from mlm_repro.evaluation import tables
    from mlm_repro.evaluation.evaluate import evaluate
    from mlm_repro.evaluation.tasks import heldout

    names = TASKS if protocol == ALL else (protocol,)
    tasks: dict[str, MakeTask] = {
        name: partial(build_task, name, window=window, path=file) for name in names
    }
    if file and protocol in FILE_TASKS:
        of_text = partial(
            heldout.file_perplexity, window=window, stride=stride, name=protocol, first=first
        )
        make = partial(heldout.file_cloze, window=window) if protocol == "cloze" else of_text
        tasks = {
            protocol: lambda evaluated: make(file, evaluated.tokenizer, evaluated.model.seq_length)
        }
    evaluations = evaluate(place, tasks, settings, limit, window)
    if not is_first_rank():
        return
    results = {name: evaluation.result for name, evaluation in evaluations.done.items()}
    tables.print_results(results, evaluations.missing)
    if protocol == ALL:
        dumped = {name: result.to_json() for name, result in results.items()}
        _write(json, {"results": dumped, "missing": evaluations.missing})
    else:
        _write(json, results[protocol].to_json())
    if samples is not None:
        every = chain.from_iterable(
            evaluation.task.samples(evaluation.scores) for evaluation in evaluations.done.values()
        )
        _write(samples, "".join(sample.to_line() for sample in every))


@app.command()
def compare(
    results: Annotated[
        list[Path],
        Argument(
            help="Two or more files that --json wrote; the others are compared with the first."
        ),
    ],
    json: Json = None,
    csv: Annotated[
        Path | None, Option(help="Also write the table of all models to this .csv file.")
    ] = None,
) -> None:
    """Compare models by their results on the same texts: the paired difference, its 95 % interval
    and its p value, in a Markdown table."""
    check_place("--json", json, '"differences"')
    check_place("--csv", csv, "model,task")
    from rich.box import MARKDOWN

    from mlm_repro.evaluation import compare, tables

    first, *others = map(compare.read_results, results)
    if not others or not all(first.keys() & other.keys() for other in others):
        raise BadInput(
            "give two or more files that --json wrote, each with a protocol in common with the"
            f" first, {results[0]}"
        )
    compared: list[compare.Compared] = [(result, None) for result in first.values()]
    for other in others:
        for name, result in other.items():
            change = compare.paired_difference(first[name], result) if name in first else None
            compared.append((result, change))
    rows = compare.rows(compared)
    tables.print_rows(rows, MARKDOWN)
    tables.print_remarks([result for result, _ in compared])
    _write(
        json,
        {"differences": [change.model_dump(mode="json") for _, change in compared if change]},
    )
    _write(csv, compare.as_csv(rows))


@app.command()
def identify(
    ckpt: Checkpoint,
    claimed: Annotated[str, Option(help="The number, with the digits that were printed.")],
    task: Annotated[Literal["wikitext103", "lambada"], Option(help="The test.")] = "wikitext103",
    scoring: Scoring = None,
    json: Json = None,
) -> None:
    """Name the conventions of evaluation by which a checkpoint gives a claimed number, within its
    rounding."""
    settings = override_config(Settings(), scoring or ())
    from mlm_repro.evaluation.conventions import identify as conventions

    # A claim that is not a number is named before a checkpoint is loaded.
    conventions.parse_claim(claimed)
    place = _start(settings, ckpt, json, '"claimed"')
    identified = conventions.identify(place, claimed, task, settings)
    if is_first_rank():
        print(identified.describe())
        _write(json, asdict(identified))


@app.command()
def oracle(
    out: Annotated[
        Path | None,
        Option(help="New directory for the oracle, or the one that gave the numbers."),
    ] = None,
    identify: Annotated[
        list[str] | None,
        Option(
            help=(
                "A harness's number, or TEXT=NUMBER, or TEXT=NUMBER TEXT=NUMBER of a run; may be"
                " given several times."
            )
        ),
    ] = None,
    unit: Annotated[
        Literal["ppl", "loss", "bits-per-byte", "accuracy"] | None,
        Option(help="Unit of the number."),
    ] = None,
    json: Json = None,
) -> None:
    """Write a checkpoint whose scores tell how it was evaluated, or name the convention behind a
    harness's number on it."""
    check_place("--json", json, '"identified"')
    from mlm_repro.evaluation.conventions.identify import find, parse_claims

    if not identify and not out:
        raise BadInput(
            "give --out DIR to write the oracle, or --identify NUMBER to name the convention behind"
            " a number"
        )
    for number in identify or ():
        parse_claims(number)
    from mlm_repro.evaluation.conventions.oracle import read_table, write_oracle

    with TemporaryDirectory() as temporary:
        directory = out or Path(temporary) / "oracle"
        if is_new := not identify or not directory.exists():
            write_oracle(directory)
        answers = [find(number, read_table(directory), unit) for number in identify or ()]
    print(
        "\n".join(
            [
                *(answer.describe() for answer in answers),
                *[f"written: {out}"] * bool(out and is_new),
            ]
        )
    )
    _write(json, {"identified": [asdict(answer) for answer in answers]})


@app.command()
def generate(
    ckpt: Checkpoint,
    prompt: Annotated[str, Option(help="Text to continue; by default a new document begins.")] = "",
    max_new_tokens: Annotated[
        int, Option(min=1, help="Maximum number of tokens to add; end-of-text stops earlier.")
    ] = 64,
    temperature: Annotated[
        float | None, Option(help="Sample, with the logits divided by this number.")
    ] = None,
    top_k: Annotated[int | None, Option(help="Sample from the k likeliest tokens.")] = None,
    top_p: Annotated[
        float | None,
        Option(help="Sample from the likeliest tokens that together have this probability."),
    ] = None,
    seed: Annotated[int, Option(min=0, help="Seed of the sampling.")] = 1234,
    scoring: Scoring = None,
    json: Json = None,
) -> None:
    """Continue a text: greedily, or sampled if a temperature, top-k or top-p is given."""
    settings = override_config(Settings(), scoring or ())
    is_sampled = any(option is not None for option in (temperature, top_k, top_p))
    sampling = (
        Sampling(1.0 if temperature is None else temperature, top_k, top_p, seed)
        if is_sampled
        else None
    )
    place = _start(settings, ckpt, json, '"continuation"')
    from mlm_repro.evaluation.generate import generate_text

    generated = generate_text(place, prompt, max_new_tokens, sampling, settings)
    if is_first_rank():
        print(generated.prompt + generated.continuation)
        _write(json, asdict(generated))


@app.command(
    context_settings={
        "allow_extra_args": True,
        "ignore_unknown_options": True,
        "help_option_names": [],
    }
)
def harness(context: typer.Context) -> None:
    """Run lm-evaluation-harness's command line with this engine as its model mlm: --model mlm
    --model_args pretrained=DIR."""
    if "--help" in context.args:
        print(context.get_help(), flush=True)
        if not find_spec("lm_eval"):
            return
    from mlm_repro.evaluation.harness_model import run_harness

    run_harness(context.args)


@app.command()
def fetch(
    models: Annotated[
        list[str],
        Argument(help="Names on the Hugging Face hub; owner/name@revision pins one."),
    ],
    out: Annotated[
        Path, Option(help="Folder with a directory for each; MLM_MODELS_DIR can name it.")
    ],
) -> None:
    """Copy models of the Hugging Face hub, with their digests, for a machine without a
    connection."""
    from mlm_repro.evaluation.models.hub_models import fetch_model

    for name in models:
        print(f"written: {fetch_model(name, out)}")


@app.command()
def check(
    protocols: Annotated[list[str], Argument(help="Names from `mlm-eval list`.")],
) -> None:
    """Print the path of each protocol's test file; one that is not here is downloaded.

    A training that scores its checkpoints (`record.evaluate`) looks for the files before it begins.
    """
    from mlm_repro.data_pipeline.contamination.testsets import find_test_set

    for protocol in protocols:
        check_task_name(protocol)
        print(find_test_set(TASKS[protocol].test_set))


@app.command("list")
def list_() -> None:
    """List the protocols, each with a title that says how it differs."""
    for name, protocol in TASKS.items():
        print(f"{name:<24} {protocol.title}")


def _start(settings: Settings, checkpoint: Path, json: Path | None, mark: str) -> Place:
    """Find the checkpoint that a user named by the path or name `checkpoint`, start the ranks of
    the settings' layout, and return the checkpoint's `Place`: its directory and format.

    A command that starts several ranks does not return from here: it exits with their code, and
    each rank runs the command again and returns. Raises BadInput or IntegrityFailure without a
    usable checkpoint, Interrupted if the hub stops answering. Raises BadInput also if the file
    `json`, None if there is to be none, cannot be written, or has content without the text `mark`,
    which shows that this command wrote it, unless the command line has `--overwrite`.
    """
    check_place("--json", json, mark)
    place = Place.find(checkpoint, settings.vocab)
    # Imported before the ranks are forked, so that torch is imported once for all of them.
    import mlm_repro.evaluation.evaluate  # noqa: F401

    start_ranks(settings.layout, main)
    return place


def _write(path: Path | None, content: JSON | str) -> None:
    """Write a text unchanged, or any other content as JSON, to the file `path`, and print `written:
    PATH` to standard output. Do nothing if `path` is None. Raises BadInput if the file cannot be
    written."""
    if path is not None:
        try:
            if isinstance(content, str):
                write_text(path, content)
            else:
                write_json(path, content)
        except OSError as error:
            raise BadInput(
                f"{path} cannot be written: {error.strerror}; the result is printed above: to have"
                " the file too, name another place for it"
            ) from error
        print(f"written: {path}")


def main() -> None:
    """Run the command line of `mlm-eval` with the arguments in `sys.argv`, and exit with its code.
    A first argument that is neither a verb nor an option is a protocol for the verb `run`."""
    # By default the collector takes a fifth of the time of importing torch and transformers.
    gc.set_threshold(100_000)
    keep_large_buffers()
    run_command(app, "run")


if __name__ == "__main__":
    main()
