"""`mlm-bench`: how fast this machine runs what is here, beside what else runs on it."""

import re
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from lineage.atomic import write_json
from lineage.command import CommandLine, run_command
from lineage.errors import BadInput, Diverged

Json = Annotated[Path | None, typer.Option("--json", help="Also write the result to this file.")]

app = CommandLine(help="Measure speed beside other programs, in one run on this machine.", no_args_is_help=True)


class Size(StrEnum):
    """Shapes that are measured."""

    TINY = "tiny"
    TWIN = "twin"


@app.callback()
def _bench() -> None:
    pass


@app.command()
def parallel(
    json: Json = None,
    rounds: Annotated[int, typer.Option(min=1, help="How often every contender is measured, in turn.")] = 3,
    size: Annotated[
        Size, typer.Option(help="tiny: 4 layers, 256 wide, 50,304 words; twin: the 8.3b twin.")
    ] = Size.TINY,
) -> None:
    """Training tokens/s on processor cores: serial, tp2, pp2, dp2 and the peers installed here.

    Forward, backward, gradient reduction and AdamW in fp32, with dropout 0 and 0.1, one thread per process. Ends with
    code 3 if a contender's losses show that it computed something else.
    """
    from experiments.bench.parallel import measure_parallel
    from experiments.bench.sizes import read_size
    from experiments.bench.table import show_parallel

    _check_output(json)
    result = measure_parallel(read_size(size.value), rounds)
    show_parallel(result)
    _write(json, result)
    if result["disagreements"]:
        raise Diverged("; ".join(result["disagreements"]))


@app.command("eval")
def evaluation(
    json: Json = None,
    rounds: Annotated[int, typer.Option(min=1, help="How often both of each comparison are measured, in turn.")] = 3,
) -> None:
    """Evaluation beside the plain loop over full logits and lm-evaluation-harness: processor time and memory.

    Ends with code 3 if the answers differ by more than rounding.
    """
    from experiments.bench.eval import measure_eval
    from experiments.bench.table import show_eval

    _check_output(json)
    result = measure_eval(rounds)
    show_eval(result)
    _write(json, result)
    if result["disagreements"]:
        raise Diverged("; ".join(result["disagreements"]))


@app.command()
def data(
    corpus: Annotated[Path, typer.Option("--corpus", help="A .jsonl file with a string `text` on every line.")],
    json: Json = None,
) -> None:
    """The data pipeline on one core, stage by stage beside the plain libraries, and whole beside their chain.

    Every answer is compared. Takes about three seconds for each megabyte. Ends with code 3 if any answer differs.
    """
    from experiments.bench.data import measure_data
    from experiments.bench.table import show_data

    _check_output(json)
    result = measure_data(corpus)
    show_data(result)
    _write(json, result)
    differing = {row["stage"]: row["differing"] for row in [*result["stages"], result["whole"] | {"stage": "whole"}]}
    if any(differing.values()):
        raise Diverged(", ".join(f"{name}: {count} answers differ" for name, count in differing.items() if count))


@app.command()
def data_scale(
    corpus: Annotated[Path, typer.Option("--corpus", help="A .jsonl file whose paragraphs the corpora are made of.")],
    json: Json = None,
    megabytes: Annotated[list[float] | None, typer.Option(help="Size of a corpus; may be repeated.")] = None,
    workers: Annotated[int, typer.Option(min=1, help="Worker processes.")] = 2,
) -> None:
    """Throughput and peak memory of the data pipeline at 20, 200 and 2,000 MB, held to the stated bound."""
    from experiments.bench.data_scale import measure_scale
    from experiments.bench.table import show_data_scale

    _check_output(json)
    result = measure_scale(corpus, megabytes or [20, 200, 2000], workers)
    show_data_scale(result)
    _write(json, result)


@app.command()
def train(
    json: Json = None,
    rounds: Annotated[int, typer.Option(min=1, help="How often every contender is measured, in turn.")] = 3,
    case: Annotated[list[str] | None, typer.Option(help="Only this row; may be repeated.")] = None,
) -> None:
    """Training on one core beside nanoGPT, stock and tuned, and beside the core's limit; then two processes to one.

    Takes about 15 minutes. Ends with code 3 if a contender's losses show that it computed something else.
    """
    from experiments.bench.table_train import show_train
    from experiments.bench.train import CASES, measure_train

    _check_output(json)
    cases = [each for each in CASES if case is None or each.name in case]
    if unknown := set(case or ()) - {each.name for each in CASES}:
        raise BadInput(f"no row is called {sorted(unknown)[0]!r}; there are: {', '.join(c.name for c in CASES)}")
    result = measure_train(rounds, cases)
    show_train(result)
    _write(json, result)
    if result["disagreements"]:
        raise Diverged("; ".join(result["disagreements"]))


@app.command()
def kernels(
    json: Json = None,
    rounds: Annotated[int, typer.Option(min=1, help="How often every kernel is measured, in turn.")] = 5,
) -> None:
    """Each compiled kernel beside its reference in torch and, where there is a compiler, torch.compile."""
    from experiments.bench.kernels import measure_kernels
    from experiments.bench.table_train import show_kernels

    _check_output(json)
    result = measure_kernels(rounds)
    show_kernels(result)
    _write(json, result)


@app.command()
def growth(
    json: Json = None,
    rounds: Annotated[int, typer.Option(min=1, help="How often every point is measured, in turn.")] = 3,
) -> None:
    """Training tokens/s against width, depth, sequence length and ranks, beside what the closed form predicts."""
    from experiments.bench.growth import measure_growth
    from experiments.bench.table_train import show_growth

    _check_output(json)
    result = measure_growth(rounds)
    show_growth(result)
    _write(json, result)


@app.command()
def gemm(
    json: Json = None,
    rounds: Annotated[int, typer.Option(min=1, help="How often every product is measured, in turn.")] = 5,
    largest: Annotated[int | None, typer.Option(min=64, help="Largest size; 1024 on a CPU, 8192 on a GPU.")] = None,
) -> None:
    """Products of n × n matrices with n a multiple of 8, one less and one more, in every number format.

    Tensor cores want dimensions that are multiples of 8; a GPU is measured where there is one.
    """
    from experiments.bench.gemm import measure_gemm
    from experiments.bench.table_gemm import show_gemm

    _check_output(json)
    result = measure_gemm(rounds, largest)
    show_gemm(result)
    _write(json, result)


@app.command()
def gpu(
    json: Json = None,
    rounds: Annotated[int, typer.Option(min=1, help="How often every contender is measured, in turn.")] = 3,
) -> None:
    """Kernels and training on one GPU beside torch.compile, the peers' models and the GPU's own limits.

    Exactness of each kernel, its time beside what copying or products allow, then training of 355m and 2.5b, and
    forward and backward of 8.3b. Ends with code 4 where there is no GPU, with 3 if a kernel is not exact or losses
    differ.
    """
    from experiments.bench.gpu import measure_gpu
    from experiments.bench.table_gpu import show_gpu

    _check_output(json)
    result = measure_gpu(rounds)
    show_gpu(result)
    _write(json, result)
    if result["disagreements"]:
        raise Diverged("; ".join(result["disagreements"]))


@app.command()
def pipeline(json: Json = None) -> None:
    """What two ranks compute when under GPipe, 1F1B and the interleaved schedule, beside the engine's plan.

    Takes some seconds. Ends with code 3 if the losses of two schedules differ.
    """
    from experiments.bench.pipeline import measure_pipeline
    from experiments.bench.table import show_pipeline

    _check_output(json)
    result = measure_pipeline()
    show_pipeline(result)
    _write(json, result)
    if result["disagreements"]:
        raise Diverged("; ".join(result["disagreements"]))


@app.command()
def compare(
    old: Annotated[Path, typer.Argument(help="A result written by --json.")],
    new: Annotated[Path, typer.Argument(help="A later result of the same benchmark.")],
) -> None:
    """Ratios of two results side by side. Ends with code 3 if one fell by more than a tenth."""
    from experiments.bench.compare import compare as compare_results
    from experiments.bench.table_train import show_comparison

    rows = compare_results(old, new)
    show_comparison(rows)
    if fallen := [row["ratio"] for row in rows if row["fell"]]:
        raise Diverged(f"fell by more than a tenth: {'; '.join(fallen)}")


def _check_output(path: Path | None) -> None:
    """Minutes of measuring should not end at a name that cannot be written."""
    if path is None:
        return
    if path.is_dir():
        raise BadInput(f"--json {path} is a directory, not a file to write")
    if any(parent.exists() and not parent.is_dir() for parent in path.parents):
        raise BadInput(f"--json {path} cannot be written: a part of its path is a file")


def _write(path: Path | None, result: dict[str, Any]) -> None:
    if path is None:
        return
    environment = result["environment"]
    try:
        write_json(path, result | {"environment": environment | {"argv": _to_repeat(environment["argv"])}})
    except OSError as error:
        raise BadInput(f"{path} cannot be written: {error.strerror}") from error
    print(f"written: {path}")


def _to_repeat(argv: list[str]) -> list[str]:
    """The command as anybody may give it: without its record, and of every other path only the file's name."""
    pairs = zip(["", *argv], argv, strict=False)
    kept = [word for before, word in pairs if before != "--json" and not word.startswith("--json")]
    return [re.sub(r"^(--[a-z-]+=)?.*/", r"\1", word, flags=re.DOTALL) for word in kept]


def main() -> None:
    """Entry point."""
    run_command(app)
