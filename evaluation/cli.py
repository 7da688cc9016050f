"""`mlm-eval`: a checkpoint's numbers by named protocols, and on a user's own text."""

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from mlm_repro.engine.launch.local import keep_large_buffers
from mlm_repro.evaluation.models.places import Place
from mlm_repro.evaluation.settings import Sampling, Settings, start_ranks
from mlm_repro.evaluation.tasks.names import TASKS, build_task, check_task_name
from mlm_repro.evaluation.windows import check_stride
from mlm_repro.lineage.atomic import write_json, write_text
from mlm_repro.lineage.command import CommandLine, run_command
from mlm_repro.lineage.config import override_config
from mlm_repro.lineage.errors import BadInput
from mlm_repro.lineage.lock import check_place
from mlm_repro.lineage.variables import is_first_rank

if TYPE_CHECKING:
    from mlm_repro.evaluation.evaluate import MakeTask
    from mlm_repro.evaluation.schema import Result

app = CommandLine(help="Evaluate a checkpoint by a named protocol.", no_args_is_help=True)
ALL = "all"
FILE_TASKS = (
    "perplexity", "perplexity-huggingface", "perplexity-gptq", "perplexity-llama.cpp", "perplexity-nanochat",
    "perplexity-lm-eval", "perplexity-lm-eval-bos-twice", "cloze",
)  # fmt: skip
CKPT_HELP = (
    "Checkpoint or run directory, a Hugging Face directory or hub name of any causal language model, a GGUF file, the "
    "directory of a PEFT adapter, smollm2 (with the extra of that name), or a Megatron-LM save directory."
)
Checkpoint = Annotated[Path, typer.Option("--ckpt", help=CKPT_HELP)]
Json = Annotated[Path | None, typer.Option("--json", help="Also write the result to this file.")]
Limit = Annotated[int | None, typer.Option(
    min=1, help="Score only so many windows or examples, spread evenly; the result is partial."
)]  # fmt: skip
Scoring = Annotated[list[str] | None, typer.Option(
    "--set", help="Override a setting: batch_size, workers, layout, backend, dtype, device, vocab or heads=VALUE."
)]  # fmt: skip
Window = Annotated[int | None, typer.Option(
    min=2, help="Longest input; by default the model's context, beyond which only a model with rotary positions goes."
)]  # fmt: skip
Stride = Annotated[int | None, typer.Option(
    min=1, help="Tokens from window to window; by default a 32nd of one, by transformers' recipe half."
)]  # fmt: skip


@app.command()
def run(
    protocol: Annotated[str, typer.Argument(
        help="A name of `mlm-eval list`, `all`, `cloze`, or `perplexity`, which may go on as below."
    )],
    ckpt: Checkpoint,
    file: Annotated[Path | None, typer.Argument(
        help='Your text file, .jsonl file of {"text": ...} lines or .json array of them; for a named protocol its test '
        "file, where MLM_DATA_DIR and the hub do not have it.", show_default=False,
    )] = None,
    window: Window = None, stride: Stride = None,
    first: Annotated[Literal["once", "every"], typer.Option(
        help="Where a file's perplexity has what the tokenizer puts before a text: once, or in every window."
    )] = "once",
    limit: Limit = None, scoring: Scoring = None, json: Json = None,
    samples: Annotated[
        Path | None, typer.Option("--samples", help="Also write every window or example to this .jsonl file.")
    ] = None,
) -> None:  # fmt: skip
    """Score a checkpoint: `mlm-eval wikitext103 --ckpt DIR`, `mlm-eval perplexity FILE --ckpt DIR`.

    `all` scores every protocol in one pass. `perplexity` joins the documents of a .jsonl or .json file by blank
    lines, `perplexity-huggingface`, `-gptq`, `-llama.cpp`, `-nanochat` (bits per byte), `-lm-eval` and
    `-lm-eval-bos-twice` do it by these programs' recipes; `cloze` is the strict last-word accuracy on passages, one a
    line.
    """
    if protocol not in (ALL, *FILE_TASKS):
        check_task_name(protocol)
    if protocol in ((ALL,) if file else FILE_TASKS):
        raise BadInput(f"{protocol} takes no file: {file}" if file else f"{protocol} needs a text file")
    if file and protocol in FILE_TASKS:
        from mlm_repro.evaluation.tasks.heldout import read_file

        read_file(file)
    if (stride or first != "once") and not protocol.startswith("perplexity"):
        raise BadInput(f"--stride and --first are for the perplexity of a file; {protocol} has its own")
    if window and stride:
        check_stride(stride, window)
    settings = override_config(Settings(), scoring or ())
    check_place("--samples", samples, '"log_probabilities"')
    (place,) = _start(settings, [ckpt], json, '"checkpoint_digest"')
    from mlm_repro.evaluation import tables
    from mlm_repro.evaluation.evaluate import evaluate, file_task
    from mlm_repro.evaluation.tasks import heldout

    names = TASKS if protocol == ALL else (protocol,)
    tasks: dict[str, MakeTask] = {name: partial(build_task, name, window=window, path=file) for name in names}
    if file and protocol in FILE_TASKS:
        of_text = partial(heldout.file_perplexity, window=window, stride=stride, name=protocol, first=first)
        of_lines = partial(heldout.file_cloze, window=window)
        tasks = {protocol: file_task(of_lines if protocol == "cloze" else of_text, file)}
    evaluations = evaluate(place, tasks, settings, limit, window)
    if not is_first_rank():
        return
    results = {name: evaluation.result for name, evaluation in evaluations.done.items()}
    if protocol == ALL:
        tables.print_conventions(results, evaluations.missing)
        _write(json, {"results": _dump(results), "missing": evaluations.missing})
    else:
        tables.print_result(results[protocol])
        _write(json, results[protocol].to_json())
    if samples is not None:
        lines = (sample.to_line() for each in evaluations.done.values() for sample in each.task.samples(each.scores))
        _write(samples, "".join(lines))


@app.command()
def compare(
    models: Annotated[list[Path], typer.Argument(
        help="Two checkpoints, or two or more files that --json wrote; the others are compared with the first."
    )],
    task: Annotated[
        list[str], typer.Option("--task", help="A protocol of `mlm-eval list`; may be given several times.")
    ] = ["wikitext103", "lambada"],  # noqa: B006
    limit: Limit = None, scoring: Scoring = None, json: Json = None,
    table: Annotated[Path | None, typer.Option(help="Also write a table of all models, .md or .csv.")] = None,
) -> None:  # fmt: skip
    """Compare models on the same texts: the paired difference with its 95 % interval and its p value."""
    if len(models) < 2:
        raise BadInput("give two checkpoints, or two or more files of results")
    check_place("--table", table, "| model |")
    if is_kept := all(model.suffix == ".json" and model.is_file() for model in models):
        check_place("--json", json, '"differences"')
    else:
        if len(models) > 2:
            raise BadInput("more than two models are compared by their files, which --json writes")
        for name in task:
            check_task_name(name)
        settings = override_config(Settings(), scoring or ())
        places = _start(settings, models, json, '"differences"')
    from mlm_repro.evaluation import compare, tables

    missing: list[dict[str, str]] = [{} for _ in models]
    if is_kept:
        results = [compare.read_results(model) for model in models]
    else:
        from mlm_repro.evaluation.evaluate import evaluate

        done = [evaluate(place, {name: partial(build_task, name) for name in task}, settings, limit)
                for place in places]  # fmt: skip
        if not is_first_rank():
            return
        results = [{name: each.result for name, each in evaluations.done.items()} for evaluations in done]
        missing = [evaluations.missing for evaluations in done]
    first, *others = results
    shared = [[name for name in first if name in other] for other in others]
    if not all(shared):
        raise BadInput(f"{models[0]} and another have no protocol in common")
    pairs = [(first[name], other[name]) for other, names in zip(others, shared, strict=True) for name in names]
    differences = [compare.paired_difference(*pair) for pair in pairs]
    for shown, left_out in zip(results, missing, strict=True):
        tables.print_conventions(shown, left_out)
    tables.print_differences(differences)
    dumped = [difference.model_dump(mode="json") for difference in differences]
    _write(json, {"differences": dumped, "results": [_dump(each) for each in results]})
    _write(table, compare.table(results, differences, table.suffix if table else ""))


@app.command()
def identify(
    ckpt: Checkpoint,
    claimed: Annotated[str, typer.Option(help="The number, with the digits that were printed.")],
    task: Annotated[Literal["wikitext103", "lambada"], typer.Option(help="The test.")] = "wikitext103",
    scoring: Scoring = None, json: Json = None,
) -> None:  # fmt: skip
    """Name the conventions that give a claimed number within its rounding."""
    settings = override_config(Settings(), scoring or ())
    from mlm_repro.evaluation.conventions import identify as conventions

    conventions.parse_claim(claimed)
    (place,) = _start(settings, [ckpt], json, '"claimed"')
    identified = conventions.identify(place, claimed, task, settings)
    if is_first_rank():
        print(identified.describe())
        _write(json, asdict(identified))


@app.command()
def oracle(
    out: Annotated[
        Path | None, typer.Option(help="New directory of the oracle, or the one that numbers are of.")
    ] = None,
    identify: Annotated[
        list[str] | None,
        typer.Option(
            help="A harness's number, or numbers of one run as TEXT=NUMBER TEXT=NUMBER; may be given several times."
        ),
    ] = None,
    unit: Annotated[Literal["ppl", "loss", "bits-per-byte", "accuracy"] | None, typer.Option(help="Its unit.")] = None,
    text: Annotated[str | None, typer.Option(help="The oracle's text that it is of, such as prose.")] = None,
    numbers: Annotated[
        str | None, typer.Option("--from", help="loss=…,bits_per_byte=…,tokenizer=DIR,text=FILE: are they consistent?")
    ] = None,
    json: Json = None,
) -> None:
    """Write a checkpoint that tells how it was evaluated, or name the convention of a harness's number on it."""
    check_place("--json", json, '"identified"')
    from mlm_repro.evaluation.conventions.identify import explain_bytes, find, parse_claims

    if numbers:
        print(explain_bytes(numbers))
        return
    if not identify and not out:
        raise BadInput("give --out DIR to write the oracle, or --identify NUMBER")
    for number in identify or ():
        parse_claims(number, text)
    from mlm_repro.evaluation.conventions.oracle import read_table, write_oracle

    with TemporaryDirectory() as temporary:
        directory = out or Path(temporary) / "oracle"
        if is_new := not identify or not directory.exists():
            write_oracle(directory)
        answers = [find(number, read_table(directory), unit, text) for number in identify or ()]
    print("\n".join([*(answer.describe() for answer in answers), *[f"written: {out}"] * bool(out and is_new)]))
    _write(json, {"identified": [asdict(answer) for answer in answers]})


@app.command()
def generate(
    ckpt: Checkpoint,
    prompt: Annotated[str, typer.Option(help="Text to continue; without one a document begins.")] = "",
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Most tokens to add; end-of-text ends earlier.")] = 64,
    temperature: Annotated[float | None, typer.Option(help="Divides the logits; asks for sampling.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Sample from the k likeliest tokens.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Sample from the likeliest tokens of this probability.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the sampling.")] = 1234,
    scoring: Scoring = None, json: Json = None,
) -> None:  # fmt: skip
    """Continue a text: greedily, or sampled if a temperature, top-k or top-p is given."""
    settings = override_config(Settings(), scoring or ())
    is_sampled = any(option is not None for option in (temperature, top_k, top_p))
    sampling = Sampling(1.0 if temperature is None else temperature, top_k, top_p, seed) if is_sampled else None
    (place,) = _start(settings, [ckpt], json, '"continuation"')
    from mlm_repro.evaluation.generate import generate_text

    generated = generate_text(place, prompt, max_new_tokens, sampling, settings)
    if is_first_rank():
        print(generated.prompt + generated.continuation)
        _write(json, asdict(generated))


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []})
def harness(context: typer.Context) -> None:
    """lm-evaluation-harness's command line; its model mlm is this engine: --model mlm --model_args pretrained=DIR."""
    if "--help" in context.args:
        print(context.get_help(), flush=True)
        if find_spec("lm_eval"):
            subprocess.run([sys.executable, "-m", "lm_eval", *context.args], check=False)
        return
    from mlm_repro.evaluation.harness_model import run_harness

    run_harness(context.args)


@app.command()
def fetch(
    models: Annotated[list[str], typer.Argument(help="Names on the Hugging Face hub; owner/name@revision pins one.")],
    out: Annotated[Path, typer.Option(help="Folder with a directory for each; MLM_MODELS_DIR can name it.")],
) -> None:
    """Copy models of the Hugging Face hub, with their digests, for a machine without a connection."""
    from mlm_repro.evaluation.models.hub_models import fetch_model

    for name in models:
        print(f"written: {fetch_model(name, out)}")


@app.command("list")
def list_() -> None:
    """List the protocols with their differences."""
    for name, protocol in TASKS.items():
        print(f"{name:<24} {protocol.title}")


def _start(settings: Settings, checkpoints: Sequence[Path], json: Path | None, mark: str) -> list[Place]:
    """Find the checkpoints, then start the ranks; they are forked from a process that has the engine."""
    check_place("--json", json, mark)
    places = [Place.find(path, settings.vocab) for path in checkpoints]
    import mlm_repro.evaluation.evaluate  # noqa: F401

    start_ranks(settings.layout, main)
    return places


def _dump(results: "dict[str, Result]") -> dict[str, Any]:
    return {name: result.to_json() for name, result in results.items()}


def _write(path: Path | None, content: dict[str, Any] | str) -> None:
    if path is not None:
        try:
            if isinstance(content, str):
                write_text(path, content)
            else:
                write_json(path, content)
        except OSError as error:
            raise BadInput(f"{path} cannot be written: {error.strerror}") from error
        print(f"written: {path}")


def main() -> None:
    """Entry point: a first word that is no verb is a protocol."""
    keep_large_buffers()
    run_command(app, "run")


if __name__ == "__main__":
    main()
