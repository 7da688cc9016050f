"""`mlm-experiment`: run what the papers ran, at the size this machine allows."""

from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Literal

from typer import Argument, Option

from mlm_repro.lineage.command import CommandLine, run_command
from mlm_repro.lineage.errors import BadInput, Diverged
from mlm_repro.lineage.lock import check_is_there, check_place
from mlm_repro.lineage.shipped import Shipped, find_file

if TYPE_CHECKING:
    from mlm_repro.experiments.catalogue import Experiment

app = CommandLine(
    help="Reproduce the papers' runs at the size this machine allows.", no_args_is_help=True
)
Runs = Annotated[Path, Option("--runs", help="Folder of run directories.")]
DryRun = Annotated[bool, Option("--dry-run", help="Print sizes and cost, and stop.")]
Name = Annotated[str | None, Argument(help="An experiment, such as 2021/figure-11.")]


@app.command()
def reproduce(
    target: Annotated[
        Literal["355m", "2.5b", "8.3b"],
        Argument(help="Largest model; the smaller ones are run for comparison."),
    ],
    mode: Annotated[
        Literal["auto", "full", "scaled"],
        Option(help="full: published size; scaled: twins; auto: what fits."),
    ] = "auto",
    smoke: Annotated[
        bool,
        Option("--smoke", help="Train twins of the smallest size, to see that everything works."),
    ] = False,
    seeds: Annotated[
        int | None,
        Option(
            min=1,
            max=9,
            help="Trainings of each twin, 2 by default, 1 with --smoke; several give a band.",
        ),
    ] = None,
    data: Annotated[
        Path | None, Option(help="Another data recipe, such as wikipedia or a TOML file.")
    ] = None,
    runs: Runs = Path("runs"),
    dry_run: DryRun = False,
) -> None:
    """Go from raw text to report: data, training, evaluation, page. Finished parts are reused."""
    recipe = find_file(data, Shipped.RECIPE) if data else None
    if recipe:
        from mlm_repro.data_pipeline.config import DataConfig
        from mlm_repro.lineage.config import load_config

        load_config(recipe, DataConfig)
    # Imports follow the checks of arguments, so that a mistake is named at once.
    from mlm_repro.experiments.reproduce.plan import make_plan
    from mlm_repro.experiments.runner import carry_out

    carry_out(make_plan(target, mode, smoke, recipe, seeds), runs, dry_run)


@app.command()
def sweep(
    recipe: Annotated[str, Argument(help="A shipped model, such as 355m, or a TOML file.")],
    vary: Annotated[
        list[str],
        Option(help="A key and its values: train.learning_rate=1e-3,3e-3. May be repeated."),
    ],
    fixed: Annotated[
        list[str] | None, Option("--set", help="Override a key for all: section.key=value.")
    ] = None,
    runs: Runs = Path("runs"),
    part: Annotated[
        str,
        Option(
            metavar="I/N",
            help="Train every Nth, from the Ith on: N tasks of a job array divide them.",
        ),
    ] = "1/1",
    best: Annotated[
        Path | None, Option(help="Write the best as a recipe to this TOML file.")
    ] = None,
) -> None:
    """Train a recipe at every combination of settings; print the losses with intervals over the
    seeds, best first.

    Complete trainings are not repeated, so the last call of a divided sweep prints the whole table.
    """
    from mlm_repro.data_pipeline.work.executors.part import parse_part
    from mlm_repro.engine.run.resolved import read_run_config
    from mlm_repro.experiments.sweep import format_swept
    from mlm_repro.experiments.sweep import sweep as train_all
    from mlm_repro.lineage.atomic import write_text
    from mlm_repro.lineage.config import to_toml

    swept = train_all(recipe, vary, fixed or (), runs, parse_part(part))
    print("\n".join(format_swept(swept)))
    if best is not None:
        write_text(best, to_toml(read_run_config(recipe, [*(fixed or ()), *swept[0].settings])))
        print(f"written: {best}")


@app.command()
def launch(
    manifest: Annotated[
        Path, Argument(help="A shipped job, such as 8.3b, or the TOML file of one.")
    ],
    out: Annotated[Path, Option(help="Folder for the launch files.")],
    overrides: Annotated[
        list[str] | None, Option("--set", help="Override a key: key=value.")
    ] = None,
) -> None:
    """Write the torchrun and Slurm files of a training job, with a container also Kubernetes'. They
    repeat its attempts until it is complete or gets no further."""
    from mlm_repro.experiments.launch.job import Job, describe_job, write_launch_files
    from mlm_repro.lineage.config import load_config

    job = load_config(find_file(manifest, Shipped.JOB), Job, overrides or [])
    print(describe_job(job))
    slurm, torchrun = write_launch_files(job, out)
    print(f"with Slurm: sbatch {quote(str(slurm))}")
    print(f"without, on each node: bash {quote(str(torchrun))}")
    if job.container:
        print(f"with Kubernetes: kubectl apply --filename {quote(str(out / 'jobset.yaml'))}")


@app.command()
def simulate(
    rows: Annotated[
        Path,
        Argument(help="CSV file of clusters, models and layouts; ptd-p-runs is shipped."),
    ],
    out: Annotated[Path, Option(help="CSV file of predictions.")],
) -> None:
    """Predict time, TFLOP/s and memory of an iteration for every row, or say why it cannot run."""
    from mlm_repro.experiments.simulator.batch import simulate_file

    count, refused = simulate_file(find_file(rows, Shipped.WORKLOAD_FILE), out)
    print(
        f"{out}: {count - refused} rows simulated, {refused} cannot run (see the column `reason`)"
    )


@app.command("plan")
def plan_(
    model: Annotated[
        str, Argument(help="A shipped model, such as 8.3b or ptd-p/145.6b, or a TOML file.")
    ],
    gpus: Annotated[int, Option(min=1, help="GPUs of the cluster that train.")],
    cluster: Annotated[str, Option(help="A shipped cluster, such as dgx-2h-v100, or a TOML file.")],
    software: Annotated[
        str, Option(help="Training software, such as megatron-2021; by default this engine.")
    ] = "",
    batch: Annotated[
        int, Option(min=0, help="Sequences of an iteration; by default the model's.")
    ] = 0,
    seq: Annotated[int, Option(min=0, help="Length of a sequence; by default the model's.")] = 0,
    tokens: Annotated[
        float,
        Option(min=0, help="Tokens to train on, such as 300e9; by default the model's."),
    ] = 0,
    days: Annotated[
        float, Option(min=0, help="Also print how many tokens this many days suffice for.")
    ] = 0.0,
    price: Annotated[
        float, Option(min=0, help="Price of a GPU-hour: adds what a layout costs.")
    ] = 0.0,
    overrides: Annotated[
        list[str] | None, Option("--set", help="Override a key: section.key=value.")
    ] = None,
    out: Annotated[
        Path | None, Option(help="Write the model by its first layout to this TOML file.")
    ] = None,
    explain: Annotated[
        bool, Option("--explain", help="Print where the time of the first layout goes.")
    ] = False,
) -> None:
    """Rank the layouts of a model that fit a cluster: time, days, GPU-hours, with intervals and
    failures.

    The file that --out writes is a run: `mlm-train run`, `mlm-train to-megatron` and a job take it.
    """
    from mlm_repro.experiments.simulator import planner
    from mlm_repro.experiments.simulator.cluster import load_cluster
    from mlm_repro.lineage.atomic import write_text
    from mlm_repro.lineage.config import to_toml

    if out is not None:
        check_place("--out", out, "[parallel]")
    asked = {
        "train.global_batch_size": batch,
        "model.seq_length": seq,
        "train.iterations": tokens and f"{tokens:.0f} tokens",
    }
    stated = [f"{key}={value}" for key, value in asked.items() if value]
    planned = planner.read_model(model, [*(overrides or ()), *stated])
    machine = load_cluster(cluster, software or planner.OWN)
    choices = planner.ranked_layouts(planned, machine, gpus)
    print(planner.format_plan(planned, machine, choices, price, days))
    print(planner.reasons(choices))
    if out is not None:
        write_text(out, to_toml(planner.planned_run(planned, machine, choices[0])))
        print(f"written: {out}")
    if explain:
        print(f"\n{planner.explain(machine, choices[0])}")


@app.command("list")
def list_() -> None:
    """List every published table and figure; `compare` gives the verdicts on its claims."""
    from mlm_repro.experiments.catalogue import load_experiments

    print(
        *(f"{name:<40}{experiment.title}" for name, experiment in load_experiments().items()),
        sep="\n",
    )


@app.command("run")
def run_(
    name: Name = None,
    every: Annotated[
        bool, Option("--all", help="Run all experiments except those that train models.")
    ] = False,
    runs: Runs = Path("runs"),
    limit: Annotated[
        int | None,
        Option(min=1, help="For released weights: at most this many windows per test."),
    ] = None,
) -> None:
    """Predict the numbers of a published table or figure, and measure those that this machine can.
    An experiment that a reproduction answers makes the reproduction."""
    from mlm_repro.experiments.runner import run_named
    from mlm_repro.lineage.run import MANIFEST

    chosen = _chosen(name, every)
    if limit and [experiment.measures for experiment in chosen] != ["released"]:
        raise BadInput(
            "--limit goes with the name of an experiment on released weights, such as gpt2/released"
        )
    check_place("--runs", runs / MANIFEST, "")
    run_named(chosen, runs, limit)


@app.command()
def ablate(
    name: Annotated[
        str, Argument(help="An experiment with an ablation, such as transformer-xl/memory.")
    ],
    dataset: Annotated[
        list[Path],
        Option(help="Dataset directory; twice where arms differ in their tokens."),
    ],
    runs: Runs = Path("runs"),
) -> None:
    """Train recipes that differ in one thing, over seeds that a sealed forecast gives, and print
    the effects."""
    from mlm_repro.experiments.catalogue import ablation_of, find_experiment

    experiment = find_experiment(name)
    ablation = ablation_of(experiment)
    for path in dataset:
        check_is_there(path, "dataset")
    from mlm_repro.experiments.forecast.ablation import derive_effects
    from mlm_repro.experiments.forecast.study import run_ablation
    from mlm_repro.experiments.verdicts import named

    run = run_ablation(experiment, dataset, runs)
    print(ablation.question)
    for finding in derive_effects(run.path)[0]:
        print(f"{named(finding.outcome)}: {finding.sentence}, claimed {finding.effect.claimed}")
    print(run.path)


@app.command()
def compare(
    name: Name = None,
    every: Annotated[bool, Option("--all", help="Every claim of the catalogue.")] = False,
    results: Annotated[
        list[Path] | None,
        Option(help="Folders of run directories; results, results/ablations and runs."),
    ] = None,
    rows: Annotated[bool, Option("--rows", help="With --all: a row for every claim too.")] = False,
) -> None:
    """Give a verdict on every published claim; exit code 3 if a number contradicts one.

    Measured and counted numbers come from sealed runs, others are computed anew. For one experiment
    there is a row for every claim. With --all, verdicts are counted by scale and paper, and only
    contradicted claims are shown. An effect that is not seen at reduced scale does not cause exit
    code 3.
    """
    from mlm_repro.experiments.verdicts import (
        format_summary,
        format_verdicts,
        judge,
        load_results,
        unanswered,
    )

    chosen = _chosen(name, every)
    usual = map(Path, ("results", "results/ablations", "runs"))
    loaded = load_results(results or filter(Path.is_dir, usual))
    verdicts = [*judge(chosen, loaded), *(unanswered(chosen) if every else [])]
    beyond = [verdict for verdict in verdicts if verdict.is_against]
    if every:
        print(format_summary(verdicts))
    if rows or not every:
        print("\n".join([*loaded.left_out, format_verdicts(verdicts)]))
    else:
        if loaded.left_out:
            print(f"left out: {len(loaded.left_out)} directories that were never finished")
        print("a row for each claim: mlm-experiment compare --all --rows")
        if shown := [verdict for verdict in verdicts if verdict.outcome == "contradicted"]:
            print(f"\n{format_verdicts(shown)}")
    if beyond:
        more = f" and {len(beyond) - 1} more" if len(beyond) > 1 else ""
        raise Diverged(
            f"{beyond[0].claim.id}{more}: a number of this suite contradicts the published claim;"
            " the table above has both"
        )


def _chosen(name: str | None, every: bool) -> "list[Experiment]":
    from mlm_repro.experiments.catalogue import find_experiment, load_experiments

    if (name is None) != every:
        raise BadInput(
            "name one experiment (`mlm-experiment list` shows them) or say --all, and not both"
        )
    return [find_experiment(name)] if name else list(load_experiments().values())


def main() -> None:
    """Run the command line of `mlm-experiment` and exit the process with its code."""
    run_command(app)
