"""`mlm-eval`: a checkpoint's numbers by named protocols, and on a user's own text."""

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from engine.launch.allocator import keep_large_buffers
from evaluation.settings import Settings, is_first_rank, start_ranks
from evaluation.tasks import TASKS, check_task_name
from lineage.atomic import check_place, write_json, write_text
from lineage.command import CommandLine, run_command
from lineage.errors import BadInput

if TYPE_CHECKING:
    from evaluation.evaluate import Evaluation, MakeTask
    from evaluation.schema import Result

app = CommandLine(help="Evaluate a checkpoint by a named protocol.", no_args_is_help=True)

CKPT_HELP = "Checkpoint or run directory, a Hugging Face GPT-2 directory or hub name, or a Megatron-LM save directory."
Checkpoint = Annotated[Path, typer.Option("--ckpt", help=CKPT_HELP)]
TextFile = Annotated[Path, typer.Argument(help='A text file, or a .jsonl file of {"text": ...} lines.')]
Json = Annotated[Path | None, typer.Option("--json", help="Also write the result to this file.")]
Samples = Annotated[
    Path | None, typer.Option("--samples", help="Also write every window or example to this .jsonl file.")
]


OF_ONE_TASK = tuple(vars(Settings()))
OF_SEVERAL = tuple(name for name in OF_ONE_TASK if name != "until")


def _scores(command: Callable[..., None], names: Sequence[str] = OF_SEVERAL) -> Callable[..., None]:
    """The command with fields of `Settings` as options, after its other parameters and in place of its `settings`."""
    own, fields = (inspect.signature(parameter).parameters for parameter in (command, Settings))
    added = {name: fields[name] for name in names}

    @wraps(command)
    def run(**given: Any) -> None:
        for option in ("json", "samples"):
            check_place(f"--{option}", given.get(option))
        settings = Settings(**{name: given.pop(name) for name in added})
        import evaluation.evaluate  # noqa: F401  (ranks are forked from a process that has the engine)

        start_ranks(settings.layout, main)
        command(settings=settings, **given)

    parameters = [*(parameter for name, parameter in own.items() if name != "settings"), *added.values()]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _named_command(name: str) -> Callable[..., None]:
    @partial(_scores, names=OF_ONE_TASK)
    def command(ckpt: Checkpoint, settings: Settings, json: Json = None, samples: Samples = None) -> None:
        from evaluation.evaluate import named_task

        _report_one(ckpt, named_task(name), settings, json, samples)

    command.__doc__ = f"{TASKS[name][0].upper()}{TASKS[name][1:]}."
    return command


def _file_command(kind: Literal["perplexity", "cloze"], description: str) -> Callable[..., None]:
    @partial(_scores, names=OF_ONE_TASK)
    def command(
        file: TextFile, ckpt: Checkpoint, settings: Settings, json: Json = None, samples: Samples = None
    ) -> None:
        from evaluation.evaluate import file_task
        from evaluation.heldout import file_cloze, file_perplexity

        make = {"perplexity": file_perplexity, "cloze": file_cloze}[kind]
        _report_one(ckpt, file_task(make, file), settings, json, samples)

    command.__doc__ = description
    return command


for _name in TASKS:
    app.command(_name)(_named_command(_name))
app.command("perplexity")(
    _file_command(
        "perplexity", "Perplexity of your own text; the documents of a .jsonl file are joined by blank lines."
    )
)
app.command("cloze")(_file_command("cloze", "Strict last-word accuracy on your own passages, one a line."))


@app.command("all")
@_scores
def all_command(ckpt: Checkpoint, settings: Settings, json: Json = None, samples: Samples = None) -> None:
    """Every protocol in one pass, side by side."""
    from evaluation import tables
    from evaluation.evaluate import evaluate, named_task

    evaluations = evaluate(ckpt, {name: named_task(name) for name in TASKS}, settings)
    if not is_first_rank():
        return
    results = {name: evaluation.result for name, evaluation in evaluations.done.items()}
    tables.print_conventions(results, evaluations.missing)
    _write(json, {"results": _dump(results), "missing": evaluations.missing})
    _write_samples(samples, evaluations.done.values())


@app.command("compare")
@_scores
def compare_command(
    first: Annotated[Path, typer.Argument(help=CKPT_HELP)],
    second: Annotated[Path, typer.Argument(help="Another.")],
    settings: Settings,
    task: Annotated[
        list[str], typer.Option("--task", help="A protocol of `mlm-eval list`; may be given several times.")
    ] = ["wikitext103", "lambada"],  # noqa: B006
    json: Json = None,
) -> None:
    """Two checkpoints on the same tests: the paired difference with its standard error.

    Of two of one shape the first window, tensor and weight that differ are named; a Hugging Face directory is run by
    transformers for this, where it is installed.
    """
    for name in task:
        check_task_name(name)
    from evaluation import tables
    from evaluation.compare import paired_difference
    from evaluation.evaluate import evaluate, named_task

    left, other = (evaluate(ckpt, {name: named_task(name) for name in task}, settings) for ckpt in (first, second))
    if not is_first_rank():
        return
    names = [name for name in left.done if name in other.done]
    results = [{name: evaluations.done[name].result for name in names} for evaluations in (left, other)]
    for name in names:
        if results[0][name].data_digest != results[1][name].data_digest:
            raise BadInput(f"{name}: the two checkpoints were scored on different texts")
    pairs = [(name, left.done[name], other.done[name]) for name in names]
    differences = [paired_difference(n, a.task.losses(a.scores), b.task.losses(b.scores)) for n, a, b in pairs]
    for shown, evaluations in zip(results, (left, other), strict=True):
        tables.print_conventions(shown, evaluations.missing)
    tables.print_differences(differences)
    compared = {"differences": [difference.model_dump(mode="json") for difference in differences],
                "first": _dump(results[0]), "second": _dump(results[1])}  # fmt: skip
    windows = [one.task.requests for name, one in left.done.items() if name in names and not one.task.with_memory]
    if windows and results[0][names[0]].tokenizer_digest == results[1][names[0]].tokenizer_digest:
        from evaluation.same_model import compare_windows

        if agreement := compare_windows(first, second, windows[0], settings):
            tables.print_agreement(agreement, len(windows[0]))
            compared["windows"] = agreement.model_dump(mode="json")
    _write(json, compared)


@app.command("identify")
@_scores
def identify_command(
    ckpt: Checkpoint,
    claimed: Annotated[str, typer.Option(help="The number, with the digits that were printed.")],
    settings: Settings,
    task: Annotated[
        Literal["wikitext103", "lambada"], typer.Option(help="Whose conventions are tried.")
    ] = "wikitext103",
    budget: Annotated[float, typer.Option(min=1, help="Most tokens to score, in costs of the dearest protocol.")] = 1.5,
    json: Json = None,
) -> None:
    """Which conventions give a claimed number within its rounding: every one is derived from windows scored once."""
    if settings.limit is not None:
        raise BadInput("a number is identified on the whole test: leave out --limit")
    from evaluation import tables
    from evaluation.identify import identify

    found = identify(ckpt, claimed, task, settings, budget)
    if is_first_rank():
        tables.print_identified(found)
        _write(json, asdict(found))


@app.command("generate")
@partial(_scores, names=("vocab", "heads", "layout"))
def generate_command(
    ckpt: Checkpoint,
    prompt: Annotated[str, typer.Option(help="Text to continue; an empty one begins a document.")],
    settings: Settings,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Most tokens to add; end-of-text ends earlier.")] = 64,
    temperature: Annotated[float | None, typer.Option(help="Divides the logits; asks for sampling.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Sample from the k likeliest tokens.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Sample from the likeliest tokens of this probability.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of sampling.")] = 1234,
    json: Json = None,
) -> None:
    """Continue a text: greedy, or sampled where a temperature, top-k or top-p is given."""
    from evaluation.generate import Sampling, generate_text

    is_sampled = any(option is not None for option in (temperature, top_k, top_p))
    sampling = Sampling(1.0 if temperature is None else temperature, top_k, top_p, seed) if is_sampled else None
    generated = generate_text(ckpt, prompt, max_new_tokens, sampling, settings)
    if is_first_rank():
        print(generated.prompt + generated.continuation)
        _write(json, asdict(generated))


@app.command("harness", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def harness_command(context: typer.Context) -> None:
    """lm-evaluation-harness's command line; its model mlm is this engine: --model mlm --model_args pretrained=DIR."""
    from evaluation.harness_model import run_harness

    run_harness(context.args)


@app.command("fetch")
def fetch_command(
    models: Annotated[list[str], typer.Argument(help="Names on the Hugging Face hub; owner/name@revision pins one.")],
    out: Annotated[Path, typer.Option(help="Folder with a directory for each; MLM_MODELS_DIR can name it.")],
) -> None:
    """Copy models of the Hugging Face hub, with their digests, for a machine without a connection."""
    from evaluation.hub_models import fetch_model

    for name in models:
        print(f"written: {fetch_model(name, out)}")


@app.command("list")
def list_command() -> None:
    """The protocols and what sets them apart."""
    for name, title in TASKS.items():
        print(f"{name:<24} {title}")


def _report_one(ckpt: Path, task: "MakeTask", settings: Settings, json: Path | None, samples: Path | None) -> None:
    from evaluation import tables
    from evaluation.evaluate import evaluate

    (evaluation,) = evaluate(ckpt, {"task": task}, settings).done.values()
    if not is_first_rank():
        return
    tables.print_result(evaluation.result)
    _write(json, evaluation.result.to_json())
    _write_samples(samples, [evaluation])


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


def _write_samples(path: Path | None, evaluations: "Iterable[Evaluation]") -> None:
    if path is not None:
        lines = (
            sample.to_line() for evaluation in evaluations for sample in evaluation.task.samples(evaluation.scores)
        )
        _write(path, "".join(lines))


def main() -> None:
    """Entry point."""
    keep_large_buffers()
    run_command(app)


if __name__ == "__main__":
    main()
