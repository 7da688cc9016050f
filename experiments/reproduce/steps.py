"""The commands of a reproduction: their words, and running them as processes. Imports no torch."""

import math
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

from mlm_repro.engine.config import RunConfig
from mlm_repro.experiments.reproduce.plan import Plan
from mlm_repro.lineage.errors import Interrupted, UserError
from mlm_repro.lineage.processes import (
    end_with_parent,
    ended_by,
    exit_code_of,
    hear_stops,
    held_back,
    when_stopped,
)
from mlm_repro.lineage.progress import is_quiet
from mlm_repro.lineage.shipped import model_file

TASKS = ("wikitext103", "lambada")
Step = list[str]


def say_step(number: int, count: int, what: str) -> None:
    """Print to standard output an empty line and one that says that step `number`, from 1, of
    `count` begins, with its name `what`; print nothing in quiet mode."""
    if not is_quiet():
        print(f"\nstep {number} of {count}: {what}", flush=True)


def train_step(plan: Plan, config: RunConfig, dataset: Path, runs: Path) -> Step:
    """Return a list of the words of the command that trains one of the plan's models, of the
    configuration `config`, in a run below the folder `runs`: a twin by `mlm-train` on the dataset's
    directory; a published size by the launch file in `launch_folder(config, runs)`, which must have
    been written and names its dataset itself. Nothing is run."""
    if plan.size is None:
        return ["bash", shown(launch_folder(config, runs) / "torchrun.sh")]
    model = shown(model_file(config.name.split("-")[0]))
    settings = (*plan.overrides(config), f"data.dataset={dataset}")
    options = (f"--set={setting}" for setting in settings)
    return ["mlm-train", "run", model, "--twin", *options, "--runs", str(runs)]


def evaluation_step(plan: Plan, task: str, checkpoint: Path, out: Path) -> Step:
    """Return a list of the words of the `mlm-eval` command that evaluates a checkpoint, given by
    its path, on a task, `wikitext103` or `lambada`, and writes the result to the file `out`. If the
    `plan` is of twins, only as many windows or examples are scored as the plan's size states.
    Nothing is run."""
    limits = {"wikitext103": plan.size.windows, "lambada": plan.size.examples} if plan.size else {}
    limit = ["--limit", str(limits[task])] if task in limits else []
    return ["mlm-eval", task, "--ckpt", shown(checkpoint), "--json", shown(out), *limit]


def evaluation_name(model: str, task: str) -> str:
    """Return the name of an evaluation's result in a reproduction, such as `8.3b-lambada`: model
    and task with a hyphen between them."""
    return f"{model}-{task}"


def launch_folder(config: RunConfig, runs: Path) -> Path:
    """Return the path of the folder of a published model's launch files: `launch-NAME` in the
    folder `runs`, with the configuration's name. It is not made."""
    return runs / f"launch-{config.name}"


def shown(path: Path) -> str:
    """Return the path as a text: relative to the current directory if the path lies below that
    directory, else as the path was given."""
    return os.path.relpath(path) if path.resolve().is_relative_to(Path.cwd()) else str(path)


class StepFailed(UserError):
    """Raised when the command or training `command` failed, which has printed its own sentence.
    `status` is the one with which it ended, as Python gives it; `stopped` is true if this process
    was told to stop meanwhile. The error keeps neither, but its `exit_code` is the documented one
    that `exit_code_of` gives for both."""

    def __init__(self, command: str, status: int, stopped: bool = False) -> None:
        super().__init__(f"`{command}` {ended_by(status)}; what was finished before it is kept")
        self.exit_code = exit_code_of(status, stopped)


def run_step(program: str, *arguments: str) -> None:
    """Run a command of this suite, or of the system if this environment has no such `program`, and
    wait for its end; the command is printed before it starts, unless in quiet mode. Raises
    StepFailed if the command fails, also because it was stopped, Interrupted if it ends well
    although this process was stopped meanwhile, and FileNotFoundError if the system has no such
    program either.

    If this process is killed, the step receives SIGTERM on Linux, so that a training leaves a
    checkpoint. On Ctrl-C the terminal stops the step as well; on another signal this process sends
    it SIGINT. The step then ends by itself.
    """
    words = shlex.join([program, *arguments])
    if not is_quiet():
        print(f"\n$ {words}", flush=True)
    # This environment's command of that name, or the system's.
    own = Path(sys.executable).with_name(program)
    command = [str(own) if own.is_file() else program, *arguments]
    is_ours = own.is_file()
    stopped = []

    def leave(number: int) -> None:
        stopped.append(number)
        if number != signal.SIGINT and process.poll() is None:
            process.send_signal(signal.SIGINT)

    def prepare() -> None:
        end_with_parent(signal.SIGTERM)
        if not is_ours:  # only our own programs release the signals that are held back here
            hear_stops()

    with when_stopped(leave):
        # Until `process` is bound, a stop could not be passed on to it.
        with held_back():
            process = subprocess.Popen(command, preexec_fn=prepare)
        # A limit makes `wait` poll: another thread may have taken the signal.
        status = process.wait(math.inf)
    if status:
        raise StepFailed(words, status, bool(stopped))
    if stopped:
        raise Interrupted(
            f"stopped after the step `{words}`; your own command, given again, continues from there"
        )
