"""`mlm-train`: train, resume and fine-tune, print a schedule, divide, export and import weights,
and translate Megatron-LM's flags."""

import os
import shlex
import sys
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from typer import Argument, Option

from mlm_repro.engine.launch.local import keep_large_buffers
from mlm_repro.engine.run.scores import check_protocols
from mlm_repro.lineage.atomic import write_json
from mlm_repro.lineage.command import CommandLine, run_command
from mlm_repro.lineage.errors import KEEPS_NOTHING, BadInput
from mlm_repro.lineage.extras import check_torch
from mlm_repro.lineage.lock import check_is_there, check_place
from mlm_repro.lineage.progress import announce, format_bytes, is_quiet
from mlm_repro.lineage.variables import is_first_rank, launched_ranks

if TYPE_CHECKING:
    from mlm_repro.engine.pipeline.lowering import Lowered
    from mlm_repro.engine.pipeline.schedule import Compute
    from mlm_repro.engine.run.resolved import ResolvedRun

app = CommandLine(help="Train GPT-2 the Megatron-LM way.", no_args_is_help=True)
Model = Annotated[Path, Argument(help="A shipped model, such as 355m, or a TOML file.")]
Twin = Annotated[
    bool, Option("--twin", help="Shrink the recipe to laptop size by the stated rule.")
]
Overrides = Annotated[list[str] | None, Option("--set", help="Override a key: section.key=value.")]
Runs = Annotated[Path, Option("--runs", help="Folder of run directories.")]
Ranks = Annotated[
    int | None,
    Option("--ranks", min=1, help="Processes; by default one per GPU or core of this machine."),
]
SameCode = Annotated[
    bool, Option("--same-code", help="Refuse a run on which other code worked last.")
]


@app.command(context_settings={"ignore_unknown_options": True})
def run(
    config: Model,
    others: Annotated[list[str] | None, Argument(hidden=True)] = None,
    overrides: Overrides = None,
    twin: Twin = False,
    runs: Runs = Path("runs"),
    ranks: Ranks = None,
    threads: Annotated[
        bool,
        Option("--threads", help="Run the ranks as threads of this process, for a debugger."),
    ] = False,
    dry_run: Annotated[
        bool, Option("--dry-run", help="Print the resolved run and its cost, and stop.")
    ] = False,
    earlier: Annotated[
        Path | None,
        Option("--continue", help="Go on from the end of this run, as a new run."),
    ] = None,
    same_code: SameCode = False,
) -> None:
    """Train a configuration, or resume its run, in a run directory of its own, and print the
    directory.

    The directory's name follows from what the run computes, so the same command resumes a run. With
    --dry-run, print the resolved run and its cost, and train nothing.
    """
    from mlm_repro.engine.config import RunConfig
    from mlm_repro.engine.run.resolved import read_run

    unknown = next((word for word in (str(config), *(others or ())) if word.startswith("-")), None)
    if unknown:
        key = RunConfig.other_names.get(
            unknown.partition("=")[0].lstrip("-").replace("-", "_"), "one that --dry-run prints"
        )
        raise BadInput(
            f"`mlm-train run` has no option {unknown}: it takes a setting of the recipe as --set"
            f" KEY=VALUE, and here it is {key}"
        )
    if others:
        raise BadInput(
            f"{others[0]!r} is one argument too many: `mlm-train run` takes one model or TOML file,"
            " and every setting needs --set before it"
        )
    resolved = read_run(config, overrides or [], twin, launched_ranks() or ranks, earlier)
    if dry_run:
        if resolved.dataset:
            resolved.check_validation()
        check_protocols(resolved.config.record.evaluate)
        print(resolved.describe())
    else:
        resolved.check_not_longer(runs)
        _train(resolved, runs, same_code, threads)


@app.command()
def resume(
    run: Annotated[Path, Argument(help="Run directory.")],
    overrides: Overrides = None,
    ranks: Ranks = None,
    same_code: SameCode = False,
) -> None:
    """Resume a run from its newest checkpoint, at the layout that trained last unless `--set
    parallel.` changes it, and print its directory."""
    from mlm_repro.engine.run.resolved import resolve_begun
    from mlm_repro.lineage.run import RunDirectory

    directory = RunDirectory.open(run, "training")
    _train(
        resolve_begun(directory, launched_ranks() or ranks, overrides or ()),
        directory.path.parent,
        same_code,
    )


def _train(run: "ResolvedRun", runs: Path, same_code: bool, threads: bool = False) -> None:
    """Train a ResolvedRun on its ranks, in the directory where it was begun or else its own below
    the folder `runs`, and print the directory. If the run is complete already, train nothing: make
    the link with the run's name lead to its directory, and print that.

    The ranks are threads if `threads` is set. Otherwise this process trains if it is a rank or the
    only one; else it forks the ranks and raises SystemExit with 0 or the exit code of a rank that
    failed. Raises BadInput without a fitting torch, if a protocol of `record.evaluate` cannot be
    scored here, or if `same_code` is set and other code worked on the run last; and the errors of
    `ResolvedRun.begin`, and of the function `train` if this process trains or else of `launch`.
    """
    check_torch()
    directory = run.begun or run.directory(runs)
    other = directory.other_code
    if other and same_code:
        raise BadInput(
            f"{other}: --same-code refuses a run on which other code worked last; without it a run"
            " that is not complete goes on, and its manifest notes the code"
        )
    if not launched_ranks():  # of launched ranks the first one asks, when all have come
        if not directory.is_at_rest:
            check_protocols(run.config.record.evaluate)
        directory = run.begin(runs)
        if directory.is_at_rest:
            directory.link()
            print(f"already complete: {directory.path}")
            if other:
                print(f"note: {other}", file=sys.stderr)
            return
        run = replace(run, begun=directory)  # so that the ranks do not search for it again
    from mlm_repro.engine.launch.local import launch
    from mlm_repro.engine.launch.mesh import leave_ranks
    from mlm_repro.engine.launch.threads import run_threads
    from mlm_repro.engine.train import train

    ranks = run.layout.world_size
    if threads:
        _say_end(run_threads(train, ranks, run, runs, timeout_seconds=None)[0].path)
        return

    def work() -> None:
        try:
            path = train(run, runs).path
        finally:
            leave_ranks()
        if is_first_rank():
            _say_end(path)

    if ranks > 1 and not launched_ranks():
        raise SystemExit(launch(work, ranks))
    work()


def _say_end(run: Path) -> None:
    """Print `complete:` and the directory of the complete training `run` on standard output, and
    before that on standard error, unless `--quiet` is given, how the training ended."""
    from mlm_repro.engine.run.files import describe_end

    if not is_quiet():
        print(describe_end(run), file=sys.stderr)
    print(f"complete: {run}")


@app.command("finetune")
def finetune_(
    task: Annotated[str, Argument(help="mnli, qqp, squad, squad2 or race.")],
    checkpoint: Annotated[
        Path,
        Option("--ckpt", help="A BERT's checkpoint or run directory; `import` makes one."),
    ],
    data: Annotated[Path, Option(help="Folder with the task's published files.")],
    overrides: Annotated[
        list[str] | None,
        Option("--set", help="Override a value of the published recipe: key=value."),
    ] = None,
    ensemble: Annotated[
        int, Option(min=1, help="Trainings, with seeds from `seed` on: medians, ensemble.")
    ] = 1,
    json: Annotated[Path | None, Option(help="Also write the result to this file.")] = None,
) -> None:
    """Fine-tune a BERT on MNLI, QQP, SQuAD or RACE and print its metrics on the held-out files. The
    trained weights are not kept."""
    from mlm_repro.engine.finetune.tasks import find_task, read_sets
    from mlm_repro.lineage.chain import resolve_checkpoint
    from mlm_repro.lineage.config import override_config

    check_place("--json", json, '"metrics"')
    recipe = override_config(find_task(task).recipe, overrides or ())
    resolve_checkpoint(checkpoint)
    check_is_there(data, "folder")
    sets = read_sets(task, data)
    from mlm_repro.engine.finetune.train import describe, finetune

    result = finetune(task, checkpoint, sets, recipe, ensemble)
    print(describe(result))
    if json:
        write_json(json, asdict(result))
        print(f"written: {json}")


@app.command("export")
def export_(
    checkpoint: Annotated[Path, Argument(help="Checkpoint or run directory.")],
    out: Annotated[Path, Argument(help="New directory.")],
) -> None:
    """Write a checkpoint, or a model that `shard-hf` divided, as a Hugging Face directory, and
    print the directory."""
    from mlm_repro.engine.published import PLAN
    from mlm_repro.lineage.chain import resolve_checkpoint

    is_divided = (checkpoint / PLAN).is_file()
    _announce_conversion(checkpoint if is_divided else resolve_checkpoint(checkpoint))
    from mlm_repro.engine.formats.convert import export_checkpoint
    from mlm_repro.engine.formats.model_shards import merge_model

    print(f"written: {(merge_model if is_divided else export_checkpoint)(checkpoint, out)}")


@app.command("shard-hf")
def shard_hf(
    directory: Annotated[Path, Argument(help="Hugging Face directory with safetensors.")],
    out: Annotated[Path, Argument(help="New directory.")],
    tp: Annotated[int, Option(min=1, help="Tensor-parallel ranks, a file each.")] = 1,
) -> None:
    """Divide a Hugging Face model over tensor-parallel ranks, bit for bit; `export` merges it
    again.

    The plan is transformers', or ours for a GPT-2, BERT, T5, BART or OPT. It is printed. If memory
    suffices, the ranks' outputs are compared with the undivided model's. A GPT-2 or BERT that is to
    train at any layout goes through `import` instead.
    """
    from mlm_repro.engine.published import CONFIG

    _announce_conversion(directory)
    if not (directory / CONFIG).is_file():
        raise BadInput(
            f"{directory} has no {CONFIG}, so it is not a Hugging Face directory: `mlm-train"
            " export` makes one of a checkpoint"
        )
    from mlm_repro.engine.formats.model_shards import shard_model

    print("\n".join([*shard_model(directory, out, tp), f"written: {out}"]))


@app.command("import")
def import_(
    directory: Annotated[
        Path, Argument(help="Hugging Face GPT-2 or BERT, Megatron-LM save or torch_dist.")
    ],
    out: Annotated[Path, Argument(help="New checkpoint directory.")],
    vocab: Annotated[
        Path | None,
        Option(help="Folder with vocab.json and merges.txt; Megatron-LM's needs one."),
    ] = None,
    heads: Annotated[
        int | None,
        Option(min=1, help="Attention heads, if the files do not have them."),
    ] = None,
) -> None:
    """Turn another program's published weights into a checkpoint of this engine, and print the
    checkpoint's directory."""
    from mlm_repro.engine.published import check_published

    check_published(directory)
    _announce_conversion(directory)
    from mlm_repro.engine.formats.convert import import_checkpoint

    print(f"written: {import_checkpoint(directory, out, vocab, heads)}")


@app.command()
def schedule(
    pp: Annotated[int, Option(min=1, help="Pipeline-parallel ranks.")],
    microbatches: Annotated[
        int, Option(min=1, help="Microbatches per iteration and data-parallel rank.")
    ],
    chunks: Annotated[
        int, Option(min=1, help="Stages per rank; more than one is interleaved.")
    ] = 1,
    name: Annotated[
        Literal["gpipe", "1f1b", "interleaved"] | None,
        Option("--schedule", help="By default 1f1b, with chunks interleaved."),
    ] = None,
) -> None:
    """Print a pipeline schedule as a grid, with its bubble and the peak number of its activations
    in flight on each rank."""
    from mlm_repro.engine.pipeline.lowering import lower
    from mlm_repro.engine.pipeline.schedule import compute_orders, ideal_bubble, peaks_in_flight

    chosen = name or ("interleaved" if chunks > 1 else "1f1b")
    orders = compute_orders(chosen, pp, chunks, microbatches)
    lowered = lower(orders, chunks)
    print(format_grid(lowered, chunks))
    print(
        f"schedule {chosen}: F forward, B backward (twice as long), number of the microbatch,"
        " letter of the chunk"
    )
    ideal = ideal_bubble(chosen, pp, chunks, microbatches)
    print(f"bubble {lowered.bubble:.4f} of the ideal time; the formula says {ideal:.4f}")
    peaks = ", ".join(map(str, peaks_in_flight(chosen, pp, chunks, microbatches)))
    print(f"peak activations in flight, chunks per rank: {peaks}")


def format_grid(lowered: "Lowered", chunks: int) -> str:
    """Return the grid of a lowered schedule as text: a line for each rank, `rank N |…|`, and a
    column for each unit of time, which is the shortest pass. `chunks` is the number of stages per
    rank.

    A cell has F or B for forward or backward, the microbatch's number and, with several chunks, the
    chunk's letter. A long pass fills several cells, and a cell is blank while the rank is idle.
    """
    every = list(chain.from_iterable(lowered.timeline))
    unit = min(interval.end - interval.start for interval in every)
    width = max(len(_cell(interval.compute, chunks)) for interval in every)
    lines = []
    for rank, intervals in enumerate(lowered.timeline):
        cells = [" " * width] * round(lowered.makespan / unit)
        for interval in intervals:
            for column in range(round(interval.start / unit), round(interval.end / unit)):
                cells[column] = _cell(interval.compute, chunks).ljust(width)
        lines.append(f"rank {rank} |" + "|".join(cells) + "|")
    return "\n".join(lines)


def _cell(compute: "Compute", chunks: int) -> str:
    chunk = chr(ord("a") + compute.chunk) if chunks > 1 else ""
    return f"{compute.op}{compute.microbatch}{chunk}"


@app.command(
    "from-megatron", context_settings={"ignore_unknown_options": True, "allow_extra_args": True}
)
def from_megatron_(context: typer.Context) -> None:
    """Translate Megatron-LM's command line, or a script that contains it, and print the
    configuration (TOML).

    `mlm-train from-megatron pretrain.sh` or `mlm-train from-megatron --num-layers 24 …`. The script
    is not run. Flags about data or without effect follow as comments; warnings about flags without
    a counterpart go to standard error.
    """
    from mlm_repro.engine.megatron_flags import from_megatron, script_or_arguments
    from mlm_repro.lineage.config import to_toml

    translated = from_megatron(script_or_arguments(context.args))
    print(to_toml(translated.config), end="")
    for title, flags in (
        ("of the data, which mlm-data makes", translated.data),
        ("without effect on the result", translated.without_effect),
    ):
        print("".join(f"# {title}: {flag}\n" for flag in flags), end="")
    for sentence in translated.missing:
        print(f"warning: {sentence}", file=sys.stderr)


@app.command("to-megatron")
def to_megatron_(config: Model, overrides: Overrides = None, twin: Twin = False) -> None:
    """Print the flags with which Megatron-LM trains a configuration, as one line for a shell, and a
    warning on standard error for each setting that they do not express."""
    from mlm_repro.engine.megatron_flags import to_megatron
    from mlm_repro.engine.run.resolved import read_run

    line = to_megatron(read_run(config, overrides or [], twin).config)
    print(shlex.join(line.words))
    for key in line.missing:
        print(f"warning: the printed flags do not express {key}", file=sys.stderr)


def _announce_conversion(directory: Path) -> None:
    """Print to standard error, unless `--quiet` is given, how many bytes a conversion reads from
    `directory`, and that it writes at most twice as many. Raises BadInput if there is no such
    directory.

    Sets an environment variable of this process, so that a message about an interruption says that
    the command begins anew.
    """
    from mlm_repro.lineage.digest import bytes_below

    check_is_there(directory, "directory")
    os.environ[KEEPS_NOTHING] = "1"
    announce(f"reads {format_bytes(bytes_below(directory))}", "writes at most twice as much")


def main() -> None:
    """Run the command line of `mlm-train` with this process's arguments, and exit with its exit
    code. A first argument that is neither a verb nor an option is taken as the model to `run`."""
    keep_large_buffers()
    run_command(app, "run")


def program() -> None:
    """Run `mlm-train` as `python -m mlm_repro.engine.cli`, by which torchrun starts ranks, and exit
    with its exit code. A launched rank ends at once, without Python's cleanup, because leftover
    threads of the libraries can abort a process that ends in the ordinary way."""
    try:
        main()
    except SystemExit as end:
        if "RANK" in os.environ:
            sys.stderr.flush()
            os._exit(end.code if isinstance(end.code, int) else int(end.code is not None))
        raise


if __name__ == "__main__":
    program()
