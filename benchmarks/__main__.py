"""`python -m benchmarks data|train|checkpoints|eval|gpu|calibrate|fixes`. Modules import torch when
they measure."""

import os
import sys
from functools import partial
from pathlib import Path
from typing import Annotated

from typer import Option

from benchmarks.timing import carry_out
from mlm_repro.lineage.command import CommandLine, run_command
from mlm_repro.lineage.errors import KEEPS_NOTHING, BadInput
from mlm_repro.lineage.lock import check_place

Json = Annotated[Path | None, Option("--json", help="Also write the record to this file.")]
Rounds = Annotated[int, Option(min=1, help="How often every contender is measured, in turn.")]
Only = Annotated[list[str] | None, Option(help="Only this case; may be repeated.")]

app = CommandLine(
    help="Measure speed beside other programs, in one run on this machine.", no_args_is_help=True
)


@app.command()
def data(
    corpus: Annotated[
        Path | None, Option(help="A .jsonl file with a string `text` on every line.")
    ] = None,
    rounds: Annotated[int, Option(min=1, help="How often the whole pipeline is run.")] = 3,
    case: Annotated[
        list[str] | None,
        Option(
            help=(
                "Instead: memory, disk and time of crawl, templates, tweets, books or code; may be"
                " repeated."
            )
        ),
    ] = None,
    json: Json = None,
) -> None:
    """Time the data pipeline on one core: stage by stage beside the plain libraries, and whole
    beside these together.

    Every answer is compared. Takes about seven seconds for each megabyte. Ends with code 3 if any
    answer differs.
    """
    from benchmarks import corpora
    from benchmarks.data import measure

    if case and not corpus:
        carry_out(partial(corpora.measure, case), json)
    elif corpus and not case:
        carry_out(partial(measure, corpus, rounds), json)
    else:
        raise BadInput("give either --corpus or --case, and not both")


@app.command()
def train(
    rounds: Rounds = 3,
    case: Only = None,
    json: Json = None,
) -> None:
    """Time training on one core beside nanoGPT, stock and tuned, and the core's limit; also two
    processes beside one, and kernels.

    Takes about half an hour a round. Ends with code 3 if a contender's losses show that it computed
    something else.
    """
    from benchmarks.train import measure

    carry_out(partial(measure, rounds, case), json)


@app.command()
def checkpoints(rounds: Rounds = 9, json: Json = None) -> None:
    """Time a training that writes checkpoints beside itself: ten iterations with a checkpoint and
    ten without, in turn."""
    from benchmarks.beside import measure

    carry_out(partial(measure, rounds), json)


@app.command("eval")
def evaluate(rounds: Rounds = 9, json: Json = None) -> None:
    """Time scoring on one core beside the plain loop and transformers, by processor time.

    Ends with code 3 if the answers differ by more than rounding.
    """
    from benchmarks.eval import measure

    carry_out(partial(measure, rounds), json)


@app.command()
def gpu(
    items: Annotated[
        str,
        Option(
            help=(
                "`all`, or some with commas between them; they are measured in the order of"
                " docs/gpu.md."
            )
        ),
    ] = "all",
    out: Annotated[
        Path | None,
        Option(
            help="Write gpu.jsonl and gpu.json into it, and leave out the items that these have."
        ),
    ] = None,
    deadline: Annotated[float | None, Option(min=1, help="End after this many seconds.")] = None,
    dry_run: Annotated[
        bool, Option("--dry-run", help="Only print the items with their seconds.")
    ] = False,
    json: Json = None,
) -> None:
    """Time kernels and training on one GPU beside torch.compile, nanoGPT and the GPU's own limits.

    Ends with code 4 without a GPU, and with 3 if a kernel is not exact or losses differ.
    """
    from benchmarks.gpu import chosen_items, measure

    if dry_run:
        chosen = chosen_items(items)
        until = 0.0
        for name, seconds in chosen.items():
            until += seconds
            print(f"{name}: {seconds:g} s, {until:g} s in all")
        return
    carry_out(partial(measure, items, out, deadline), json)


@app.command()
def calibrate(
    out: Annotated[Path, Option(help="Folder for constants.")] = Path("runs/calibration"),
    json: Json = None,
) -> None:
    """Fit the simulator's constants on the measured iterations that are shipped, write them to
    --out, and print the errors on rows left out."""
    from benchmarks.calibrate import calibrate as run

    carry_out(partial(run, out), json)


@app.command()
def fixes(
    clone: Annotated[
        Path | None,
        Option(exists=True, help="A clone of NVIDIA/Megatron-LM; nothing is fetched."),
    ] = None,
    torchtitan: Annotated[
        Path | None, Option(exists=True, help="A clone of pytorch/torchtitan.")
    ] = None,
    case: Only = None,
    json: Annotated[
        Path | None, Option(help="Keep the rows in this file, and go on where it ends.")
    ] = None,
) -> None:
    """Test `mlm-verify layouts` on upstream's fixes of silent parallel faults: a finding before
    each fix, silence after it.

    Takes about a minute a case. Ends with code 3 if a fix is followed by a finding that the table
    does not explain.
    """
    from benchmarks.fixes import measure

    check_place("--json", json, '"rows"')
    clones = {
        name: path for name, path in (("megatron", clone), ("torchtitan", torchtitan)) if path
    }
    if not clones:
        raise BadInput(
            "no clone is given: name one of NVIDIA/Megatron-LM with --clone or of"
            " pytorch/torchtitan with --torchtitan"
        )
    measure(clones, case or [], json)


def main() -> None:
    """Run the command line of the benchmarks and exit with its code. Sets the environment variable
    named by `KEEPS_NOTHING`, so that an interrupted command does not promise to go on where it
    stopped."""
    sys.argv[0] = "benchmarks"
    os.environ[KEEPS_NOTHING] = "1"
    run_command(app)


if __name__ == "__main__":
    main()
