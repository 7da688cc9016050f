"""The commands of a reproduction, in words that run. Imports no torch."""

import os
import shlex
from collections.abc import Iterator
from pathlib import Path

from engine.config import RunConfig
from experiments.files import EVALUATIONS
from experiments.launch.job import describe_job, slurm_script, torchrun_script
from experiments.reproduce.plan import Plan, disk_bytes, manifest_file, training_job
from lineage.installation import HOME
from lineage.shipped import model_file

TASKS = ("wikitext103", "lambada")
BENCH, KEPT = HOME / "results" / "bench", (HOME / "results" / "ladder", HOME / "results" / "ablations")
"""Results kept in a checkout: the report shows them, so that it begins with what is measured, where they are."""

Step = list[str]


def preflight_step(plan: Plan, runs: Path) -> Step:
    """Look at the machine before anything is run in full."""
    return ["mlm-experiment", "preflight", "--runs", str(runs), "--needed-gb", f"{disk_bytes(plan, runs) / 1e9:.0f}"]


def data_step(plan: Plan, runs: Path) -> Step:
    """Build the dataset."""
    return ["mlm-data", "run", shown(plan.recipe), "--runs", str(runs)]


def train_step(plan: Plan, config: RunConfig, dataset: Path, runs: Path) -> Step:
    """Train one of the plan's models: a twin at once, a published size through its launch file."""
    if plan.size is None:
        return ["bash", shown(launch_folder(config, runs) / "torchrun.sh")]
    published = config.name.split("-")[0]
    options = [f"--set={setting}" for setting in (*plan.overrides(config), f"data.dataset={dataset}")]
    return ["mlm-train", "run", shown(model_file(published)), "--twin", *options, "--runs", str(runs)]


def evaluation_step(plan: Plan, task: str, checkpoint: Path, out: Path) -> Step:
    """Evaluate a trained model."""
    limits = {"wikitext103": plan.size.windows, "lambada": plan.size.examples} if plan.size else {}
    limit = ["--limit", str(limits[task])] if task in limits else []
    return ["mlm-eval", task, "--ckpt", shown(checkpoint), "--json", shown(out), *limit]


def evaluation_file(reproduction: Path, model: str, task: str) -> Path:
    """File of an evaluation's result."""
    return reproduction / EVALUATIONS / f"{model}-{task}.json"


def report_steps(directory: Path, runs: Path) -> list[Step]:
    """Predict what cannot run here, and build the page of everything; it names the commits where there are several."""
    bench = ["--bench", shown(BENCH)] if BENCH.is_dir() else []
    studies = [shown(path) for path in KEPT if path.is_dir()]
    return [
        ["mlm-experiment", "run", "--all", "--mode", "simulate", "--runs", str(runs)],
        ["mlm-report", "build", str(directory), str(runs), *studies, *bench, "--mixed-commits"],
    ]


def launch_folder(config: RunConfig, runs: Path) -> Path:
    """Folder of a published model's launch files."""
    return runs / f"launch-{config.name}"


def format_steps(plan: Plan, runs: Path) -> str:
    """Every command of the full size in order, with the scripts that train; `ID` stands for digits not yet known."""
    directory = runs / f"reproduce-{plan.target}-ID"
    lines = [
        _line(preflight_step(plan, runs)),
        _line(data_step(plan, runs)),
        *(line for config in plan.configs for line in _training_lines(plan, config, runs)),
        *(
            _line(evaluation_step(plan, task, runs / config.name, evaluation_file(directory, config.name, task)))
            for config in plan.published
            for task in TASKS
        ),
        *map(_line, report_steps(directory, runs)),
    ]
    return "\n".join(lines)


def _training_lines(plan: Plan, config: RunConfig, runs: Path) -> Iterator[str]:
    job, folder = training_job(plan, config, runs), launch_folder(config, runs)
    yield "\n" + describe_job(job)
    if plan.possible:
        yield _line(train_step(plan, config, job.dataset, runs))
        script = torchrun_script(job, folder)
    else:
        settings = [f"--set={name}={getattr(job, name)}" for name in ("runs", "dataset")]
        yield _line(["mlm-experiment", "launch", shown(manifest_file(job.name)), *settings, "--out", str(folder)])
        yield _line(["sbatch", "--wait", str(folder / "slurm.sh")])
        script = slurm_script(job, folder)
    yield "".join(f"    {line}".rstrip() + "\n" for line in script.splitlines())


def _line(step: Step) -> str:
    return f"$ {shlex.join(step)}"


def shown(path: Path) -> str:
    """The path relative to the current directory where it lies below it."""
    return os.path.relpath(path) if path.resolve().is_relative_to(Path.cwd()) else str(path)
